"""Rows of a store as records: all that belongs to a row lies side by side in memory.

A batch is then one gather of whole records, and its keys are cut out of what was gathered::

    record    | observation | action | reward | trajectory_id | terminated | ... | padding |

Values are ordered by the size of their elements, so that each is aligned; a record is a multiple of
8 bytes, or of the largest element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from gymtask.errors import ConfigurationError
from gymtask.trajectory import put
from gymtask.workers.layout import Array

Path = tuple[str, ...]

# Torch has dtypes that numpy lacks: their bits are kept as integers.
_AS_INTEGERS = {torch.bfloat16: torch.int16}
_NUMPY = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    )
}


@dataclass(frozen=True)
class Field:
    """One key of a record.

    Attributes:
        path: The key, with those above it.
        shape: The shape of a row's value.
        dtype: Its dtype.
        linked: Whether the value under "next" is that of the row that follows.
        name: The name in the structured dtype.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    linked: bool = False

    @cached_property
    def name(self) -> str:
        """See the attribute."""
        return "/".join(self.path)

    @cached_property
    def next_path(self) -> Path:
        """The key of the next value."""
        return "next", *self.path

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the stored bits."""
        return _NUMPY[_AS_INTEGERS.get(self.dtype, self.dtype)]

    def numbers(self, bits: Array) -> Array:
        """Stored values as float64."""
        if self.dtype in _AS_INTEGERS:
            bits = torch.from_numpy(bits).view(self.dtype).double().numpy()
        return bits.astype(np.float64)

    def bits(self, numbers: Array) -> Array:
        """Such numbers as they would be stored; sums of integers and flags are float32."""
        if self.dtype in _AS_INTEGERS:
            return torch.from_numpy(numbers).to(self.dtype).view(_AS_INTEGERS[self.dtype]).numpy()
        return numbers.astype(self.numpy_dtype if self.dtype.is_floating_point else np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes in a record."""
        return int(np.prod(self.shape)) * self.numpy_dtype.itemsize


def bits_of(path: Path, value: Any) -> tuple[Tensor, Array]:
    """The values of a tensor as they are stored, without a copy where that can be.

    They are given as a tensor and as an array, which share their memory.

    Raises:
        ConfigurationError: It is no tensor, or of a dtype that cannot be stored.
    """
    if not isinstance(value, Tensor):
        raise ConfigurationError(
            f"`{'/'.join(path)}` must be a tensor to be stored in a ReplayBuffer, got"
            f" {type(value).__name__}; leave it out, or keep such data with the pieces"
            " (MultiReplaySamples)"
        )
    try:
        return value, value.numpy()
    except (RuntimeError, TypeError):
        converted = _converted(path, value.detach().cpu())
        return converted, converted.numpy()


def _converted(path: Path, value: Tensor) -> Tensor:
    """A tensor that numpy takes."""
    if value.dtype in _AS_INTEGERS:
        return value.view(_AS_INTEGERS[value.dtype])
    if value.dtype not in _NUMPY:
        raise ConfigurationError(
            f"`{'/'.join(path)}` must be of a dtype that numpy has, or bfloat16, got {value.dtype}"
        )
    return value.resolve_conj().resolve_neg()


class RecordLayout:
    """Where the fields of a record lie.

    Attributes:
        fields: The fields by path, in the order given.
        linked: Those of them whose next values are found by link.
        accepted: Dtype and shape, by path, of what rows must hold to be stored.
        reinterpreted: By path the dtypes of tensors whose bits are stored as integers.
        dtype: The structured dtype of a record.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = {field.path: field for field in fields}
        self.linked = [field for field in fields if field.linked]
        self.accepted = {field.path: (field.dtype, field.shape) for field in fields}
        for field in self.linked:
            self.accepted["next", *field.path] = field.dtype, field.shape
        self.reinterpreted = {
            path: dtype for path, (dtype, _) in self.accepted.items() if dtype in _AS_INTEGERS
        }
        ordered = sorted(fields, key=lambda field: -field.numpy_dtype.itemsize)
        offsets, end = [], 0
        for field in ordered:
            offsets.append(end)
            end += field.nbytes
        # Strides are whole numbers of any field's elements, as torch wants them.
        size = max([8, *(field.numpy_dtype.itemsize for field in fields)])
        self.dtype = np.dtype(
            {
                "names": [field.name for field in ordered],
                "formats": [(field.numpy_dtype, field.shape) for field in ordered],
                "offsets": offsets,
                "itemsize": -(-max(end, 1) // size) * size,
            }
        )


def is_below(path: Path, keys: Sequence[Path]) -> bool:
    """Whether a path is one of some keys, or lies below one."""
    return any(path[: len(key)] == key for key in keys)


# Makes a TensorDict without looking at each value: a fifth of the time of a small batch. It is not
# public; where it is gone, the public way does the same.
_make = getattr(TensorDict, "_new_unsafe", TensorDict)


def nested(values: Mapping[Path, Tensor | Array], batch_size: Sequence[int]) -> TensorDict:
    """A TensorDict of values by path, all of them on the CPU and of that batch shape.

    Tensors share the memory of arrays.
    """
    content: dict[str, Any] = {}
    for path, given in values.items():
        value = torch.from_numpy(given) if type(given) is np.ndarray else given
        if len(path) == 1:
            content[path[0]] = value
        elif len(path) == 2:
            content.setdefault(path[0], {})[path[1]] = value
        else:
            put(content, path, value)
    made: TensorDict = _make(content, batch_size=torch.Size(batch_size))
    return made
