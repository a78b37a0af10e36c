"""What the functions of `returns` are given: checked, and as numpy arrays where these will do."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gymtask.errors import ConfigurationError

_BOOL = np.dtype(np.bool_)
_FAST = np.dtype(np.float32), np.dtype(np.float64)


def checked_rows(
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    end: Tensor | None,
    others: dict[str, Tensor],
) -> list[Any]:
    """Gives reward, others, terminated, truncated and end as numpy arrays where these will do.

    Raises:
        ConfigurationError: One is no tensor, or has another shape, dtype or device than `reward`.
    """
    floats, flags = [reward, *others.values()], [terminated, truncated]
    if (views := _plain(floats, flags if end is None else [*flags, end])) is not None:
        return [*views, None] if end is None else views
    if not isinstance(reward, Tensor):
        raise broken("reward", "be a torch.Tensor", type(reward).__name__)
    if not reward.dtype.is_floating_point:
        raise broken("reward", "have a floating dtype", reward.dtype)
    if not reward.shape:
        raise broken("reward", "have the shape [..., T], time last", "()")
    _check_like(reward, reward.dtype, **others)
    _check_like(reward, torch.bool, terminated=terminated, truncated=truncated)
    if end is not None:
        _check_like(reward, torch.bool, end=end)
    return [*floats, *flags, end]


def _plain(floats: list[Tensor], flags: list[Tensor]) -> list[Any] | None:
    """Gives numpy views of the tensors, or None unless numpy can do the work with all of them.

    It can where they have one shape [..., T], the floats one dtype of float32 and float64, the
    flags bool. Numpy tells it of its views at a fraction of what PyTorch takes.
    """
    if torch.compiler.is_compiling():  # which would trace numpy's operations one by one
        return None
    given, count = (*floats, *flags), len(floats)
    try:
        views: list[Any] = [x.numpy() for x in given if isinstance(x, Tensor)]
    except (RuntimeError, TypeError):  # on a GPU, of a graph, or negated lazily
        return None
    if len(views) != len(given):
        return None
    shape, dtype = views[0].shape, views[0].dtype
    if not shape or dtype not in _FAST:
        return None
    for view in views[:count]:
        if view.dtype != dtype or view.shape != shape:
            return None
    for view in views[count:]:
        if view.dtype != _BOOL or view.shape != shape:
            return None
    return views


def _check_like(reward: Tensor, dtype: torch.dtype, **tensors: Tensor) -> None:
    shape, device = reward.shape, reward.device
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise broken(name, "be a torch.Tensor", type(tensor).__name__)
        if tensor.shape != shape:
            rule = f"have the shape {tuple(shape)} of `reward`, time last"
            raise broken(name, rule, tuple(tensor.shape))
        if tensor.dtype != dtype:
            raise broken(name, f"have the dtype {dtype}", tensor.dtype)
        if tensor.device != device:
            raise broken(name, f"be on {device}, the device of `reward`", tensor.device)


def checked_fraction(name: str, value: float) -> float:
    """A number in [0, 1]."""
    if type(value) is float and 0.0 <= value <= 1.0:
        return value
    if not isinstance(value, Real) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise broken(name, "be a number in [0, 1]", repr(value))
    return float(value)


def checked_clip(name: str, value: float) -> float:
    """A number above 0, which may be inf."""
    if not isinstance(value, Real) or isinstance(value, bool) or not value > 0.0:
        raise broken(name, "be a number above 0", repr(value))
    return float(value)


def checked_count(name: str, value: int) -> int:
    """A whole number of at least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise broken(name, "be a whole number of at least 1", repr(value))
    return int(value)


def broken(name: str, rule: str, value: object) -> ConfigurationError:
    """The error that says which rule an argument breaks."""
    return ConfigurationError(f"`{name}` must {rule}, got {value}")
