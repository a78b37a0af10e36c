"""Environments that forbid actions, and what they forbid where."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import gymtask
from gymtask.testing import ScriptedEnv

NUM_ACTIONS = 5
LENGTHS = (3, 5, 4)  # of the episodes of environments 0, 1, 2; those of 1 are truncated

Array = np.ndarray[Any, np.dtype[Any]]


def mask_of(number: int, episode: int, step: int) -> Array:
    """What environment `number` allows in a state, int8 [5]; nothing where it has terminated."""
    if step == LENGTHS[number % 3] and number % 2 == 0:
        return np.zeros(NUM_ACTIONS, np.int8)
    code = 1 + (7 * number + 11 * episode + 5 * step) % 31
    return np.array([code >> bit & 1 for bit in range(NUM_ACTIONS)], np.int8)


class MaskedEnv(ScriptedEnv):
    """A `ScriptedEnv` that raises at forbidden actions, and tells them in its info dict.

    It fills one mask again and again, and environments with odd numbers truncate.

    Args:
        lacks: The number of the step, or 0 for the reset, in whose info dict the mask is missing.
    """

    def __init__(self, lacks: int = -1) -> None:
        super().__init__(LENGTHS, num_actions=NUM_ACTIONS, reuse_arrays=True)
        self._mask = np.zeros(NUM_ACTIONS, np.int8)
        self._lacks = lacks

    def action_masks(self) -> Array:
        """The mask of the present state, as a policy of stable-baselines3 asks for it."""
        return mask_of(self.number, self.episode, self.num_steps)

    def reset(self, **keywords: Any) -> tuple[Array, dict[str, Any]]:
        observation, info = super().reset(**keywords)
        return observation, self._tell(info)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if not self.action_masks()[action]:
            raise ValueError(f"forbidden action {action} in environment {self.number}")
        observation, reward, ended, _, info = super().step(action)
        odd = self.number % 2 == 1
        return observation, reward, ended and not odd, ended and odd, self._tell(info)

    def _tell(self, info: dict[str, Any]) -> dict[str, Any]:
        self._mask[:] = self.action_masks()
        return info if self._lacks == self.num_steps else {**info, "action_mask": self._mask}


class DictEnv(gym.Wrapper[dict[str, Any], Any, Any, Any]):
    """A `MaskedEnv` whose own observation holds the mask."""

    def __init__(self) -> None:
        super().__init__(MaskedEnv())
        parts = {
            "observation": self.env.observation_space,
            "action_mask": spaces.MultiBinary(NUM_ACTIONS),
        }
        self.observation_space = spaces.Dict(parts)

    def reset(self, **keywords: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        observation, info = self.env.reset(**keywords)
        return {"observation": observation, "action_mask": info["action_mask"]}, info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        observation, *rest, info = self.env.step(action)
        return {"observation": observation, "action_mask": info["action_mask"]}, *rest, info


def masked_environment(way: str, **keywords: Any) -> gymtask.Environment:
    """An environment whose mask comes from its "info", a "method" or its "observation"."""
    if way == "observation":
        return gymtask.Environment(DictEnv, **keywords)
    method = {"info": None, "method": "action_masks"}[way]
    mask = {"action_mask": spaces.MultiBinary(NUM_ACTIONS)}
    wrapper = partial(gymtask.InfoToObservation, spaces=mask, method=method)
    return gymtask.Environment(MaskedEnv, wrappers=(wrapper,), **keywords)
