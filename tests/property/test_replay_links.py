"""Links that are not written are those that are."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gymtask.replay.links import Links, Piece

ENVS = st.integers(0, 2)
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=3)


def add(links: Links, pieces: list[Piece]) -> list[int]:
    links.evict(pieces[-1].last + 1)
    return links.add(pieces)[1]


def known(links: Links) -> dict[str, Any]:
    """All that is asked of links, of all their rows."""
    rows = links.all_rows()
    ended, slots = links.side_slots(rows)
    return {
        "rows": rows,
        "ended": ended,
        "slots": slots,
        "num_after": links.num_after(rows),
        "places": links.places(rows),
        "begins": links.begins_episode(rows),
        "oldest": links.is_oldest(rows),
        "history": links.has_history(rows, 2),
        "before": links.lead_up(rows[:, None], 3),
        "after": links.follow(rows[:, None], (0, 1, 3), clamp=True),
        "following": links.following(rows[~ended]) % links.capacity,
    }


@given(
    capacity=st.integers(18, 30),
    calls=st.lists(st.tuples(ENVS, LENGTHS, st.booleans()), max_size=30),
    later=st.integers(0, 30),
    reload=st.integers(0, 30),
)
def test_rows_are_linked_alike_whether_links_are_spelled_out_or_not(
    capacity: int, calls: list[tuple[int, list[int], bool]], later: int, reload: int
) -> None:
    """One environment alone at first, which needs no links; then several."""
    links, spelled = Links(capacity), Links(capacity)
    spelled._is_spelled = True
    trajectory, step = list(range(3)), [0] * 3
    for number, (env, lengths, ends) in enumerate(calls):
        env = env if number >= later else 0
        pieces: list[Piece] = []
        for length in lengths:
            first = pieces[-1].last + 1 if pieces else 0
            before = (trajectory[env], step[env]) if step[env] else None
            step[env] += length
            after = None if ends else (trajectory[env], step[env])
            pieces.append(Piece(first, first + length - 1, before is None, before, after))
            if ends:
                trajectory[env], step[env] = max(trajectory) + 1, 0
        assert add(links, pieces) == add(spelled, pieces)
        expected = known(spelled)
        assert (expected["before"] >= 0).all()
        for name, values in known(links).items():
            np.testing.assert_array_equal(values, expected[name], err_msg=name)
        if number == reload:
            state, links = links.state(), Links(capacity)
            links.load_state(state)
            np.testing.assert_equal(state, spelled.state())


def test_a_ring_is_even_again_once_the_links_to_other_rows_are_overwritten() -> None:
    links = Links(6)
    for piece in (
        Piece(0, 0, after=(0, 1)),
        Piece(0, 0, after=(1, 1)),
        Piece(0, 1, before=(0, 1)),
    ):
        add(links, [piece])
    assert not links.is_even
    add(links, [Piece(0, 2)])
    assert links.is_even
