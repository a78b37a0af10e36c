"""How a pool closes, and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gymtask.errors import WorkerDiedError
from tests.integration.pool_envs import (
    ASYNC_MODES,
    ChildrenEnv,
    FaultyEnv,
    NumberedEnv,
    assert_all_gone,
    end,
    is_running,
    open_pool,
    pids_of,
    step_all,
    wait_for,
    worker_threads,
)


class TestClose:
    def test_twice_does_nothing_the_second_time(self, mode: str) -> None:
        pool = open_pool(NumberedEnv, mode)
        pids = pids_of(pool)
        with pool:
            pool.reset()
            pool.close()
            assert_all_gone(pids)
        pool.close()

    def test_before_any_reset(self, mode: str) -> None:
        pool = open_pool(NumberedEnv, mode)
        pids = pids_of(pool)
        pool.close()
        assert_all_gone(pids)

    def test_every_environment_is_closed_once(self, mode: str, tmp_path: Path) -> None:
        with open_pool(FaultyEnv, mode, envs=3, workers=2, where="", what="") as pool:
            pool.reset()
            pool.set_attr("closed_file", tmp_path / "closed")
        assert sorted(os.listdir(tmp_path)) == ["closed.0", "closed.1", "closed.2"]

    def test_an_exception_in_the_with_block_goes_through(self, mode: str) -> None:
        pool = open_pool(NumberedEnv, mode)
        pids = pids_of(pool)
        pool.reset()
        pool.send([0, 0])
        with pytest.raises(ZeroDivisionError), pool:
            raise ZeroDivisionError
        assert_all_gone(pids)

    def test_a_process_asleep_in_a_step_is_killed_in_time(self) -> None:
        pool = open_pool(FaultyEnv, "process", where="step", what="sleep:600", after=1, cleanup=0.5)
        pids = pids_of(pool)
        pool.reset()
        pool.send([0, 0])
        assert pool.recv(1).env_ids.tolist() == [0]
        start = time.monotonic()
        pool.close()
        assert 0.4 < time.monotonic() - start < 1.5
        assert_all_gone(pids)

    def test_a_process_that_holds_the_interpreter_is_killed_in_time(self) -> None:
        pool = open_pool(FaultyEnv, "process", where="step", what="spin", after=1, cleanup=0.3)
        pids = pids_of(pool)
        pool.reset()
        pool.send([0, 0])
        pool.recv(1)
        start = time.monotonic()
        pool.close()
        assert time.monotonic() - start < 1.3
        assert_all_gone(pids)

    def test_a_thread_asleep_in_a_step_is_abandoned_and_named(self) -> None:
        pool = open_pool(FaultyEnv, "thread", where="step", what="sleep:2", after=1, cleanup=0.3)
        pool.reset()
        pool.send([0, 0])
        assert pool.recv(1).env_ids.tolist() == [0]
        time.sleep(0.2)  # until the other thread is in its step: a job not begun is dropped
        start = time.monotonic()
        with pytest.warns(ResourceWarning, match=r"1 worker threads did not .* \[\(1,\)\]"):
            pool.close()
        assert time.monotonic() - start < 1.3
        assert wait_for(lambda: not worker_threads())  # it ends by itself after its step

    def test_a_failure_does_not_wait_for_those_asleep_longer_than_the_cleanup(self) -> None:
        pool = open_pool(TwoFaultsEnv, "process", cleanup=0.3)
        pids = pids_of(pool)
        pool.reset()
        pool.send([0, 0])
        start = time.monotonic()
        with pytest.raises(ValueError, match="boom 1"):
            pool.recv(2)
        assert time.monotonic() - start < 1.3
        assert_all_gone(pids)

    def test_a_given_timeout_wins(self) -> None:
        pool = open_pool(FaultyEnv, "process", where="step", what="sleep:600", after=1, cleanup=60)
        pool.reset()
        pool.send([0, 0])
        pool.recv(1)
        start = time.monotonic()
        pool.close(0.1)
        assert time.monotonic() - start < 1.1

    @pytest.mark.parametrize("call", ["recv", "call"])
    def test_ctrl_c_while_waiting_then_close(self, mode: str, call: str) -> None:
        where = "step" if call == "recv" else "call"
        pool = open_pool(FaultyEnv, mode, where=where, what="sleep:2", after=1, cleanup=0.4)
        pids = pids_of(pool)
        pool.reset()
        timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        start = time.monotonic()
        calls = {"recv": lambda: step_all(pool), "call": lambda: pool.call("act_up")}
        with pytest.raises(KeyboardInterrupt), abandoned_threads(mode):
            calls[call]()
        with abandoned_threads(mode):
            pool.close()
        assert time.monotonic() - start < 2.0
        timer.join()
        assert wait_for(lambda: not any(map(is_running, pids)), 1.0)
        assert wait_for(lambda: not worker_threads())

    def test_ctrl_c_while_waiting_for_processes_or_threads_loses_no_row(self) -> None:
        for mode in ASYNC_MODES:
            with open_pool(FaultyEnv, mode, where="step", what="sleep:1", after=1) as pool:
                pool.reset()
                pool.send([0, 0])
                timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    pool.recv(2)
                timer.join()
                assert pool.recv(2).observation[:, 1].tolist() == [1, 1]

    def test_garbage_collection_leaves_nothing(self, mode: str) -> None:
        pool = open_pool(NumberedEnv, mode)
        pids = pids_of(pool)
        pool.memory = pool  # as the collector's rows refer to their pool
        pool.reset()
        del pool
        gc.collect()
        assert_all_gone(pids)

    def test_a_closed_pool_is_freed_without_the_garbage_collector(self, mode: str) -> None:
        pool = open_pool(NumberedEnv, mode)
        pool.memory = pool
        before = len(os.listdir("/proc/self/fd"))
        gc.disable()
        try:
            pool.close()
            del pool
            after = len(os.listdir("/proc/self/fd"))
        finally:
            gc.enable()
        assert after < before or mode != "process"

    @pytest.mark.parametrize("workers", [1, 2])
    def test_twenty_pools_leak_nothing(self, mode: str, workers: int) -> None:
        def cycle() -> list[int]:
            with open_pool(NumberedEnv, mode, workers=workers) as pool:
                pool.reset()
                step_all(pool)
                return pids_of(pool)

        cycle()
        gc.collect()
        descriptors = sorted(os.listdir("/proc/self/fd"))
        threads = threading.active_count()
        pids = [pid for _ in range(20) for pid in cycle()]
        gc.collect()
        assert sorted(os.listdir("/proc/self/fd")) == descriptors
        assert threading.active_count() == threads
        assert_all_gone(pids)

    def test_workers_that_cannot_be_made_leak_nothing(self, tmp_path: Path) -> None:
        def cycle() -> None:
            with pytest.raises(ValueError, match="boom 1"):
                open_pool(FaultyEnv, "process", where="make", what="raise:value", counter=counter)

        counter = tmp_path / "made"
        counter.touch()
        cycle()
        gc.collect()
        descriptors = sorted(os.listdir("/proc/self/fd"))
        for _ in range(5):
            counter.write_text("")
            cycle()
        gc.collect()
        assert sorted(os.listdir("/proc/self/fd")) == descriptors


class TwoFaultsEnv(NumberedEnv):
    def step(self, action: Any) -> Any:
        if self.number == 0:
            time.sleep(600)
        raise ValueError("boom 1")


@contextlib.contextmanager
def abandoned_threads(mode: str) -> Iterator[None]:
    """Lets the warning about threads that are still in a step pass, where there are threads."""
    with warnings.catch_warnings():
        if mode == "thread":
            warnings.simplefilter("ignore", ResourceWarning)
        yield


class TestChildrenOfEnvironments:
    @pytest.fixture(params=[True, False], ids=["daemon", "not daemon"])
    def opened(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        pool = open_pool(
            ChildrenEnv, "process", daemon=request.param, with_multiprocessing=not request.param
        )
        pool.reset()
        children = [pid for pids in pool.get_attr("pids") for pid in pids]
        assert len(children) == (4 if request.param else 6)
        assert all(map(is_running, children))
        yield pool, children
        pool.close()

    def test_are_gone_after_close(self, opened: Any) -> None:
        pool, children = opened
        pool.close()
        own_session = children[1::2] if len(children) == 4 else children[1::3]
        rest = sorted(set(children) - set(own_session))
        assert wait_for(lambda: not any(map(is_running, rest)), 1.0)
        # The others end when no pool is open any more; see test_pool_processes.py.
        end(own_session)

    def test_are_gone_after_a_worker_died(self, opened: Any) -> None:
        pool, children = opened
        os.kill(pids_of(pool)[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            step_all(pool)
        assert wait_for(lambda: not is_running(children[0]), 1.0)
        end(children)
