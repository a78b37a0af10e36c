"""Info values in shared memory: one cell for each environment and asked key.

A cell holds a number, a bool, or a small array of numbers, with its type: what is read is what was
written. Everything else (text, objects, large arrays) goes over the pipe of its worker::

    byte      0      1       2             4              32
              kind   dtype   dimensions    their sizes    values
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CELL = 256  # bytes
VALUES = 32  # where they begin in a cell
MOST_DIMENSIONS = 7  # as many sizes of 4 bytes lie before the values
MISSING, BOOL, INT, FLOAT, SCALAR, ARRAY = range(6)

_FORMATS = {
    kind: struct.Struct(f"<B{VALUES - 1}x{code}")
    for kind, code in ((BOOL, "?"), (INT, "q"), (FLOAT, "d"))
}
_KINDS = {bool: BOOL, int: INT, float: FLOAT}
_HEAD = struct.Struct("<BcB")


class InfoCells:
    """The cells of N environments.

    Args:
        keys: The asked keys of each environment, by its index.
        num_keys: How many keys an environment has at most.
        memory: What the cells lie in, N * num_keys * CELL writable bytes.
    """

    def __init__(
        self, keys: Mapping[int, Sequence[str]], num_keys: int, memory: memoryview
    ) -> None:
        self._memory = memory
        self._cells = {
            index: [(key, (index * num_keys + place) * CELL) for place, key in enumerate(own)]
            for index, own in keys.items()
        }

    def write(self, index: int, info: Mapping[str, Any]) -> bool:
        """Writes what an environment gave; False if something does not fit into a cell."""
        return all(self._put(info.get(key, self), start) for key, start in self._cells[index])

    def read(self, index: int) -> dict[str, Any]:
        """What was written for an environment."""
        memory = self._memory
        return {
            key: self._get(memory[start], start)
            for key, start in self._cells[index]
            if memory[start] != MISSING
        }

    def _put(self, value: Any, start: int) -> bool:
        if kind := _KINDS.get(type(value)):
            try:
                _FORMATS[kind].pack_into(self._memory, start, kind, value)
            except struct.error:  # an int of more than 64 bits
                return False
            return True
        if value is self:
            self._memory[start] = MISSING
            return True
        kind = ARRAY if type(value) is np.ndarray else SCALAR
        if kind == SCALAR and not isinstance(value, np.generic):
            return False
        return self._put_array(np.asarray(value), kind, start)

    def _put_array(self, array: Any, kind: int, start: int) -> bool:
        size, shape = array.nbytes, array.shape
        plain = array.dtype.kind in "biufc" and array.dtype.isnative
        if not plain or size > CELL - VALUES or array.ndim > MOST_DIMENSIONS:
            return False
        _HEAD.pack_into(self._memory, start, kind, array.dtype.char.encode(), array.ndim)
        struct.pack_into(f"<{array.ndim}I", self._memory, start + 4, *shape)
        self._memory[start + VALUES : start + VALUES + size] = array.tobytes()
        return True

    def _get(self, kind: int, start: int) -> Any:
        memory = self._memory
        if kind in _FORMATS:
            return _FORMATS[kind].unpack_from(memory, start)[1]
        _, char, dimensions = _HEAD.unpack_from(memory, start)
        shape = struct.unpack_from(f"<{dimensions}I", memory, start + 4)
        array: Any = np.ndarray(shape, char.decode(), memory, start + VALUES)
        return array.copy() if kind == ARRAY else array[()]
