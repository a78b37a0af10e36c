"""Where records lie: in memory, or in a file that is mapped into it and may be larger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor
from torch import Tensor

from gymtask.errors import ReplayError
from gymtask.workers.layout import Array


class Records:
    """A table of records.

    Attributes:
        path: The file, None in memory.
        array: The records, of a structured dtype.
    """

    def __init__(self, num_rows: int, dtype: np.dtype[Any], path: Path | None) -> None:
        """Makes the table; what its records hold is not said.

        Raises:
            ReplayError: The file cannot be made, or the disk has no room for it.
        """
        self.path = path
        self._dtype = dtype
        self._block = _allocate(num_rows * dtype.itemsize, path)
        self.array: Array = self._block.numpy().view(dtype)

    def __len__(self) -> int:
        return len(self.array)

    def grow(self, num_rows: int) -> None:
        """Makes it longer; what it holds stays.

        Raises:
            ReplayError: As when it was made; then it is as long as before.
        """
        if self.path is not None:
            self._block = _allocate(num_rows * self._dtype.itemsize, self.path)
            self.array = self._block.numpy().view(self._dtype)
            return
        longer = Records(num_rows, self._dtype, None)
        longer.array[: len(self)] = self.array
        self._block, self.array = longer._block, longer.array

    def discard(self) -> None:
        """Deletes the file; the memory is given back with the last view of it."""
        if self.path is not None:
            self.path.unlink()

    def __getstate__(self) -> dict[str, Any]:
        # Torch sends shared memory to another process without a copy. What is not shared yet it
        # would move there by itself, and leave the array behind as a view of memory that is freed.
        self._block.share_memory_()  # type: ignore[no-untyped-call]
        self.array = self._block.numpy().view(self._dtype)
        return {name: value for name, value in vars(self).items() if name != "array"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.array = self._block.numpy().view(self._dtype)


def _allocate(nbytes: int, path: Path | None) -> Tensor:
    if path is None:
        return torch.from_numpy(np.empty(nbytes, np.uint8))
    try:
        # Now, as a full disk kills the process that writes into a mapped file later.
        with open(path, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
    except OSError as error:
        raise ReplayError(
            f"cannot reserve {nbytes / 1e9:.3f} GB for {path} ({error.strerror}); free some space,"
            " or choose a smaller `capacity` or another `storage`"
        ) from error
    block: Tensor = MemoryMappedTensor.from_filename(path, torch.uint8, torch.Size([nbytes]))
    return block
