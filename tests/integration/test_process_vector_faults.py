"""What a `ProcessVectorEnv` does when something goes wrong, and what it leaves behind."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.error import ClosedEnvironmentError

import gymtask
from gymtask.errors import ConfigurationError, WorkerDiedError, WorkerTraceback
from gymtask.testing import ScriptedEnv
from tests.integration.pool_envs import (
    FaultyEnv,
    NumberedEnv,
    ProbeEnv,
    assert_all_gone,
    is_running,
    wait_for,
)

ROOT = Path(__file__).parents[2]
ACTIONS = [0, 0, 0, 0]


def make(env: Any = ScriptedEnv, workers: int = 2, **kwargs: Any) -> Any:
    envs = gymtask.ProcessVectorEnv([env] * 4, num_workers=workers, **kwargs)
    envs.reset(seed=0)
    return envs


def pids_of(envs: Any) -> list[int]:
    return [process.pid for process in envs.processes]


class TestAnException:
    @pytest.mark.parametrize("workers", [1, 2, 4])
    def test_in_a_step_is_raised_with_its_traceback_and_its_environment(self, workers: int) -> None:
        envs = make(partial(FaultyEnv, "step", "raise:value"), workers)
        pids = pids_of(envs)
        envs.step(ACTIONS)
        with pytest.raises(ValueError, match="boom 1") as caught:
            envs.step(ACTIONS)
        assert isinstance(caught.value.__cause__, WorkerTraceback)
        assert "the root of it" in str(caught.value.__cause__)
        assert "raised by environment 1 of 4, in a worker process" in caught.value.__notes__
        assert_all_gone(pids)
        with pytest.raises(ClosedEnvironmentError):
            envs.step(ACTIONS)
        envs.close()

    @pytest.mark.parametrize("where", ["reset", "call"])
    def test_elsewhere_is_raised_likewise(self, where: str) -> None:
        envs = gymtask.ProcessVectorEnv(
            [partial(FaultyEnv, where, "raise:handle")] * 4, num_workers=2
        )
        with pytest.raises(Exception, match="boom 1") as caught:  # noqa: PT012
            envs.reset(seed=0)
            envs.call("act_up")
        assert type(caught.value).__name__ == "HandleError"
        assert "raised by environment 1 of 4, in a worker process" in caught.value.__notes__
        assert envs.closed

    def test_in_two_workers_is_reported_for_both(self) -> None:
        faults = {1: (1, "raise"), 2: (1, "raise")}
        envs = make(partial(ScriptedEnv, faults=faults), 4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(ValueError, match=r"boom [12]") as raised:
                envs.step(ACTIONS)
        last = int(str(raised.value)[-1])
        assert raised.value.__notes__ == [
            f"raised by environment {last} of 4, in a worker process",
            f"environment {3 - last} also raised ValueError: boom {3 - last}",
        ]
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == 5
        assert sum("Worker-2 - Shutting it down" in text for text in texts) == 1
        assert "Raising the last exception" in texts[-1]

    def test_of_closing_is_told_apart_from_it(self) -> None:
        class Twice(ScriptedEnv):
            def close(self) -> None:
                if self.number == 0:
                    raise KeyError("closing")

        envs = make(partial(Twice, faults={1: (1, "raise")}), 4)
        with pytest.raises(ValueError, match="boom 1") as raised:
            envs.step(ACTIONS)
        assert raised.value.__notes__ == [
            "raised by environment 1 of 4, in a worker process",
            "closing the vector environment then raised KeyError: 'closing'",
        ]

    def test_while_making_an_environment_leaves_nothing(self, tmp_path: Path) -> None:
        make().close()
        gc.collect()
        before = sorted(os.listdir("/proc/self/fd"))
        env = partial(FaultyEnv, "make", "raise:value", counter=tmp_path / "count")
        with pytest.raises(ValueError, match="boom 1"):
            gymtask.ProcessVectorEnv([env] * 4, num_workers=2)
        gc.collect()
        assert sorted(os.listdir("/proc/self/fd")) == before

    def test_does_not_wait_for_a_worker_that_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gymtask.vector.crewed.GATHER_LIMIT", 0.2)
        monkeypatch.setattr("gymtask.vector.crewed.CLOSE_LIMIT", 0.3)
        faults = {0: (1, "raise"), 3: (1, "sleep")}
        envs = make(partial(ScriptedEnv, faults=faults))
        pids, started = pids_of(envs), time.monotonic()
        with pytest.raises(ValueError, match="boom 0"):
            envs.step(ACTIONS)
        assert time.monotonic() - started < 1.5
        assert_all_gone(pids)


class TestADeath:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_in_a_step_is_told_within_a_second(self, number: signal.Signals) -> None:
        envs = make(partial(FaultyEnv, "step", f"kill:{int(number)}", number=2))
        pids = pids_of(envs)
        envs.step(ACTIONS)
        started = time.monotonic()
        with pytest.raises(WorkerDiedError) as caught:
            envs.step(ACTIONS)
        assert time.monotonic() - started < 1
        assert "worker 1, which runs environments [2, 3], died in step() of environment 2" in str(
            caught.value
        )
        assert number.name in str(caught.value)
        assert_all_gone(pids)
        envs.close()

    def test_between_steps_is_told_by_the_next_call(self) -> None:
        for call in ("step", "reset", "render"):
            envs = make()
            os.kill(envs.processes[1].pid, signal.SIGKILL)
            assert wait_for(lambda pid=envs.processes[1].pid: not is_running(pid))
            with pytest.raises(WorkerDiedError, match=r"worker 1, .* died \(killed by SIGKILL"):
                getattr(envs, call)(*([ACTIONS] if call == "step" else []))
            assert envs.closed


class TestTheEnd:
    def test_comes_in_time_although_an_environment_is_asleep(self) -> None:
        envs = make(partial(ScriptedEnv, faults={1: (1, "sleep")}))
        pids = pids_of(envs)
        envs.step_async(ACTIONS)
        started = time.monotonic()
        with pytest.warns(UserWarning, match="pending call"):
            envs.close(timeout=0.3)
        assert time.monotonic() - started < 1.5
        assert_all_gone(pids)

    def test_ctrl_c_in_a_step_loses_no_row(self) -> None:
        envs = make(partial(ScriptedEnv, seconds=[0.0, 0.4]), 4)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            envs.step(ACTIONS)
        timer.join()
        assert envs.step_wait()[1].tolist() == [1.0] * 4
        for step in range(2, 5):
            assert envs.step(ACTIONS)[1].tolist() == [0.0 if step == 4 else step] * 4
        envs.close()

    def test_an_exception_of_closing_reaches_the_caller(self) -> None:
        envs = make(partial(FaultyEnv, "close", "raise:value"))
        with pytest.raises(ValueError, match="boom 1"):
            envs.close()
        assert envs.closed
        envs.close()

    def test_fifty_leave_nothing(self) -> None:
        make().close()
        gc.collect()
        before, blocks = sorted(os.listdir("/proc/self/fd")), os.listdir("/dev/shm")
        pids = []
        for index in range(50):
            envs = make()
            envs.step(ACTIONS)
            pids += pids_of(envs)
            if index % 2:
                envs.close()
            del envs  # without close: garbage
        assert_all_gone(pids)
        assert sorted(os.listdir("/proc/self/fd")) == before
        assert os.listdir("/dev/shm") == blocks

    @pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "1 / 0", "pass"])
    def test_of_the_parent_is_the_end_of_all(self, end: str) -> None:
        script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import gymtask
from gymtask.testing import ScriptedEnv
envs = gymtask.ProcessVectorEnv([lambda: ScriptedEnv()] * 4, num_workers=2)
envs.reset(seed=0)
print(*[process.pid for process in envs.processes], flush=True)
envs.step_async([0] * 4)
{end}
"""
        done = subprocess.run(
            [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60
        )
        pids = [int(pid) for pid in done.stdout.split()]
        assert len(pids) == 2
        assert_all_gone(pids)


class TestWorkers:
    def test_know_neither_torch_nor_main_and_what_is_registered(self) -> None:
        gym.register("VectorProbe-v0", lambda: ProbeEnv())
        try:
            envs = make(lambda: ProbeEnv())
            (modules, *_), (names, *_) = envs.call("modules"), envs.call("main_names")
            assert not {"torch", "pytest"} & set(modules)
            assert "pytest" not in names
            assert set(envs.call("makes", "VectorProbe-v0")) == {"ProbeEnv"}
            assert len(set(envs.call("pid"))) == 2
            envs.close()
        finally:
            del gym.registry["VectorProbe-v0"]

    def test_that_are_the_users_own_run_one_environment_each(self) -> None:
        envs = make(NumberedEnv, 4, worker=echo_worker)
        assert envs.step(ACTIONS)[1].tolist() == [0.0, 1.0, 2.0, 3.0]
        envs.close()
        with pytest.raises(ConfigurationError, match="where a `worker` is given"):
            make(NumberedEnv, 2, worker=echo_worker)
        if "max_concurrency" in inspect.signature(gym.vector.AsyncVectorEnv).parameters:
            # Gymnasium 1.2 does not look.
            with pytest.raises(ValueError, match="must accept 8 arguments"):
                make(NumberedEnv, 4, worker=print_nothing)


def print_nothing() -> None:
    """No worker."""


def echo_worker(
    index: int, env_fn: Any, pipe: Any, parent: Any, memory: Any, errors: Any, mode: Any, *_: Any
) -> None:
    """Speaks AsyncVectorEnv's protocol, and rewards with its number."""
    parent.close()
    while True:
        command, _ = pipe.recv()
        answers: dict[str, Any] = {
            "step": (None, float(index), False, False, {}),
            "reset": (None, {}),
            "_check_spaces": (True, True),
        }
        pipe.send((answers.get(command), True))
        if command == "close":
            return
