"""Trajectories by hand for the tests of normalisation, and a plain loop as oracle."""

from __future__ import annotations

import io
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gymtask import RewardNormalizer

NAN, INF = float("nan"), float("inf")


def piece(
    *rewards: float,
    env_id: int = 0,
    trajectory_id: int = 0,
    step: int = 0,
    end: str = "",
    observation: Any = None,
) -> TensorDict:
    """A trajectory [T] that starts at `step`; `end` is the flag of its last row."""
    length = len(rewards)
    last = torch.arange(length) == length - 1
    return TensorDict(
        {
            "observation": torch.zeros(length, 2) if observation is None else observation,
            "env_id": torch.full((length,), env_id),
            "trajectory_id": torch.full((length,), trajectory_id),
            "step": torch.arange(step, step + length),
            "next": {
                "reward": torch.tensor(rewards, dtype=torch.float32),
                "terminated": last & (end == "terminated"),
                "truncated": last & (end == "truncated"),
            },
        },
        [length],
    )


def observed(observation: Any) -> TensorDict:
    return TensorDict({"observation": observation}, [len(observation)])


def saved(module: nn.Module) -> dict[str, Tensor]:
    """Its state dict, as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state: dict[str, Tensor] = torch.load(file, weights_only=True)
    return state


def assert_same(a: nn.Module, b: nn.Module) -> None:
    """Equal to the last bit, what is not saved as well."""
    left, right = dict(a.named_buffers()), dict(b.named_buffers())
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def running_returns(*pieces: TensorDict, gamma: float = 0.5) -> list[float]:
    """R of each row, in a plain loop that knows only flags and numbers."""
    open_episodes: dict[int, tuple[int, int, float]] = {}
    found = []
    for row in (row for each in pieces for row in each):
        env_id, step = int(row["env_id"]), int(row["step"])
        trajectory_id, reward = int(row["trajectory_id"]), float(row["next", "reward"])
        known = open_episodes.pop(env_id, None)
        value = known[2] if known and known[:2] == (trajectory_id, step) else 0.0
        value = gamma * value + reward
        found.append(value)
        if not (row["next", "terminated"] or row["next", "truncated"]):
            open_episodes[env_id] = (trajectory_id, step + 1, value)
    return found


def counted(normalize: RewardNormalizer) -> tuple[int, float, float]:
    statistics = normalize.statistics
    return int(statistics.count), float(statistics.mean), float(statistics.variance)


def assert_counted(normalize: RewardNormalizer, returns: list[float]) -> None:
    expected = (len(returns), np.mean(returns), np.var(returns))
    assert counted(normalize) == pytest.approx(expected, rel=1e-12)


SPACE = gym.spaces.Dict(
    {
        "image": gym.spaces.Box(0, 255, (2, 2, 1), np.uint8),
        "keys": gym.spaces.Box(-np.inf, np.inf, (2,), np.float64),
        "room": gym.spaces.Tuple((gym.spaces.Discrete(4), gym.spaces.Box(-1, 1, (), np.float32))),
    }
)


def nested(length: int) -> TensorDict:
    stream = torch.Generator().manual_seed(length)
    return TensorDict(
        {
            "image": torch.randint(256, (length, 2, 2, 1), dtype=torch.uint8, generator=stream),
            "keys": torch.randn(length, 2, generator=stream),
            "room": {
                "0": torch.randint(4, (length,), generator=stream),
                "1": torch.rand(length, generator=stream),
            },
        },
        [length],
    )
