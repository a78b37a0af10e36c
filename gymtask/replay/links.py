"""Which row of a ring follows which, and where trajectories begin and end in it.

Rows stand in a ring in the order in which they arrived. Those of one trajectory need not lie side
by side: of environments that are stepped together each gives one row in turn. So each row knows its
successor, and which row of its chain it is; a *chain* is what the ring holds of a trajectory::

    row          0    1    2    3    4    5    6
    chain        0    1    0    1    0    1    2
    place        0    0    1    1    2    2    0       number in the chain
    successor    2    3    4    5    -    -    -

The last row of a chain has no successor. The state that it leads to lies beside the ring, in the
*side slot* of the chain, which has the number of the chain.

Where every successor is the next row of the ring, these links follow from where chains end, and are
not written: adding rows is a fifth cheaper. They are *spelled out* for all rows when the first link
to another row is made, and written from then on.
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
        is_last: bool [capacity]: whether no row follows.
        chain: int64 [capacity]: the chain of each row.
        first: int64 [capacity], by chain: the place of its oldest row in the ring.
        last: Likewise of its newest row.
        newest: int64 [capacity], by chain: that row.
        begins: bool [capacity], by chain: whether place 0 is the first row of an episode.
        num_chains: Chains that there are, or were at one time; the next ones take their numbers.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_added = 0
        self.is_last: Array = np.empty(capacity, bool)
        self.chain: Array = np.empty(capacity, np.int64)
        self.first: Array = np.empty(capacity, np.int64)
        self.last: Array = np.empty(capacity, np.int64)
        self.newest: Array = np.empty(capacity, np.int64)
        self.begins: Array = np.empty(capacity, bool)
        self._is_spelled = False  # whether these are written:
        self._successor: Array = np.empty(capacity, np.int64)  # the row behind; capacity for none
        self._predecessor: Array = np.empty(capacity, np.int64)  # the row before; -1 for none
        self._place: Array = np.empty(capacity, np.int64)
        self.num_chains = 0
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
        if num_evicted > 0:
            evict = self._evict_chains if self.is_even else self._evict_rows
            evict(self.num_added - size, num_evicted)

    def _evict_chains(self, oldest: int, count: int) -> None:
        """Forgets rows of a ring in which chains lie one behind the other."""
        row = oldest % self.capacity
        while count > 0:
            chain = int(self.chain[row])
            num_after = (int(self.newest[chain]) - row) % self.capacity
            if num_after >= count:  # the last one stays in part
                self.first[chain] = int(self.last[chain]) - num_after + count
                if self._is_spelled:
                    self._predecessor[(row + count) % self.capacity] = NOBODY
                return
            self._free(chain, (row + num_after) % self.capacity)
            row, count = (row + num_after + 1) % self.capacity, count - num_after - 1

    def _evict_rows(self, oldest: int, count: int) -> None:
        """Forgets rows of any ring."""
        rows = np.arange(oldest, oldest + count) % self.capacity
        ended = self.is_last[rows]
        for row in rows[ended].tolist():  # with the last row of a chain the others are gone, too
            self._free(int(self.chain[row]), row)
        # Of one chain the rows come in order, and of several values for one place numpy keeps the
        # last.
        self.first[self.chain[rows]] = self._place[rows] + 1
        goes_on = rows[~ended]
        linked = self._successor[goes_on]
        self._num_jumps -= int((linked != (goes_on + 1) % self.capacity).sum())
        self._predecessor[linked] = NOBODY

    def _free(self, chain: int, row: int) -> None:
        """Forgets a chain whose last row this was."""
        self._free_chains.append(chain)
        if key := self._opened_as.pop(row, None):
            del self._open[key]

    def add(self, pieces: Sequence[Piece]) -> tuple[slice | Array, list[int]]:
        """Adds pieces, for which `evict` made room.

        Returns:
            The rows, and for each piece its chain, in whose side slot the state behind it belongs.
        """
        before, count = pieces[0].first, pieces[-1].last + 1 - pieces[0].first
        number = self.num_added
        rows = self._places(number, count)
        self.is_last[rows] = False
        self.num_added += count
        if self._is_spelled:
            self._link_neighbours(number, count)
        return rows, [self._add(piece, number + piece.first - before) for piece in pieces]

    def _link_neighbours(self, number: int, count: int) -> None:
        """Links rows from the one with this number on with those beside them in the ring."""
        rows, around = self._places(number, count), np.arange(number - 1, number + count + 1)
        if (number - 1) // self.capacity != (number + count) // self.capacity:
            around %= self.capacity  # takes longer than the rest
        else:
            around -= number // self.capacity * self.capacity
        self._successor[rows], self._predecessor[rows] = around[2:], around[:-2]

    def _add(self, piece: Piece, number: int) -> int:
        """Adds a piece whose first row has this number, and gives its chain."""
        length, capacity = piece.last + 1 - piece.first, self.capacity
        first, last = number % capacity, (number + length - 1) % capacity
        before = NOBODY if piece.before is None else self._take_open(piece.before)
        if before == NOBODY:
            chain = self._new_chain(piece.begins)
        else:
            chain = int(self.chain[before])
            self._lead_on(before, first, number)
        rows, place = self._places(number, length), int(self.last[chain]) + 1
        self.chain[rows], self.is_last[last] = chain, True
        self.last[chain], self.newest[chain] = place + length - 1, last
        if self._is_spelled:
            self._place[rows] = np.arange(place, place + length)
            self._predecessor[first], self._successor[last] = before, capacity
        if piece.after is not None:
            self._leave_open(last, piece.after)
        return chain

    def _lead_on(self, row: int, following: int, number: int) -> None:
        """Links the last row of a chain with another one, which has this number."""
        self.is_last[row] = False
        if following != (row + 1) % self.capacity:
            if not self._is_spelled:
                self._spell_out(number)
                self._is_spelled = True
            self._num_jumps += 1
        if self._is_spelled:
            self._successor[row] = following

    def _new_chain(self, begins: bool) -> int:
        if self._free_chains:
            chain = self._free_chains.pop()
        else:
            chain, self.num_chains = self.num_chains, self.num_chains + 1
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

    # ---- links that are not written --------------------------------------------------------------

    def _spell_out(self, stop: int) -> None:
        """Writes the links of all rows with numbers below `stop`.

        Those from there on are about to be added, and linked with their neighbours for now.
        """
        oldest = self.num_added - len(self)
        rows = np.arange(oldest, stop) % self.capacity
        self._place[rows] = self.places(rows)
        self._link_neighbours(oldest, len(self))
        self._predecessor[rows[self.is_oldest(rows)]] = NOBODY
        self._successor[rows[self.is_last[rows]]] = self.capacity

    # ---- windows ---------------------------------------------------------------------------------

    def num_after(self, rows: Array) -> Array:
        """How many rows of its chain come after each row, int64 of the shape of `rows`."""
        chains = self.chain[rows]
        if self._is_spelled:
            after: Array = self.last[chains] - self._place[rows]
        else:
            after = (self.newest[chains] - rows) % self.capacity
        return after

    def places(self, rows: Array) -> Array:
        """The number of each row in its chain, int64 of the shape of `rows`."""
        if self._is_spelled:
            places: Array = self._place[rows]
        else:
            places = self.last[self.chain[rows]] - self.num_after(rows)
        return places

    def side_slots(self, rows: Array) -> tuple[Array, Array]:
        """Which rows are the last of their chains, bool of the shape of `rows`.

        And the side slots of the states that those lead to, int64 [number of them].
        """
        ended: Array = self.is_last.take(rows)
        if not np.count_nonzero(ended):  # a fraction of the time of any()
            return ended, _NONE
        return ended, self.chain[rows[ended]]

    def begins_episode(self, rows: Array) -> Array:
        """Whether each row is the first of an episode, bool [n]."""
        begins: Array = (self.places(rows) == 0) & self.begins[self.chain[rows]]
        return begins

    def is_oldest(self, rows: Array) -> Array:
        """Whether each row is the first of its chain that is still there, bool [n]."""
        oldest: Array = self._num_before(rows) == 0
        return oldest

    def has_history(self, rows: Array, count: int) -> Array:
        """Whether `count` rows before each are there, or all of its episode, bool [n]."""
        chains = self.chain[rows]
        whole = self.begins[chains] & (self.first[chains] == 0)
        known: Array = whole | (self._num_before(rows) >= count)
        return known

    def _num_before(self, rows: Array) -> Array:
        """How many rows of its chain that are still there come before each row."""
        before: Array = self.places(rows) - self.first[self.chain[rows]]
        return before

    def all_rows(self) -> Array:
        """All rows in order of arrival, int64 [n]."""
        rows: Array = np.arange(self.num_added - len(self), self.num_added) % self.capacity
        return rows

    def following(self, rows: Array) -> Array:
        """The row that follows each row, modulo the capacity; any row for the last of a chain."""
        return rows + 1 if self.is_even else self._successor.take(rows)

    def follow(self, rows: Array, offsets: Sequence[int], *, clamp: bool = False) -> Array:
        """The rows that many steps after each row.

        Args:
            rows: int64 [*shape].
            offsets: Steps, increasing.
            clamp: Whether a chain may end before; then its last row stands for those that are not
                there.

        Returns:
            int64 [*shape, number of offsets].
        """
        if self.is_even:
            steps = np.asarray(offsets)
            if clamp:
                steps = np.minimum(self.num_after(rows)[..., None], steps)
            found: Array = rows[..., None] + steps
            found[found >= self.capacity] -= self.capacity  # several times as fast as a remainder
            return found
        found = np.empty((*rows.shape, len(offsets)), np.int64)
        at = 0
        for column, offset in enumerate(offsets):
            while at < offset:
                following, at = self._successor[rows], at + 1
                rows = np.where(following < self.capacity, following, rows) if clamp else following
            found[..., column] = rows
        return found

    def lead_up(self, rows: Array, count: int) -> Array:
        """Each row behind the `count` rows before it, oldest first, int64 [*shape, count + 1].

        The first row of its chain that is there stands for those that are not.
        """
        if self.is_even:
            steps = np.minimum(self._num_before(rows)[..., None], np.arange(count, -1, -1))
            found: Array = rows[..., None] - steps
            found[found < 0] += self.capacity
            return found
        found = np.empty((*rows.shape, count + 1), np.int64)
        found[..., count] = rows
        for column in range(count - 1, -1, -1):
            before = self._predecessor[rows]
            rows = np.where(before == NOBODY, rows, before)
            found[..., column] = rows
        return found

    # ---- saving ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All of it, as numbers, lists and arrays."""
        size = len(self)
        if not self._is_spelled:
            self._spell_out(self.num_added)
        arrays = {name: getattr(self, f"_{name}")[:size] for name in _WRITTEN}
        arrays |= {name: getattr(self, name)[: self.num_chains] for name in _BY_CHAIN}
        keys = [[*key, row] for key, row in self._open.items()]
        return {
            **arrays,
            "chain": self.chain[:size],
            "open": np.array(keys, np.int64).reshape(-1, 3),
            "free_chains": np.array(self._free_chains, np.int64),
            "counts": np.array([self.num_added, self.num_chains, self._num_jumps]),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave."""
        self.num_added, self.num_chains, self._num_jumps = state["counts"].tolist()
        self._is_spelled = not self.is_even
        for name in _WRITTEN:
            getattr(self, f"_{name}")[: len(state[name])] = state[name]
        for name in ("chain", *_BY_CHAIN):
            getattr(self, name)[: len(state[name])] = state[name]
        rows = self.all_rows()
        self.is_last[rows] = self._successor[rows] >= self.capacity
        ends = rows[self.is_last[rows]]
        self.newest[self.chain[ends]] = ends
        self._free_chains = state["free_chains"].tolist()
        opened = state["open"].tolist()
        self._open = {(trajectory, step): row for trajectory, step, row in opened}
        self._opened_as = {row: key for key, row in self._open.items()}


_WRITTEN = ("successor", "predecessor", "place")
_BY_CHAIN = ("first", "last", "begins")
