"""What a pool does when an environment raises or its worker dies."""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from gymtask.errors import PoolClosedError, WorkerDiedError, WorkerTraceback
from gymtask.testing import ScriptedEnv
from gymtask.workers.pool import WorkerPool
from gymtask.workers.worker_main import pack_exception, unpack_exception
from tests.integration.pool_envs import (
    ASYNC_MODES,
    CodeError,
    FaultyEnv,
    GravityEnv,
    HandleError,
    MoodyEnv,
    NumberedEnv,
    assert_all_gone,
    is_running,
    open_pool,
    pids_of,
    step_all,
    wait_for,
)

BOOM = "(?m)^boom 1$"  # notes follow in lines of their own


def reset_and_act_up(pool: WorkerPool) -> None:
    pool.reset()
    pool.call("act_up")


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

    def test_what_another_raised_in_the_same_step_is_told_as_that(self) -> None:
        for mode in ASYNC_MODES:
            faults = {0: (1, "raise"), 1: (1, "raise")}
            pool = open_pool(ScriptedEnv, mode, envs=2, faults=faults, seconds=0.1)
            pool.reset()
            with pytest.raises(ValueError, match=r"boom [01]") as caught:
                step_all(pool)
            first = int(str(caught.value)[-1])
            assert caught.value.__notes__ == [
                f"raised by environment {first} of 2, in {mode} mode",
                f"environment {1 - first} also raised ValueError: boom {1 - first}",
            ]
            assert_all_gone([])

    def test_what_closing_raised_is_told_apart_from_it(self, mode: str) -> None:
        class Twice(ScriptedEnv):
            closing = 99  # nobody

            def close(self) -> None:
                if self.number == self.closing:
                    raise KeyError("closing")

        # What the failing environment itself then raises is left out where a process holds it.
        for closing in (0, 1) if mode != "process" else (0,):
            pool = open_pool(Twice, mode, envs=2, faults={1: (1, "raise")})
            pool.reset()
            pool.set_attr("closing", closing)
            with pytest.raises(ValueError, match="boom 1") as caught:
                step_all(pool)
            assert caught.value.__notes__ == [
                f"raised by environment 1 of 2, in {mode} mode",
                "closing the pool then raised KeyError: 'closing'",
            ]
            assert_all_gone([])

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

    def test_what_only_the_worker_knows_comes_as_text(self) -> None:
        with open_pool(FaultyEnv, "process", where="step", what="raise:stranger") as pool:
            pool.reset()
            step_all(pool)
            with pytest.raises(RuntimeError, match=r"^only_in_this_process.Stranger: boom 1"):
                step_all(pool)

    def test_an_answer_that_cannot_be_read_closes_the_pool(self) -> None:
        with open_pool(GravityEnv, "process") as pool:
            with pytest.raises(ValueError, match=BOOM) as caught:
                pool.call("give_unreadable")
            assert re.search(
                "raised while reading what worker [01] sent", caught.value.__notes__[0]
            )
            assert pool.closed

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
            with pytest.raises(ValueError, match="boom 1") as caught:
                pool.close()
            assert caught.value.__notes__ == [
                "raised while the pool was closing",
                f"raised by environment 1 of 2, in {mode} mode",
            ]
            assert_all_gone([])

    @pytest.mark.parametrize("error", [ValueError("a", 1), CodeError(1, name="x"), KeyError("k")])
    def test_packing_keeps_notes_and_attributes(self, error: Exception) -> None:
        error.add_note("a note")
        again = unpack_exception(pack_exception(error))
        assert type(again) is type(error)
        assert (again.args, again.__dict__) == (error.args, error.__dict__)


def _message_waits(pool: Any) -> bool:
    if hasattr(pool, "_answers"):
        return len(pool._answers) == 2
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
