"""The rows of a replay buffer: records in a ring, their links, and states without a row."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gymtask.errors import ConfigurationError, ReplayError
from gymtask.replay.incoming import Incoming
from gymtask.replay.links import NOBODY, Links, Piece
from gymtask.replay.reading import Reader, Reading
from gymtask.replay.records import Field, Path, RecordLayout
from gymtask.replay.storage import Records
from gymtask.workers.layout import Array

FEWEST_SLOTS = 64
CHUNK = 1 << 24  # bytes that are moved at once


class Ring:
    """The last `capacity` rows.

    Attributes:
        capacity: Rows that fit.
        folder: Where the files of records lie, None in memory.
        links: Which row follows which.
        layout: What the records hold; None before the first rows.
        records: The records of the rows.
        side: Records of the linked fields: the states that the last rows of chains lead to.
    """

    layout: RecordLayout | None = None
    records: Records
    side: Records

    def __init__(self, capacity: int, folder: FilePath | None) -> None:
        self.capacity, self.folder = capacity, folder
        self.links = Links(capacity)
        self._num_files = 0
        self._reader: Reader | None = None  # that was made last, of all keys

    def __getstate__(self) -> dict[str, Any]:
        # The tables move into shared memory, and the reader would keep a copy of them alive.
        self._reader = None
        return vars(self)

    def begin(self, layout: RecordLayout, num_slots: int = FEWEST_SLOTS) -> None:
        """Makes the tables, in place of those that are there.

        Raises:
            ReplayError: The disk has no room for them; then it has those that it had.
        """
        tables = self._tables(layout, num_slots)
        self.discard()
        self.records, self.side = tables
        self.layout = layout

    def _tables(self, layout: RecordLayout, num_slots: int) -> tuple[Records, Records]:
        records = self._table(self.capacity, layout)
        try:
            return records, self._table(num_slots, RecordLayout(layout.linked))
        except ReplayError:
            records.discard()
            raise

    def discard(self) -> None:
        """Gives the tables up, and deletes their files."""
        self._reader = self.layout = None
        for name in ("records", "side"):
            if hasattr(self, name):
                getattr(self, name).discard()
                delattr(self, name)

    def _table(self, num_rows: int, layout: RecordLayout) -> Records:
        path = None
        if self.folder is not None:
            path = self.folder / f"records-{self._num_files}.bin"
            self._num_files += 1
        return Records(num_rows, layout.dtype, path)

    def reader(self, reading: Reading, keys: Sequence[Path] | None = None) -> Reader:
        """Reads batches of what is here now; see `Reader`."""
        assert self.layout is not None
        records, side, kept = self.records.array, self.side.array, self._reader
        if keys is None and kept is not None and kept.reads(records, side, reading):
            return kept
        made = Reader(self.links, self.layout, records, side, reading, keys)
        if keys is None:
            self._reader = made
        return made

    # ---- adding ----------------------------------------------------------------------------------

    def extend(self, incoming: Incoming) -> Sequence[slice | Array]:
        """Adds rows, and gives where they lie.

        Raises:
            ConfigurationError: They do not fit here; nothing was added.
            ReplayError: The disk is full; nothing was added.
        """
        if incoming.num_rows > self.capacity:
            longest = max(piece.last + 1 - piece.first for piece in incoming.pieces)
            if longest > self.capacity:
                raise ConfigurationError(
                    f"`capacity` must be at least the length of a trajectory, {longest},"
                    f" got {self.capacity}"
                )
        if self.layout is None:
            self.begin(incoming.layout())
        else:
            incoming.check(self.layout)
        self._reserve(len(incoming.pieces))
        self._store_twice(self._changed(incoming))
        if incoming.num_rows <= self.capacity:
            return [self._add(incoming.values, incoming.pieces)]
        return [self._add(incoming.values, group) for group in self._groups(incoming.pieces)]

    def _reserve(self, num_pieces: int) -> None:
        """Makes room for the states behind more pieces."""
        needed = min(self.links.num_chains + num_pieces, self.capacity)
        if needed > len(self.side):
            self.side.grow(max(needed, 2 * len(self.side)))

    def _groups(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """As many pieces at once as have room beside each other."""
        group: list[Piece] = []
        for piece in pieces:
            if group and piece.last + 1 - group[0].first > self.capacity:
                yield group
                group = []
            group.append(piece)
        yield group

    def _add(self, values: Mapping[Path, Array], pieces: Sequence[Piece]) -> slice | Array:
        assert self.layout is not None
        first, last = pieces[0].first, [piece.last for piece in pieces]
        count = last[-1] + 1 - first
        self.links.evict(count)
        rows, chains = self.links.add(pieces)
        self.records.prepare(rows)
        columns = self.records.columns
        for path, field in self.layout.fields.items():
            new = values[path]
            columns[field.name][rows] = new if len(new) == count else new[first : first + count]
        # A single place is found faster as a number than as a list of one.
        to, states = (chains, last) if len(pieces) > 1 else (chains[0], last[0])
        for field in self.layout.linked:
            self.side.columns[field.name][to] = values[field.next_path][states]
        return rows

    # ---- next values that are not those of the following rows ------------------------------------

    def _changed(self, incoming: Incoming) -> list[Field]:
        """The linked fields in which a row does not lead to the state of the row that follows."""
        assert self.layout is not None
        return [
            field
            for field in self.layout.linked
            if not incoming.is_linked(field.path) or not self._goes_on(incoming, field)
        ]

    def _goes_on(self, incoming: Incoming, field: Field) -> bool:
        """Whether pieces begin with the states that the rows here lead to with which they go on."""
        if not incoming.goes_on:
            return True
        firsts: list[int] = []
        chains: list[int] = []
        for piece in incoming.pieces:
            if piece.before and (row := self.links.find_open(piece.before)) != NOBODY:
                firsts.append(piece.first)
                chains.append(int(self.links.chain[row]))
        if not firsts:
            return True
        begun, led_to = incoming.values[field.path][firsts], self.side.columns[field.name][chains]
        return bool(begun.tobytes() == led_to.tobytes())

    def _store_twice(self, fields: Sequence[Field]) -> None:
        """From now on keeps what lies under "next" for some fields in the rows themselves."""
        if not fields:
            return
        assert self.layout is not None
        names = [field.name for field in fields]
        warnings.warn(
            f"('next', key) is not the value of the following row for {names}, so both are stored,"
            " which takes twice the memory; a hook that changes one of them should change both",
            stacklevel=4,
        )
        layout = _with_next_values(self.layout, names)
        records, side = self._tables(layout, len(self.side))
        for field in layout.linked:
            side.array[field.name] = self.side.array[field.name]
        self._copy(records.array, layout, names)
        self.discard()
        self.records, self.side, self.layout = records, side, layout

    def _copy(self, target: Array, layout: RecordLayout, names: Sequence[str]) -> None:
        assert self.layout is not None
        reader, size = self.reader(Reading()), len(self.links)
        step = max(1, CHUNK // layout.dtype.itemsize)
        for start in range(0, size, step):
            rows = np.arange(start, min(start + step, size))
            for field in self.layout.fields.values():
                target[field.name][rows] = self.records.array[field.name][rows]
            following = reader.states_after(rows)
            for name in names:
                target[f"next/{name}"][rows] = following[name]


def _with_next_values(layout: RecordLayout, names: Sequence[str]) -> RecordLayout:
    fields = []
    for field in layout.fields.values():
        twice = field.name in names
        fields.append(Field(field.path, field.shape, field.dtype, field.linked and not twice))
        if twice:
            fields.append(Field(("next", *field.path), field.shape, field.dtype))
    return RecordLayout(fields)
