"""The tape on which all environments of a pool write side by side, and the pieces read from it.

One table per key, [capacity, N, ...]: column i belongs to environment i, and a step writes one row
of it. A step of all environments is one row of the tape. An episode's end leaves no trace here: the
next episode goes on below it, and a `Piece` says which rows of a column belong together::

    row of the tape     0    1    2    3    4    5    6
    column i, states    s0   s1   s2   s3'  s4   s5         s3' is the next episode's first
    column i, rows      r0   r1   r2   r3   r4
                        piece 1: rows 0 to 2     piece 2: rows 3 to 4

Row t acts on state t and leads to state t + 1. The last state of an ended episode, whose place on
the tape is taken by the next episode's first, is kept with the piece.

Where policies see stacks of k frames, up to k - 1 earlier states of its episode lie above a piece,
in the same column. A stack is made of them and the piece's own whenever one is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gymtask.workers.layout import Array

Key: TypeAlias = "tuple[str, ...]"

REWARD: Key = ("next", "reward")
FLAGS: Key = ("next", "flags")
"""Key of a table bool [capacity, N, 2]: terminated and truncated, side by side."""


class Tape:
    """The tables of N environments.

    Attributes:
        num_columns: N.
        capacity: Rows of each table.
        states: Tables of observations and carries.
        rows: Tables of actions, what else the policy returned, reward (float64) and flags.
    """

    def __init__(self, num_columns: int, capacity: int) -> None:
        self.num_columns = num_columns
        self.capacity = capacity
        self.states: dict[Key, Array] = {}
        self.rows: dict[Key, Array] = {}

    def table(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new table of zeros for values of this shape and dtype."""
        return np.zeros((self.capacity, self.num_columns, *shape), dtype)


def pairs(flags: Array) -> Array:
    """Flags [..., 2] seen as one number [...] for each two, which is copied faster."""
    return flags.view(np.uint16)[..., 0]


def move_rows(
    old: Array, new: Array, cursors: list[int], lengths: list[int], longest: int, more: int
) -> None:
    """Moves each column's open rows so that they end above row `longest`, and `more` after them."""
    if min(cursors) == max(cursors):
        # All stand together: one block, in which a shorter piece has rows above it that nobody
        # reads.
        first, target = cursors[0] - max(lengths), longest - max(lengths)
        block = old[first : cursors[0] + more]
        if new is not old or first != target:
            new[target : target + len(block)] = block  # numpy copes with the overlap
        return
    for index, (cursor, length) in enumerate(zip(cursors, lengths, strict=True)):
        # A copy first: old and new may be one table, and the rows overlap.
        open_rows = old[cursor - length : cursor + more, index].copy()
        first = longest - length
        new[first : first + len(open_rows), index] = open_rows


def write_stacks(
    tables: Sequence[Array], row: Any, columns: Any, step: Array, targets: Sequence[Array]
) -> None:
    """Copies the last frames of some episodes, the first one repeated where there are fewer.

    Args:
        tables: For each leaf the frames, [capacity, N, *shape].
        row: Row of the newest frame of each; one for all, or int64 [n].
        columns: Their columns, a slice then, or int64 [n].
        step: int64 [n], how many earlier frames of the episode lie above it.
        targets: For each leaf where the stacks are put, [n, k, *shape].
    """
    count = targets[0].shape[1]
    if type(row) is not int:
        for back in range(count):
            rows = row - np.minimum(back, step)
            for table, target in zip(tables, targets, strict=True):
                target[:, count - 1 - back] = table[rows, columns]
        return
    for table, target in zip(tables, targets, strict=True):
        target[...] = table[row - count + 1 : row + 1, columns].swapaxes(0, 1)
    # Above an episode's first frame lies what does not belong to it.
    for number in np.flatnonzero(step < count - 1).tolist():
        first = count - 1 - int(step[number])
        for target in targets:
            target[number, :first] = target[number, first]


