"""Native mode: how a VectorEnv that has processes or threads of its own is closed, in time."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AsyncVectorEnv, VectorWrapper

import gymtask
from gymtask.testing import ScriptedEnv
from gymtask.vector.thread import ThreadVectorEnv
from gymtask.workers.pool import WorkerPool
from tests.integration.pool_envs import FaultyEnv, assert_all_gone, open_pool, step_all, wait_for
from tests.integration.vector_envs import ClingingEnv, StubbornEnv
from tests.tasks import make_task

PROCESSES = [AsyncVectorEnv, gymtask.ProcessVectorEnv]
pytestmark = pytest.mark.timeout(60)


class Plain(VectorWrapper):  # no [...]: Gymnasium 1.2 has none
    """A wrapper whose close takes no keywords."""

    closed_by_hand = 0

    def close(self) -> None:  # type: ignore[override]
        Plain.closed_by_hand += 1
        self.env.close()


def opened(
    kind: Any, env: Callable[..., Any], cleanup: float = 0.5, wrap: Any = None, **kwargs: Any
) -> WorkerPool:
    def make(num_envs: int) -> Any:
        envs = kind([partial(env, **kwargs)] * num_envs)
        return envs if wrap is None else wrap(envs)

    return open_pool(make, "native", envs=2, workers=1, cleanup=cleanup)


def inner(pool: Any) -> Any:
    return pool._env.unwrapped


def pids_of(pool: WorkerPool) -> list[int]:
    return [process.pid for process in inner(pool).processes]


@contextmanager
def in_time(pool: WorkerPool, limit: float = 1.5) -> Iterator[None]:
    pids, started = pids_of(pool), time.monotonic()
    yield
    assert time.monotonic() - started < limit
    assert inner(pool).closed
    assert_all_gone(pids)


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Ctrl-C after some time."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    timer.join()


@pytest.mark.parametrize("env", [ScriptedEnv, StubbornEnv])
@pytest.mark.parametrize("kind", PROCESSES)
def test_ctrl_c_in_a_step_ends_it_at_once(kind: Any, env: Any) -> None:
    pool = opened(kind, env, seconds=[0.0, 600.0])
    pool.reset()
    with in_time(pool):
        with interrupted(0.3):
            step_all(pool)
        assert pool.closed
        pool.close()


def test_ctrl_c_in_a_collection_ends_it_at_once() -> None:
    env = partial(ScriptedEnv, seconds=[0.0, 0.6])
    task = make_task(2, 1, "native", env=lambda num_envs: AsyncVectorEnv([env] * num_envs))
    with task.get_worker_pool() as pool, in_time(pool), interrupted(0.9):
        task.collect_samples(None, pool, 1000, use_tqdm=False)


@pytest.mark.parametrize("call", ["reset", "render"])
def test_ctrl_c_in_another_call_too(call: str) -> None:
    class Slow(ScriptedEnv):
        def reset(self, **kwargs: Any) -> Any:
            if self.episode >= 0:
                self.render()
            return super().reset(**kwargs)

        def render(self) -> Any:
            time.sleep(600.0 if self.number else 0.0)

    pool = opened(AsyncVectorEnv, Slow)
    pool.reset()
    with in_time(pool), interrupted(0.3):
        getattr(pool, call)()


@pytest.mark.parametrize("what", ["raise:value", "kill:9"])
@pytest.mark.parametrize("kind", PROCESSES)
def test_a_failure_or_a_death_ends_it(kind: Any, what: str) -> None:
    pool = opened(kind, FaultyEnv, where="step", what=what, number=1, after=1)
    pool.reset()
    with in_time(pool), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # how Gymnasium reports them
        with pytest.raises(Exception, match=r"boom 1|^$|died"):
            step_all(pool)
        assert pool.closed


def test_the_others_are_closed_after_a_failure(tmp_path: Path) -> None:
    pool = opened(AsyncVectorEnv, FaultyEnv, where="step", what="raise:value", number=1, after=1)
    pool.reset()
    pool.set_attr("closed_file", tmp_path / "closed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(ValueError, match="boom 1"):
            step_all(pool)
    assert wait_for(lambda: "closed.0" in os.listdir(tmp_path))


@pytest.mark.parametrize("kind", PROCESSES)
def test_environments_that_do_not_close_are_killed_in_time(kind: Any) -> None:
    for timeout in (None, 0.1, 0.0):
        pool = opened(kind, ClingingEnv)
        pool.reset()
        step_all(pool)
        with in_time(pool):
            pool.close(timeout)


def test_they_may_take_longer_than_five_seconds_if_they_are_told_so() -> None:
    pool = opened(gymtask.ProcessVectorEnv, ScriptedEnv, cleanup=7.5)
    pool.close()
    assert inner(pool).close_limit == 7.5


@pytest.mark.parametrize("kind", PROCESSES)
def test_wrappers_are_closed_too_with_or_without_keywords(kind: Any) -> None:
    for wrap in (Plain, gym.wrappers.vector.RecordEpisodeStatistics):
        before = Plain.closed_by_hand
        pool = opened(kind, ScriptedEnv, wrap=wrap)
        pool.reset()
        with in_time(pool):
            pool.close()
        assert Plain.closed_by_hand == before + (wrap is Plain)


class TestThreads:
    def test_that_are_stuck_are_abandoned_in_time_and_named(self) -> None:
        for give in (lambda envs: envs.close(timeout=0.3), limited):
            envs = ThreadVectorEnv([partial(ScriptedEnv, seconds=[0.0, 2.0])] * 2, num_workers=2)
            envs.reset(seed=0)
            with interrupted(0.2):
                envs.step([0, 0])
            started = time.monotonic()
            with pytest.warns(ResourceWarning, match=r"1 worker threads .* 0.3 s .* \[\[1\]\]"):
                give(envs)
            assert time.monotonic() - started < 1.3
            assert envs.closed
            assert wait_for(lambda: not vector_threads())

    def test_are_abandoned_after_ctrl_c_in_native_mode_as_well(self) -> None:
        pool = opened(
            partial(ThreadVectorEnv, num_workers=2), ScriptedEnv, cleanup=0.3, seconds=[0.0, 2.0]
        )
        pool.reset()
        started = time.monotonic()
        with interrupted(0.2), pytest.warns(ResourceWarning, match="1 worker threads"):
            step_all(pool)
        assert time.monotonic() - started < 1.5
        assert wait_for(lambda: not vector_threads())

    def test_whose_environments_close_end_without_a_word(self) -> None:
        envs = ThreadVectorEnv([ScriptedEnv] * 3, num_workers=2)
        envs.close()
        assert not vector_threads()


def limited(envs: ThreadVectorEnv) -> None:
    envs.close_limit = 0.3
    envs.close()


def vector_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gymtask-vector")]
