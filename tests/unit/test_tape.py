"""The tape, the pieces that lie on it, and what a selection of them reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gymtask.tape import FLAGS, REWARD, Key, Piece, Selection, Tape

SEEN: Key = ("observation",)
PAIR: Key = ("carry", "pair")
NOTE: Key = ("note",)


def make_tape(num_columns: int = 2, capacity: int = 6, base: int = 0) -> Tape:
    """State and row t of column i are base + 100 · i + t; pairs are that and its half."""
    tape = Tape(num_columns, capacity)
    number = base + 100 * np.arange(num_columns) + np.arange(capacity)[:, None]
    tape.states = {SEEN: number.astype(np.float32), PAIR: np.stack([number, number / 2], -1)}
    flags = np.zeros((capacity, num_columns, 2), bool)
    tape.rows = {NOTE: number.copy(), REWARD: number / 4, FLAGS: flags}
    return tape


def piece_of(
    tape: Tape, column: int, first_row: int, length: int, final: float | None = None, **fields: Any
) -> Piece:
    end = None
    if final is not None:
        end = {SEEN: np.float32(final), PAIR: np.array([final, -final])}
    whole = {"env_id": column, "trajectory_id": 0, "first_step": 0, "first_run_step": first_row}
    return Piece(tape, column, first_row, length, final=end, **{**whole, **fields})  # type: ignore[arg-type]


# ---- one piece -----------------------------------------------------------------------------------


def test_a_piece_reads_the_rows_of_its_column() -> None:
    selection = Selection([piece_of(make_tape(), 1, 2, 3)])
    assert selection.rows(NOTE).tolist() == [102, 103, 104]
    assert selection.rows(REWARD).tolist() == [25.5, 25.75, 26.0]
    assert selection.states(SEEN).tolist() == [102, 103, 104]
    assert selection.next_states(SEEN).tolist() == [103, 104, 105]
    assert selection.all_states(SEEN).tolist() == [102, 103, 104, 105]
    assert selection.next_states(PAIR).tolist() == [[103, 51.5], [104, 52], [105, 52.5]]
    assert selection.rows(FLAGS).shape == (3, 2)


def test_the_final_state_takes_the_place_of_the_next_episodes_first() -> None:
    selection = Selection([piece_of(make_tape(), 0, 1, 2, final=77.0)])
    assert selection.states(SEEN).tolist() == [1, 2]
    assert selection.next_states(SEEN).tolist() == [2, 77]
    assert selection.all_states(SEEN).tolist() == [1, 2, 77]
    assert selection.next_states(PAIR).tolist() == [[2, 1], [77, -77]]


def test_reading_leaves_the_tape_and_the_dtypes_as_they_are() -> None:
    tape = make_tape()
    before = {key: table.copy() for key, table in {**tape.states, **tape.rows}.items()}
    selection = Selection([piece_of(tape, 0, 0, 3, final=9.0), piece_of(tape, 0, 3, 2)])
    for key in tape.states:
        for read in (selection.states, selection.next_states, selection.all_states):
            found = read(key)
            assert found.dtype == tape.states[key].dtype
            found[:] = -1
    for key in tape.rows:
        selection.rows(key)[:] = 1
    for key, table in {**tape.states, **tape.rows}.items():
        np.testing.assert_array_equal(table, before[key])


def test_a_table_is_of_zeros_for_every_row_and_column() -> None:
    table = Tape(3, 4).table((2,), np.int8)
    assert (table.shape, table.dtype, table.any()) == ((4, 3, 2), np.int8, False)


# ---- split ---------------------------------------------------------------------------------------


def test_both_parts_of_a_split_know_the_state_between_them() -> None:
    infos = [{"t": t} for t in range(4)]
    piece = piece_of(
        make_tape(), 1, 1, 4, 77.0, first_step=5, first_run_step=9, trajectory_id=3, infos=infos
    )
    head, tail = piece.split(3)
    assert [(part.first_row, part.length) for part in (head, tail)] == [(1, 3), (4, 1)]
    assert [(part.first_step, part.first_run_step) for part in (head, tail)] == [(5, 9), (8, 12)]
    assert (head.env_id, tail.env_id, head.trajectory_id, tail.trajectory_id) == (1, 1, 3, 3)
    assert (head.final, tail.final is piece.final) == (None, True)
    assert (head.infos, tail.infos) == (infos[:3], infos[3:])
    assert Selection([head]).next_states(SEEN).tolist() == [102, 103, 104]
    assert Selection([tail]).all_states(SEEN).tolist() == [104, 77]
    together = Selection([head, tail])
    assert together.next_states(SEEN).tolist() == [102, 103, 104, 77]
    assert together.all_states(SEEN).tolist() == [101, 102, 103, 104, 104, 77]


def test_a_split_leaves_the_piece_itself_as_it_was() -> None:
    piece = piece_of(make_tape(), 0, 0, 4, 5.0, infos=[{}] * 4)
    before = replace(piece)
    piece.split(1)
    assert piece == before


# ---- from_arrays ---------------------------------------------------------------------------------


def test_from_arrays_makes_a_piece_on_a_tape_of_its_own() -> None:
    piece = Piece.from_arrays(
        {SEEN: np.array([1.0, 2.0, 3.0]), PAIR: np.arange(6).reshape(3, 2)},
        {
            ("action",): np.array([7, 8]),
            REWARD: np.array([0.5, 1.5]),
            ("next", "terminated"): np.array([False, True]),
            ("next", "truncated"): np.array([True, False]),
        },
        env_id=4,
        trajectory_id=12,
        first_step=3,
        first_run_step=30,
        infos=[{"a": 1}, {}],
    )
    selection = Selection([piece])
    assert (piece.length, piece.env_id, piece.trajectory_id) == (2, 4, 12)
    assert (piece.first_step, piece.first_run_step, piece.infos) == (3, 30, [{"a": 1}, {}])
    assert selection.row_keys == [{("action",), REWARD, FLAGS}]
    assert selection.rows(FLAGS).tolist() == [[False, True], [True, False]]
    assert selection.rows(("action",)).tolist() == [7, 8]
    assert selection.next_states(SEEN).tolist() == [2, 3]
    assert selection.all_states(PAIR).tolist() == [[0, 1], [2, 3], [4, 5]]


# ---- many pieces ---------------------------------------------------------------------------------


def test_pieces_of_several_tapes_come_in_the_order_given() -> None:
    old, new = make_tape(2), make_tape(3, capacity=9, base=1000)
    selection = Selection(
        [
            piece_of(new, 2, 5, 2),
            piece_of(old, 1, 0, 1, final=-1.0),
            piece_of(new, 0, 0, 3, final=-2.0),
            piece_of(old, 0, 2, 2),
        ]
    )
    assert selection.rows(NOTE).tolist() == [1205, 1206, 100, 1000, 1001, 1002, 2, 3]
    assert selection.next_states(SEEN).tolist() == [1206, 1207, -1, 1001, 1002, -2, 3, 4]
    assert selection.all_states(SEEN).tolist() == [
        *(1205, 1206, 1207),
        *(100, -1),
        *(1000, 1001, 1002, -2),
        *(2, 3, 4),
    ]


def test_the_keys_of_each_tape_are_told() -> None:
    old, new = make_tape(), make_tape()
    new.rows["log_prob",] = np.zeros((6, 2))
    selection = Selection([piece_of(old, 0, 0, 1), piece_of(new, 0, 0, 1)])
    assert selection.row_keys == [{NOTE, REWARD, FLAGS}, {NOTE, REWARD, FLAGS, ("log_prob",)}]


@st.composite
def many_pieces(draw: st.DrawFn) -> list[Piece]:
    tapes = [
        make_tape(columns, capacity, 1000 * number)
        for number, (columns, capacity) in enumerate(
            draw(st.lists(st.tuples(st.integers(1, 4), st.integers(2, 8)), min_size=1, max_size=3))
        )
    ]
    pieces = []
    for _ in range(draw(st.integers(1, 8))):
        tape = draw(st.sampled_from(tapes))
        first = draw(st.integers(0, tape.capacity - 2))
        length = draw(st.integers(1, tape.capacity - 1 - first))
        column = draw(st.integers(0, tape.num_columns - 1))
        final = draw(st.none() | st.integers(-99, -1))
        piece = piece_of(tape, column, first, length, final, infos=[{"row": first}] * length)
        if length > 1 and draw(st.booleans()):
            pieces += piece.split(draw(st.integers(1, length - 1)))
        else:
            pieces.append(piece)
    return draw(st.permutations(pieces))


@settings(deadline=None)
@given(many_pieces())
def test_a_selection_reads_what_lists_would_hold(pieces: list[Piece]) -> None:
    rows: list[float] = []
    before: list[float] = []
    after: list[float] = []
    everything: list[float] = []
    for piece in pieces:
        table = piece.tape.states[SEEN]
        shown = [float(table[piece.first_row + t, piece.column]) for t in range(piece.length + 1)]
        if piece.final is not None:
            shown[-1] = float(piece.final[SEEN])
        rows += [
            int(piece.tape.rows[NOTE][piece.first_row + t, piece.column])
            for t in range(piece.length)
        ]
        before += shown[:-1]
        after += shown[1:]
        everything += shown
    selection = Selection(pieces)
    assert selection.rows(NOTE).tolist() == rows
    assert selection.states(SEEN).tolist() == before
    assert selection.next_states(SEEN).tolist() == after
    assert selection.all_states(SEEN).tolist() == everything
    assert selection.next_states(PAIR)[:, 0].tolist() == after
    assert selection.states(PAIR)[:, 1].tolist() == [number / 2 for number in before]


def test_states_and_rows_may_be_arrays_of_no_numbers() -> None:
    tape = make_tape()
    tape.states[PAIR] = np.zeros((6, 2, 3, 0))
    tape.rows[NOTE] = np.zeros((6, 2, 0), np.int64)
    piece = piece_of(tape, 1, 1, 3)
    piece.final = {SEEN: np.float32(7), PAIR: np.zeros((3, 0))}
    selection = Selection([piece, piece_of(tape, 0, 2, 2)])
    assert selection.rows(NOTE).shape == (5, 0)
    assert selection.states(PAIR).shape == selection.next_states(PAIR).shape == (5, 3, 0)
    assert selection.all_states(PAIR).shape == (7, 3, 0)
    assert selection.next_states(SEEN).tolist() == [102, 103, 7, 3, 4]
