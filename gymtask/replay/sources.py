"""Where a ReplayDataset takes its windows from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from gymtask.errors import ReplayError
from gymtask.replay.buffer import ReplayBuffer
from gymtask.replay.pieces import (
    Key,
    MultiReplaySamples,
    gather,
    leaves_of,
    require_window,
    select,
    stacks_of,
)
from gymtask.windows import window_rows, window_starts


class Source(ABC):
    """Windows of one length and stride, each told by a number."""

    @property
    @abstractmethod
    def num_windows(self) -> int:
        """How many there are."""

    @abstractmethod
    def all_windows(self) -> Tensor:
        """All of them in the order of the store, int64."""

    @abstractmethod
    def draw(self, count: int, stream: torch.Generator) -> Tensor:
        """Some, each drawn anew, int64 [count]."""

    @abstractmethod
    def read(self, windows: Tensor) -> TensorDict:
        """Their rows, TensorDict [B, W]."""


class SamplesSource(Source):
    """Windows of MultiReplaySamples, told by their first rows."""

    def __init__(
        self,
        samples: MultiReplaySamples,
        clip_size: int,
        stride: int,
        batch_keys: Sequence[Key] | None,
    ) -> None:
        require_window(samples.lengths, clip_size, stride)
        lengths = torch.tensor(samples.lengths, dtype=torch.int64)
        self._starts = window_starts(lengths, clip_size, stride)
        rows = samples.rows
        leaves = leaves_of(rows)
        self._leaves = leaves if batch_keys is None else select(rows, batch_keys)
        self._stacks = stacks_of(samples.history, samples.lengths, leaves)
        self._device = rows.device
        self._clip_size, self._stride = clip_size, stride

    @property
    def num_windows(self) -> int:
        """See `Source`."""
        return len(self._starts)

    def all_windows(self) -> Tensor:
        """See `Source`."""
        return self._starts

    def draw(self, count: int, stream: torch.Generator) -> Tensor:
        """See `Source`."""
        return self._starts[torch.randint(len(self._starts), (count,), generator=stream)]

    def read(self, windows: Tensor) -> TensorDict:
        """See `Source`."""
        rows = window_rows(windows, self._clip_size, self._stride)
        return gather(self._leaves, rows, self._device, self._stacks)


class BufferSource(Source):
    """Windows of a ReplayBuffer, told by the arrival of their first rows."""

    def __init__(
        self,
        buffer: ReplayBuffer,
        clip_size: int,
        stride: int,
        batch_keys: Sequence[Key] | None,
    ) -> None:
        self._buffer, self._clip_size, self._stride = buffer, clip_size, stride
        self._keys = batch_keys
        # Raises if there is none. They are not listed: that takes long for a large buffer, and a
        # source is made for each epoch.
        buffer.draw(1, clip_size, stride, np.random.default_rng(0))
        if batch_keys is not None:
            buffer.check_keys(batch_keys)

    @property
    def num_windows(self) -> int:
        """See `Source`."""
        return len(self.all_windows())

    def all_windows(self) -> Tensor:
        """See `Source`."""
        return torch.from_numpy(self._buffer.windows(self._clip_size, self._stride))

    def draw(self, count: int, stream: torch.Generator) -> Tensor:
        """See `Source`."""
        seed = int(torch.randint(2**63 - 1, (), generator=stream))
        random: Any = np.random.default_rng(seed)
        drawn = self._buffer.draw(count, self._clip_size, self._stride, random)
        return torch.from_numpy(drawn)

    def read(self, windows: Tensor) -> TensorDict:
        """See `Source`.

        Raises:
            ReplayError: A row was overwritten since the window was chosen.
        """
        if self._buffer.num_added - len(self._buffer) > int(windows.min()):
            raise ReplayError(
                "cannot go on with a pass over a ReplayBuffer, as rows of it were overwritten"
                " meanwhile; begin a new iteration after extend()"
            )
        return self._buffer.read(windows.numpy(), self._clip_size, self._stride, keys=self._keys)


def source_of(
    buffer: MultiReplaySamples | ReplayBuffer,
    clip_size: int,
    stride: int,
    batch_keys: Sequence[Key] | None,
) -> Source:
    """The windows of pieces or of a buffer."""
    if isinstance(buffer, ReplayBuffer):
        return BufferSource(buffer, clip_size, stride, batch_keys)
    return SamplesSource(buffer, clip_size, stride, batch_keys)
