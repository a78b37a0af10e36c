"""An environment whose every value can be worked out by hand.

With GYMTASK_DEBUG=1 in the environment variables, `states` is filled with nonsense after each call
of `get_actions`, so that a reference to it that a policy kept by mistake shows at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["ScriptedEnv"]

Array = np.ndarray[Any, np.dtype[Any]]

ENDS = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}


class ScriptedEnv(gym.Env[Array, Any]):
    """Counts.

    The observation is float32 [3]: 100 · episode + step, the environment's number, and the last
    action (-1 after a reset). The reward of step t is t, and the info dict of a step {"t": t} holds
    it too. Its number is the seed of its first reset, so with `env_seed=0` environment i of a pool
    has the number i. Rendered, it is grey, 10 times as bright as the step.

    Args:
        lengths: Length of the episodes: one number, or one for each number of an environment,
            modulo their count.
        end: How episodes end: "terminated", "truncated" or "both" at once.
        num_actions: n of the Discrete action space.
        start: Its start.
        seconds: Time that a step takes: one number, or one for each number of an environment.
        reuse_arrays: Whether one array is filled and returned again and again.
        faults: For the environment of that number, the step of its life at which something happens
            and what: "raise" (ValueError("boom <number>")), "die" (SIGKILL to its own process) or
            "sleep" (for an hour).
        render_mode: None or "rgb_array".
    """

    # Gymnasium declares it as an attribute of instances.
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(
        self,
        lengths: int | Sequence[int] = 3,
        end: str = "terminated",
        *,
        num_actions: int = 2,
        start: int = 0,
        seconds: float | Sequence[float] = 0.0,
        reuse_arrays: bool = False,
        faults: Mapping[int, tuple[int, str]] | None = None,
        render_mode: str | None = None,
    ) -> None:
        if end not in ENDS:
            raise ValueError(f"`end` must be one of {list(ENDS)}, got {end!r}")
        self.observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(num_actions, start=start)
        self.render_mode = render_mode
        self.number = -1
        self.episode = -1
        self.num_steps = 0  # of the present episode
        self.life = 0  # steps taken since it was made
        self._lengths = [lengths] if isinstance(lengths, int) else list(lengths)
        self._seconds = [seconds] if isinstance(seconds, (int, float)) else list(seconds)
        self._flags = ENDS[end]
        self._faults = dict(faults or {})
        self._array = np.zeros(3, np.float32)
        self._reuse_arrays = reuse_arrays

    @property
    def length(self) -> int:
        """Length of each of its episodes."""
        return self._lengths[self.number % len(self._lengths)]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begins the next episode."""
        super().reset(seed=seed)
        if self.number < 0:
            self.number = seed or 0
        self.episode += 1
        self.num_steps = 0
        return self._observe(-1), {"episode": self.episode}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Counts on."""
        self.num_steps += 1
        self.life += 1
        seconds = self._seconds[self.number % len(self._seconds)]
        if seconds:
            time.sleep(seconds)
        self._misbehave()
        terminated, truncated = self._flags if self.num_steps >= self.length else (False, False)
        info = {"t": self.num_steps}
        return self._observe(action), float(self.num_steps), terminated, truncated, info

    def render(self) -> Array:
        """A grey picture, uint8 [16, 16, 3]."""
        return np.full((16, 16, 3), min(10 * self.num_steps, 255), np.uint8)

    def _observe(self, action: Any) -> Array:
        array = self._array if self._reuse_arrays else np.zeros(3, np.float32)
        array[:] = (100 * self.episode + self.num_steps, self.number, action)
        return array

    def _misbehave(self) -> None:
        step, fault = self._faults.get(self.number, (0, ""))
        if self.life != step:
            return
        if fault == "raise":
            raise ValueError(f"boom {self.number}")
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "sleep":
            time.sleep(3600)
