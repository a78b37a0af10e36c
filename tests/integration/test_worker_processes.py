"""What the processes of workers are like."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gymtask.maker import EnvironmentMaker
from tests.integration.pool_envs import (
    WORKERS,
    NumberedEnv,
    ProbeEnv,
    open_pool,
)


class TestWorkerProcesses:
    @pytest.mark.parametrize("workers", WORKERS)
    def test_are_as_many_as_asked_for_each_with_one_thread(self, workers: int) -> None:
        with open_pool(ProbeEnv, "process", envs=5, workers=workers) as pool:
            assert len(set(pool.call("pid"))) == workers
            assert pool.call("num_threads") == (1,) * 5

    def test_import_neither_torch_nor_main(self) -> None:
        with open_pool(ProbeEnv, "process") as pool:
            (modules, _) = pool.call("modules")
            (names, _) = pool.call("main_names")
        assert "gymtask.workers.worker_main" in modules
        assert not {"torch", "tensordict", "pytest", "_pytest", "tests.conftest"} & set(modules)
        assert "pytest" not in names

    def test_have_one_compute_thread_unless_the_user_says_otherwise(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        with open_pool(ProbeEnv, "process") as pool:
            assert pool.call("environment_variable", "OMP_NUM_THREADS") == ("1", "1")
            assert pool.call("torch_threads") == (1, 1)
        assert "OMP_NUM_THREADS" not in os.environ
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with open_pool(ProbeEnv, "process", envs=1) as pool:
            assert pool.call("environment_variable", "OMP_NUM_THREADS") == ("2",)
            assert pool.call("torch_threads") == (2,)

    def test_see_the_present_environment_folder_and_search_path(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("POOL_TEST_VARIABLE", "here")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path / "lib"))
        with open_pool(ProbeEnv, "process", envs=1) as pool:
            assert pool.call("environment_variable", "POOL_TEST_VARIABLE") == ("here",)
            assert pool.call("folder") == (str(tmp_path),)
            assert str(tmp_path / "lib") in pool.call("search_path")[0]

    def test_do_not_share_the_global_random_stream(self) -> None:
        found = []
        for _ in range(2):
            with open_pool(ProbeEnv, "process") as pool:
                found += pool.call("global_noise")
        assert len(set(found)) == 4

    def test_know_what_was_registered_in_the_parent(self, mode: str) -> None:
        import gymnasium as gym

        gym.register("PoolProbe-v0", lambda: ProbeEnv())
        lock = threading.Lock()
        gym.register("PoolUnsendable-v0", lambda: lock and ProbeEnv())
        try:
            with open_pool(ProbeEnv, mode) as pool:
                assert pool.call("makes", "PoolProbe-v0") == ("ProbeEnv", "ProbeEnv")
        finally:
            del gym.registry["PoolProbe-v0"], gym.registry["PoolUnsendable-v0"]


def test_the_maker_of_a_pool_is_pickled_once_for_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 0
    original = EnvironmentMaker.to_bytes

    def counting(self: EnvironmentMaker) -> bytes:
        nonlocal count
        count += 1
        return original(self)

    monkeypatch.setattr(EnvironmentMaker, "to_bytes", counting)
    with open_pool(NumberedEnv, "process", envs=4):
        assert count == 1
