"""Discounted returns that run forward in time, over episodes that go on between collections."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from gymtask.errors import ConfigurationError
from gymtask.moments import Wide
from gymtask.scans import is_tame, scan
from gymtask.workers.layout import Array


class Rows(NamedTuple):
    """Columns [T] of rows, in order of environment and time."""

    reward: Array
    terminated: Array
    truncated: Array
    env_id: Array
    trajectory_id: Array
    step: Array

    def in_order(self) -> Self:
        """The same rows, whatever order they are in."""
        order = np.lexsort((self.step, self.trajectory_id, self.env_id))
        return type(self)(*(column[order] for column in self))

    @property
    def done(self) -> Array:
        """Whether an episode ends with the row, bool [T]."""
        done: Array = (self.terminated | self.truncated).astype(bool)
        return done

    def follow(self) -> Array:
        """Whether the row is, in its episode, the one after the row before it, bool [T]."""
        follow = np.zeros(len(self.step), bool)
        follow[1:] = (
            (self.env_id[1:] == self.env_id[:-1])
            & (self.trajectory_id[1:] == self.trajectory_id[:-1])
            & (self.step[1:] == self.step[:-1] + 1)
            & ~self.done[:-1]
        )
        return follow


class RunningReturns(Wide):
    """The discounted sum, at each row, of the rewards that its episode has paid so far.

        R[t] = r[t]                       an episode's first row, or where the row before is missing
        R[t] = r[t] + gamma * R[t - 1]    anything else

    Args:
        num_envs: Number of environments N.
        gamma: Discount of one step, in [0, 1].

    Attributes:
        value: R at the last row seen of each environment's open episode, float64 [N]; 0 where none
            is open.
        trajectory_id: The number of that episode, int64 [N]; -1 where none is open.
        step: The number of the row that it goes on with, int64 [N].
    """

    value: Tensor
    trajectory_id: Tensor
    step: Tensor

    def __init__(self, num_envs: int, gamma: float) -> None:
        super().__init__()
        self.num_envs, self.gamma = num_envs, gamma
        self.register_buffer("value", torch.zeros(num_envs, dtype=torch.float64))
        self.register_buffer("trajectory_id", torch.full((num_envs,), -1))
        self.register_buffer("step", torch.zeros(num_envs, dtype=torch.int64))

    def of(self, rows: Rows) -> Array:
        """R of each row, float64 [T]; changes nothing.

        Raises:
            ConfigurationError: An environment's number is N or more, or a reward is not finite.
        """
        self._check(rows)
        follow = rows.follow()
        total = rows.reward.astype(np.float64)
        # A row that follows none of these may follow the last one that was kept.
        heads = np.flatnonzero(~follow)
        env_id = rows.env_id[heads]
        kept = [each.numpy(force=True) for each in (self.value, self.trajectory_id, self.step)]
        value, trajectory_id, step = (each[env_id] for each in kept)
        goes_on = (trajectory_id == rows.trajectory_id[heads]) & (step == rows.step[heads])
        total[heads] += np.where(goes_on, self.gamma * value, 0.0)
        # A scan runs back in time, so time is turned round: row t stops where it follows none.
        backward, stopped = total[::-1].copy(), ~follow[::-1].copy()
        scanned = scan(backward, stopped, self.gamma, torch.float64, tame=is_tame(backward))
        returns: Array = scanned[::-1].copy()
        return returns

    def keep(self, rows: Rows, returns: Array) -> None:
        """Keeps where the rows leave the open episodes, for the ones that follow them."""
        last = np.flatnonzero(np.diff(rows.env_id, append=-1))
        index, is_open = torch.from_numpy(rows.env_id[last]), ~rows.done[last]
        for buffer, values, closed in (
            (self.value, returns[last], 0.0),
            (self.trajectory_id, rows.trajectory_id[last], -1),
            (self.step, rows.step[last] + 1, 0),
        ):
            kept = torch.from_numpy(np.where(is_open, values, closed))
            buffer[index.to(buffer.device)] = kept.to(buffer)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"num_envs={self.num_envs}, gamma={self.gamma}"

    def _check(self, rows: Rows) -> None:
        if len(rows.env_id) and not 0 <= rows.env_id.min() <= rows.env_id.max() < self.num_envs:
            largest = rows.env_id.max()
            raise ConfigurationError(
                f"`num_envs` must be above each env_id ({largest} is one), got {self.num_envs}"
            )
        infinite = np.flatnonzero(~np.isfinite(rows.reward))
        if len(infinite):
            row, reward = infinite[0], rows.reward[infinite[0]]
            place = f"step {rows.step[row]} of trajectory {rows.trajectory_id[row]}"
            raise ConfigurationError(f"`reward` must be finite, got {reward} at {place}")
