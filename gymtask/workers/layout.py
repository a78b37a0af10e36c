"""How the values of a space lie in numpy arrays, and how one is written and read.

A space is a tree whose leaves are arrays. With a leading axis of N environments each leaf is one
buffer [N, *shape]; `make_writer` and `make_reader` give the functions that put one value in and
take one out. Both are built once per buffer, so that a step does no dispatch on the kind of the
space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from gymtask.errors import ObservationError, SpaceError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Space: TypeAlias = "spaces.Space[Any]"
Path: TypeAlias = "tuple[str, ...]"
Writer: TypeAlias = "Callable[[int, Any], None]"
Reader: TypeAlias = "Callable[[int], Any]"


@dataclass(frozen=True)
class Leaf:
    """One array of a space.

    Attributes:
        path: Keys that lead to it: keys of a Dict, "0", "1", … of a Tuple; () for a space that is
            itself a leaf.
        space: The Box, Discrete, MultiDiscrete or MultiBinary at that place.
        shape: Its shape, without the axis of environments.
        dtype: Its dtype in the environment's own terms.
    """

    path: Path
    space: Space
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def children(space: Space) -> list[tuple[str, Space]] | None:
    """The named parts of a Dict or Tuple space, in the space's order; None for any other space."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return [(str(index), part) for index, part in enumerate(space.spaces)]
    return None


def space_leaves(space: Space, role: str, path: Path = ()) -> list[Leaf]:
    """Lists the arrays of a space, depth first.

    Args:
        space: The space.
        role: "observation" or "action", for the error.
        path: Where the space stands in a larger one.

    Raises:
        SpaceError: A part has no fixed shape, or is of a kind that has no array form.
    """
    parts = children(space)
    if parts is not None:
        for key, _ in parts:
            if not isinstance(key, str):
                raise SpaceError(f"keys of the {role} space must be strings, got {key!r}")
        return [leaf for key, part in parts for leaf in space_leaves(part, role, (*path, key))]
    kinds = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, kinds):
        where = "".join(f"[{key!r}]" for key in path)
        raise SpaceError(
            f"the {role} space must be built of Box, Discrete, MultiDiscrete, MultiBinary, Dict and"
            f" Tuple spaces, which have a fixed shape, got {space!r}"
            + (f" at {role}{where}" if where else "")
        )
    assert space.shape is not None
    # By its name: a dtype that has come out of a pickle is equal to numpy's own, but another
    # object, and arrays that are laid out with it would miss the quick way of `_leaf_writer`.
    return [Leaf(path, space, tuple(space.shape), np.dtype(np.dtype(space.dtype).str))]


def make_writer(space: Space, arrays: Sequence[Array], path: Path = ()) -> Writer:
    """The function `write(i, value)` that copies one value of `space` into row i of its arrays.

    Args:
        space: The space.
        arrays: One array [N, *shape] for each leaf, in the order of `space_leaves`.
        path: Where the space stands in a larger one, for errors.

    Returns:
        The writer. It raises ObservationError where a value has another structure, shape or kind
        than the space.
    """
    parts = children(space)
    if parts is None:
        return _leaf_writer(arrays[0], path)
    writers: list[tuple[str, Writer]] = []
    start = 0
    for key, part in parts:
        count = len(space_leaves(part, "observation"))
        writers.append((key, make_writer(part, arrays[start : start + count], (*path, key))))
        start += count
    return (
        _dict_writer(writers, path)
        if isinstance(space, spaces.Dict)
        else _tuple_writer(writers, path)
    )


def _leaf_writer(array: Array, path: Path) -> Writer:
    shape, dtype = array.shape[1:], array.dtype
    if shape == () and dtype == np.int64:
        return _integer_writer(array, path)

    def write(index: int, value: Any) -> None:
        # The quick way is for what nearly every environment returns; `array[index] = value` alone
        # would broadcast a value of another shape and truncate floats to integers without a word.
        if type(value) is np.ndarray and value.shape == shape and value.dtype is dtype:
            array[index] = value
        else:
            array[index] = checked_value(value, shape, dtype, path)

    return write


def _integer_writer(array: Array, path: Path) -> Writer:
    def write(index: int, value: Any) -> None:
        if type(value) is int or type(value) is np.int64:
            array[index] = value
        else:
            array[index] = checked_value(value, (), array.dtype, path)

    return write


