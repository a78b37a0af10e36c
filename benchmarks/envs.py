"""The environments of the benchmarks. Workers import this file: no torch here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

MEAN, SIGMA = 2e-3, 1.5  # seconds, and sigma of the logarithm
NUM_STRAGGLERS, NUM_SLEEPS = 16, 4096


@dataclass(frozen=True)
class Work:
    """One row of the collection benchmark: `num_steps` of each environment make a rollout."""

    task: str
    env_id: str
    num_envs: int
    num_steps: int

    @property
    def pixels(self) -> bool:
        """Whether observations are stacks of frames."""
        return self.env_id.startswith("ALE/")

    @property
    def make_env(self) -> partial[gym.Env[Any, Any]]:
        """Makes one environment; the same for everything that steps Gymnasium environments."""
        return partial(make_atari if self.pixels else make_plain, self.env_id)


WORKS = (
    Work("cartpole", "CartPole-v1", 8, 128),
    Work("cartpole", "CartPole-v1", 64, 32),
    Work("cheetah", "HalfCheetah-v5", 8, 64),
    Work("pong", "ALE/Pong-v5", 8, 32),
)


def make_plain(env_id: str) -> gym.Env[Any, Any]:
    return gym.make(env_id, disable_env_checker=True)


def make_atari(env_id: str) -> gym.Env[Any, Any]:
    """Four stacked grey frames of 84 x 84, each the maximum of the last two of four."""
    gym.register_envs(import_module("ale_py"))
    # Resizing would start a thread for each core in each worker.
    import_module("cv2").setNumThreads(1)
    env = gym.make(env_id, frameskip=1, repeat_action_probability=0.0, disable_env_checker=True)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    return gym.wrappers.FrameStackObservation(env, 4)


def sleep_times() -> NDArray[np.float64]:
    """Seconds that each step of each straggler takes, [environments, steps]: always the same."""
    location = np.log(MEAN) - SIGMA**2 / 2
    generator = np.random.default_rng(123)
    return generator.lognormal(location, SIGMA, (NUM_STRAGGLERS, NUM_SLEEPS))


class Straggler(gym.Env[NDArray[np.float32], np.int64]):
    """Sleeps in each step, mostly for a moment and sometimes for long; episodes of 1,000 steps.

    Args:
        index: Which row of `sleep_times` is slept through.
        counter: A file of float64 [environments, 2] that counts, for whoever measures, the steps
            made and the seconds spent in them.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, index: int, counter: str | None = None) -> None:
        self.sleeps = sleep_times()[index].tolist()
        self.total, self.length = 0, 0
        memory = open_counter(counter) if counter else np.zeros((NUM_STRAGGLERS, 2))
        self.count = memory[index]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        self.length = 0
        return np.zeros(8, np.float32), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        start = time.perf_counter()
        time.sleep(self.sleeps[self.total % NUM_SLEEPS])
        self.total += 1
        self.length += 1
        self.count[0] = self.total
        self.count[1] += time.perf_counter() - start
        observation = np.full(8, self.length * 1e-3, np.float32)
        return observation, 1.0, False, self.length >= 1000, {}


def open_counter(path: str) -> NDArray[np.float64]:
    """The file that stragglers count their steps in."""
    return np.memmap(path, np.float64, "r+", shape=(NUM_STRAGGLERS, 2))
