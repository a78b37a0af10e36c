"""Which row of a ring follows which, and where trajectories begin and end in it.

Rows stand in a ring in the order in which they arrived. Those of one trajectory need not lie side
by side: of environments that are stepped together each gives one row in turn. So each row knows its
successor, and which row of its chain it is; a *chain* is what the ring holds of a trajectory::

    row          0    1    2    3    4    5    6
    chain        A    B    A    B    A    B    C
    place        0    0    1    1    2    2    0       number in the chain
    successor    2    3    4    5    s0   s1   s2      s: a side slot

The last row of a chain has no successor. The state that it leads to lies in a *side slot*, which
is freed when the continuation arrives or the row is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gymtask.workers.layout import Array

NOBODY = -1


class Links:
    """The links of a ring of `capacity` rows.

    Attributes:
        capacity: Rows of the ring.
        num_added: Rows that were added so far; row number n lies at n % capacity.
        successor: int64 [capacity]: the row that follows; capacity + s where there is none, and the
            next state lies in side slot s.
        predecessor: int64 [capacity]: the row before, -1 where there is none.
        chain: int64 [capacity]: the chain of each row.
        place: int64 [capacity]: its number in the chain.
        first: int64 [capacity], by chain: the place of its oldest row in the ring.
        last: Likewise of its newest row.
        begins: bool [capacity], by chain: whether place 0 is the first row of an episode.
        num_side_slots: Side slots that are used or were.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_added = 0
        self.successor: Array = np.empty(capacity, np.int64)
        self.predecessor: Array = np.empty(capacity, np.int64)
        self.chain: Array = np.empty(capacity, np.int64)
        self.place: Array = np.empty(capacity, np.int64)
        self.first: Array = np.empty(capacity, np.int64)
        self.last: Array = np.empty(capacity, np.int64)
        self.begins: Array = np.empty(capacity, bool)
        self.num_side_slots = 0
        self._free_slots: list[int] = []
        self._num_chains = 0
        self._free_chains: list[int] = []
        # Of chains that may go on: by (trajectory, step of the next row) their last row.
        self._open: dict[tuple[int, int], int] = {}
        self._opened_as: dict[int, tuple[int, int]] = {}  # by that row its key
        self._num_jumps = 0  # links to another row than the next one of the ring

    def __len__(self) -> int:
        """Rows in the ring."""
        return min(self.num_added, self.capacity)

    @property
    def is_even(self) -> bool:
        """Whether every successor is the next row of the ring."""
        return self._num_jumps == 0

    def next_places(self, count: int) -> Array:
        """Where the next `count` rows go, int64 [count]; what lies there is still to be evicted."""
        places: Array = np.arange(self.num_added, self.num_added + count) % self.capacity
        return places

    def evict(self, rows: Array) -> None:
        """Forgets rows, the oldest of the ring in order."""
        following = self.successor[rows]
        ends = following >= self.capacity
        self._free_slots += (following[ends] - self.capacity).tolist()
        linked = following[~ends]
        self._num_jumps -= int((linked != (rows[~ends] + 1) % self.capacity).sum())
        self.predecessor[linked] = NOBODY
        for row in rows[ends].tolist():
            if key := self._opened_as.pop(row, None):
                del self._open[key]
        chains = self.chain[rows]
        # Of one chain the rows come in order, and of several values for one place numpy keeps the
        # last.
        self.first[chains] = self.place[rows] + 1
        empty = chains[ends & (self.first[chains] > self.last[chains])]
        self._free_chains += empty.tolist()

    def find_open(self, trajectory_id: int, step: int) -> int:
        """The row that a piece goes on from which begins at this step, -1 for none."""
        return self._open.get((trajectory_id, step), NOBODY)

    def add(self, rows: Array, lengths: Sequence[int], begins: Sequence[bool]) -> Array:
        """Adds pieces, each as a chain of its own that ends where it ends.

        Args:
            rows: As `next_places` gave them; what lay there was evicted.
            lengths: Rows of each piece.
            begins: Whether each begins an episode.

        Returns:
            The side slots of their last rows, int64 [number of pieces].
        """
        chains = [self._new_chain() for _ in lengths]
        self.first[chains] = 0
        self.begins[chains] = begins
        of_piece = np.repeat(np.arange(len(lengths)), lengths)
        counts = np.asarray(lengths)
        ends = np.cumsum(counts) - 1  # numbers, among the rows, of the last of each piece
        self.last[chains] = counts - 1
        self.chain[rows] = np.asarray(chains)[of_piece]
        self.place[rows] = np.arange(len(rows)) - (ends - counts + 1)[of_piece]
        self.successor[rows[:-1]] = rows[1:]
        self.predecessor[rows[1:]] = rows[:-1]
        self.predecessor[rows[ends - counts + 1]] = NOBODY
        slots = np.array([self._new_slot() for _ in lengths])
        self.successor[rows[ends]] = self.capacity + slots
        self.num_added += len(rows)
        return slots

    def leave_open(self, row: int, trajectory_id: int, step: int) -> None:
        """Notes that a piece of this trajectory may come that goes on from `row` at this step."""
        key = (trajectory_id, step)
        before = self._open.pop(key, None)
        if before is not None:  # the same trajectory was added twice: the newer one goes on
            del self._opened_as[before]
        self._open[key], self._opened_as[row] = row, key

    def join(self, row: int, following: int) -> None:
        """Links the last row of a chain to the first of another, which becomes a part of it."""
        self._free_slots.append(int(self.successor[row]) - self.capacity)
        if key := self._opened_as.pop(row, None):
            del self._open[key]
        chain, other = int(self.chain[row]), int(self.chain[following])
        self.successor[row], self.predecessor[following] = following, row
        self._num_jumps += following != (row + 1) % self.capacity
        rows = self._rows_of(following)
        self.chain[rows] = chain
        self.place[rows] += self.last[chain] + 1
        self.last[chain] += len(rows)
        self._free_chains.append(other)

    def _rows_of(self, first: int) -> Array:
        """The rows of the newest chain, which lie one after the other from `first` on."""
        length = int(self.last[self.chain[first]]) + 1
        rows: Array = (first + np.arange(length)) % self.capacity
        return rows

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self.num_side_slots += 1
        return self.num_side_slots - 1

    def _new_chain(self) -> int:
        if self._free_chains:
            return self._free_chains.pop()
        self._num_chains += 1
        return self._num_chains - 1

    # ---- windows ---------------------------------------------------------------------------------

    def num_after(self, rows: Array) -> Array:
        """How many rows of its chain come after each row, int64 [n]."""
        after: Array = self.last[self.chain[rows]] - self.place[rows]
        return after

    def begins_episode(self, rows: Array) -> Array:
        """Whether each row is the first of an episode, bool [n]."""
        begins: Array = (self.place[rows] == 0) & self.begins[self.chain[rows]]
        return begins

    def is_oldest(self, rows: Array) -> Array:
        """Whether each row is the first of its chain that is still there, bool [n]."""
        oldest: Array = self.place[rows] == self.first[self.chain[rows]]
        return oldest

    def has_history(self, rows: Array, count: int) -> Array:
        """Whether `count` rows before each are there, or all of its episode, bool [n]."""
        chains = self.chain[rows]
        first = self.first[chains]
        whole = self.begins[chains] & (first == 0)
        known: Array = whole | (self.place[rows] - first >= count)
        return known

    def all_rows(self) -> Array:
        """All rows in order of arrival, int64 [n]."""
        rows: Array = np.arange(self.num_added - len(self), self.num_added) % self.capacity
        return rows

    def follow(self, rows: Array, offsets: Sequence[int], *, clamp: bool = False) -> Array:
        """The rows that many steps after each row.

        Args:
            rows: int64 [n].
            offsets: Steps, increasing.
            clamp: Whether a chain may end before; then its last row stands for those that are not
                there.

        Returns:
            int64 [n, number of offsets].
        """
        if self.is_even:
            steps = np.asarray(offsets)
            if clamp:
                steps = np.minimum(self.num_after(rows)[:, None], steps)
            found: Array = rows[:, None] + steps
            found[found >= self.capacity] -= self.capacity  # several times as fast as a remainder
            return found
        found = np.empty((len(rows), len(offsets)), np.int64)
        at = 0
        for column, offset in enumerate(offsets):
            while at < offset:
                following, at = self.successor[rows], at + 1
                rows = np.where(following < self.capacity, following, rows) if clamp else following
            found[:, column] = rows
        return found

    # ---- saving ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All of it, as numbers, lists and arrays."""
        size = len(self)
        arrays = {name: getattr(self, name)[:size] for name in _BY_ROW}
        arrays |= {name: getattr(self, name)[: self._num_chains] for name in _BY_CHAIN}
        keys = [[*key, row] for key, row in self._open.items()]
        return {
            **arrays,
            "open": np.array(keys, np.int64).reshape(-1, 3),
            "free_slots": np.array(self._free_slots, np.int64),
            "free_chains": np.array(self._free_chains, np.int64),
            "counts": np.array(
                [self.num_added, self.num_side_slots, self._num_chains, self._num_jumps]
            ),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave."""
        counts = [int(count) for count in state["counts"]]
        self.num_added, self.num_side_slots, self._num_chains, self._num_jumps = counts
        for name in (*_BY_ROW, *_BY_CHAIN):
            getattr(self, name)[: len(state[name])] = state[name]
        self._free_slots = state["free_slots"].tolist()
        self._free_chains = state["free_chains"].tolist()
        opened = state["open"].tolist()
        self._open = {(trajectory, step): row for trajectory, step, row in opened}
        self._opened_as = {row: key for key, row in self._open.items()}


_BY_ROW = ("successor", "predecessor", "chain", "place")
_BY_CHAIN = ("first", "last", "begins")
