"""Rows drawn in proportion to priorities (Schaul et al. 2016, "Prioritized Experience Replay").

The sums of priorities form a tree in which a node has `FAN` children. A draw goes down from the
top, whose few sums are searched at once, and an update goes up: both take O(log n) steps of array
arithmetic for a whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gymtask.config import raise_if_any, require_number
from gymtask.workers.layout import Array

FAN = 16
TOP = 8192  # sums at most that have no parent
# Products with these are sums, and several times as fast: of all children of a node, and for each
# child of those before it.
_ALL = np.ones(FAN)
_BEFORE = np.triu(np.ones((FAN, FAN)), 1)


@dataclass(frozen=True)
class Prioritization:
    """How strongly priorities count.

    A row whose priority was set to p is drawn with a probability in proportion to (p + epsilon) **
    alpha, and its importance weight is (n · probability) ** -beta, divided by the largest weight of
    the batch (equation 1 and section 3.4 of the paper).

    Attributes:
        alpha: 0 draws uniformly, 1 in proportion.
        beta: 0 gives all rows the weight 1, 1 corrects wholly for the priorities. It is usual to
            raise it to 1 in the course of training: `ReplayBuffer.beta` can be set.
        epsilon: Keeps rows of priority 0 in the draw.
    """

    alpha: float = 0.6
    beta: float = 0.4
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        raise_if_any(
            [
                *require_number("alpha", self.alpha),
                *require_number("beta", self.beta),
                *require_number("epsilon", self.epsilon),
            ]
        )


class PriorityTree:
    """Weights of `capacity` rows, all 0 at first, and draws in proportion to them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._levels: list[Array] = []  # from the weights of the rows up
        size = capacity
        while True:
            # A whole number of families, so that a level can be seen as [families, FAN].
            padded = -(-size // FAN) * FAN
            self._levels.append(np.zeros(padded))
            if padded <= TOP:
                break
            size = padded // FAN

    @property
    def weights(self) -> Array:
        """Of the rows, float64 [capacity]; read only, since sums are kept of them."""
        return self._levels[0][: self._capacity]  # no attribute: a copy of it would be no view

    def set(self, rows: slice | Array, weights: Array | float) -> None:
        """Sets the weights, float64 [n], of rows, int64 [n]; of equal rows the last counts."""
        self._levels[0][rows] = weights
        if isinstance(rows, slice):
            rows = np.arange(rows.start, rows.stop)
        for lower, upper in zip(self._levels[:-1], self._levels[1:], strict=True):
            rows = rows // FAN
            # Summed anew from all children: adding differences would let rounding errors grow.
            upper[rows] = lower.reshape(-1, FAN).take(rows, axis=0) @ _ALL

    def draw(self, numbers: Array) -> Array:
        """Finds the rows at these places in the sum of all weights.

        Args:
            numbers: float64 [n] from [0, 1).

        Returns:
            int64 [n]. By rounding a row of weight 0 can be among them.
        """
        order = numbers.argsort()  # of sorted numbers, one is found near the other, and faster
        top = self._levels[-1]
        sums = top.cumsum()
        left = numbers[order] * sums[-1]
        nodes = np.minimum(sums.searchsorted(left, side="right"), len(top) - 1)
        left -= sums[nodes] - top[nodes]
        for level in self._levels[-2::-1]:
            before = level.reshape(-1, FAN).take(nodes, axis=0) @ _BEFORE
            # The last child before which no more is summed up than what is left.
            child = ((before[:, 1:] <= left[:, None]) @ _ALL[1:]).astype(np.int64)
            left -= before[np.arange(len(before)), child]
            nodes = nodes * FAN + child
        found: Array = np.empty_like(nodes)
        found[order] = np.minimum(nodes, self._capacity - 1)  # behind it lies what fills a family
        return found
