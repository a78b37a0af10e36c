"""Pieces of one episode that follow each other become one piece again."""

from __future__ import annotations

from collections.abc import Iterable

from gymtask.tape import Piece


def joined_pieces(pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
    """The pieces of each environment in order of time, those that go on in the next one as one."""
    joined: dict[int, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda each: each.first_run_step):
        own = joined.setdefault(piece.env_id, [])
        if own and own[-1].goes_on_in(piece):
            own[-1] = own[-1].joined_with(piece)
        else:
            own.append(piece)
    return joined
