"""Returns and advantages: pure functions of tensors [..., T] whose last dimension is time.

Row t is one transition: the reward it paid, the flags it ended with, `value` of the observation it
started from and `next_value` of its true next observation (never the first one of a new episode).
Pieces of trajectories may lie end to end along time; nothing flows from one into the one before it:

    row t is              what comes after it counts as
    terminated            0, even where truncated too and where its next value is NaN
    truncated             next_value[t]
    the end of a piece    next_value[t]
    anything else         row t + 1

Bootstrapping at time limits is that of Pardo et al. 2018, "Time Limits in Reinforcement Learning",
https://arxiv.org/abs/1712.00378. Both functions solve `x[t] = b[t] + c * x[t + 1]`, cut after each
row that stops, in float64 for any dtype of the arguments, since an advantage is often a small
difference of large values. Arguments are never changed.
"""

from __future__ import annotations

import warnings
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from gymtask.errors import ConfigurationError, CutReturnWarning

__all__ = ["discounted_returns", "generalized_advantage_estimate"]

Array = TypeVar("Array", Tensor, NDArray[Any])

_SLAB = 32768
"""Elements scanned at a time, so that the three buffers of float64 stay in the processor's cache."""

_NUMPY_DTYPES = (torch.float32, torch.float64)

_cut_return_warned = False


def discounted_returns(
    reward: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    next_value: Tensor | None = None,
    end: Tensor | None = None,
) -> Tensor:
    """Sums the discounted rewards from each row on, with a bootstrap where the sum was cut short.

        G[t] = r[t]                            terminated
        G[t] = r[t] + gamma * next_value[t]    truncated, or the end of a piece
        G[t] = r[t] + gamma * G[t + 1]         anything else

    Sutton & Barto, "Reinforcement Learning: An Introduction", 2nd edition, equation 3.9.

    Without `next_value` what comes after a truncated row or an end counts as 0. At an end with
    neither flag (a cut piece) that makes returns too low, which warns once per process.

    Args:
        reward: Reward of each row, floating [..., T]; T = 0 gives an empty result.
        terminated: Whether the environment ended the episode at this row, bool [..., T].
        truncated: Whether a limit ended the episode at this row, bool [..., T].
        gamma: Discount of one step, in [0, 1].
        next_value: Value of each row's true next observation, [..., T], dtype of `reward`; looked
            at only where truncated or an end, and not terminated.
        end: Whether the row is the last of its piece, bool [..., T]; row T - 1 is one in any case,
            and with None the only one.

    Returns:
        The return of each row, [..., T], dtype of `reward`.

    Raises:
        ConfigurationError: A shape, dtype, device or number breaks its rule, or a `next_value`
            that is looked at is NaN.
    """
    _check_reward(reward)
    _check_floats(reward, next_value=next_value)
    _check_flags(reward, terminated=terminated, truncated=truncated, end=end)
    gamma = _check_fraction("gamma", gamma)
    r, n, term, trunc, last = _fastest(reward, next_value, terminated, truncated, end)
    stopped = _stops(term, trunc, last)
    if n is None:
        _warn_of_cut(stopped & ~(term | trunc))
    with np.errstate(all="ignore"):
        total = _one_step(r, n, stopped & ~term, gamma)
        return _tensor(_scan(total, stopped, gamma, reward.dtype), reward.dtype)


