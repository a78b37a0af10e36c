"""Spaces with arrays of no numbers: collected, noise drawn, read back."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from torch import Tensor

import gymtask
from tests.integration.pool_envs import MODES
from tests.integration.vector_envs import RandomSpaceEnv
from tests.tasks import make_task

EMPTY = spaces.Box(-1, 1, (0,), np.float32)
DEEP = spaces.Dict({"a": spaces.Box(-1, 1, (2, 0), np.float32), "b": spaces.Discrete(3)})


def no_action(self: Any, model: Any, states: Any, optimal: bool) -> Tensor:
    return torch.zeros(len(states), 0)


def noise(self: Any, model: Any, states: Any, optimal: bool) -> Tensor:
    return gymtask.sampling.gaussian(torch.zeros(len(states), 0), 0.3, states)


def one(self: Any, model: Any, states: Any, optimal: bool) -> Tensor:
    return torch.ones(len(states), dtype=torch.int64)


@pytest.mark.parametrize("mode", [*MODES, "native"])
@pytest.mark.parametrize(
    ("observation_space", "action_space", "policy"),
    [
        (EMPTY, spaces.Discrete(2), one),
        (DEEP, spaces.Discrete(2), one),
        (DEEP, EMPTY, no_action),
        (EMPTY, EMPTY, noise),
    ],
)
def test_are_collected_as_others_are(
    observation_space: Any, action_space: Any, policy: Any, mode: str
) -> None:
    env = partial(RandomSpaceEnv, observation_space, action_space, infos=False)
    make = (lambda num_envs: SyncVectorEnv([env] * num_envs)) if mode == "native" else env
    task = make_task(2, 1, mode, env=make, get_actions=policy)
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 14, use_tqdm=False, max_batch_size=1)
    rows = samples.to_tensordict()
    assert rows.shape == (14,)
    if observation_space is EMPTY:
        assert rows["observation"].shape == rows["next", "observation"].shape == (14, 0)
    else:
        assert rows["observation", "a"].shape == rows["next", "observation", "a"].shape
        assert rows["observation", "a"].shape == (14, 2, 0)
    assert rows["action"].shape == ((14, 0) if action_space is EMPTY else (14,))
