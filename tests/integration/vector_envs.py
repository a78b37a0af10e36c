"""Environments for the tests of vector environments, and how two of those are compared.

Workers import this module; it must not import torch.
"""

from __future__ import annotations

import copy
import signal
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import VectorEnv

from gymtask.testing import ScriptedEnv

AUTORESET = ("NextStep", "SameStep", "Disabled")
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
)  # fmt: skip
NESTED = spaces.Dict(
    {
        "picture": spaces.Box(0, 255, (2, 3), np.uint8),
        "parts": spaces.Tuple(
            (spaces.Discrete(7, start=-3), spaces.Dict({"x": spaces.Box(-1, 1, (), np.float64)}))
        ),
        "bits": spaces.MultiBinary(5),
        "many": spaces.MultiDiscrete([3, 4], start=[1, -1]),
    }
)


class RandomSpaceEnv(gym.Env[Any, Any]):
    """Observations are drawn from a space; ends and infos too, by the environment's own generator.

    Args:
        space: The observation space.
        action_space: The action space; the action is echoed in the info.
        reuse: Whether one array is filled and returned again and again (a Box only).
        infos: Whether infos are given: of many kinds, sometimes.
    """

    def __init__(
        self,
        space: spaces.Space[Any] = NESTED,
        action_space: spaces.Space[Any] | None = None,
        reuse: bool = False,
        infos: bool = True,
    ) -> None:
        # Copies: environments in one process would share the random stream of a space.
        self.observation_space = copy.deepcopy(space)
        self.action_space = copy.deepcopy(action_space or spaces.Discrete(3))
        self._reuse, self._infos = reuse, infos
        self._array: Any = None
        self._steps = 0
        self.seen: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        info = {"fresh": True, "options": str(options)} if self._infos else {}
        return self._observe(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self.seen.append(action)
        draw = self.np_random.random(3)
        info: dict[str, Any] = {}
        if self._infos and draw[2] < 0.5:
            info = {"steps": self._steps, "action": action, "deep": {"draw": draw[0]}}
            if draw[2] < 0.2:
                info["array"] = draw
                info["text"] = f"step {self._steps}"
        return self._observe(), draw[0], bool(draw[0] < 0.15), bool(draw[1] < 0.15), info

    def _observe(self) -> Any:
        value = self.observation_space.sample()
        if not self._reuse:
            return value
        if self._array is None:
            self._array = value
        self._array[...] = value
        return self._array

    def actions_seen(self) -> list[Any]:
        return self.seen


class TextEnv(RandomSpaceEnv):
    """Observations without a fixed shape."""

    def __init__(self) -> None:
        # Of one letter: Gymnasium 1.2 draws several in another order in each process.
        text = spaces.Text(6, charset="a")
        space = spaces.Dict({"text": text, "list": spaces.Sequence(spaces.Discrete(3))})
        super().__init__(space, spaces.Text(4))


class StubbornEnv(ScriptedEnv):
    """Does not end when it is asked to."""

    def reset(self, **kwargs: Any) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().reset(**kwargs)


class ClingingEnv(ScriptedEnv):
    """The close of environment 1 takes an hour."""

    def close(self) -> None:
        if self.number == 1:
            time.sleep(3600)


class TellingEnv(ScriptedEnv):
    """Its reset tells how the last episode ended, by the names that Gymnasium uses."""

    def reset(self, **kwargs: Any) -> Any:
        observation, _ = super().reset(**kwargs)
        return observation, {"final_obs": observation + 1, "final_info": {"t": 7}}


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, with the same types, shapes and dtypes, keys in any order."""
    return bool(data_equivalence(one, other, True))


def assert_same_run(
    ours: VectorEnv[Any, Any, Any], theirs: VectorEnv[Any, Any, Any], steps: int = 60
) -> None:
    """Drives both with the same seeds and actions, and compares all that they give."""
    disabled = theirs.metadata["autoreset_mode"].value == "Disabled"
    try:
        assert same(ours.reset(seed=7), theirs.reset(seed=7))
        theirs.action_space.seed(3)
        for _ in range(steps):
            actions = theirs.action_space.sample()
            got, expected = ours.step(actions), theirs.step(actions)
            assert same(got, expected), (got, expected)
            ended = expected[2] | expected[3]
            if disabled and ended.any():
                again = [env.reset(options={"reset_mask": ended}) for env in (ours, theirs)]
                assert same(*again), again
        assert same(ours.reset(seed=1, options={"a": 1}), theirs.reset(seed=1, options={"a": 1}))
        assert same(ours.reset(), theirs.reset())
    finally:
        ours.close()
        theirs.close()
