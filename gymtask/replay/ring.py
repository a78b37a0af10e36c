"""The rows of a replay buffer: records in a ring, their links, and states without a row."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath

import numpy as np

from gymtask.errors import ConfigurationError
from gymtask.replay.incoming import Incoming
from gymtask.replay.links import Links
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

    def begin(self, layout: RecordLayout, num_slots: int = FEWEST_SLOTS) -> None:
        """Makes the tables.

        Raises:
            ReplayError: The disk has no room for them.
        """
        self.records = self._table(self.capacity, layout)
        self.side = self._table(num_slots, RecordLayout(layout.linked))
        self.layout = layout

    def _table(self, num_rows: int, layout: RecordLayout) -> Records:
        path = None
        if self.folder is not None:
            path = self.folder / f"records-{self._num_files}.bin"
            self._num_files += 1
        return Records(num_rows, layout.dtype, path)

    def reader(self, reading: Reading, keys: Sequence[Path] | None = None) -> Reader:
        """Reads batches of what is here now; see `Reader`."""
        assert self.layout is not None
        tables = self.records.array, self.side.array
        return Reader(self.links, self.layout, *tables, reading, keys)

    # ---- adding ----------------------------------------------------------------------------------

    def extend(self, incoming: Incoming) -> Iterator[Array]:
        """Adds rows and yields where they lie, some pieces at a time.

        Raises:
            ConfigurationError: They do not fit here; nothing was added.
            ReplayError: The disk is full; nothing was added.
        """
        if max(incoming.lengths) > self.capacity:
            raise ConfigurationError(
                f"`capacity` must be at least the length of a trajectory, {max(incoming.lengths)},"
                f" got {self.capacity}"
            )
        changed: list[Field] = []
        if self.layout is None:
            self.begin(incoming.layout())
        else:
            incoming.check(self.layout)
            changed = incoming.changed(self.layout)
        self._reserve(len(incoming.lengths))
        self._store_twice(changed)
        return self._add_groups(incoming)

    def _reserve(self, num_pieces: int) -> None:
        """Makes room for the states behind more pieces."""
        needed = min(self.links.num_side_slots + num_pieces, 2 * self.capacity)
        if needed > len(self.side):
            self.side.grow(max(needed, 2 * len(self.side)))

    def _add_groups(self, incoming: Incoming) -> Iterator[Array]:
        """Adds as many pieces at once as have room beside each other."""
        lengths, piece, row = incoming.lengths, 0, 0
        while piece < len(lengths):
            count, start, first = 0, row, piece
            while piece < len(lengths) and count + lengths[piece] <= self.capacity:
                count += lengths[piece]
                piece += 1
            row += count
            yield self._add(incoming, slice(first, piece), slice(start, row))

    def _add(self, incoming: Incoming, pieces: slice, span: slice) -> Array:
        assert self.layout is not None
        links, lengths = self.links, incoming.lengths[pieces]
        rows = links.next_places(sum(lengths))
        num_evicted = len(links) + len(rows) - self.capacity
        if num_evicted > 0:
            links.evict(rows[-num_evicted:])
        values = {path: value[span] for path, value in incoming.values.items()}
        # A slice is written faster than an array of places.
        place = slice(rows[0], rows[-1] + 1) if rows[0] <= rows[-1] else rows
        self.layout.write(self.records.array, place, values)
        slots = links.add(rows, lengths, incoming.begins[pieces])
        ends = np.cumsum(lengths)
        for field in self.layout.linked:
            self.side.array[field.name][slots] = values["next", *field.path][ends - 1]
        self._join(rows, ends, lengths, incoming, pieces)
        return rows

    def _join(
        self, rows: Array, ends: Array, lengths: Sequence[int], incoming: Incoming, pieces: slice
    ) -> None:
        """Links the pieces to those that they go on from, and notes which may go on."""
        firsts, lasts = rows[ends - lengths].tolist(), rows[ends - 1].tolist()
        keys = incoming.goes_on_from[pieces], incoming.may_go_on_at[pieces]
        for first, last, before, after in zip(firsts, lasts, *keys, strict=True):
            if before is not None and (row := self.links.find_open(*before)) >= 0:
                self._store_twice(self._unlike(row, first))
                self.links.join(row, first)
            if after is not None:
                self.links.leave_open(last, *after)

    def _unlike(self, row: int, first: int) -> list[Field]:
        """The fields in which the state behind a row is not the one of the row that goes on."""
        assert self.layout is not None
        slot = int(self.links.successor[row]) - self.capacity
        side, records = self.side.array, self.records.array
        return [
            field
            for field in self.layout.linked
            if side[field.name][slot].tobytes() != records[field.name][first].tobytes()
        ]

    # ---- next values that are not those of the following rows ------------------------------------

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
        records = self._table(self.capacity, layout)
        side = self._table(len(self.side), RecordLayout(layout.linked))
        for field in layout.linked:
            side.array[field.name] = self.side.array[field.name]
        self._copy(records.array, layout, names)
        self.records.discard()
        self.side.discard()
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
