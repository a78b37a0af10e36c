"""Between arrays and tensors: which dtype is stored, and what an action must look like.

Floats are stored as float32 (float64 is kept on request), integers, uint8 and bool as they are.
Torch lacks most operations for uint16 and uint32, which are widened to int32 and int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor

from gymtask.errors import ActionError, SpaceError
from gymtask.workers.layout import Array, Leaf, Path, Space, children, flatten, space_leaves

_WIDENED: dict[str, np.dtype[Any]] = {"uint16": np.dtype(np.int32), "uint32": np.dtype(np.int64)}
_NUMPY_FLOATS = frozenset({torch.float16, torch.float32, torch.float64})


MAX_LISTED = 1024  # indices of a Discrete space that are kept in a set


def stored_dtype(dtype: np.dtype[Any], *, keep_float64: bool = False) -> np.dtype[Any]:
    """The dtype in which values of a space's dtype are stored.

    Raises:
        SpaceError: Torch has no dtype that holds the values exactly.
    """
    if dtype.kind == "f":
        return np.dtype(np.float64 if keep_float64 and dtype.itemsize >= 8 else np.float32)
    if dtype.name in _WIDENED:
        return np.dtype(_WIDENED[dtype.name])
    if dtype.kind not in "biu" or dtype.name == "uint64":
        raise SpaceError(
            "the dtype of a space must be a float, a signed integer, uint8, uint16, uint32 or bool,"
            f" got {dtype}"
        )
    return dtype


def nest_tensors(space: Space, tensors: list[Tensor]) -> Any:
    """Arranges one tensor for each leaf as a TensorDict holds them, with "0", "1", … for Tuples."""
    iterator = iter(tensors)

    def build(part: Space) -> Any:
        parts = children(part)
        return next(iterator) if parts is None else {key: build(child) for key, child in parts}

    return build(space)


def to_numpy(tensor: Tensor) -> Array:
    """The tensor's values on the CPU, without a copy where possible.

    Floats that numpy lacks, such as bfloat16, as float32.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if tensor.is_floating_point() and tensor.dtype not in _NUMPY_FLOATS:
        tensor = tensor.float()
    array: Array = tensor.numpy()
    return array


class ActionCodec:
    """Checks what a policy returned, and turns it into rows to store and values for environments.

    A Discrete action is stored as int64 index from 0, and the environment gets index + start; every
    other action is stored in the space's own units: float Boxes as float32, the rest in their own
    dtype.

    Attributes:
        leaves: The leaves of the action space.
        dtypes: For each of them the dtype that is stored.
    """

    def __init__(self, space: Space, *, clip: bool = False) -> None:
        self.space = space
        self.leaves = space_leaves(space, "action")
        self._rules = [_Rule.of(leaf, clip=clip) for leaf in self.leaves]
        self.dtypes = [rule.stored for rule in self._rules]
        self._is_leaf = children(space) is None
        self._as_stored = not any(
            rule.offset or (clip and rule.stored.kind == "f") for rule in self._rules
        )

    def encode(self, action: Any, num_rows: int) -> list[Array]:
        """The rows to store, one array [n, *shape] for each leaf.

        Args:
            action: A tensor [n, *shape], or a nested TensorDict for Dict and Tuple spaces.
            num_rows: n.

        Raises:
            ActionError: Structure, shape, dtype or a value does not fit the action space.
        """
        if self._is_leaf and type(action) is Tensor:
            return [self._rules[0].encode(action, num_rows)]
        tensors = _tensors_of(self.space, action)
        return [
            rule.encode(tensor, num_rows) for rule, tensor in zip(self._rules, tensors, strict=True)
        ]

    def decode(self, rows: list[Array]) -> list[Array]:
        """What the environments get for these rows, one array for each leaf."""
        if self._as_stored:
            return rows
        return [rule.decode(row) for rule, row in zip(self._rules, rows, strict=True)]

    def inverse(self, action: Any) -> list[Array]:
        """For each leaf the row [*shape] to store for one action such as `space.sample()` gives."""
        values = flatten(self.space, action)
        return [
            rule.inverse(np.asarray(value)) for rule, value in zip(self._rules, values, strict=True)
        ]

    def rows_of(self, action: Any) -> Any:
        """The same as tensors, nested as the space is."""
        rows = [torch.from_numpy(np.array(row)) for row in self.inverse(action)]
        return nest_tensors(self.space, rows)


def _tensors_of(space: Space, action: Any, path: Path = ()) -> list[Tensor]:
    """The leaves of an action, in the order of `space_leaves`; nothing may be missing or extra."""
    parts = children(space)
    if parts is None:
        if not isinstance(action, Tensor):
            raise ActionError(f"`{_name(path)}` must be a tensor, got {_describe(action)}")
        return [action]
    keys = [key for key, _ in parts]
    if not isinstance(action, TensorDictBase) or set(action.keys()) != set(keys):
        raise ActionError(
            f"`{_name(path)}` must be a TensorDict with the keys {sorted(keys)}, got"
            f" {_describe(action)}"
        )
    return [
        leaf for key, part in parts for leaf in _tensors_of(part, action.get(key), (*path, key))
    ]


def _describe(value: Any) -> str:
    if isinstance(value, TensorDictBase):
        return f"a TensorDict with the keys {sorted(map(str, value.keys()))}"
    return f"{type(value).__name__}"


def _name(path: Path) -> str:
    return "/".join(("action", *path))


def _short(value: Any) -> str:
    """Values for an error message, which a batch of large actions must not fill."""
    text = str(value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value)
    return text if len(text) <= 200 else f"{text[:200]}…"


