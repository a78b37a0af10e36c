"""Stacks of frames: rows that hold single frames, each shown with those before it.

With stacks of k frames, a row shows the frames of its episode from k - 1 steps before it to its
own; where the episode had fewer, its first one stands for those that are missing. Frames before a
piece that begins within an episode are kept beside it, k - 1 at most. With k = 3, and a piece of
three rows that begins on step 1 of its episode:

    kept beside it     f0
    rows                        f1          f2          f3
    shown                    f0 f0 f1    f0 f1 f2    f1 f2 f3
    shown as next            f0 f1 f2    f1 f2 f3    f2 f3 next
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gymtask.errors import ConfigurationError

Key = str | tuple[str, ...]  # of a TensorDict; a tuple for a nested one


@dataclass(frozen=True, eq=False)
class FrameHistory:
    """The frames before pieces.

    Attributes:
        num_frames: k, the frames of a stack.
        counts: For each piece how many frames are kept: k - 1, or as many as its episode had.
        frames: By the key of a leaf of the observation those of all pieces end to end, oldest
            first, [sum of counts, *shape].
    """

    num_frames: int
    counts: Sequence[int]
    frames: Mapping[Key, Tensor]

    def split(self) -> list[FrameHistory]:
        """That of each piece alone."""
        counts = list(self.counts)
        parts = {key: torch.split(frames, counts) for key, frames in self.frames.items()}
        return [
            FrameHistory(self.num_frames, [count], {key: part[i] for key, part in parts.items()})
            for i, count in enumerate(self.counts)
        ]

    @staticmethod
    def joined(histories: Sequence[FrameHistory | None]) -> FrameHistory | None:
        """That of several pieces together, a copy.

        Raises:
            ConfigurationError: Some have one and others do not, or their stacks differ.
        """
        sizes = {0 if each is None else each.num_frames for each in histories}
        if len(sizes) > 1:
            raise ConfigurationError(
                "`samples` must all show stacks of the same number of frames (0: single frames),"
                f" got {sorted(sizes)}; those of one task do, taken as ReplaySamples"
            )
        found = [each for each in histories if each is not None]
        if not found:
            return None
        keys = found[0].frames
        frames = {key: torch.cat([each.frames[key] for each in found]) for key in keys}
        counts = [count for each in found for count in each.counts]
        return FrameHistory(found[0].num_frames, counts, frames)


class FrameStacks:
    """Shows rows of pieces, which lie end to end in a store, as stacks.

    Args:
        history: The frames before the pieces.
        lengths: Rows of each piece.
        store: The rows by flat key.

    Attributes:
        keys: Of the frames in the store, whose stacks `show` gathers itself.

    Raises:
        ConfigurationError: The store holds other frames than the history, or next ones alone.
    """

    def __init__(
        self, history: FrameHistory, lengths: Sequence[int], store: Mapping[Key, Any]
    ) -> None:
        self._num_frames, self._history, self._store = history.num_frames, history.frames, store
        self.keys = frozenset(key for key in history.frames if key in store)
        for key, frames in history.frames.items():
            _check_store(key, frames, store)
        self._ends = torch.tensor(list(accumulate(lengths)), dtype=torch.int64)
        self._first = self._ends - torch.tensor(list(lengths), dtype=torch.int64)
        self._counts = torch.tensor(list(history.counts), dtype=torch.int64)
        self._history_ends = self._counts.cumsum(0)

    def show(self, rows: Tensor, wanted: Mapping[Key, Any], batch: dict[Key, Any]) -> None:
        """Puts the stacks of some rows into a batch.

        Args:
            rows: int64 [..., W], rows of the store; those of a window lie in one piece.
            wanted: Its keys say what the batch is to hold.
            batch: Holds the frames that follow the rows, which become stacks, too.
        """
        chosen = [key for key in self.keys if key in wanted or next_of(key) in wanted]
        if not chosen:
            return
        inside, number, before = self._places(rows)
        axis, shape = rows.ndim, (*rows.shape, self._num_frames)
        for key in chosen:
            frames, history = self._store[key], self._history[key]
            stacks = frames.index_select(0, inside.to(frames.device))
            if len(number):
                earlier = history.index_select(0, before.to(history.device))
                stacks[number.to(frames.device)] = earlier.to(frames.device)
            stacks = stacks.view(*shape, *frames.shape[1:])
            if key in wanted:
                batch[key] = stacks
            if (following := next_of(key)) in wanted:
                newer = stacks.narrow(axis, 1, self._num_frames - 1)
                batch[following] = torch.cat([newer, batch[following].unsqueeze(axis)], axis)

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the frames of rows lie.

        Returns:
            Rows of the store, for all frames of all stacks, int64 [n]; the numbers of those that
            lie in the history instead; and where in it they lie.
        """
        rows = rows.to(self._ends.device)
        piece = torch.searchsorted(self._ends, rows[..., :1].contiguous(), right=True)
        first, count, history_end = (
            each[piece].unsqueeze(-1) for each in (self._first, self._counts, self._history_ends)
        )
        # Counted from the first row of the piece: frame 0 is its own, frame -1 the last before it.
        # What would lie before the oldest frame that there is, is that one.
        back = torch.arange(self._num_frames - 1, -1, -1)
        local = torch.maximum(rows.unsqueeze(-1) - first - back, -count)
        number = (local < 0).flatten().nonzero().squeeze(-1)
        before = (history_end + local).flatten()[number]
        return (first + local.clamp(min=0)).flatten(), number, before


def next_of(key: Key) -> Key:
    """The key of what follows."""
    return ("next", key) if isinstance(key, str) else ("next", *key)


def _check_store(key: Key, frames: Tensor, store: Mapping[Key, Any]) -> None:
    own, following = store.get(key), store.get(next_of(key))
    if own is None and following is not None:
        raise ConfigurationError(
            f"{key!r} must be there beside {next_of(key)!r}, of whose stacks it is a part, got none"
        )
    for name, leaf in ((key, own), (next_of(key), following)):
        if leaf is None:
            continue
        kind = (leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else None
        if kind != (frames.dtype, frames.shape[1:]):
            raise ConfigurationError(
                f"{name!r} must be {frames.dtype} [T, {', '.join(map(str, frames.shape[1:]))}] as"
                f" the frames before it, of which stacks are made, got {leaf!r:.80}"
            )
