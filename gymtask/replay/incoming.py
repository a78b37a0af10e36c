"""Trajectories on their way into a ring: checked, flattened, and cut where something ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from gymtask.errors import ConfigurationError
from gymtask.replay.pieces import MultiReplaySamples, ReplaySamples, join, leaves_of
from gymtask.replay.records import Field, Path, RecordLayout, bits_of
from gymtask.workers.layout import Array

Trajectories = TensorDictBase | Sequence[TensorDictBase | ReplaySamples] | MultiReplaySamples

# Estimates change with the model that makes them: what follows a cut is estimated anew.
_NOT_LINKED = ("state_value",)


class Incoming:
    """Rows of some pieces, end to end.

    A new piece begins wherever a row cannot lead to the next one: behind the end of an episode, and
    where `trajectory_id` or `step` do not go on.

    Attributes:
        values: What the rows hold, [sum T, *shape] by path, as it is stored.
        lengths: Rows of each piece.
        begins: Whether each begins an episode.
        goes_on_from: For each (trajectory_id, step) of its first row, None where that is not known
            or it begins an episode.
        may_go_on_at: Likewise of the row that may follow its last one, None where an episode ends.
    """

    def __init__(self, trajectories: Trajectories) -> None:
        rows, given = _rows_of(trajectories)
        leaves = leaves_of(rows).items()
        tensors = {(key,) if isinstance(key, str) else key: leaf for key, leaf in leaves}
        self.values = {path: bits_of("/".join(path), leaf) for path, leaf in tensors.items()}
        self._dtypes = {path: leaf.dtype for path, leaf in tensors.items()}
        ids, steps = (self._numbers(name) for name in ("trajectory_id", "step"))
        done = self._done(sum(given))
        ends = _ends(given, done, ids, steps, self._numbers("is_init"))
        last = np.flatnonzero(ends)
        first = np.concatenate(([0], last[:-1] + 1))
        self.lengths: list[int] = (last - first + 1).tolist()
        self.begins = self._begins(first, steps)
        self.goes_on_from: list[tuple[int, int] | None] = [None] * len(last)
        self.may_go_on_at = list(self.goes_on_from)
        if ids is not None and steps is not None:
            for number, (start, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
                if not self.begins[number]:
                    self.goes_on_from[number] = int(ids[start]), int(steps[start])
                if not done[end]:
                    self.may_go_on_at[number] = int(ids[end]), int(steps[end]) + 1
        self._inner = ~ends[:-1]  # rows, but for the last, that lead to the next one

    def __len__(self) -> int:
        return sum(self.lengths)

    def _numbers(self, name: str) -> Array | None:
        return self.values.get((name,))

    def _done(self, count: int) -> Array:
        found: Array = np.zeros(count, bool)
        for name in ("terminated", "truncated", "done"):
            if ("next", name) in self.values:
                flags = self.values["next", name]
                found |= flags if flags.ndim == 1 else flags.reshape(count, -1).any(axis=1)
        return found

    def _begins(self, first: Array, steps: Array | None) -> list[bool]:
        begins = self._numbers("is_init")
        if begins is None:
            begins = steps == 0 if steps is not None else np.ones(len(self), bool)
        found: list[bool] = begins[first].tolist()
        return found

    # ---- next values -----------------------------------------------------------------------------

    def layout(self) -> RecordLayout:
        """A layout for rows like these."""
        linked = [path for path in self.values if self._has_twin(path) and self.is_linked(path)]
        fields = [
            Field(path, value.shape[1:], self._dtypes[path], path in linked)
            for path, value in self.values.items()
            if path[0] != "next" or path[1:] not in linked
        ]
        return RecordLayout(fields)

    def _has_twin(self, path: Path) -> bool:
        if path[0] in _NOT_LINKED or ("next", *path) not in self.values:
            return False
        own, following = ((self._dtypes[p], self.values[p].shape) for p in (path, ("next", *path)))
        return own == following

    def is_linked(self, path: Path) -> bool:
        """Whether the value under "next" is that of the following row wherever one follows."""
        if not self._inner.any():
            return True
        following, own = self.values["next", *path], self.values[path]
        # As integers: NaN is not equal to itself, and 0.0 is to -0.0.
        whole = np.dtype(f"u{own.dtype.itemsize}") if own.dtype.itemsize <= 8 else own.dtype
        following, own = following[:-1].view(whole), own[1:].view(whole)
        if np.array_equal(following, own):  # nearly always, but for ends
            return True
        same = following == own
        return bool(same.reshape(len(same), -1).all(axis=1)[self._inner].all())

    def changed(self, layout: RecordLayout) -> list[Field]:
        """The linked fields of a layout whose next values here are not those that follow."""
        return [field for field in layout.linked if not self.is_linked(field.path)]

    def check(self, layout: RecordLayout) -> None:
        """Checks that these rows have the keys, shapes and dtypes of a layout.

        Raises:
            ConfigurationError: They have not.
        """
        got = {path: (self._dtypes[path], value.shape[1:]) for path, value in self.values.items()}
        if got == layout.accepted:
            return
        for path in {**layout.accepted, **got}:
            if got.get(path) != layout.accepted.get(path):
                raise ConfigurationError(
                    f"`{'/'.join(path)}` of trajectories must be"
                    f" {_describe(layout.accepted.get(path))} as in those stored before, got"
                    f" {_describe(got.get(path))}"
                )


def _rows_of(trajectories: Any) -> tuple[TensorDictBase, list[int]]:
    if isinstance(trajectories, MultiReplaySamples):
        return trajectories.rows, trajectories.lengths
    if isinstance(trajectories, (TensorDictBase, ReplaySamples)):
        trajectories = [trajectories]
    if not isinstance(trajectories, Sequence) or isinstance(trajectories, str):
        raise ConfigurationError(
            "`trajectories` must be MultiReplaySamples, a TensorDict [T], or a list of them, got"
            f" {type(trajectories).__name__}"
        )
    pieces = [one.samples if isinstance(one, ReplaySamples) else one for one in trajectories]
    for number, piece in enumerate(pieces):
        if not isinstance(piece, TensorDictBase) or piece.batch_dims != 1 or len(piece) == 0:
            got = (
                f"batch shape {list(piece.batch_size)}"
                if isinstance(piece, TensorDictBase)
                else type(piece).__name__
            )
            raise ConfigurationError(
                f"`trajectories[{number}]` must be a TensorDict of batch shape [T], T above 0, got"
                f" {got}"
            )
    return (pieces[0] if len(pieces) == 1 else join(pieces)), [len(piece) for piece in pieces]


def _ends(
    lengths: Sequence[int],
    done: Array,
    ids: Array | None,
    steps: Array | None,
    is_init: Array | None,
) -> Array:
    """Whether each row is the last of a piece, bool [sum T]."""
    ends = done.copy()
    ends[np.cumsum(np.asarray(lengths, np.int64)) - 1] = True
    if ids is not None:
        ends[:-1] |= ids[1:] != ids[:-1]
    if steps is not None:
        ends[:-1] |= steps[1:] != steps[:-1] + 1
    if is_init is not None:
        ends[:-1] |= is_init[1:]
    return ends


def _describe(kind: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    if kind is None:
        return "absent"
    dtype, shape = kind
    return f"{dtype} [{', '.join(['T', *map(str, shape)])}]"