@dataclass(slots=True)
class Piece:
    """Consecutive rows of one episode, which lie on a tape.

    Attributes:
        tape: The tape.
        column: Their column.
        first_row: Row of the tape of the first of them.
        length: T.
        env_id: Index of the environment.
        trajectory_id: Number of the episode.
        first_step: Row number in the episode of the first row.
        first_run_step: Step of the environment in the run at the first row.
        final: The state that the last row leads to, [*shape] by key, where the tape holds another
            one in its place.
        infos: For each row the values of the asked info keys; empty when none are asked for.
    """

    tape: Tape
    column: int
    first_row: int
    length: int
    env_id: int
    trajectory_id: int
    first_step: int
    first_run_step: int
    final: Mapping[Key, Array] | None = None
    infos: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_arrays(
        cls,
        states: Mapping[Key, Array],
        rows: Mapping[Key, Array],
        *,
        env_id: int = 0,
        trajectory_id: int = 0,
        first_step: int = 0,
        first_run_step: int = 0,
        infos: Sequence[dict[str, Any]] = (),
    ) -> Piece:
        """A piece on a tape of its own.

        Args:
            states: Arrays [T + 1, ...].
            rows: Arrays [T, ...]; among them ("next", "reward"), ("next", "terminated") and
                ("next", "truncated").
            env_id: As the attribute; likewise the rest.
            trajectory_id: Likewise.
            first_step: Likewise.
            first_run_step: Likewise.
            infos: Likewise.
        """
        length = len(rows[REWARD])
        tape = Tape(1, length + 1)
        tape.states = {key: array[:, None] for key, array in states.items()}
        flags = np.stack([rows["next", name] for name in ("terminated", "truncated")], axis=-1)
        named = {key: array for key, array in rows.items() if key[0] != "next" or key == REWARD}
        tape.rows = {key: array[:, None] for key, array in [*named.items(), (FLAGS, flags)]}
        place = (env_id, trajectory_id, first_step, first_run_step)
        return cls(tape, 0, 0, length, *place, None, list(infos))

    def split(self, length: int) -> tuple[Piece, Piece]:
        """The first `length` rows and the rest; the state between them belongs to both."""
        # `dataclasses.replace` takes four times as long.
        place, episode = (self.tape, self.column), (self.env_id, self.trajectory_id)
        steps = self.first_step, self.first_run_step
        head = Piece(*place, self.first_row, length, *episode, *steps, None, self.infos[:length])
        tail = Piece(
            *place,
            self.first_row + length,
            self.length - length,
            *episode,
            self.first_step + length,
            self.first_run_step + length,
            self.final,
            self.infos[length:],
        )
        return head, tail


