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
from gymtask.workers.layout import Array, Leaf, Space, children, space_leaves

_WIDENED: dict[str, np.dtype[Any]] = {"uint16": np.dtype(np.int32), "uint32": np.dtype(np.int64)}


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
            f"the dtype of a space must be a float, an integer up to 64 bit or bool, got {dtype}"
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

    Bfloat16, which numpy lacks, as float32.
    """
    tensor = tensor.detach().cpu()
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
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

    def encode(self, action: Any, num_rows: int) -> list[Array]:
        """The rows to store, one array [n, *shape] for each leaf.

        Args:
            action: A tensor [n, *shape], or a nested TensorDict for Dict and Tuple spaces.
            num_rows: n.

        Raises:
            ActionError: Structure, shape, dtype or a value does not fit the action space.
        """
        encoded = []
        for leaf, rule in zip(self.leaves, self._rules, strict=True):
            value = _pick(action, leaf)
            encoded.append(rule.encode(value, num_rows))
        return encoded

    def decode(self, rows: list[Array]) -> list[Array]:
        """What the environments get for these rows, one array for each leaf."""
        return [rule.decode(row) for rule, row in zip(self._rules, rows, strict=True)]

    def rows_of(self, action: Any) -> Any:
        """The row [*shape] to store for one action such as `space.sample()` gives."""
        values = _leaf_values(self.space, action)
        rows = [
            torch.from_numpy(np.array(rule.inverse(np.asarray(value)), dtype=rule.stored))
            for rule, value in zip(self._rules, values, strict=True)
        ]
        return nest_tensors(self.space, rows)


def _leaf_values(space: Space, value: Any) -> list[Any]:
    parts = children(space)
    if parts is None:
        return [value]
    keys = [key if isinstance(space, spaces.Dict) else int(key) for key, _ in parts]
    return [
        leaf
        for key, (_, part) in zip(keys, parts, strict=True)
        for leaf in _leaf_values(part, value[key])
    ]


def _pick(action: Any, leaf: Leaf) -> Tensor:
    found = action
    for key in leaf.path:
        if not isinstance(found, TensorDictBase) or key not in set(found.keys()):
            raise ActionError(
                f"`action` must be a TensorDict with the leaf {'/'.join(leaf.path)!r}, got"
                f" {_describe(action)}"
            )
        found = found.get(key)
    if not isinstance(found, Tensor):
        raise ActionError(f"`{_name(leaf)}` must be a tensor, got {_describe(found)}")
    return found


def _describe(value: Any) -> str:
    if isinstance(value, TensorDictBase):
        return f"a TensorDict with the keys {sorted(map(str, value.keys()))}"
    return f"{type(value).__name__}"


def _name(leaf: Leaf) -> str:
    return "/".join(("action", *leaf.path))


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
    """

    leaf: Leaf
    stored: np.dtype[Any]
    tensor_dtype: torch.dtype
    low: Any
    high: Any
    offset: int
    clip: bool

    @classmethod
    def of(cls, leaf: Leaf, *, clip: bool) -> _Rule:
        space, offset = leaf.space, 0
        stored = stored_dtype(leaf.dtype)
        low: Any
        high: Any
        if isinstance(space, spaces.Discrete):
            stored, low, high, offset = np.dtype(np.int64), 0, int(space.n) - 1, int(space.start)
        elif isinstance(space, spaces.MultiDiscrete):
            low, high = space.start, space.start + space.nvec - 1
        elif isinstance(space, spaces.MultiBinary):
            low, high = 0, 1
        else:
            assert isinstance(space, spaces.Box)
            low, high = space.low, space.high
        return cls(
            leaf, stored, torch.from_numpy(np.empty(0, stored)).dtype, low, high, offset, clip
        )

    def encode(self, value: Tensor, num_rows: int) -> Array:
        expected = (num_rows, *self.leaf.shape)
        if value.shape != expected:
            if self.leaf.shape != () or value.shape != (num_rows, 1):
                raise ActionError(
                    f"`{_name(self.leaf)}` must have shape {expected} for {num_rows} environments, "
                    f"got {tuple(value.shape)}"
                )
            value = value.squeeze(-1)
        if not torch.can_cast(value.dtype, self.tensor_dtype):
            raise ActionError(
                f"`{_name(self.leaf)}` must be of a dtype that can be cast to {self.tensor_dtype}"
                f" for the space {self.leaf.space}, got {value.dtype}"
            )
        given = to_numpy(value)
        self._check_values(given)
        rows = given if given.dtype == self.stored else given.astype(self.stored)
        if rows is not given and given.dtype.kind in "iu" and not np.array_equal(rows, given):
            raise ActionError(
                f"`{_name(self.leaf)}` must stay exact as {self.stored}, got {given.tolist()}"
            )
        return rows

    def _check_values(self, given: Array) -> None:
        if self.stored.kind == "f":
            # Beyond the largest float32 a float64 is finite, but what would be stored is not.
            if not (np.abs(given) <= np.finfo(self.stored).max).all():
                raise ActionError(f"`{_name(self.leaf)}` must be finite, got {given.tolist()}")
        elif ((given < self.low) | (given > self.high)).any():
            raise ActionError(
                f"`{_name(self.leaf)}` must lie in {np.min(self.low)} to {np.max(self.high)} "
                f"(the space is {self.leaf.space}, indices count from 0), got {given.tolist()}"
            )

    def decode(self, rows: Array) -> Array:
        if self.offset:
            return rows + self.offset
        if self.clip and self.stored.kind == "f":
            clipped: Array = np.clip(rows.astype(self.leaf.dtype), self.low, self.high)
            return clipped
        return rows

    def inverse(self, value: Array) -> Array:
        return value - self.offset
