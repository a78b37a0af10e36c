"""What environments of a `ProcessVectorEnv` are given where a batch of actions is no array."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import gymtask
from tests.integration.vector_envs import NESTED, RandomSpaceEnv, same


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (spaces.Discrete(5), [0, 4, 2]),
        (spaces.Discrete(5), (0, 4, 2)),
        (spaces.Discrete(5), [0, np.int64(4), True]),
        (spaces.Discrete(5), [np.int32(1), np.int32(4), np.int32(2)]),
        (spaces.Box(-1, 1, (), np.float32), [0.1, 0.2, 0.3]),
        (spaces.Box(-1, 1, (2,), np.float32), [[0.1, 0.2]] * 3),
        (spaces.Box(-1, 1, (2,), np.float32), [np.zeros(2, np.float32)] * 3),
        (spaces.MultiBinary(2), [[True, False]] * 3),
        (
            spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (), np.float64)}),
            {"a": [0, 1, 2], "b": np.array([0.1, 0.2, 0.3])},
        ),
    ],
    ids=str,
)
def test_actions_of_a_sequence_have_the_types_that_gymnasium_hands_on(
    space: Any, actions: Any
) -> None:
    seen = []
    env = partial(RandomSpaceEnv, NESTED, space)
    for envs in (gymtask.ProcessVectorEnv([env] * 3, num_workers=2), SyncVectorEnv([env] * 3)):
        envs.reset(seed=0)
        envs.action_space.seed(0)
        # Arrays between: what one batch was does not stick to the next.
        for step in range(16):
            envs.step(actions if step % 2 else envs.action_space.sample())
        seen.append(envs.call("actions_seen"))
        envs.close()
    assert same(*seen), seen