class Selection:
    """Rows of some pieces, end to end, in the order of the pieces.

    Args:
        pieces: One or more.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        tapes = {id(piece.tape): piece.tape for piece in pieces}
        by_tape = [[each for each in pieces if each.tape is tape] for tape in tapes.values()]
        self._parts = [_Part(part) for part in by_tape]
        # Places of the pieces in the order of the parts; sorted by them, rows are in their order.
        places = {id(piece): place for place, piece in enumerate(pieces)}
        self._places = [places[id(piece)] for part in by_tape for piece in part]
        self._lengths = [piece.length for part in by_tape for piece in part]

    @property
    def row_keys(self) -> list[set[Key]]:
        """The keys of the rows of each tape."""
        return [set(part.tape.rows) for part in self._parts]

    def rows(self, key: Key) -> Array:
        """What the rows hold under a key, [sum T, ...]."""
        return self._joined([part.take(part.tape.rows[key], part.index) for part in self._parts])

    def states(self, key: Key) -> Array:
        """The states that the rows act on, [sum T, ...]."""
        return self._joined([part.take(part.tape.states[key], part.index) for part in self._parts])

    def next_states(self, key: Key) -> Array:
        """The states that the rows lead to, [sum T, ...]."""
        return self._joined([part.next_states(key) for part in self._parts])

    def all_states(self, key: Key) -> Array:
        """The states of each piece, followed by the one that its last row leads to, [sum T + 1]."""
        return self._joined([part.all_states(key) for part in self._parts], more=1)

    def all_stacks(self, key: Key, num_frames: int) -> Array:
        """The same as stacks of the last frames, [sum T + 1, num_frames, ...]."""
        stacks = [part.all_stacks(key, num_frames) for part in self._parts]
        return self._joined(stacks, more=1)

    def num_before(self, most: int) -> Array:
        """Earlier states of its episode that lie above each piece, `most` or fewer, int64 [P]."""
        counts = np.concatenate([part.num_before(most) for part in self._parts])
        return counts[np.argsort(self._places)]

    def states_before(self, key: Key, most: int) -> Array:
        """These states, end to end, [sum of `num_before`, ...]."""
        counts = [part.num_before(most).tolist() for part in self._parts]
        lengths = [count for part in counts for count in part]
        return self._in_order([part.states_before(key, most) for part in self._parts], lengths)

    def _joined(self, arrays: list[Array], more: int = 0) -> Array:
        return self._in_order(arrays, [length + more for length in self._lengths])

    def _in_order(self, arrays: list[Array], lengths: list[int]) -> Array:
        if len(arrays) == 1:
            return arrays[0]
        order = np.argsort(np.repeat(self._places, lengths), kind="stable")
        joined: Array = np.concatenate(arrays)[order]
        return joined


class _Part:
    """The rows of pieces that lie on one tape."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.tape = pieces[0].tape
        self._column = np.array([piece.column for piece in pieces])
        self._first = np.array([piece.first_row for piece in pieces])
        self._length = np.array([piece.length for piece in pieces])
        self._first_step = np.array([piece.first_step for piece in pieces])
        # Places, in the order of the pieces, of those whose last state is not on the tape.
        self._ended = [place for place, piece in enumerate(pieces) if piece.final is not None]
        self._finals = [piece.final for piece in pieces if piece.final is not None]
        self.index = self._index(self._first, self._length)

    def _index(self, first: Array, lengths: Array) -> Array:
        """Places of so many rows of each piece's column in a table [capacity * N, ...]."""
        before = np.cumsum(lengths) - lengths  # rows of the pieces before each
        # Row t of column i lies at t * N + i, and the next row of the column N places further. Of
        # all rows end to end number r belongs to a piece that begins at number `before`, so it lies
        # (r - before) * N after that piece's first.
        first = first * self.tape.num_columns + self._column
        steps = np.arange(int(lengths.sum())) * self.tape.num_columns
        index: Array = np.repeat(first - before * self.tape.num_columns, lengths) + steps
        return index

    def take(self, table: Array, index: Array) -> Array:
        # Not -1, as a state may be an array of no numbers.
        return table.reshape(table.shape[0] * table.shape[1], *table.shape[2:]).take(index, axis=0)

    def next_states(self, key: Key) -> Array:
        found = self.take(self.tape.states[key], self.index + self.tape.num_columns)
        return self._with_finals(key, found, self._length)

    def all_states(self, key: Key) -> Array:
        lengths = self._length + 1
        found = self.take(self.tape.states[key], self._index(self._first, lengths))
        return self._with_finals(key, found, lengths)

    def all_stacks(self, key: Key, num_frames: int) -> Array:
        lengths = self._length + 1
        # How many earlier states of its episode each one has, and how far back its frames lie.
        before = np.repeat(self.num_before(num_frames - 1) - np.cumsum(lengths) + lengths, lengths)
        before += np.arange(len(before))
        back = np.minimum(np.arange(num_frames - 1, -1, -1), before[:, None])
        index = self._index(self._first, lengths)[:, None] - back * self.tape.num_columns
        found = self.take(self.tape.states[key], index)
        self._with_finals(key, found[:, -1], lengths)
        return found

    def num_before(self, most: int) -> Array:
        # Those of a piece on a tape of its own are not there.
        counts: Array = np.minimum(np.minimum(self._first_step, self._first), most)
        return counts

    def states_before(self, key: Key, most: int) -> Array:
        counts = self.num_before(most)
        return self.take(self.tape.states[key], self._index(self._first - counts, counts))

    def _with_finals(self, key: Key, found: Array, lengths: Array) -> Array:
        """Puts the final states at the last of the `lengths` rows of their pieces."""
        if self._ended:
            last = np.cumsum(lengths) - 1
            found[last[self._ended]] = [final[key] for final in self._finals]
        return found
