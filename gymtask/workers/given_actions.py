"""The actions of a vector environment, in shared memory, in the dtype that the caller gave them.

A `VectorEnv` hands actions on as they are: a float64 action reaches an environment whose Box is
float32 as float64. So the memory has room for the largest dtype, and says of each leaf which it is.
Python's own numbers, as in a list, reach it as such too: a flag beside the dtype says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from gymtask.workers.layout import (
    Array,
    Leaf,
    Reader,
    Space,
    children,
    flatten,
    space_leaves,
)

LINE = 64  # bytes that the name of a leaf's dtype takes, so that the data after it is aligned
WIDEST = 8  # bytes of the largest dtype
PLAIN = 0x80  # beside the character of a dtype, which is ASCII: these were Python's own numbers
_PLAIN_KINDS = {bool: "b", int: "iu", float: "f"}  # kinds of dtypes that hold such a number


class GivenActions:
    """Actions of N environments for which a space of fixed shape is given."""

    def __init__(self, space: Space, num_envs: int, memory: memoryview) -> None:
        """Lays them over `memory`, of which `nbytes` are taken."""
        self._space = space
        self._leaves = space_leaves(space, "action")
        self._shapes = [(num_envs, *leaf.shape) for leaf in self._leaves]
        self._codes = memory[: LINE * len(self._leaves)].cast("B")
        self._areas = []
        start = LINE * len(self._leaves)
        for leaf in self._leaves:
            self._areas.append(memory[start : start + _size(leaf, num_envs)])
            start += _size(leaf, num_envs)
        # For each leaf, the array in each dtype that was used so far.
        self._arrays: list[dict[int, Array]] = [{} for _ in self._leaves]
        self._read: Reader | None = None
        self._read_codes = b""

    @staticmethod
    def nbytes(space: Space, num_envs: int) -> int:
        """Bytes of memory that they take."""
        leaves = space_leaves(space, "action")
        return sum(LINE + _size(leaf, num_envs) for leaf in leaves)

    def write(self, actions: Any) -> bool:
        """Writes a batch of actions.

        Returns:
            False where it is none of numbers in the space's shape, or of such that would come out
            as others: a list of Python's lists, or of numbers of several types.
        """
        try:
            given = flatten(self._space, actions)
            values = [np.asarray(value) for value in given]
        except (TypeError, ValueError, LookupError):
            return False
        if len(values) != len(self._shapes):
            return False
        # What is written before one is refused does no harm: nobody reads it.
        for number, value in enumerate(values):
            dtype, one = value.dtype, given[number]
            if value.shape != self._shapes[number]:
                return False
            if dtype.kind not in "biuf" or dtype.itemsize > WIDEST:
                return False
            flag = 0 if value is one else _flag(one, value)
            if flag is None:
                return False
            code = ord(dtype.char) | flag
            self._array(number, code & ~PLAIN)[...] = value
            self._codes[number * LINE] = code
        return True

    def reader(self) -> Reader:
        """The function `read(i)` that gives the action of environment i, which may keep it."""
        codes = bytes(self._codes[::LINE])
        if self._read is None or codes != self._read_codes:
            leaves = [
                (self._array(number, code & ~PLAIN), bool(code & PLAIN))
                for number, code in enumerate(codes)
            ]
            self._read = _reader(self._space, iter(leaves))
            self._read_codes = codes
        return self._read

    def _array(self, number: int, code: int) -> Array:
        arrays = self._arrays[number]
        if code not in arrays:
            dtype = np.dtype(chr(code) if code else self._leaves[number].dtype)
            shape = self._shapes[number]
            count = int(np.prod(shape))
            flat: Array = (
                np.frombuffer(self._areas[number], dtype, count) if count else np.empty(0, dtype)
            )
            arrays[code] = flat.reshape(shape)
        return arrays[code]


def _size(leaf: Leaf, num_envs: int) -> int:
    count = num_envs * int(np.prod(leaf.shape))
    return -(-max(count, 1) * WIDEST // LINE) * LINE


def _flag(given: Any, array: Array) -> int | None:
    """What is to be said of the numbers of a batch beside the dtype of the array made of it.

    Returns:
        PLAIN for numbers of Python, None where the array would not give back what a sequence held.
    """
    if not isinstance(given, (list, tuple)):
        return 0
    kinds = set(map(type, given))
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    if kind in _PLAIN_KINDS:
        return PLAIN if array.dtype.kind in _PLAIN_KINDS[kind] else None
    if kind is np.ndarray and array.ndim > 1:
        return 0 if all(one.dtype == array.dtype for one in given) else None
    return 0 if issubclass(kind, np.generic) else None


def _reader(space: Space, leaves: Iterator[tuple[Array, bool]]) -> Reader:
    parts = children(space)
    if parts is None:
        return _leaf_reader(*next(leaves))
    readers: Sequence[tuple[str, Reader]] = [(key, _reader(part, leaves)) for key, part in parts]
    if isinstance(space, spaces.Dict):
        return lambda index: {key: read(index) for key, read in readers}
    return lambda index: tuple(read(index) for _, read in readers)


def _leaf_reader(array: Array, plain: bool) -> Reader:
    if array.ndim == 1:
        return array.item if plain else array.__getitem__  # a numpy scalar
    return lambda index: array[index].copy()
