"""Window arithmetic, as pure functions: which rows of a store make up a window."""

from __future__ import annotations

import torch
from torch import Tensor


def window_span(clip_size: int, stride: int) -> int:
    """Returns the number of rows from the first to the last of a window, both counted."""
    return (clip_size - 1) * stride + 1


def window_starts(lengths: Tensor, clip_size: int, stride: int) -> Tensor:
    """Returns the store row on which each window starts, int64 [number of windows], rising.

    `lengths` has the rows of each piece, int64 [P], in the order of the store.
    """
    # Windows of piece p: one per row that has the rest of the span after it in the same piece.
    counts = (lengths - window_span(clip_size, stride) + 1).clamp(min=0)
    # The store row on which piece p begins: the rows of all pieces before it.
    first_rows = lengths.cumsum(0) - lengths
    # Number all windows 0, 1, 2, ... through the store; this is the number of piece p's first.
    first_windows = counts.cumsum(0) - counts
    # Window k of all is window k - first_windows[p] of its piece p, so it starts on row
    # first_rows[p] + (k - first_windows[p]). Without k that is one number a piece; repeat it
    # for each window of the piece (never, where there are none), and add k.
    shifts = (first_rows - first_windows).repeat_interleave(counts)
    return torch.arange(len(shifts)) + shifts


def window_rows(starts: Tensor, clip_size: int, stride: int) -> Tensor:
    """Returns the store rows of windows, int64 [B, W], for `starts` [B] (or [W], for one start)."""
    return starts.unsqueeze(-1) + torch.arange(clip_size) * stride