@dataclass(frozen=True)
class _Rule:
    """What an action leaf must be.

    Attributes:
        leaf: The leaf.
        stored: The dtype of rows.
        tensor_dtype: The same, in torch's terms.
        low: Least allowed value of an integer leaf, in stored units; the bound that floats are
            clipped to.
        high: Largest allowed value, likewise.
        offset: What is added on the way to the environment.
        clip: Whether floats are clipped on the way to the environment.
        largest: Largest magnitude of a float that stays finite as a row, and for the environment.
        indices: All values of a Discrete leaf, if they are not too many to be listed.
        is_wide: Whether all finite rows of a float leaf fit.
    """

    leaf: Leaf
    stored: np.dtype[Any]
    tensor_dtype: torch.dtype
    low: Any
    high: Any
    offset: int
    clip: bool
    largest: np.float32
    indices: frozenset[int]
    is_wide: bool

    @classmethod
    def of(cls, leaf: Leaf, *, clip: bool) -> _Rule:
        stored, offset = stored_dtype(leaf.dtype), 0
        if isinstance(leaf.space, spaces.Discrete):
            stored, offset = np.dtype(np.int64), int(leaf.space.start)
        low, high = _bounds(leaf.space)
        tensor_dtype = torch.from_numpy(np.empty(0, stored)).dtype
        # The clipped value is within the bounds, so only the row must stay finite.
        narrow = leaf.dtype == np.float16 and not clip
        largest = np.float32(np.finfo(np.float16 if narrow else np.float32).max)
        listed = isinstance(leaf.space, spaces.Discrete) and leaf.space.n <= MAX_LISTED
        indices = frozenset(range(high + 1)) if listed else frozenset[int]()
        wide = stored.kind == "f" and not narrow
        return cls(leaf, stored, tensor_dtype, low, high, offset, clip, largest, indices, wide)

    def encode(self, value: Tensor, num_rows: int) -> Array:
        if self.indices and value.dtype is torch.int64 and value.shape == (num_rows,):
            given: Array = value.numpy() if value.is_cpu else to_numpy(value)
            if self.indices.issuperset(given.tolist()):  # a third of what numpy takes for a few
                return given
        elif self.is_wide and value.dtype is self.tensor_dtype and value.is_cpu:
            given = value.numpy(force=value.requires_grad)
            fits = given.shape == (num_rows, *self.leaf.shape)
            if fits and np.logical_and.reduce(np.isfinite(given), None):
                return given
        expected = (num_rows, *self.leaf.shape)
        if value.shape != expected:
            if self.leaf.shape != () or value.shape != (num_rows, 1):
                raise ActionError(
                    f"`{_name(self.leaf.path)}` must have shape {expected} for {num_rows}"
                    f" environments, got {tuple(value.shape)}"
                )
            value = value.squeeze(-1)
        if not torch.can_cast(value.dtype, self.tensor_dtype):
            raise ActionError(
                f"`{_name(self.leaf.path)}` must be of a dtype that can be cast to"
                f" {self.tensor_dtype} for the space {self.leaf.space}, got {value.dtype}"
            )
        given = to_numpy(value)
        self._check_values(given)
        return given if given.dtype == self.stored else self._cast(given)

    def _check_values(self, given: Array) -> None:
        if self.stored.kind == "f":
            # Beyond the largest float32 a float64 is finite, but what would be stored is not.
            if not (np.abs(given) <= self.largest).all():
                raise ActionError(
                    f"`{_name(self.leaf.path)}` must be finite as {self.stored} and as"
                    f" {self.leaf.dtype}, got {_short(given)}"
                )
        elif ((given < self.low) | (given > self.high)).any():
            counting = ", counted from 0," if isinstance(self.leaf.space, spaces.Discrete) else ""
            raise ActionError(
                f"`{_name(self.leaf.path)}` must lie in {_short(self.low)} to {_short(self.high)}"
                f"{counting} for the space {self.leaf.space}, got {_short(given)}"
            )

    def _cast(self, given: Array) -> Array:
        rows = given.astype(self.stored)
        whole = self.stored.kind == "f" and given.dtype.kind in "iu"
        # Python compares an int with a float exactly; numpy would round the int first.
        if whole and rows.tolist() != given.tolist():
            raise ActionError(
                f"`{_name(self.leaf.path)}` must stay exact as {self.stored}, got {_short(given)}"
            )
        return rows

    def decode(self, rows: Array) -> Array:
        if self.offset:
            return rows + self.offset
        if self.clip and self.stored.kind == "f":
            # Clipped first: what lies outside float16 would become infinite, with a warning. Not by
            # np.clip, which takes several times as long for a few rows.
            clipped: Array = np.minimum(np.maximum(rows, self.low), self.high)
            return clipped.astype(self.leaf.dtype, copy=False)
        return rows

    def inverse(self, value: Array) -> Array:
        rows: Array = value.astype(self.stored)
        return rows - self.offset if self.offset else rows


def _bounds(space: Space) -> tuple[Any, Any]:
    """Least and largest value, as rows hold them."""
    if isinstance(space, spaces.Discrete):
        return 0, int(space.n) - 1
    if isinstance(space, spaces.MultiDiscrete):
        # In int64, since start + nvec - 1 is computed in the space's dtype otherwise.
        start, nvec = np.asarray(space.start, np.int64), np.asarray(space.nvec, np.int64)
        return start, start + nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    assert isinstance(space, spaces.Box)
    return space.low, space.high
