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
from typing import Any, NamedTuple

import numpy as np

from gymtask.workers.layout import Array

NOBODY = -1
_NONE: Array = np.empty(0, np.int64)
Going = tuple[int, int]  # where a piece goes on: trajectory_id, and step of its first row


class Piece(NamedTuple):
    """Rows of one trajectory that are added together.

    Attributes:
        first: The number of its first row, among all that are added.
        last: That of its last row.
        begins: Whether it begins an episode.
        before: Where it goes on, None where it does not, or that is not known.
        after: Where another piece may go on with it, likewise.
    """

    first: int
    last: int
    begins: bool = True
    before: Going | None = None
    after: Going | None = None


class Links:
    """The links of a ring of `capacity` rows.

    Attributes:
        capacity: Rows of the ring.
        num_added: Rows that were added so far; row number n lies at n % capacity.
        successor: int64 [capacity]: the row that follows; capacity + s where there is none, and the
            next state lies in side slot s.
        is_last: bool [capacity]: whether none follows; a look at it misses the cache less often.
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
        self.is_last: Array = np.empty(capacity, bool)
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
        self._open: dict[Going, int] = {}  # the last rows of chains that may go on there
        self._opened_as: dict[int, Going] = {}  # the other way round
        self._num_jumps = 0  # links to another row than the next one of the ring

    def __len__(self) -> int:
        """Rows in the ring."""
        return min(self.num_added, self.capacity)

    @property
    def is_even(self) -> bool:
        """Whether every successor is the next row of the ring."""
        return self._num_jumps == 0

    # ---- adding ----------------------------------------------------------------------------------

    def _places(self, number: int, count: int) -> slice | Array:
        """Where so many rows lie from the one with this number on.

        That is a slice where it can be, which reads and writes faster than single places.
        """
        start = number % self.capacity
        if start + count <= self.capacity:
            return slice(start, start + count)
        return np.arange(start, start + count) % self.capacity

    def evict(self, count: int) -> None:
        """Forgets the oldest rows, so that there is room for `count` new ones."""
        size = len(self)
        num_evicted = size + count - self.capacity
        if num_evicted <= 0:
            return
        oldest = self.num_added - size
        rows = self._places(oldest, num_evicted)
        following, chains, places = self.successor[rows], self.chain[rows], self.place[rows]
        ended = self.is_last[rows]
        last = ended.nonzero()[0]
        if len(last):  # with the last row of a chain the others are gone, too
            self._free_slots += (following[last] - self.capacity).tolist()
            self._free_chains += chains[last].tolist()
            for row in ((oldest + last) % self.capacity).tolist() if self._open else ():
                if key := self._opened_as.pop(row, None):
                    del self._open[key]
        if self.is_even:  # then rows stay of one chain at most, that of the last row
            self.first[chains[-1]] = places[-1] + 1
            if (row := following[-1]) < self.capacity:
                self.predecessor[row] = NOBODY
        else:
            # Of one chain the rows come in order, and of several values for one place numpy keeps
            # the last.
            self.first[chains] = places + 1
            goes_on = (~ended).nonzero()[0]
            linked = following[goes_on]
            self._num_jumps -= int((linked != (oldest + 1 + goes_on) % self.capacity).sum())
            self.predecessor[linked] = NOBODY

    def add(self, pieces: Sequence[Piece]) -> tuple[slice | Array, list[int]]:
        """Adds pieces, for which `evict` made room.

        Returns:
            The rows, and for each piece the side slot of the state behind it.
        """
        before, count = pieces[0].first, pieces[-1].last + 1 - pieces[0].first
        start = self.num_added % self.capacity
        rows = self._places(start, count)
        around = np.arange(start - 1, start + count + 1)  # and the rows on both sides
        if start == 0 or start + count >= self.capacity:  # a remainder takes longer than the rest
            around %= self.capacity
        self.successor[rows], self.predecessor[rows] = around[2:], around[:-2]
        self.is_last[rows] = False
        self.num_added += count
        return rows, [self._add(piece, start + piece.first - before) for piece in pieces]

    def _add(self, piece: Piece, start: int) -> int:
        """Adds a piece whose rows were linked with each other, and gives its side slot."""
        length, capacity = piece.last + 1 - piece.first, self.capacity
        first, last = start % capacity, (start + length - 1) % capacity
        before = NOBODY if piece.before is None else self._take_open(piece.before)
        if before == NOBODY:
            chain, slot = self._new_chain(piece.begins), self._new_slot()
        else:  # which needs its side slot no more
            chain, slot = int(self.chain[before]), int(self.successor[before]) - capacity
            self.successor[before], self.is_last[before] = first, False
            self._num_jumps += first != (before + 1) % capacity
        self.predecessor[first] = before
        self.successor[last], self.is_last[last] = capacity + slot, True
        rows, place = self._places(first, length), int(self.last[chain]) + 1
        self.chain[rows] = chain
        self.place[rows] = np.arange(place, place + length)
        self.last[chain] = place + length - 1
        if piece.after is not None:
            self._leave_open(last, piece.after)
        return slot

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self.num_side_slots += 1
        return self.num_side_slots - 1

    def _new_chain(self, begins: bool) -> int:
        if self._free_chains:
            chain = self._free_chains.pop()
        else:
            chain, self._num_chains = self._num_chains, self._num_chains + 1
        self.first[chain], self.last[chain], self.begins[chain] = 0, -1, begins
        return chain

    # ---- chains that may go on -------------------------------------------------------------------

    def find_open(self, key: Going) -> int:
        """The row that a piece goes on from which begins there, -1 for none."""
        return self._open.get(key, NOBODY)

    def _take_open(self, key: Going) -> int:
        """Likewise, and no other piece will go on from it."""
        row = self._open.pop(key, NOBODY)
        if row != NOBODY:
            del self._opened_as[row]
        return row

    def _leave_open(self, row: int, key: Going) -> None:
        """Notes that a piece may come that goes on from `row`."""
        self._take_open(key)  # where the same trajectory is added twice, the newer one goes on
        self._open[key], self._opened_as[row] = row, key

    # ---- windows ---------------------------------------------------------------------------------

    def num_after(self, rows: Array) -> Array:
        """How many rows of its chain come after each row, int64 [n]."""
        after: Array = self.last[self.chain[rows]] - self.place[rows]
        return after

    def side_slots(self, rows: Array) -> tuple[Array, Array]:
        """Which rows are the last of their chains, bool of the shape of `rows`.

        And the side slots of the states that those lead to, int64 [number of them].
        """
        ended: Array = self.is_last.take(rows)
        if not np.count_nonzero(ended):  # a fraction of the time of any()
            return ended, _NONE
        return ended, self.successor[rows[ended]] - self.capacity

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
        self.is_last[:] = self.successor >= self.capacity
        self._free_slots = state["free_slots"].tolist()
        self._free_chains = state["free_chains"].tolist()
        opened = state["open"].tolist()
        self._open = {(trajectory, step): row for trajectory, step, row in opened}
        self._opened_as = {row: key for key, row in self._open.items()}


_BY_ROW = ("successor", "predecessor", "chain", "place")
_BY_CHAIN = ("first", "last", "begins")
