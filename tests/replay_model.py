"""A replay buffer in plain Python, and trajectories whose rows say who they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

OBSERVATIONS = 1000  # of one trajectory at most


@dataclass(frozen=True)
class Row:
    """One transition.

    Attributes:
        number: Of arrival.
        trajectory: Its `trajectory_id`.
        step: Its step in the episode.
        reward: Its reward.
        terminated: Its flag.
        truncated: Its flag.
    """

    number: int
    trajectory: int
    step: int
    reward: float
    terminated: bool
    truncated: bool

    @property
    def observation(self) -> int:
        """Its observation, which no other row has."""
        return self.trajectory * OBSERVATIONS + self.step

    @property
    def next_observation(self) -> int:
        """The observation that it leads to."""
        return self.observation + 1


@dataclass
class Model:
    """What a ReplayBuffer must hold and may give."""

    capacity: int
    rows: list[Row] = field(default_factory=list)
    num_added: int = 0

    def add(self, trajectory: int, first: int, rewards: Sequence[float], end: str) -> None:
        """Adds a piece whose last row has the flag `end` ("" for a cut)."""
        for place, reward in enumerate(rewards):
            is_last = place == len(rewards) - 1
            flags = (is_last and end == "terminated", is_last and end == "truncated")
            self.rows.append(Row(self.num_added, trajectory, first + place, reward, *flags))
            self.num_added += 1
        self.rows = self.rows[-self.capacity :]

    def successor(self, row: Row) -> Row | None:
        """The row that follows, if it is there."""
        if row.terminated or row.truncated:
            return None
        for other in self.rows:
            if (other.trajectory, other.step) == (row.trajectory, row.step + 1):
                return other
        return None

    def run(self, row: Row) -> list[Row]:
        """The row and those after it."""
        found = [row]
        while (following := self.successor(found[-1])) is not None:
            found.append(following)
        return found

    def windows(self, clip_size: int, stride: int) -> dict[int, list[Row]]:
        """All windows by the number of their first row."""
        span = (clip_size - 1) * stride + 1
        runs = {row.number: self.run(row) for row in self.rows}
        return {number: run[:span:stride] for number, run in runs.items() if len(run) >= span}

    def n_step(self, row: Row, n: int, gamma: float) -> tuple[float, Row, float]:
        """Sum of rewards, the last row that counts, and the factor of what it leads to."""
        run = self.run(row)[:n]
        total = sum(gamma**k * each.reward for k, each in enumerate(run))
        return total, run[-1], gamma ** len(run)

    def frames(self, row: Row, k: int) -> list[int] | None:
        """The observations of a stack, oldest first; None if one is gone."""
        steps = [max(0, row.step - back) for back in range(k - 1, -1, -1)]
        there = {(each.trajectory, each.step) for each in self.rows}
        if not all((row.trajectory, step) in there for step in steps):
            return None
        return [row.trajectory * OBSERVATIONS + step for step in steps]


def piece(
    trajectory: int, first: int, rewards: Sequence[float], end: str, **more: Any
) -> TensorDict:
    """The TensorDict [T] of what `Model.add` adds."""
    length = len(rewards)
    step = torch.arange(first, first + length)
    observation = (trajectory * OBSERVATIONS + step).float()
    last = torch.arange(length) == length - 1
    terminated, truncated = last & (end == "terminated"), last & (end == "truncated")
    following = {
        "observation": torch.stack([observation + 1, -observation - 1], dim=-1),
        "reward": torch.tensor(list(rewards), dtype=torch.float32),
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated | truncated,
    }
    content = {
        "observation": torch.stack([observation, -observation], dim=-1),
        "action": observation.long() * 3,
        "is_init": step == 0,
        "step": step,
        "trajectory_id": torch.full((length,), trajectory),
        "next": following,
        **more,
    }
    return TensorDict(content, batch_size=[length])
