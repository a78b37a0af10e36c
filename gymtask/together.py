"""Plans for environments that can only be stepped together.

All go on until everyone has given what is owed. What some gave beyond that is handed out by the
next call, so that a call still hands out exactly what was asked for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from gymtask.plan import Plan, equal_shares
from gymtask.workers.layout import Array


class Together(Plan):
    """Lets all go on, or none."""

    @override
    def admit(self, env_ids: Array, step: Array) -> Array:
        return env_ids if self._goes_on() else env_ids[:0]

    @override
    def room(self, env_id: int) -> int | None:
        return None

    @abstractmethod
    def _goes_on(self) -> bool:
        """Whether somebody has still to give rows."""


class RowsTogether(Together):
    """Hands out shares[i] rows of environment i, or so many of all of them.

    With `whole_episodes`, it hands out the episodes that began before the share was given.

    Args:
        shares: The rows of each environment; or one number for all of them together.
        num_envs: N.
        whole_episodes: Whether episodes are finished.
    """

    def __init__(self, shares: Sequence[int] | int, num_envs: int, whole_episodes: bool) -> None:
        self._num_envs = num_envs
        self._num_sure = 0  # how many more times somebody owes rows, whatever comes
        self._shares: Array = np.atleast_1d(np.array(shares, np.int64))
        # The share that each environment's rows count for: its own, or that of all.
        self._group: Array = np.arange(num_envs) % len(self._shares)
        self._given = np.zeros_like(self._shares)
        self._handed = np.zeros_like(self._shares)
        self._whole_episodes = whole_episodes
        self._put_off: set[int] = set()  # of whom the next call hands out rows
        # Whose open episode was begun while rows were owed.
        self._owes_episode: Array = np.ones(num_envs, bool)

    @override
    def complete(self, env_ids: Array, step: Array, began: Array | None) -> None:
        self._count(env_ids, 1)
        if began is not None:
            self._count(began, -1)
        if self._whole_episodes:
            owing = (self._given < self._shares)[self._group]
            self._owes_episode = owing | (self._owes_episode & (step > 0))

    @override
    def _goes_on(self) -> bool:
        if self._whole_episodes:
            return bool(self._owes_episode.any())
        if self._num_sure > 0:
            self._num_sure -= 1
            return True
        # One step gives no environment more than one row, and all of them no more than N.
        owing = int((self._shares - self._given).max())
        self._num_sure = owing - 1 if len(self._shares) > 1 else owing // self._num_envs - 1
        return owing > 0

    def _count(self, env_ids: Array, rows: int) -> None:
        if len(self._shares) > 1:
            self._given[env_ids] += rows
        else:
            self._given[0] += rows * len(env_ids)

    @override
    def credit(self, env_id: int, rows: int) -> None:
        self._given[self._group[env_id]] += rows

    @override
    def share_of(self, env_id: int, rows: int, first_step: int) -> int:
        group = self._group[env_id]
        left = int(self._shares[group] - self._handed[group])
        count = min(rows, max(0, left))
        if self._whole_episodes:
            # An episode that was open when the call began is finished, whatever the share.
            goes_on = first_step > 0 and env_id not in self._put_off
            count = rows if left > 0 or goes_on else 0
        if count < rows:
            self._put_off.add(env_id)
        self._handed[group] += count
        return count


class EpisodesTogether(Together):
    """Goes on until environment i has played shares[i] episodes; what it plays then is left out."""

    def __init__(self, shares: Sequence[int]) -> None:
        self._owing: Array = np.array(shares, np.int64)

    @override
    def complete(self, env_ids: Array, step: Array, began: Array | None) -> None:
        ended = step[env_ids] == 0
        self._owing[env_ids[ended]] -= 1
        if began is not None:  # not ended, but begun
            self._owing[began] += 1

    @override
    def _goes_on(self) -> bool:
        return bool((self._owing > 0).any())

    @override
    def credit(self, env_id: int, rows: int) -> None:
        return


def shares_with_left(shares: Sequence[int], left: Sequence[int]) -> list[int]:
    """The shares, where an environment that has more left than its share gives all of that.

    The others give less accordingly, in equal parts. One that is reset less often than others gets
    ahead of them with every call; so what it has left stays below a call's share.

    Args:
        shares: What each environment would give.
        left: Rows of each that earlier calls left.
    """
    total = sum(shares)
    ahead = {index for index, rows in enumerate(left) if rows > shares[index]}
    given = [min(left[index], total) if index in ahead else 0 for index in range(len(shares))]
    behind = [index for index in range(len(shares)) if index not in ahead]
    owed = total - sum(given)
    if not ahead or not behind or owed < 0:
        return list(shares)
    for index, share in zip(behind, equal_shares(owed, len(behind), 0), strict=True):
        given[index] = share
    return given