def generalized_advantage_estimate(
    reward: Tensor,
    *,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
    end: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimates each row's advantage over `value`: n-step advantages of all n, weighted by lambda.

        delta[t] = r[t] + gamma * next_value[t] - value[t]    (no next_value where terminated)
        A[t] = delta[t] + gamma * gae_lambda * A[t + 1]       (no A[t + 1] where the row stops)
        value_target[t] = A[t] + value[t]

    A row stops where it is terminated, truncated or an end.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", https://arxiv.org/abs/1506.02438, equations 11 and 16.

    Args:
        reward: Reward of each row, floating [..., T]; T = 0 gives empty results.
        value: Value of the observation each row started from, [..., T], dtype of `reward`.
        next_value: Value of each row's true next observation, [..., T], dtype of `reward`; looked
            at everywhere but where terminated.
        terminated: Whether the environment ended the episode at this row, bool [..., T].
        truncated: Whether a limit ended the episode at this row, bool [..., T].
        gamma: Discount of one step, in [0, 1].
        gae_lambda: Weight of long sums of rewards against values, in [0, 1]: 0 leaves the TD error
            delta, 1 the bootstrapped discounted return minus `value`.
        end: Whether the row is the last of its piece, bool [..., T]; row T - 1 is one in any case,
            and with None the only one.

    Returns:
        The advantage and the value target of each row, each [..., T], dtype of `reward`.

    Raises:
        ConfigurationError: A shape, dtype, device or number breaks its rule, or a `next_value`
            that is looked at is NaN.
    """
    _check_reward(reward)
    _check_floats(reward, value=value, next_value=next_value)
    _check_flags(reward, terminated=terminated, truncated=truncated, end=end)
    gamma = _check_fraction("gamma", gamma)
    gae_lambda = _check_fraction("gae_lambda", gae_lambda)
    floats = (reward, value, next_value)
    r, v, n, term, trunc, last = _fastest(*floats, terminated, truncated, end)
    with np.errstate(all="ignore"):
        delta = _one_step(r, n, ~term, gamma)
        delta -= v
        stopped = _stops(term, trunc, last)
        advantage = _scan(delta, stopped, gamma * gae_lambda, reward.dtype)
        return _tensor(advantage, reward.dtype), _tensor(advantage + v, reward.dtype)


def _fastest(*tensors: Tensor | None) -> list[Any]:
    """Gives numpy views of the tensors where numpy can do the work, else the tensors themselves.

    At a rollout's usual sizes a call costs a third in numpy of what it costs in torch.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    if differentiated or given[0].device.type != "cpu" or given[0].dtype not in _NUMPY_DTYPES:
        return list(tensors)
    return [None if tensor is None else tensor.numpy(force=True) for tensor in tensors]


def _stops(terminated: Array, truncated: Array, end: Array | None) -> Array:
    """Tells after which rows nothing flows back; the last row of time is always one."""
    stopped = terminated | truncated
    if end is not None:
        stopped |= end
    stopped[..., -1:] = True
    return stopped


def _one_step(reward: Array, next_value: Array | None, used: Array, gamma: float) -> Array:
    """Adds gamma * next_value to the reward of the rows in `used`: a new array, in float64.

    Masks by selection and not by a product, since 0 * NaN is NaN.
    """
    if next_value is not None:
        _refuse_nan(next_value, used)
    if isinstance(reward, Tensor):
        # Apple's GPUs have no float64.
        wide = reward.to(torch.float32 if reward.device.type == "mps" else torch.float64, copy=True)
        if next_value is None:
            return wide
        return torch.where(used, torch.add(wide, next_value, alpha=gamma), wide)
    if next_value is None:
        return reward.astype(np.float64, order="C")
    bootstrap = np.multiply(next_value, gamma, dtype=np.float64, order="C")
    np.copyto(bootstrap, 0.0, where=~used)
    bootstrap += reward
    return bootstrap


def _scan(x: Array, stopped: Array, coefficient: float, dtype: torch.dtype) -> Array:
    """Solves `y[t] = x[t] + (0 if stopped[t] else coefficient * y[t + 1])`; may overwrite x.

    By doubling (Hillis & Steele 1986): once x[t] sums the rows t to t + span - 1 of its piece,
    adding coefficient**span * x[t + span] makes it sum twice as many. That ends when nothing is
    left to add, or when it is less than a rounding error of `dtype` even for x far above y.
    """
    negligible = 1e-5 * torch.finfo(dtype).eps
    if isinstance(x, Tensor):
        return _scan_torch(x, stopped, coefficient, negligible)
    # Rows of a batch are pieces that lie end to end: the whole batch is one long row.
    flat, flat_stopped = x.reshape(-1), stopped.reshape(-1)
    slab = max(1, _SLAB // max(1, x.shape[-1])) * x.shape[-1]
    for start in range(0, x.size, slab):
        part = slice(start, start + slab)
        _scan_numpy(flat[part], flat_stopped[part], coefficient, negligible)
    return x


def _scan_torch(x: Tensor, stopped: Tensor, coefficient: float, negligible: float) -> Tensor:
    # open_[t]: none of the rows t to t + span - 1 stops, so row t + span belongs to the same sum.
    open_, span = ~stopped, 1
    while span < x.shape[-1] and coefficient > negligible:
        later = torch.where(open_[..., :-span], coefficient * x[..., span:], 0.0)
        x = x + pad(later, (0, span))
        # The windows of the last rows reach T - 1, which stops: they stay closed.
        open_ = pad(open_[..., :-span] & open_[..., span:], (0, span))
        span, coefficient = 2 * span, coefficient * coefficient
    return x


def _scan_numpy(
    x: NDArray[np.float64], stopped: NDArray[np.bool_], coefficient: float, negligible: float
) -> None:
    """Does in place and on one dimension what `_scan_torch` does, while any piece is open."""
    ends = stopped.nonzero()[0]
    # Piece k is the rows ends[k - 1] + 1 to ends[k], the first one the rows 0 to ends[0].
    longest = (ends[1:] - ends[:-1]).max(initial=ends[0] + 1)
    # As in _scan_torch, but with all 64 bits of a row set or none: "and" then turns what is not of
    # this piece into 0, NaN and infinity too, at half the cost of a selection.
    open_ = np.full(x.size, -1, np.int64)
    open_[ends] = 0
    later = np.empty_like(x)
    later_bits, span = later.view(np.int64), 1
    while span < longest and coefficient > negligible:
        rows = x.size - span
        np.multiply(x[span:], coefficient, out=later[:rows])
        later_bits[:rows] &= open_[:rows]
        x[:rows] += later[:rows]
        open_[:rows] &= open_[span:]
        span, coefficient = 2 * span, coefficient * coefficient


def _tensor(x: Array, dtype: torch.dtype) -> Tensor:
    if isinstance(x, Tensor):
        return x.to(dtype)
    return torch.from_numpy(x).to(dtype)


def _warn_of_cut(cut: Array) -> None:
    global _cut_return_warned
    if _cut_return_warned or not bool(cut.any()):
        return
    _cut_return_warned = True
    warnings.warn(
        "a piece ends with neither flag and no `next_value` says what comes after it: its returns "
        "are too low; give `next_value`, or collect with whole_episodes=True",
        CutReturnWarning,
        stacklevel=3,
    )


def _refuse_nan(next_value: Array, used: Array) -> None:
    # The sum is NaN if an element is, and much cheaper than a look at each of them.
    total = next_value.sum()
    if total == total:
        return
    bad = (next_value != next_value) & used
    if bad.any():
        row = torch.as_tensor(bad).nonzero()[0].tolist()
        raise ConfigurationError(
            "`next_value` must not be NaN at a row that bootstraps from it, got nan at row "
            f"{row[0] if len(row) == 1 else tuple(row)}"
        )


def _check_reward(reward: Tensor) -> None:
    if not isinstance(reward, Tensor):
        raise _broken("reward", "be a torch.Tensor", type(reward).__name__)
    if not reward.is_floating_point():
        raise _broken("reward", "have a floating dtype", reward.dtype)
    if reward.dim() == 0:
        raise _broken("reward", "have the shape [..., T], time last", "shape ()")


def _check_floats(reward: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if name == "value" or tensor is not None:
            _check_like(reward, name, tensor, reward.dtype)


def _check_flags(reward: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if name != "end" or tensor is not None:
            _check_like(reward, name, tensor, torch.bool)


def _check_like(reward: Tensor, name: str, tensor: Tensor | None, dtype: torch.dtype) -> None:
    if not isinstance(tensor, Tensor):
        raise _broken(name, "be a torch.Tensor", type(tensor).__name__)
    if tensor.shape != reward.shape:
        raise _broken(
            name, f"have the shape {tuple(reward.shape)} of `reward`", tuple(tensor.shape)
        )
    if tensor.dtype != dtype:
        raise _broken(name, f"have the dtype {dtype}", tensor.dtype)
    if tensor.device != reward.device:
        raise _broken(name, f"be on the device of `reward`, {reward.device}", tensor.device)


def _check_fraction(name: str, value: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise _broken(name, "be a number in [0, 1]", repr(value))
    return float(value)


def _broken(name: str, rule: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"`{name}` must {rule}, got {value}")
