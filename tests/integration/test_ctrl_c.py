"""Ctrl-C at every moment of a call: what is used afterwards is closed, or goes on as it was."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState

import gymtask
from gymtask.errors import NothingPendingError
from gymtask.testing import ScriptedEnv
from gymtask.vector.thread import ThreadVectorEnv
from gymtask.workers.handle import Handle, left_over
from gymtask.workers.pool import WorkerPool
from tests.integration.pool_envs import FaultyEnv, NumberedEnv, assert_all_gone, open_pool, pids_of

Scripted = partial(ScriptedEnv, lengths=10**6, num_actions=10**6)
FOLDERS = tuple(
    str(Path(module.__file__).parent)  # type: ignore[arg-type]
    for module in (gymtask, multiprocessing, gym.vector)
)

pytestmark = pytest.mark.timeout(100)


@contextmanager
def ctrl_c(moment: int) -> Iterator[list[int]]:
    """Raises KeyboardInterrupt at one of the moments at which the interpreter looks for signals.

    Those are the beginnings of functions and the returns from functions in C. The list that it
    gives holds, in the end, how many moments there were.
    """
    seen = [0]

    def look(frame: Any, event: str, _: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(FOLDERS):
            return
        seen[0] += 1
        if seen[0] == moment:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield seen
    except KeyboardInterrupt:
        assert seen[0] == moment
    finally:
        sys.setprofile(None)


KINDS: dict[str, Any] = {
    "sync": SyncVectorEnv,
    "async": AsyncVectorEnv,
    "thread": ThreadVectorEnv,
    "process": gymtask.ProcessVectorEnv,
}


def open_scripted(mode: str) -> WorkerPool:
    mode, _, kind = mode.partition(" ")
    env: Any = (lambda num_envs: KINDS[kind]([Scripted] * num_envs)) if kind else Scripted
    pool = open_pool(env, mode, envs=2, workers=1 if kind else 2, info_keys=("t",))
    pool.reset()
    return pool


@pytest.mark.parametrize(
    "mode", ["sync", "thread", "process", *(f"native {kind}" for kind in KINDS)]
)
def test_a_pool_is_closed_or_goes_on_as_it_was(mode: str) -> None:
    pool, number = open_scripted(mode), 0
    for moment in itertools.count(1):
        number += 1
        with ctrl_c(moment) as seen:
            pool.send([number, number])
            pool.recv(2)
        if pool.closed:
            pool = open_scripted(mode)
            continue
        while pool.num_pending:
            assert pool.recv(2).observation[:, 2].tolist() in ([number] * 2, [number])
        with pytest.raises(NothingPendingError):
            pool.recv()
        before = pool.num_posted
        pool.send([7, 7])
        steps = pool.recv(2)
        assert pool.num_posted == before + 2
        assert steps.observation[:, 1:].tolist() == [[0, 7], [1, 7]]
        assert steps.observation[0, 0] == steps.observation[1, 0] == steps.reward[0]
        assert steps.info == [{"t": steps.reward[0]}] * 2
        if seen[0] < moment:
            break
    pool.close()
    assert_all_gone([])


CALLS: dict[str, Callable[[Any], Any]] = {
    "step": lambda envs: envs.step([3, 3]),
    "reset": lambda envs: envs.reset(seed=50),
    "call": lambda envs: envs.call("num_steps"),
    "set_attr": lambda envs: envs.set_attr("other", 1),
}


@pytest.mark.parametrize("kind", [gymtask.ProcessVectorEnv, ThreadVectorEnv])
@pytest.mark.parametrize("call", CALLS)
def test_a_vector_environment_is_closed_or_goes_on_as_it_was(call: str, kind: Any) -> None:
    def make() -> Any:
        envs = kind([Scripted] * 2, num_workers=2)
        envs.reset(seed=0)
        return envs

    envs, num_closed = make(), 0
    for moment in itertools.count(1):
        with ctrl_c(moment) as seen:
            CALLS[call](envs)
        if envs.closed:
            num_closed += 1
            with pytest.raises(ClosedEnvironmentError):
                envs.step([0, 0])
            envs = make()
            continue
        state = getattr(envs, "_state", AsyncState.DEFAULT)
        if state != AsyncState.DEFAULT:
            getattr(envs, f"{state.value}_wait")()
        assert envs.reset(seed=7)[0][:, 2].tolist() == [-1, -1]
        for number in (1, 2):
            observations, rewards, _, _, infos = envs.step([number] * 2)
            assert (observations[:, 2].tolist(), rewards.tolist()) == ([number] * 2, [number] * 2)
            assert infos["t"].tolist() == [number, number]
        assert envs.call("num_steps") == (2, 2)
        if seen[0] < moment:
            break
    envs.close()
    assert (num_closed > 0) == (kind is gymtask.ProcessVectorEnv)


# ---- at chosen moments ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["step", "command"])
@pytest.mark.parametrize("kind", ["pool", "vector"])
def test_between_the_orders_to_two_workers_it_ends_both(
    kind: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Any = Handle if order == "command" else sys.modules["gymtask.workers.crew"].Crew
    original = getattr(target, order)

    def struck(*args: Any) -> None:
        original(*args)
        signal.raise_signal(signal.SIGINT)

    opened: Any = open_scripted("process") if kind == "pool" else vector_of_two()
    pids = pids_of(opened) or [process.pid for process in opened.processes]
    calls = {
        ("pool", "step"): lambda: opened.send([1, 1]),
        ("pool", "command"): lambda: opened.get_attr("life"),
        ("vector", "step"): lambda: opened.step_async([1, 1]),
        ("vector", "command"): lambda: opened.call_async("life"),
    }
    monkeypatch.setattr(target, order, struck)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        calls[kind, order]()
    assert opened.closed
    assert time.monotonic() - started < 1
    assert_all_gone(pids)


def vector_of_two() -> Any:
    envs = gymtask.ProcessVectorEnv([Scripted] * 2, num_workers=2)
    envs.reset(seed=0)
    return envs


class TalkativeEnv(NumberedEnv):
    """Says more than fits into a pipe."""

    def __init__(self) -> None:
        super().__init__()
        # Read from anywhere, it begins with a length, of something that is no pickle.
        self.speech = np.full(400_000, 4, ">u4")

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, *rest, _ = super().step(action)
        return observation, *rest, {"speech": self.speech}  # type: ignore[return-value]


def talk(kind: str, call: str) -> tuple[Any, Callable[[], Any]]:
    if kind == "pool":
        pool: Any = open_pool(TalkativeEnv, "process", info_keys=("speech",))
        pool.reset()
        pool.send([0, 0])
        if call == "step":
            return pool, lambda: pool.recv(2)
        pool.recv(2)
        return pool, lambda: pool.get_attr("speech")
    envs = gymtask.ProcessVectorEnv([TalkativeEnv] * 2, num_workers=2)
    envs.reset(seed=0)
    return envs, (lambda: envs.step([0, 0])) if call == "step" else (lambda: envs.call("speech"))


@pytest.mark.parametrize("call", ["step", "call"])
@pytest.mark.parametrize("kind", ["pool", "vector"])
def test_in_the_middle_of_a_message_it_is_raised_at_once_and_as_itself(
    kind: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Connection._recv  # type: ignore[attr-defined]

    def struck(self: Any, size: int, *args: Any) -> Any:
        if size > 1000:
            monkeypatch.undo()
            original(self, 1000, *args)
            signal.raise_signal(signal.SIGINT)
        return original(self, size, *args)

    opened, act = talk(kind, call)
    pids = pids_of(opened) or [process.pid for process in opened.processes]
    monkeypatch.setattr(Connection, "_recv", struck)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        act()
    assert opened.closed
    opened.close()
    assert time.monotonic() - started < 1
    assert_all_gone(pids)


def test_what_cannot_be_read_counts_as_the_end_of_a_pipe() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.send("first")
    theirs.send_bytes(b"no pickle")
    theirs.send("last")
    assert left_over(ours) == ["first"]
    assert left_over(ours) == ["last"]
    theirs.close()
    assert left_over(ours) == []


def test_as_a_thread_answers_it_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_scripted("thread") as pool:
        answers: Any = pool._answers  # type: ignore[attr-defined]
        wait = type(answers).wait

        def struck(self: Any, timeout: float) -> bool:
            wait(self, timeout)
            raise KeyboardInterrupt

        for number in range(1, 5):
            with monkeypatch.context() as patched:
                patched.setattr(type(answers), "wait", struck)
                pool.send([number, number])
                with pytest.raises(KeyboardInterrupt):
                    pool.recv(2)
            assert pool.recv(2).observation[:, 2].tolist() == [number, number]


def test_while_a_failure_is_summed_up_it_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = gymtask.ProcessVectorEnv([partial(FaultyEnv, "step", "raise:value")] * 2, num_workers=2)
    envs.reset(seed=0)
    envs.step([0, 0])
    pids = [process.pid for process in envs.processes]

    def struck(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(envs, "_others", struck)
    with pytest.raises(KeyboardInterrupt):
        envs.step([0, 0])
    assert envs.closed
    assert_all_gone(pids)
