"""An environment that keeps count of what is done to it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Spy(gym.Env[Any, Any]):
    """Counts what is done to it, and draws the same picture again and again."""

    num_made = 0
    metadata: dict[str, Any] = {"render_modes": ["rgb_array", "ansi"]}  # noqa: RUF012

    def __init__(
        self,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        render_mode: str | None = None,
        frame: Any = None,
    ) -> None:
        Spy.num_made += 1
        self.observation_space = observation_space or spaces.Box(-1, 1, (2,), np.float64)
        self.action_space = action_space or spaces.Discrete(3)
        self.render_mode = render_mode
        self.frame = frame
        self.num_closed = 0
        self.received: list[Any] = []
        self.array = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.array[:] = 0.1
        return self.observe(), {"at": "reset"}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.received.append(action)
        self.array[:] = len(self.received)
        return self.observe(), np.float64(0.1), np.bool_(False), 0, {"at": len(self.received)}

    def observe(self) -> Any:
        if isinstance(self.observation_space, spaces.Box):
            return self.array  # the same one again and again
        return self.observation_space.sample()

    def render(self) -> Any:
        return self.frame

    def close(self) -> None:
        self.num_closed += 1
