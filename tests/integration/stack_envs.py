"""An environment whose frames all differ, and what Gymnasium shows of it as stacks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FrameStackObservation
from tensordict import TensorDict
from torch import Tensor

import gymtask
from gymtask.replay import MultiReplaySamples, ReplayDataset
from gymtask.workers.layout import flatten, space_leaves
from tests.integration.native_envs import vector_of
from tests.tasks import make_task

NUM_ENVS = 3
SEED = 5
LENGTHS = ((2, 7, 1), (9, 3), (5, 1, 1, 4))
"""Of the episodes of each environment, round and round; some are shorter than a stack."""

Shown = dict[tuple[int, int], list[np.ndarray[Any, Any]]]
"""By trajectory_id and step the stacks of all leaves."""

SPACES: dict[str, spaces.Space[Any]] = {
    "float32": spaces.Box(-9, 9, (3,), np.float32),
    "float64": spaces.Box(-9, 9, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (4, 5, 1), np.uint8),
    "discrete": spaces.Discrete(1000, start=3),
    "nested": spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (2, 3), np.uint8),
            "body": spaces.Tuple([spaces.Box(-9, 9, (2,), np.float64), spaces.MultiBinary(5)]),
            "empty": spaces.Box(0, 1, (0,), np.float32),
        }
    ),
}


class RandomFrames(gym.Env[Any, Any]):
    """Draws every frame; odd episodes are truncated, the others terminate."""

    def __init__(self, kind: str = "float32") -> None:
        self.observation_space = copy.deepcopy(SPACES[kind])  # draws for itself
        self.action_space = spaces.Discrete(4)
        self._number = self._episode = -1
        self._count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.observation_space.seed(seed)
            self._number = (seed - SEED) % len(LENGTHS)
        self._episode += 1
        self._count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        own = LENGTHS[self._number]
        ended, odd = self._count == own[self._episode % len(own)], self._episode % 2 == 1
        return self.observation_space.sample(), 1.0, ended and not odd, ended and odd, {}


def gymnasium_stacks(
    make_env: Callable[[], gym.Env[Any, Any]],
    num_frames: int,
    num_rows: int,
    action: Callable[[int, int], Any] = lambda env_id, run_step: 0,
    num_envs: int = NUM_ENVS,
    keep_float64: bool = False,
) -> Shown:
    """What FrameStackObservation shows in the first rows of each environment, floats as stored.

    After the last row of an episode stands what that leads to.
    """
    shown: Shown = {}
    for env_id in range(num_envs):
        env = FrameStackObservation(make_env(), num_frames)
        observation, _ = env.reset(seed=SEED + env_id)
        trajectory_id, step = env_id, 0
        for run_step in range(num_rows):
            shown[trajectory_id, step] = stored(env.observation_space, observation, keep_float64)
            observation, _, *flags, _ = env.step(action(env_id, run_step))
            step += 1
            shown[trajectory_id, step] = stored(env.observation_space, observation, keep_float64)
            if any(flags):
                observation, _ = env.reset()
                trajectory_id, step = trajectory_id + num_envs, 0
        env.close()
    return shown


def stored(space: Any, value: Any, keep_float64: bool = False) -> list[np.ndarray[Any, Any]]:
    """Copies of the leaves of a value."""
    leaves = [np.array(leaf) for leaf in flatten(space, value)]
    if keep_float64:
        return leaves
    return [leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf for leaf in leaves]


def leaves_at(observation: Any, space: Any, row: Any) -> list[np.ndarray[Any, Any]]:
    """The leaves of one row of a batch of observations."""
    if isinstance(observation, Tensor):
        return [observation[row].numpy().copy()]
    paths = [leaf.path for leaf in space_leaves(space, "observation")]
    return [observation.get(path)[row].numpy().copy() for path in paths]


def assert_shown(
    td: TensorDict, space: Any, expected: Shown, key: Any = "observation", later: int = 0
) -> None:
    """Checks all rows of a TensorDict of any batch shape, bit by bit."""
    for row in np.ndindex(*td.batch_size):
        place = (int(td["trajectory_id"][row]), int(td["step"][row]) + later)
        for got, wanted in zip(leaves_at(td[key], space, row), expected[place], strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), place
            assert got.tobytes() == wanted.tobytes(), place


def stack_task(
    mode: str, kind: str = "float32", num_frames: int | None = 4, **hooks: Any
) -> tuple[gymtask.ReinforcementLearningTask, list[TensorDict]]:
    """A task over RandomFrames; and the list of all states that its policy will see."""
    seen: list[TensorDict] = []
    make_env: Callable[..., Any] = functools.partial(RandomFrames, kind)
    if mode not in ("sync", "thread", "process"):
        make_env, mode = vector_of(RandomFrames, AutoresetMode[mode], kind=kind), "native"
    keywords = {"keep_float64": hooks.pop("keep_float64", False)}

    def get_environment(self: Any) -> gymtask.Environment:
        return gymtask.Environment(make_env, frame_stack=num_frames, **keywords)

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        seen.append(states.clone())
        return torch.zeros(len(states), dtype=torch.int64)

    hooks = {"get_environment": get_environment, "get_actions": get_actions, **hooks}
    workers = NUM_ENVS if mode in ("thread", "process") else 1
    return make_task(NUM_ENVS, workers, mode, config={"env_seed": SEED}, **hooks), seen


CALLS: list[dict[str, Any]] = [
    {"total_samples": 10},
    {"total_samples": 31, "max_batch_size": 2},
    {"total_samples": 40, "max_trajectory_length": 3, "min_batch_size": 2},
    {"total_samples": 24, "min_trajectory_length": 2, "whole_episodes": True},
    {"total_samples": 90},
]
MAX_ROWS = 200


def plain_stacks(kind: str = "float32", num_frames: int = 4, **keywords: Any) -> Shown:
    return gymnasium_stacks(functools.partial(RandomFrames, kind), num_frames, MAX_ROWS, **keywords)


def collections(task: gymtask.ReinforcementLearningTask) -> list[MultiReplaySamples]:
    """What all `CALLS` give, one after another."""
    with task.get_worker_pool() as pool:
        return [task.collect_samples(None, pool, use_tqdm=False, **call) for call in CALLS]


def windows(samples: MultiReplaySamples, clip_size: int = 1, stride: int = 1) -> list[TensorDict]:
    """All windows of the samples."""
    return list(ReplayDataset(samples, clip_size, stride, 8, replacement=False))
