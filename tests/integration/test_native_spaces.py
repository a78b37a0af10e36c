"""Native mode over an id whose VectorEnv is not the single environment, or takes other keywords."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

import gymtask
from gymtask.errors import MakerError
from gymtask.workers.pool import WorkerPool
from tests.integration.native_envs import DriftEnv, DriftVectorEnv
from tests.tasks import make_task

OTHER = spaces.Box(0, 9, (4,), np.float32)


class WiderVectorEnv(DriftVectorEnv):
    """Says that it observes and acts otherwise than a `DriftEnv`."""

    def __init__(self, num_envs: int, **_: Any) -> None:
        super().__init__(num_envs)
        self.single_observation_space = self.single_action_space = OTHER
        self.observation_space = self.action_space = batch_space(OTHER, num_envs)


class StrictVectorEnv(DriftVectorEnv):
    """Takes no keywords."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)


def breaks(**_: Any) -> DriftEnv:
    raise RuntimeError("no single one")


@pytest.fixture
def register() -> Iterator[Callable[..., str]]:
    """Registers an id while the test runs."""

    def register(vector: Any, single: Any = DriftEnv) -> str:
        gym.register("Spaces-v0", single, vector_entry_point=vector)
        return "Spaces-v0"

    yield register
    gym.registry.pop("Spaces-v0", None)


def told(task: gymtask.ReinforcementLearningTask, times: int = 1) -> list[str]:
    """What is warned of while pools are started."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            task.get_worker_pool().close()
    return [str(warning.message) for warning in caught]


def test_other_spaces_than_those_of_the_single_environment_are_told_of_once(register: Any) -> None:
    task = make_task(2, 1, "native", env=register(WiderVectorEnv))
    (text,) = told(task, 2)
    single = DriftEnv()
    assert f"observation space {OTHER} where a single environment has" in text
    assert f"has {single.observation_space} and action space {OTHER}" in text
    assert f"environment has {single.action_space}. Build the model from" in text
    assert "sample_clip() and force_sync=True use the single one" in text


def test_the_spaces_of_ale_are_told_of() -> None:
    gym.register_envs(pytest.importorskip("ale_py"))
    (text,) = told(make_task(2, 1, "native", env="ALE/Pong-v5"))
    assert "(4, 84, 84), uint8) where a single environment has Box(0, 255, (210, 160, 3)" in text
    assert "action space" not in text


def test_nothing_is_told_where_the_spaces_are_the_same(register: Any) -> None:
    assert told(make_task(2, 1, "native", env=register(DriftVectorEnv))) == []
    assert told(make_task(2, 1, "native", env="CartPole-v1")) == []


def test_native_mode_needs_no_single_environment(register: Any) -> None:
    assert told(make_task(2, 1, "native", env=register(WiderVectorEnv, breaks))) == []
    assert told(make_task(2, 1, "native", env=WiderVectorEnv)) == []  # a callable has none


def test_the_pool_is_closed_where_the_warning_is_an_error(
    register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[WorkerPool] = []
    start = WorkerPool.from_workers
    monkeypatch.setattr(
        WorkerPool, "from_workers", lambda workers: made.append(start(workers)) or made[-1]
    )
    with pytest.raises(UserWarning, match="another environment"):
        make_task(2, 1, "native", env=register(WiderVectorEnv)).get_worker_pool()
    assert made[0].closed


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"max_episode_steps": 9},
            "`max_episode_steps` must be None in native mode for Spaces-v0, whose VectorEnv takes"
            " no such keyword, got 9; pass a keyword that it has (ale_py's:"
            " max_num_frames_per_episode), or a callable that returns a VectorEnv made that way",
        ),
        (
            {"render_mode": "rgb_array"},
            "`render_mode` must be None in native mode for Spaces-v0, whose VectorEnv takes no"
            " such keyword, got 'rgb_array'; pass a callable that returns",
        ),
    ],
)
def test_a_keyword_that_the_vector_env_does_not_take_is_refused_with_what_to_do(
    register: Any, keywords: dict[str, Any], message: str
) -> None:
    maker = gymtask.Environment(register(StrictVectorEnv), **keywords).maker
    with pytest.raises(MakerError, match=re.escape(message)) as caught:
        maker.make_vector(2, 0)
    assert isinstance(caught.value.__cause__, TypeError)


def test_other_type_errors_of_a_vector_env_are_its_own(register: Any) -> None:
    maker = gymtask.Environment(register(StrictVectorEnv), max_episode_steps=None, size=3).maker
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        maker.make_vector(2, 0)


def test_a_time_limit_of_an_ale_vector_env_is_its_own_keyword() -> None:
    gym.register_envs(pytest.importorskip("ale_py"))
    with pytest.raises(MakerError, match=r"ale_py's: max_num_frames_per_episode"):
        gymtask.Environment("ALE/Pong-v5", max_episode_steps=9).maker.make_vector(1, 0)
    env = gymtask.Environment("ALE/Pong-v5", max_num_frames_per_episode=36).maker.make_vector(1, 0)
    env.reset(seed=0)
    ends = [bool(env.step(np.zeros(1, int))[3][0]) for _ in range(9)]
    assert ends == [False] * 8 + [True]
    env.close()
