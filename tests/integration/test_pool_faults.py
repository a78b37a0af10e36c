"""What a pool does when an environment raises, dies or hangs, and how it closes."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gymtask.errors import PoolClosedError, WorkerDiedError, WorkerTraceback
from gymtask.maker import EnvironmentMaker
from gymtask.workers.pool import WorkerPool
from gymtask.workers.worker_main import pack_exception, unpack_exception
from tests.integration.pool_envs import (
    ASYNC_MODES,
    WORKERS,
    ChildrenEnv,
    CodeError,
    FaultyEnv,
    HandleError,
    MoodyEnv,
    NumberedEnv,
    ProbeEnv,
    is_running,
    open_pool,
    wait_for,
)

BOOM = "(?m)^boom 1$"  # notes follow in lines of their own


def step_all(pool: WorkerPool) -> Any:
    pool.send([0] * pool.num_envs)
    return pool.recv(pool.num_envs)


def pids_of(pool: WorkerPool) -> list[int]:
    handles = getattr(pool, "_handles", [])
    return [handle.process.pid for handle in handles]


def reset_and_act_up(pool: WorkerPool) -> None:
    pool.reset()
    pool.call("act_up")


def worker_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gymtask-worker")]


def assert_all_gone(pids: list[int]) -> None:
    assert wait_for(lambda: not any(map(is_running, pids)), 1.0)
    assert wait_for(lambda: not worker_threads(), 1.0)


class TestExceptions:
    @pytest.mark.parametrize("workers", [1, 2, 4])
    def test_type_message_traceback_and_environment_reach_the_caller(
        self, mode: str, workers: int
    ) -> None:
        pool = open_pool(FaultyEnv, mode, envs=4, workers=workers, where="step", what="raise:value")
        pids = pids_of(pool)
        pool.reset()
        assert step_all(pool).observation[:, 1].tolist() == [1, 1, 1, 1]
        with pytest.raises(ValueError, match=BOOM) as caught:
            step_all(pool)
        text = "".join(traceback.format_exception(caught.value))
        assert "in raise_named" in text
        assert "KeyError: 'the root of it'" in text  # what it was raised from
        assert f"raised by environment 1 of 4, in {mode} mode" in text
        assert isinstance(caught.value.__cause__, WorkerTraceback) == (mode == "process")
        assert_all_gone(pids)
        with pytest.raises(PoolClosedError):
            pool.recv()
        pool.close()

    @pytest.mark.parametrize("where", ["reset", "call"])
    def test_outside_of_a_step_as_well(self, mode: str, where: str) -> None:
        pool = open_pool(FaultyEnv, mode, envs=3, where=where, what="raise:value")
        with pytest.raises(ValueError, match=BOOM) as caught:
            reset_and_act_up(pool)
        assert "raised by environment 1 of 3" in caught.value.__notes__[0]
        assert pool.closed
        assert_all_gone([])

    def test_when_it_is_made(self, mode: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=BOOM) as caught:
            open_pool(FaultyEnv, mode, where="make", what="raise:value", counter=tmp_path / "made")
        assert re.search("raised by environment [01] of 2", caught.value.__notes__[0])
        assert_all_gone([])

    def test_when_the_first_is_made_once_and_before_workers_start(
        self, mode: str, tmp_path: Path
    ) -> None:
        counter = tmp_path / "made"
        counter.write_text("made\n")  # so that the very first raises
        with pytest.raises(ValueError, match=BOOM) as caught:
            open_pool(FaultyEnv, mode, envs=5, where="make", what="raise:value", counter=counter)
        assert "raised by environment 0, which was made to learn its spaces" in (
            caught.value.__notes__
        )
        assert len(counter.read_text().splitlines()) == 2

    def test_when_it_is_closed(self, mode: str) -> None:
        pool = open_pool(FaultyEnv, mode, envs=3, where="close", what="raise:value")
        pids = pids_of(pool)
        pool.reset()
        with pytest.raises(ValueError, match=BOOM) as caught:
            pool.close()
        assert "raised by close() of environment 1" in caught.value.__notes__
        assert_all_gone(pids)
        pool.close()

    @pytest.mark.parametrize("workers", [1, 3])
    def test_the_others_are_closed(self, mode: str, workers: int, tmp_path: Path) -> None:
        pool = open_pool(FaultyEnv, mode, envs=3, workers=workers, where="step", what="raise:value")
        pool.reset()
        pool.set_attr("closed_file", tmp_path / "closed")
        step_all(pool)
        with pytest.raises(ValueError, match="boom 1"):
            step_all(pool)
        names = [f"closed.{number}" for number in range(3)]
        assert wait_for(lambda: sorted(os.listdir(tmp_path)) == names)

    def test_a_constructor_of_its_own_is_no_obstacle(self, mode: str) -> None:
        with open_pool(FaultyEnv, mode, where="step", what="raise:code") as pool:
            pool.reset()
            step_all(pool)
            with pytest.raises(CodeError, match=r"(?m)^code 3 of left$") as caught:
                step_all(pool)
        assert (caught.value.code, caught.value.name) == (3, "left")

    def test_attributes_that_cannot_be_pickled_are_left_behind(self, mode: str) -> None:
        with open_pool(FaultyEnv, mode, where="step", what="raise:handle") as pool:
            pool.reset()
            step_all(pool)
            with pytest.raises(HandleError, match=BOOM):
                step_all(pool)

    def test_what_cannot_be_pickled_at_all_comes_as_text(self) -> None:
        with open_pool(FaultyEnv, "process", where="step", what="raise:unspeakable") as pool:
            pool.reset()
            step_all(pool)
            with pytest.raises(RuntimeError, match=r"^UnspeakableError: \('unspeakable'") as caught:
                step_all(pool)
        assert "in raise_named" in str(caught.value.__cause__)

    @pytest.mark.parametrize(
        ("what", "kind", "message"),
        [
            ("unicode", UnicodeDecodeError, "can't decode byte 0xff in position 0"),
            ("os", FileNotFoundError, r"\[Errno 2\] No such file or directory: '/nowhere"),
        ],
    )
    def test_built_in_exceptions_keep_what_they_say(
        self, mode: str, what: str, kind: type[Exception], message: str
    ) -> None:
        with open_pool(FaultyEnv, mode, where="step", what=f"raise:{what}") as pool:
            pool.reset()
            step_all(pool)
            with pytest.raises(kind, match=message):
                step_all(pool)

    @pytest.mark.parametrize("mode", ["sync", "thread"])
    def test_a_request_to_exit_in_this_process_is_one(self, mode: str) -> None:
        pool = open_pool(FaultyEnv, mode, where="step", what="ask_to_exit:3")
        pool.reset()
        step_all(pool)
        with pytest.raises(SystemExit, match="3"):
            step_all(pool)
        assert pool.closed

    def test_an_exception_of_a_step_nobody_waited_for_is_raised_by_close(self) -> None:
        for mode in ASYNC_MODES:
            pool = open_pool(FaultyEnv, mode, where="step", what="raise:value", after=1)
            pool.reset()
            pool.send([0, 0])
            assert wait_for(lambda pool=pool: _message_waits(pool))
            with pytest.raises(ValueError, match="boom 1"):
                pool.close()
            assert_all_gone([])

    @pytest.mark.parametrize("error", [ValueError("a", 1), CodeError(1, name="x"), KeyError("k")])
    def test_packing_keeps_notes_and_attributes(self, error: Exception) -> None:
        error.add_note("a note")
        again = unpack_exception(pack_exception(error))
        assert type(again) is type(error)
        assert (again.args, again.__dict__) == (error.args, error.__dict__)


def _message_waits(pool: Any) -> bool:
    if hasattr(pool, "_results"):
        return pool._results.qsize() == 2
    return any(handle.pipe.poll() for handle in pool._handles)


class TestDeath:
    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize(
        ("what", "how"),
        [
            ("kill:9", "killed by SIGKILL, exit code -9, possibly out of memory"),
            ("segfault", "killed by SIGSEGV, exit code -11"),
            ("leave:7", "exit code 7"),
            ("leave:0", "exit code 0"),
            ("ask_to_exit:5", "exit code 5"),
        ],
    )
    def test_in_a_step_it_is_named_within_a_second(self, what: str, how: str, workers: int) -> None:
        pool = open_pool(FaultyEnv, "process", workers=workers, where="step", what=what)
        pids = pids_of(pool)
        pool.reset()
        step_all(pool)
        start = time.monotonic()
        with pytest.raises(WorkerDiedError) as caught:
            step_all(pool)
        assert time.monotonic() - start < 1.0
        worker, env_ids = (0, [0, 1]) if workers == 1 else (1, [1])
        assert str(caught.value) == (
            f"worker {worker}, which runs environments {env_ids}, died in step() of environment 1"
            f" ({how})"
        )
        assert_all_gone(pids)
        pool.close()
        with pytest.raises(PoolClosedError):
            pool.reset()

    @pytest.mark.parametrize("where", ["reset", "call", "make"])
    def test_outside_of_a_step_it_is_named_too(self, where: str, tmp_path: Path) -> None:
        counter = tmp_path / "made"

        def open_and_act_up() -> None:
            reset_and_act_up(
                open_pool(FaultyEnv, "process", where=where, what="kill:9", counter=counter)
            )

        with pytest.raises(WorkerDiedError, match=r"worker [01], .* died \(killed by SIGKILL"):
            open_and_act_up()
        assert_all_gone([])

    @pytest.mark.parametrize("call", ["step", "reset", "get_attr"])
    def test_while_idle_it_is_noticed_by_the_next_call(self, call: str) -> None:
        pool = open_pool(NumberedEnv, "process", envs=3)
        pids = pids_of(pool)
        pool.reset()
        step_all(pool)
        os.kill(pids[2], signal.SIGTERM)
        assert wait_for(lambda: not is_running(pids[2]))
        calls = {
            "step": lambda: step_all(pool),
            "reset": pool.reset,
            "get_attr": lambda: pool.get_attr("number"),
        }
        start = time.monotonic()
        with pytest.raises(WorkerDiedError) as caught:
            calls[call]()
        assert time.monotonic() - start < 1.0
        assert str(caught.value) == (
            "worker 2, which runs environments [2], died (killed by SIGTERM, exit code -15)"
        )
        assert caught.value.__suppress_context__
        assert_all_gone(pids)

    def test_a_big_command_to_a_dead_worker_says_so(self) -> None:
        pool = open_pool(NumberedEnv, "process")
        pids = pids_of(pool)
        os.kill(pids[0], signal.SIGKILL)
        assert wait_for(lambda: not is_running(pids[0]))
        with pytest.raises(WorkerDiedError, match=r"worker 0, .*SIGKILL"):
            pool.set_attr("weights", bytes(1 << 21))
        assert_all_gone(pids)

    def test_rows_of_others_are_not_lost_to_it(self, tmp_path: Path) -> None:
        pool = open_pool(MoodyEnv, "process", folder=tmp_path)
        pids = pids_of(pool)
        pool.reset()
        pool.send([0, 0])
        assert wait_for((tmp_path / "1").exists)  # it is in its step, asleep
        assert pool.recv(1).env_ids.tolist() == [0]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"in step\(\) of environment 1"):
            pool.recv(1)
        assert_all_gone(pids)


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
        with pytest.raises(KeyboardInterrupt), _abandoned_threads(mode):
            calls[call]()
        with _abandoned_threads(mode):
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


class _abandoned_threads:  # noqa: N801
    """Expects the warning about threads that are still in a step, where there are some."""

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        import warnings

        self._catch = warnings.catch_warnings()
        self._catch.__enter__()
        if self._mode == "thread":
            warnings.simplefilter("ignore", ResourceWarning)

    def __exit__(self, *error: object) -> None:
        self._catch.__exit__()


def end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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
