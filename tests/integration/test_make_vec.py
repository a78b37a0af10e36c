"""`make_vec`, and the vector environments that it makes beside `ProcessVectorEnv`."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import VectorizeMode, spaces
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

import gymtask
from gymtask.errors import ConfigurationError
from gymtask.testing import ScriptedEnv
from gymtask.vector.thread import ThreadVectorEnv
from tests.integration.pool_envs import FaultyEnv, GravityEnv, wait_for
from tests.integration.vector_envs import AUTORESET, RandomSpaceEnv, TextEnv, assert_same_run

ROOT = Path(__file__).parents[2]


class CountingVectorEnv(VectorEnv[Any, Any, Any]):
    """The own VectorEnv of an id."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, max_episode_steps: int = 0, size: int = 1) -> None:
        self.num_envs, self.size = num_envs, size
        self.single_observation_space = spaces.Box(0, 1, (size,))
        self.single_action_space = spaces.Discrete(2)


@pytest.fixture
def random_id() -> Iterator[str]:
    """An id that is registered while the test runs."""
    gym.register(
        "Random-v0", RandomSpaceEnv, max_episode_steps=7, vector_entry_point=CountingVectorEnv
    )
    yield "Random-v0"
    del gym.registry["Random-v0"]


@pytest.mark.parametrize("autoreset", AUTORESET)
@pytest.mark.parametrize("mode", ["process", "thread", "sync", "async"])
def test_every_mode_gives_what_gymnasium_gives(mode: str, autoreset: str, random_id: str) -> None:
    ours = gymtask.make_vec(random_id, 3, mode, autoreset_mode=autoreset, infos=True)
    theirs = gym.make_vec(
        random_id, 3, "sync", vector_kwargs={"autoreset_mode": autoreset}, infos=True
    )
    assert_same_run(ours, theirs, 30)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("process", gymtask.ProcessVectorEnv),
        ("thread", ThreadVectorEnv),
        ("sync", SyncVectorEnv),
        (VectorizeMode.SYNC, SyncVectorEnv),
        ("async", AsyncVectorEnv),
        (VectorizeMode.ASYNC, AsyncVectorEnv),
        ("native", CountingVectorEnv),
        ("vector_entry_point", CountingVectorEnv),
        (VectorizeMode.VECTOR_ENTRY_POINT, CountingVectorEnv),
    ],
)
def test_modes_give_their_kind_with_a_spec_that_makes_it_again(
    mode: Any, kind: Any, random_id: str
) -> None:
    envs = gymtask.make_vec(random_id, 2, mode)
    assert isinstance(envs, kind)
    assert isinstance(envs, VectorEnv)
    assert (type(envs) is kind) == (kind is not AsyncVectorEnv or mode != "process")
    assert envs.num_envs == 2
    envs.close()
    again = gymtask.make_vec(envs.spec)  # type: ignore[arg-type]
    assert type(again) is type(envs)
    assert again.num_envs == 2
    assert again.spec == envs.spec
    assert again.spec is not None
    assert again.spec.id == random_id
    again.close()


