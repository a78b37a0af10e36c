"""Which environments go on, and which have given what they owe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from gymtask.workers.layout import Array


class Plan(ABC):
    """Decides who may take another step."""

    @abstractmethod
    def admit(self, env_ids: Array, step: Array) -> Array:
        """Those of `env_ids` [n] that take another step, which is thereby counted.

        Args:
            env_ids: Environments that are idle, increasing.
            step: int64 [N], steps of the open episode of every environment; 0 where none has begun.
        """

    def complete(self, env_ids: Array, step: Array, began: Array | None) -> None:  # noqa: B027
        """Told when steps of `env_ids` have arrived.

        Args:
            env_ids: Whose.
            step: int64 [N], steps of the open episode of every environment, these included.
            began: int64 [n], whose step only began an episode and is no row; None for nobody.
        """

    def share_of(self, env_id: int, rows: int, first_step: int) -> int:
        """How many rows of a piece this call hands out, counting them so.

        Args:
            env_id: Whose piece it is; asked for the pieces of an environment in order of time.
            rows: Its length.
            first_step: The step of the episode at which it begins.
        """
        return rows

    @abstractmethod
    def credit(self, env_id: int, rows: int) -> None:
        """Counts rows that are there already, left from an earlier call."""

    @abstractmethod
    def room(self, env_id: int) -> int | None:
        """How many rows of an environment may still be handed out; None for any number."""


class Endless(Plan):
    """Everybody goes on for ever."""

    @override
    def admit(self, env_ids: Array, step: Array) -> Array:
        return env_ids

    @override
    def credit(self, env_id: int, rows: int) -> None:
        return

    @override
    def room(self, env_id: int) -> int | None:
        return None


class EqualShares(Plan):
    """Environment i gives shares[i] rows.

    With `whole_episodes` it then finishes the episode that is open.
    """

    def __init__(self, shares: Sequence[int], whole_episodes: bool) -> None:
        self._owing: Array = np.array(shares, np.int64)
        self._num_sure = 0  # how many more times everybody owes rows, whoever asks
        self._whole_episodes = whole_episodes

    @override
    def admit(self, env_ids: Array, step: Array) -> Array:
        admitted = env_ids
        if self._num_sure <= 0:
            goes_on = self._owing[env_ids] > 0
            if self._whole_episodes:
                goes_on |= step[env_ids] > 0
            admitted = env_ids if goes_on.all() else env_ids[goes_on]
            # Each time takes one row at most from each.
            self._num_sure = int(self._owing.min())
        self._num_sure -= 1
        if len(admitted) == len(self._owing):
            self._owing -= 1
        else:
            self._owing[admitted] -= 1
        return admitted

    @override
    def credit(self, env_id: int, rows: int) -> None:
        self._owing[env_id] -= rows
        self._num_sure = 0

    @override
    def room(self, env_id: int) -> int | None:
        return None if self._whole_episodes else int(self._owing[env_id])


class FirstCome(Plan):
    """Whoever is ready goes on until the sum is reached.

    With `whole_episodes` open episodes are then finished.
    """

    def __init__(self, total: int, whole_episodes: bool) -> None:
        self._owing = total
        self._whole_episodes = whole_episodes

    @override
    def admit(self, env_ids: Array, step: Array) -> Array:
        if self._whole_episodes:
            goes_on = step[env_ids] > 0
            # Episodes begin only while the sum is not reached, also if many could begin at once.
            begins = np.flatnonzero(~goes_on)[: max(0, self._owing - int(goes_on.sum()))]
            goes_on[begins] = True
            admitted = env_ids[goes_on]
        else:
            admitted = env_ids if len(env_ids) <= self._owing else env_ids[: self._owing]
        self._owing -= len(admitted)
        return admitted

    @override
    def credit(self, env_id: int, rows: int) -> None:
        self._owing -= rows

    @override
    def room(self, env_id: int) -> int | None:
        return None if self._whole_episodes else self._owing


class EpisodeShares(Plan):
    """Environment i plays shares[i] episodes."""

    def __init__(self, shares: Sequence[int]) -> None:
        self._owing: Array = np.array(shares, np.int64)

    @override
    def admit(self, env_ids: Array, step: Array) -> Array:
        begins = step[env_ids] == 0
        admitted: Array = env_ids[~begins | (self._owing[env_ids] > 0)]
        self._owing[admitted[step[admitted] == 0]] -= 1
        return admitted

    @override
    def credit(self, env_id: int, rows: int) -> None:
        return

    @override
    def room(self, env_id: int) -> int | None:
        return None


def equal_shares(total: int, num_envs: int, first: int) -> list[int]:
    """Total // N rows each.

    The remainder goes one each to the environments from `first` on, round and round.
    """
    share, remainder = divmod(total, num_envs)
    # Environment i is number (i - first) mod N in the order that begins with `first`.
    return [share + ((index - first) % num_envs < remainder) for index in range(num_envs)]