def checked_value(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], path: Path) -> Array:
    """The value as an array of that shape whose kind can be cast to `dtype`.

    Raises:
        ObservationError: The shape is another one, or the cast would lose the kind (floats to
            integers, say) or the value of an integer.
    """
    try:
        found = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise ObservationError(
            f"{_where(path)} must have shape {shape}, got {value!r:.80}"
        ) from error
    if found.shape != shape:
        raise ObservationError(f"{_where(path)} must have shape {shape}, got shape {found.shape}")
    if not castable(found.dtype, dtype):
        raise ObservationError(
            f"{_where(path)} must be of dtype {dtype}, got {found.dtype} ({value!r:.80})"
        )
    cast = found.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(cast, found):
        raise ObservationError(f"{_where(path)} must fit dtype {dtype}, got {value!r:.80}")
    return cast


def castable(given: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Whether values of one dtype can be of the kind of another.

    Integers may be of any other integer dtype, if their values fit: that of a plain Python int is
    int64 whatever the space says.
    """
    if given.kind in "biu" and dtype.kind in "iu":
        return True
    return np.can_cast(given, dtype, casting="same_kind")


def _dict_writer(writers: list[tuple[str, Writer]], path: Path) -> Writer:
    def write(index: int, value: Any) -> None:
        try:
            if not isinstance(value, Mapping) or len(value) != len(writers):
                raise KeyError
            for key, part in writers:
                part(index, value[key])
        except (KeyError, TypeError) as error:
            expected = [key for key, _ in writers]
            found = list(value) if hasattr(value, "keys") else type(value).__name__
            raise ObservationError(
                f"{_where(path)} must have the keys {expected}, got {found}"
            ) from error

    return write


def _tuple_writer(writers: list[tuple[str, Writer]], path: Path) -> Writer:
    def write(index: int, value: Any) -> None:
        if not isinstance(value, (tuple, list)) or len(value) != len(writers):
            raise ObservationError(
                f"{_where(path)} must be a tuple of length {len(writers)}, got {value!r:.80}"
            )
        for (_, part), item in zip(writers, value, strict=True):
            part(index, item)

    return write


def make_reader(space: Space, arrays: Sequence[Array]) -> Reader:
    """The function `read(i)` that gives row i as a value of the type that `space.sample()` has.

    The value is a copy: an environment may keep it.

    Args:
        space: The space.
        arrays: One array [N, *shape] for each leaf, in the order of `space_leaves`.
    """
    parts = children(space)
    if parts is None:
        array = arrays[0]
        if array.ndim == 1 and array.dtype.kind in "iub":
            return array.__getitem__  # a numpy scalar, as from sample()
        return lambda index: array[index : index + 1].copy().reshape(array.shape[1:])
    readers: list[tuple[str, Reader]] = []
    start = 0
    for key, part in parts:
        count = len(space_leaves(part, "action"))
        readers.append((key, make_reader(part, arrays[start : start + count])))
        start += count
    if isinstance(space, spaces.Dict):
        return lambda index: {key: read(index) for key, read in readers}
    return lambda index: tuple(read(index) for _, read in readers)


def nest(space: Space, arrays: Sequence[Any]) -> Any:
    """Arranges one thing per leaf in the shape of the space: dicts for Dict, tuples for Tuple."""
    return _nested(space, iter(arrays))


def _nested(space: Space, arrays: Iterator[Any]) -> Any:
    # No inner function that calls itself: it would keep the arrays until a garbage collection.
    parts = children(space)
    if parts is None:
        return next(arrays)
    built = {key: _nested(part, arrays) for key, part in parts}
    return built if isinstance(space, spaces.Dict) else tuple(built.values())


def flatten(space: Space, value: Any) -> list[Any]:
    """The leaves of a value that is arranged as `nest` does, in the order of `space_leaves`."""
    parts = children(space)
    if parts is None:
        return [value]
    keys = [key if isinstance(space, spaces.Dict) else int(key) for key, _ in parts]
    return [
        leaf
        for key, (_, part) in zip(keys, parts, strict=True)
        for leaf in flatten(part, value[key])
    ]


def _where(path: Path) -> str:
    return "the observation" + "".join(f"[{key!r}]" for key in path)
