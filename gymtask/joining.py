"""Pieces of one episode that follow each other become one piece again.

Mostly they lie on one tape, below each other, and nothing is copied. Where a tape became full
between them, they lie on two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from gymtask.states import Column, fits
from gymtask.tape import Key, Piece, Tape
from gymtask.workers.layout import Array


def joined_pieces(pieces: Iterable[Piece], num_before: int) -> dict[int, list[Piece]]:
    """The pieces of each environment in order of time, those that go on in the next one as one.

    Args:
        pieces: The pieces.
        num_before: How many earlier states of an episode belong to a piece that begins within it.
    """
    chains: dict[int, list[list[Piece]]] = {}
    for piece in sorted(pieces, key=lambda each: each.first_run_step):
        own = chains.setdefault(piece.env_id, [])
        if not own or not _goes_on_in(own[-1][-1], piece):
            own.append([piece])
        elif _lies_below(piece, own[-1][-1]):
            own[-1][-1] = _extended(own[-1][-1], piece)
        else:
            own[-1].append(piece)
    return {index: [_as_one(chain, num_before) for chain in own] for index, own in chains.items()}


def has_columns(piece: Piece, states: Sequence[Column], rows: Sequence[Column]) -> bool:
    """Whether these, and no others, are the columns of the tape on which a piece lies."""
    return all(
        tables.keys() == {column.key for column in columns}
        and all(fits(tables[column.key], column) for column in columns)
        for tables, columns in ((piece.tape.states, states), (piece.tape.rows, rows))
    )


def copy_above(piece: Piece, tape: Tape, index: int, row: int, num_before: int) -> None:
    """Copies a piece to another tape of the same columns.

    Args:
        piece: The piece.
        tape: The other tape.
        index: Its column there.
        row: The row there that its last one is to lie above.
        num_before: How many earlier states of its episode come along, if there are so many.
    """
    above = _num_above(piece, num_before)
    for own, others in ((piece.tape.states, tape.states), (piece.tape.rows, tape.rows)):
        for key, table in own.items():
            rows = _column(piece, table, above, 0)
            others[key][row - len(rows) : row, index] = rows


def _num_above(piece: Piece, most: int) -> int:
    """How many earlier states of its episode lie above a piece, `most` or fewer."""
    return min(piece.first_step, piece.first_row, most)


def _goes_on_in(piece: Piece, other: Piece) -> bool:
    """Whether the rows of another piece of the environment follow in the same episode."""
    return (
        piece.final is None
        and piece.trajectory_id == other.trajectory_id
        and piece.first_step + piece.length == other.first_step
        and (piece.tape is other.tape or _kinds(piece.tape) == _kinds(other.tape))
    )


def _kinds(tape: Tape) -> list[dict[Key, tuple[tuple[int, ...], np.dtype[np.generic]]]]:
    return [
        {key: (table.shape[2:], table.dtype) for key, table in tables.items()}
        for tables in (tape.states, tape.rows)
    ]


def _lies_below(piece: Piece, other: Piece) -> bool:
    return (piece.tape, piece.column, piece.first_row) == (
        other.tape,
        other.column,
        other.first_row + other.length,
    )


def _extended(piece: Piece, other: Piece) -> Piece:
    """A piece and the one that lies below it."""
    return replace(
        piece,
        length=piece.length + other.length,
        final=other.final,
        infos=[*piece.infos, *other.infos],
    )


def _as_one(chain: Sequence[Piece], num_before: int) -> Piece:
    """Pieces that go on in each other, copied to a tape of their own if they are several."""
    if len(chain) == 1:
        return chain[0]
    first, last = chain[0], chain[-1]
    above, length = _num_above(first, num_before), sum(piece.length for piece in chain)
    tape = Tape(1, above + length + 1)
    for key in first.tape.states:  # the state that the last row leads to, too
        tables = [piece.tape.states[key] for piece in chain]
        tape.states[key] = _end_to_end(chain, tables, above, 1)
    for key in first.tape.rows:
        tables = [piece.tape.rows[key] for piece in chain]
        tape.rows[key] = _end_to_end(chain, tables, above, 0)
    return replace(
        first,
        tape=tape,
        column=0,
        first_row=above,
        length=length,
        final=last.final,
        infos=[info for piece in chain for info in piece.infos],
    )


def _end_to_end(chain: Sequence[Piece], tables: Sequence[Array], above: int, below: int) -> Array:
    """What the rows of pieces hold in the tables of their tapes, as a table of one column.

    With some rows above the first piece, and some below the last.
    """
    last = len(chain) - 1
    parts = [
        _column(piece, table, 0 if number else above, below if number == last else 0)
        for number, (piece, table) in enumerate(zip(chain, tables, strict=True))
    ]
    return np.concatenate(parts)[:, None]


def _column(piece: Piece, table: Array, above: int, below: int) -> Array:
    """The rows of a piece, and some of those above and below it, [n, ...]."""
    first = piece.first_row - above
    rows: Array = table[first : piece.first_row + piece.length + below, piece.column]
    return rows
