"""Trajectories on their way into a ring: checked, flattened, and cut where something ends."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, c_size_t, c_void_p
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from gymtask.errors import ConfigurationError
from gymtask.replay.links import Going, Piece
from gymtask.replay.pieces import MultiReplaySamples, ReplaySamples, join, leaves_of
from gymtask.replay.reading import REWARD
from gymtask.replay.records import Field, Path, RecordLayout, bits_of
from gymtask.workers.layout import Array

# Numpy would write down for each number whether it is equal, which takes twice the time.
_compare_memory = CDLL(None).memcmp
_compare_memory.argtypes = c_void_p, c_void_p, c_size_t
Trajectories = TensorDictBase | Sequence[TensorDictBase | ReplaySamples] | MultiReplaySamples

# Estimates change with the model that makes them: what follows a cut is estimated anew. And the
# rewards of n steps are summed up where they lie.
_NOT_LINKED = ("state_value", "reward")
# Integers of so many bytes.
_INTEGERS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_PLACES = (("trajectory_id",), ("step",), ("is_init",))  # say where in an episode a row is
_ENDS = (("next", "terminated"), ("next", "truncated"), ("next", "done"))


class Incoming:
    """Rows of some pieces, end to end.

    A new piece begins wherever a row cannot lead to the next one: behind the end of an episode, and
    where `trajectory_id` or `step` do not go on.

    Attributes:
        num_rows: sum T.
        values: What the rows hold, [sum T, *shape] by path, as it is stored.
        pieces: The pieces, in order.
    """

    def __init__(self, trajectories: Trajectories) -> None:
        rows, lengths = _rows_of(trajectories)
        self.num_rows = sum(lengths)
        self.values: dict[Path, Array] = {}
        self._tensors: dict[Path, Tensor] = {}  # of the same memory
        self._kinds: dict[Path, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._take(rows)
        self.pieces: list[Piece] = []
        self.goes_on = False
        if lengths:
            ids, steps, is_init = map(self._numbers, _PLACES)
            done = self._done()
            self._ends = _ends(lengths, done, ids, steps, is_init)
            self.pieces = _pieces(self._ends.nonzero()[0], done, ids, steps, is_init)
            self.goes_on = ids is not None and steps is not None
        self._joints = _joints(self.pieces) if self.goes_on else ([], [])

    def _take(self, rows: TensorDictBase) -> None:
        values, tensors, kinds = self.values, self._tensors, self._kinds
        levels: list[tuple[Path, Any]] = [((), rows)]
        for above, level in levels:  # it grows meanwhile
            for key, value in level.items():
                path = (*above, key) if isinstance(key, str) else (*above, *key)
                if type(value) is TensorDict:
                    levels.append((path, value))
                elif isinstance(value, Tensor) or is_leaf_nontensor(type(value)):
                    tensors[path], array = bits_of(path, value)  # refuses what is no tensor
                    values[path], kinds[path] = array, (value.dtype, array.shape[1:])
                else:
                    levels.append((path, leaves_of(value)))

    def _numbers(self, path: Path) -> Array | None:
        """The numbers of rows under a key, [T]; None where it is not there."""
        found = self.values.get(path)
        if found is None:
            return None
        if found.size != self.num_rows:
            raise ConfigurationError(
                f"`{path[0]}` of trajectories must be one number for each row, [T] or [T, 1], got"
                f" {_describe(self._kinds[path])}"
            )
        return found.reshape(self.num_rows)

    def _done(self) -> Array:
        """Whether each row ends its episode, [T]; to be read only."""
        done: Array | None = None
        for path in _ENDS:
            flags = self.values.get(path)
            if flags is not None:
                if flags.ndim > 1:
                    flags = np.logical_or.reduce(flags.reshape(self.num_rows, -1), axis=1)
                done = flags if done is None else np.bitwise_or(done, flags)
        return np.zeros(self.num_rows, bool) if done is None else done

    # ---- next values -----------------------------------------------------------------------------

    def layout(self) -> RecordLayout:
        """A layout for rows like these."""
        linked = [path for path in self.values if self._has_twin(path) and self.is_linked(path)]
        fields = [
            Field(path, shape, dtype, path in linked)
            for path, (dtype, shape) in self._kinds.items()
            if path[0] != "next" or path[1:] not in linked
        ]
        return RecordLayout(fields)

    def _has_twin(self, path: Path) -> bool:
        return path[0] not in _NOT_LINKED and self._kinds.get(("next", *path)) == self._kinds[path]

    def is_linked(self, path: Path) -> bool:
        """Whether the value under "next" is that of the following row wherever one follows."""
        next_path: Path = "next", *path
        following, own = self.values[next_path], self.values[path]
        firsts, lasts = self._joints
        # Bytes, as NaN is not equal to itself, and 0.0 is to -0.0.
        if not firsts and own.flags.c_contiguous and following.flags.c_contiguous:
            size = own.nbytes // self.num_rows
            second = self._tensors[path].data_ptr() + size
            first = self._tensors[next_path].data_ptr()
            if not _compare_memory(second, first, own.nbytes - size):
                return True
        # Likewise; behind ends it may differ.
        whole = _INTEGERS.get(own.dtype.itemsize, own.dtype)
        differs = following[:-1].view(whole) != own[1:].view(whole)
        if np.count_nonzero(differs):  # faster than any()
            rows = differs.reshape(len(differs), -1).nonzero()[0]
            if not self._ends[rows].all():
                return False
        return not firsts or following[lasts].tobytes() == own[firsts].tobytes()

    def require_rewards(self) -> None:
        """Checks that there are rewards which n steps can sum up.

        Raises:
            ConfigurationError: There are none.
        """
        kind = self._kinds.get(REWARD)
        if kind is None or kind[1] or kind[0].is_complex:
            raise ConfigurationError(
                f"`{'/'.join(REWARD)}` of trajectories must be a real number for each row, [T], for"
                f" `n_step` above 1 to sum up, got {_describe(kind)}; store rows with it, or make"
                " the buffer with n_step=1"
            )

    def check(self, layout: RecordLayout) -> None:
        """Checks that these rows have the keys, shapes and dtypes of a layout.

        Raises:
            ConfigurationError: They have not.
        """
        got = self._kinds
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
    if type(trajectories) is TensorDict and trajectories.batch_dims == 1 and len(trajectories):
        return trajectories, [len(trajectories)]
    if isinstance(trajectories, MultiReplaySamples):
        return trajectories.rows, trajectories.lengths
    if isinstance(trajectories, (TensorDictBase, ReplaySamples)):
        trajectories = [trajectories]
    elif not isinstance(trajectories, Sequence) or isinstance(trajectories, str):
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
    ends[-1] = True
    if len(lengths) > 1:
        ends[np.cumsum(lengths) - 1] = True
    if ids is not None:
        ends[:-1] |= ids[1:] != ids[:-1]
    if steps is not None:
        ends[:-1] |= steps[1:] != steps[:-1] + 1
    if is_init is not None:
        ends[:-1] |= is_init[1:]
    return ends


def _pieces(
    last: Array, done: Array, ids: Array | None, steps: Array | None, is_init: Array | None
) -> list[Piece]:
    """The pieces that end with these rows."""
    lasts = last.tolist()
    if len(lasts) == 1 and ids is None and steps is None and is_init is None:
        return [Piece(0, lasts[0])]
    firsts = [0, *[row + 1 for row in lasts[:-1]]]
    if is_init is not None:
        begins = is_init[firsts].tolist()
    elif steps is not None:
        begins = (steps[firsts] == 0).tolist()
    else:
        begins = [True] * len(firsts)
    if ids is None or steps is None:
        return [Piece(*each) for each in zip(firsts, lasts, begins, strict=True)]
    befores = zip(ids[firsts].tolist(), steps[firsts].tolist(), strict=True)
    afters = zip(ids[last].tolist(), (steps[last] + 1).tolist(), strict=True)
    return [
        Piece(first, row, new, None if new else before, None if ended else after)
        for first, row, new, before, ended, after in zip(
            firsts, lasts, begins, befores, done[last].tolist(), afters, strict=True
        )
    ]


def _joints(pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
    """The first rows of pieces that go on with others of these, and the last rows of those."""
    firsts: list[int] = []
    lasts: list[int] = []
    ends: dict[Going, int] = {}
    for piece in pieces:
        if piece.before is not None and piece.before in ends:
            firsts.append(piece.first)
            lasts.append(ends.pop(piece.before))
        if piece.after is not None:
            ends[piece.after] = piece.last
    return firsts, lasts


def _describe(kind: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    if kind is None:
        return "absent"
    dtype, shape = kind
    return f"{dtype} [{', '.join(['T', *map(str, shape)])}]"