def test_the_default_is_processes_and_kwargs_wrappers_and_vector_kwargs_arrive() -> None:
    gym.register("VectorGravity-v0", GravityEnv)
    try:
        envs: Any = gymtask.make_vec(
            "VectorGravity-v0",
            4,
            vector_kwargs={"copy": False},
            wrappers=[lambda env: gym.wrappers.TransformReward(env, lambda r: 10 * r)],
            num_workers=2,
            g=2.0,
            render_mode="rgb_array",
        )
        assert isinstance(envs, gymtask.ProcessVectorEnv)
        assert len(envs.processes) == 2
        assert envs.render_mode == "rgb_array"
        first, _ = envs.reset(seed=0)
        observations, rewards, *_ = envs.step([0] * 4)
        assert observations is first
        assert rewards.tolist() == [20.0] * 4
        assert repr(envs) == "ProcessVectorEnv(VectorGravity-v0, num_envs=4)"
        envs.close()
    finally:
        del gym.registry["VectorGravity-v0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": 3}, "`id` must be an id or an EnvSpec, got 3"),
        ({"num_envs": 0}, "`num_envs` must be an integer of at least 1, got 0"),
        ({"num_envs": True}, "`num_envs` must be an integer of at least 1, got True"),
        ({"num_envs": 2.0}, "got 2.0"),
        ({"vectorization_mode": "fast"}, "`vectorization_mode` must be one of 'process', 'thread'"),
        ({"vectorization_mode": None}, "got None"),
        ({"vector_kwargs": [1]}, "`vector_kwargs` must be a dict or None, got [1]"),
        ({"vector_kwargs": {"copies": 1}}, "`vector_kwargs` must hold arguments of ProcessVector"),
        ({"vector_kwargs": {"env_fns": []}}, "got ['env_fns']"),
        ({"wrappers": "TimeLimit"}, "`wrappers` must be a list of callables, got 'TimeLimit'"),
        ({"wrappers": [1]}, "`wrappers` must be a list of callables, got [1]"),
        ({"num_workers": 3}, "`num_workers` must be an integer from 1 to the number of"),
        ({"num_workers": 1, "vectorization_mode": "sync"}, "`num_workers` must be left out"),
        ({"num_workers": 1, "vectorization_mode": "native"}, "`num_workers` must be left out"),
        ({"num_workers": 1, "vectorization_mode": "async"}, "`num_workers` must be left out"),
        ({"num_workers": 1, "vector_kwargs": {"num_workers": 2}}, "or be left out there, got 1"),
        ({"autoreset_mode": "Now"}, "`autoreset_mode` must be one of ['NextStep',"),
        (
            {"autoreset_mode": "SameStep", "vectorization_mode": "native"},
            "`autoreset_mode` must be left out",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        gymtask.make_vec(**{"id": "CartPole-v1", "num_envs": 2, **arguments})


def test_what_gymnasium_refuses_it_refuses_with_gymnasiums_errors() -> None:
    for mode in ("process", "thread", "sync", "native"):
        with pytest.raises(gym.error.NameNotFound):
            gymtask.make_vec("NoSuchEnvironment-v0", 2, mode)
    with pytest.raises(gym.error.Error, match="vector_kwargs"):
        gymtask.make_vec("CartPole-v1", 2, "native", {"copy": False})
    with pytest.raises(TypeError, match="unexpected keyword"):
        gymtask.make_vec("CartPole-v1", 2, gravity_is="low")


def test_a_script_without_a_guard_may_register_its_own_environment() -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import gymnasium as gym, gymtask
from gymtask.testing import ScriptedEnv

class Mine(ScriptedEnv):
    pass

gym.register("Mine-v0", "__main__:Mine")
double = 2
envs = gymtask.make_vec("Mine-v0", 2, lengths=2, disable_env_checker=True, wrappers=[
    lambda env: gym.wrappers.TransformReward(env, lambda reward: double * reward)])
envs.reset(seed=0)
print([envs.step([0, 0])[1].tolist() for _ in range(3)])
envs.close()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-"], input=script, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("[[2.0, 2.0], [4.0, 4.0], [0.0, 0.0]]\n", "")


class ThreadedEnv(RandomSpaceEnv):
    """Knows the threads in which it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = {threading.get_ident()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        return super().step(action)

    def render(self) -> Any:
        self.threads.add(threading.get_ident())
        return self.threads

    def close(self) -> None:
        assert self.threads == {threading.get_ident()}


class TestThreads:
    @pytest.mark.parametrize("autoreset", AUTORESET)
    @pytest.mark.parametrize("workers", [1, 2, 5])
    @pytest.mark.parametrize("env", [RandomSpaceEnv, TextEnv])
    def test_equal_sync_vector_env(self, env: Any, workers: int, autoreset: str) -> None:
        ours = ThreadVectorEnv([env] * 5, autoreset_mode=autoreset, num_workers=workers)
        assert isinstance(ours, SyncVectorEnv)
        assert_same_run(ours, SyncVectorEnv([env] * 5, autoreset_mode=autoreset), 25)

    def test_keep_each_environment_in_one_thread(self) -> None:
        envs = ThreadVectorEnv([ThreadedEnv] * 4, num_workers=2)
        envs.reset(seed=0)
        envs.step([0] * 4)
        found = envs.render()
        assert all(len(threads) == 1 for threads in found)
        assert len(set.union(*found)) == 2
        assert threading.get_ident() not in set.union(*found)
        assert envs.call("render") == found
        envs.set_attr("mark", [1, 2, 3, 4])
        assert envs.get_attr("mark") == (1, 2, 3, 4)
        envs.close()
        envs.close()
        assert wait_for(lambda: not any("vector" in t.name for t in threading.enumerate()), 1.0)
        with pytest.raises(ClosedEnvironmentError):
            envs.step([0] * 4)

    def test_raise_what_an_environment_raised(self) -> None:
        envs = ThreadVectorEnv([partial(FaultyEnv, "step", "raise:value", after=1)] * 3)
        envs.reset(seed=0)
        with pytest.raises(ValueError, match="boom 1"):
            envs.step([0] * 3)
        envs.close()
        with pytest.raises(ConfigurationError, match="`num_workers` must be an integer from 1"):
            ThreadVectorEnv([ScriptedEnv], num_workers=2)

    def test_close_what_was_made_where_another_cannot_be(self) -> None:
        closed: list[int] = []

        class Closing(ScriptedEnv):
            def close(self) -> None:
                closed.append(threading.get_ident())

        def broken() -> ScriptedEnv:
            raise ValueError("no display")

        with pytest.raises(ValueError, match="no display"):
            ThreadVectorEnv([Closing, Closing, broken, Closing], num_workers=2)
        assert wait_for(lambda: len(closed) == 2, 5.0)
        assert threading.get_ident() not in closed
        assert wait_for(lambda: not any("vector" in t.name for t in threading.enumerate()), 1.0)

    def test_tell_what_others_raised_in_the_same_step(self) -> None:
        faults = {0: (1, "raise"), 2: (1, "raise")}
        envs = ThreadVectorEnv([partial(ScriptedEnv, faults=faults)] * 3, num_workers=3)
        envs.reset(seed=0)
        with pytest.raises(ValueError, match="boom 0") as caught:
            envs.step([0] * 3)
        assert caught.value.__notes__ == ["environment 2 also raised ValueError: boom 2"]
        envs.close()

    def test_refuse_a_step_after_an_end_that_was_not_reset(self) -> None:
        envs = ThreadVectorEnv([partial(ScriptedEnv, lengths=1)] * 2, autoreset_mode="Disabled")
        envs.reset(seed=0)
        assert envs.step(np.zeros(2, int))[2].all()
        with pytest.raises(AssertionError, match="_autoreset_envs"):
            envs.step([0, 0])
        envs.reset(options={"reset_mask": np.array([True, True])})
        envs.step([0, 0])
        envs.close()
