"""An environment of any spaces that keeps what it gets, and a task over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from tensordict import TensorDict

import gymtask
from tests.tasks import make_task


def recorder(
    observation_space: gym.Space[Any] | None = None,
    action_space: gym.Space[Any] | None = None,
    observations: Any = (0,),
    **keywords: Any,
) -> gymtask.Environment:
    """An environment that keeps the actions it gets in `received`.

    Observation number t since its making is observations[t], the last one again and again; an
    episode has 4 steps.
    """

    # Defined in here it travels to a worker by value, which then need not import this module.
    class Recorder(gym.Env[Any, Any]):
        def __init__(self) -> None:
            self.observation_space = observation_space or spaces.Discrete(2)
            self.action_space = action_space or spaces.Discrete(2)
            self.received: list[Any] = []
            self.shown = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            super().reset(seed=seed)
            self.steps = 0
            return self.show(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.received.append(action)
            self.steps += 1
            return self.show(), 0.0, self.steps == 4, False, {}

        def show(self) -> Any:
            self.shown += 1
            return observations[min(self.shown, len(observations)) - 1]

    return gymtask.Environment(Recorder, **keywords)


def acting(
    environment: gymtask.Environment,
    act: Callable[[TensorDict], Any] = lambda states: torch.zeros(len(states), dtype=torch.int64),
    *,
    mode: str = "sync",
    num_envs: int = 1,
    **config: Any,
) -> gymtask.ReinforcementLearningTask:
    """A task over that environment whose policy is act(states)."""
    return make_task(
        num_envs=num_envs,
        workers=1,
        mode=mode,
        config=config,
        get_environment=lambda self: environment,
        get_actions=lambda self, model, states, optimal: act(states),
    )


def collect(
    task: gymtask.ReinforcementLearningTask, total: int
) -> tuple[TensorDict, tuple[Any, ...]]:
    """The rows, and what each environment received."""
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, total, use_tqdm=False)
        return samples.to_tensordict(), pool.get_attr("received")
