"""What was done in the episodes that are open: with it they can be played again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gymtask.workers.layout import Array

FEWEST_ROWS = 16


class EpisodeActions:
    """The actions of the open episode of each of N environments, from its first step on.

    They are written as pieces are handed out, so that a step costs nothing.
    """

    def __init__(self, num_envs: int) -> None:
        self._rows: list[list[Array]] = [[] for _ in range(num_envs)]
        self._lengths = [0] * num_envs

    def write(self, index: int, first_step: int, rows: Sequence[Array]) -> None:
        """Notes the actions of consecutive steps; those of steps that are known may come again.

        Args:
            index: Whose.
            first_step: Step of the episode at which they begin.
            rows: For each leaf of the action space [T, *shape].
        """
        end = first_step + len(rows[0])
        known = self._rows[index]
        if not known or len(known[0]) < end:
            capacity = max(FEWEST_ROWS, 2 * end)
            grown = [np.empty((capacity, *leaf.shape[1:]), leaf.dtype) for leaf in rows]
            for target, leaf in zip(grown, known, strict=False):
                target[: len(leaf)] = leaf
            known = self._rows[index] = grown
        for target, leaf in zip(known, rows, strict=True):
            target[first_step:end] = leaf
        self._lengths[index] = end

    def forget(self, index: int) -> None:
        """Notes that the episode ended."""
        self._lengths[index] = 0

    def of(self, index: int) -> list[Array]:
        """For each leaf [T, *shape], copies; an empty list where no piece was handed out."""
        return [leaf[: self._lengths[index]].copy() for leaf in self._rows[index]]
