"""Where records lie: in memory, or in a file that is mapped into it and may be larger."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor
from torch import Tensor

from gymtask.errors import ReplayError
from gymtask.workers.layout import Array

MEMORY = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE  # of this machine, in bytes


class Records:
    """A table of records.

    Attributes:
        path: The file, None in memory.
        array: The records, of a structured dtype.
        columns: Its fields by name, views that take a while to make.
    """

    array: Array
    columns: dict[str, Array]

    def __init__(self, num_rows: int, dtype: np.dtype[Any], path: Path | None) -> None:
        """Makes the table; what its records hold is not said.

        Raises:
            ReplayError: The file cannot be made, or the disk has no room for it.
        """
        self.path = path
        self._dtype = dtype
        self._block = _allocate(num_rows * dtype.itemsize, path)
        self._see()

    def __len__(self) -> int:
        return len(self.array)

    def grow(self, num_rows: int) -> None:
        """Makes it longer; what it holds stays.

        Raises:
            ReplayError: As when it was made; then it is as long as before.
        """
        if self.path is not None:
            self._block = _allocate(num_rows * self._dtype.itemsize, self.path)
            self._see()
            return
        longer = Records(num_rows, self._dtype, None)
        longer.array[: len(self)] = self.array
        self._block, self.array, self.columns = longer._block, longer.array, longer.columns

    def _see(self) -> None:
        """Sees the block as records."""
        self.array = self._block.numpy().view(self._dtype)
        self.columns = {name: self.array[name] for name in self._dtype.names or ()}
        self._is_larger_than_memory = self.path is not None and self._block.numel() > MEMORY
        if self._is_larger_than_memory:
            # Else the system reads megabytes around each row, which drive out rows that are used.
            _advise(self._block, 0, self._block.numel(), mmap.MADV_RANDOM)

    def prepare(self, rows: slice | Array) -> None:
        """Has rows that are to be written read at once, not page by page, where that takes time."""
        if self._is_larger_than_memory and isinstance(rows, slice):
            size = self._dtype.itemsize
            _advise(self._block, rows.start * size, rows.stop * size, mmap.MADV_WILLNEED)

    def discard(self) -> None:
        """Deletes the file; the memory is given back with the last view of it."""
        if self.path is not None:
            self.path.unlink()

    def __getstate__(self) -> dict[str, Any]:
        # Torch sends shared memory to another process without a copy. What is not shared yet it
        # would move there by itself, and leave the array behind as a view of memory that is freed.
        self._block.share_memory_()  # type: ignore[no-untyped-call]
        self._see()
        views = ("array", "columns")
        return {name: value for name, value in vars(self).items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._see()


def _allocate(nbytes: int, path: Path | None) -> Tensor:
    if path is None:
        return torch.from_numpy(np.empty(nbytes, np.uint8))
    before = path.stat().st_size if path.exists() else None
    try:
        # Now, as a full disk kills the process that writes into a mapped file later.
        with open(path, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
    except OSError as error:
        _give_back(path, before)
        raise ReplayError(
            f"cannot reserve {nbytes / 1e6:,.2f} MB for {path} ({error.strerror}); free some space,"
            " or choose a smaller `capacity` or another `storage`"
        ) from error
    block: Tensor = MemoryMappedTensor.from_filename(path, torch.uint8, torch.Size([nbytes]))
    return block


def _advise(block: Tensor, start: int, stop: int, advice: int) -> None:
    """Tells the system how some bytes of a mapped file will be used; it may refuse to listen."""
    start -= start % mmap.PAGESIZE
    address = ctypes.c_void_p(block.data_ptr() + start)
    ctypes.CDLL(None).madvise(address, ctypes.c_size_t(stop - start), advice)


def _give_back(path: Path, nbytes: int | None) -> None:
    """Makes a file as long as it was, None for not at all: a part may have been reserved."""
    with contextlib.suppress(OSError):  # the one that is already reported says more
        if nbytes is None:
            path.unlink(missing_ok=True)
        else:
            os.truncate(path, nbytes)
