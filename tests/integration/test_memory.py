"""What is closed is freed at once, after a failure as well: nothing waits for the collector."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import gymtask
from gymtask.testing import ScriptedEnv
from gymtask.vector.thread import ThreadVectorEnv
from tests.integration.pool_envs import MODES, FaultyEnv, open_pool, step_all
from tests.tasks import make_task


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # how Gymnasium reports failures
        yield
    gc.enable()


def num_blocks() -> int:
    """Blocks of shared memory that this process has."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd:gymtask" in target for target in targets)


def failure_of(act: Callable[..., Any], *args: Any) -> str:
    """The name of what it raises, of which nothing is kept."""
    try:
        act(*args)
    except Exception as error:
        return type(error).__name__
    return ""


RAISES = [(where, "raise:value", "ValueError") for where in ("step", "reset", "call", "close")]
DIES = [(where, "kill:9", "WorkerDiedError") for where in ("step", "reset", "call")]


def use_pool(pool: Any) -> None:
    pool.reset()
    for _ in range(3):
        step_all(pool)
    pool.call("act_up")
    pool.close()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("mode", "where", "what", "name"),
    [
        *((mode, *case) for mode in MODES for case in RAISES),
        *(("process", *case) for case in DIES),
    ],
)
def test_of_a_pool(mode: str, where: str, what: str, name: str, workers: int) -> None:
    pool = open_pool(FaultyEnv, mode, workers=workers, where=where, what=what)
    memory = weakref.ref(pool.slots)
    assert failure_of(use_pool, pool) == name
    pool.close()
    del pool
    assert memory() is None
    assert num_blocks() == 0


def use_vector(envs: Any) -> None:
    envs.reset(seed=0)
    for _ in range(3):
        envs.step([0, 0, 0])
    envs.call("act_up")
    envs.close()


@pytest.mark.parametrize("number", [1, 2], ids=["two fail", "one fails"])
@pytest.mark.parametrize(
    ("kind", "where", "what", "name"),
    [
        *((gymtask.ProcessVectorEnv, *case) for case in [*RAISES, *DIES]),
        *((ThreadVectorEnv, *case) for case in RAISES),
    ],
)
def test_of_a_vector_environment(kind: Any, where: str, what: str, name: str, number: int) -> None:
    # Environment i fails if it is told the number i.
    numbers = [9, 1, 2] if number == 1 else [9, 9, 2]
    envs: Any = kind([partial(FaultyEnv, where, what, each) for each in numbers], num_workers=3)
    memory = weakref.ref(envs._batches)
    assert failure_of(use_vector, envs) == name
    envs.close()
    del envs
    assert memory() is None
    assert num_blocks() == 0


def collect(native: bool) -> None:
    env = partial(ScriptedEnv, lengths=9, faults={1: (4, "raise")})
    make = (lambda num_envs: gymtask.ProcessVectorEnv([env] * num_envs)) if native else env
    task = make_task(2, 1 if native else 2, "native" if native else "process", env=make)
    with task.get_worker_pool() as pool:
        task.collect_samples(None, pool, 40, use_tqdm=False)


@pytest.mark.parametrize("native", [False, True])
def test_of_a_collection(native: bool) -> None:
    assert failure_of(collect, native) == "ValueError"
    assert num_blocks() == 0
