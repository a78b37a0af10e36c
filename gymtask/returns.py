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

import math
import warnings
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from gymtask.errors import ConfigurationError, CutReturnWarning

__all__ = ["discounted_returns", "generalized_advantage_estimate"]

Array = TypeVar("Array", Tensor, NDArray[Any])
Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

_SMALL = 2048
"""Rows below which doubling, with its fewer calls, beats halving, with its fewer operations."""

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
        next_value: Value of each row's true next observation, [..., T], dtype of `reward`; used
            only where truncated or an end, and not terminated.
        end: Whether the row is the last of its piece, bool [..., T]; row T - 1 always is.

    Returns:
        The return of each row, [..., T], dtype of `reward`.

    Raises:
        ConfigurationError: An argument breaks its rule, or a `next_value` that is used is NaN.
    """
    _check_reward(reward)
    if next_value is not None:
        _check_like(reward, reward.dtype, next_value=next_value)
    _check_like(reward, torch.bool, terminated=terminated, truncated=truncated, end=end)
    gamma = _check_fraction("gamma", gamma)
    r, n, term, trunc, last = _fastest(reward, next_value, terminated, truncated, end)
    stopped = _stops(term, trunc, last)
    if n is None:
        _warn_of_cut(stopped & ~(term | trunc))
    with np.errstate(all="ignore"):
        total = _one_step(r, n, term | ~stopped, gamma)
        return _tensor(_scan(total, stopped, gamma, reward.dtype), r)


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
        next_value: Value of each row's true next observation, [..., T], dtype of `reward`; used
            everywhere but where terminated.
        terminated: Whether the environment ended the episode at this row, bool [..., T].
        truncated: Whether a limit ended the episode at this row, bool [..., T].
        gamma: Discount of one step, in [0, 1].
        gae_lambda: Weight of long sums of rewards against values, in [0, 1]: 0 leaves delta, the TD
            error; 1 gives the bootstrapped discounted return minus `value`.
        end: Whether the row is the last of its piece, bool [..., T]; row T - 1 always is.

    Returns:
        The advantage and the value target of each row, each [..., T], dtype of `reward`.

    Raises:
        ConfigurationError: An argument breaks its rule, or a `next_value` that is used is NaN.
    """
    _check_reward(reward)
    _check_like(reward, reward.dtype, value=value, next_value=next_value)
    _check_like(reward, torch.bool, terminated=terminated, truncated=truncated, end=end)
    gamma = _check_fraction("gamma", gamma)
    gae_lambda = _check_fraction("gae_lambda", gae_lambda)
    r, v, n, term, trunc, last = _fastest(reward, value, next_value, terminated, truncated, end)
    with np.errstate(all="ignore"):
        delta = _one_step(r, n, term, gamma)
        delta -= v
        stopped = _stops(term, trunc, last)
        x = _scan(delta, stopped, gamma * gae_lambda, reward.dtype)
        advantage = _tensor(x, r)
        x += v
        return advantage, _tensor(x, r)


def _fastest(reward: Tensor, *others: Tensor | None) -> list[Any]:
    """Gives numpy views of the tensors where numpy can do the work, else the tensors themselves.

    At a rollout's usual sizes a call costs a third in numpy of what it costs in torch.
    """
    given = [reward, *others]
    if reward.device.type != "cpu" or reward.dtype not in (torch.float32, torch.float64):
        return given
    for tensor in given:
        if tensor is not None and (tensor.requires_grad or tensor.is_neg()):
            return given
    return [None if tensor is None else tensor.numpy() for tensor in given]


def _stops(terminated: Array, truncated: Array, end: Array | None) -> Array:
    """Tells after which rows nothing flows back; the last row of time is always one."""
    stopped: Array = terminated | truncated
    if end is not None:
        stopped |= end
    stopped[..., -1:] = True
    return stopped


def _one_step(reward: Array, next_value: Array | None, skipped: Array, gamma: float) -> Array:
    """Adds gamma * next_value to the reward of all rows but the skipped, in float64.

    Masks by selection and not by a product, since 0 * NaN is NaN.
    """
    if next_value is not None:
        _refuse_nan(next_value, skipped)
    if isinstance(reward, Tensor):
        # Apple's GPUs have no float64.
        wide = reward.to(torch.float32 if reward.device.type == "mps" else torch.float64)
        if next_value is None:
            return wide
        return torch.where(skipped, wide, wide.add(next_value, alpha=gamma))
    if next_value is None:
        return reward.astype(np.float64, order="C")
    total: NDArray[Any] = np.multiply(next_value, gamma, dtype=np.float64, order="C")
    np.copyto(total, 0.0, where=skipped)
    total += reward
    return total


def _scan(x: Array, stopped: Array, coefficient: float, dtype: torch.dtype) -> Array:
    """Solves `y[t] = x[t] + (0 if stopped[t] else coefficient * y[t + 1])`; may overwrite both."""
    # Leaving out coefficient ** k * y[t + k] is far below a rounding error of the largest |y|.
    negligible = 1e-5 * torch.finfo(dtype).eps
    if isinstance(x, Tensor):
        return _scan_torch(x, stopped, coefficient, negligible)
    if x.size and coefficient > negligible:
        # Rows of a batch are pieces that lie end to end: the whole batch is one long row.
        _scan_numpy(x.reshape(-1), stopped.reshape(-1), coefficient, negligible)
    return x


def _scan_torch(x: Tensor, stopped: Tensor, coefficient: float, negligible: float) -> Tensor:
    """Doubles (Hillis & Steele 1986): two sums of `span` rows each make one of twice as many."""
    # open_[t]: none of the rows t to t + span - 1 stops, so row t + span belongs to the same sum.
    open_, span = ~stopped, 1
    while span < x.shape[-1] and coefficient > negligible:
        later = torch.where(open_[..., :-span], coefficient * x[..., span:], 0.0)
        x = x + pad(later, (0, span))
        # The windows of the last rows reach T - 1, which stops: they stay closed.
        open_ = pad(open_[..., :-span] & open_[..., span:], (0, span))
        span, coefficient = 2 * span, coefficient * coefficient
    return x


def _scan_numpy(x: Floats, stopped: Flags, coefficient: float, negligible: float) -> None:
    """Halves (Blelloch 1990) down to a small scan, in place and on one dimension.

    With each odd row added to the even one before it, the even rows obey the same recurrence with
    coefficient ** 2; once they are solved, an odd row needs only the even one after it.
    """
    if x.size <= _SMALL:
        y = x.copy()
        _scan_small(y, stopped.copy(), coefficient, negligible)
        x[:] = y
        return
    even, odd = x[::2], x[1::2]
    even_stopped, odd_stopped = stopped[::2], stopped[1::2]
    # Even row 2i is followed by odd row 2i + 1, but the last one of an odd number by none.
    later = odd * coefficient
    np.copyto(later, 0.0, where=even_stopped[: later.size])
    even[: later.size] += later
    even_stopped[: later.size] |= odd_stopped
    _scan_numpy(even, even_stopped, coefficient * coefficient, negligible)
    # Odd row 2i + 1 is followed by even row 2i + 2, but the last one of an even number by none.
    later = even[1:] * coefficient
    np.copyto(later, 0.0, where=odd_stopped[: later.size])
    odd[: later.size] += later


def _scan_small(x: Floats, stopped: Flags, coefficient: float, negligible: float) -> None:
    """Does in place and on one dimension what `_scan_torch` does, while any piece is open."""
    ends = stopped.nonzero()[0]
    # Piece k is the rows ends[k - 1] + 1 to ends[k], the first one the rows 0 to ends[0].
    longest = (ends[1:] - ends[:-1]).max(initial=ends[0] + 1)
    buffer, span = np.empty_like(x), 1
    while span < longest and coefficient > negligible:
        later = buffer[:-span]
        np.multiply(x[span:], coefficient, out=later)
        # stopped[t]: one of the rows t to t + span - 1 stops, so row t + span is of another piece.
        np.copyto(later, 0.0, where=stopped[:-span])
        x[:-span] += later
        stopped[:-span] |= stopped[span:]
        span, coefficient = 2 * span, coefficient * coefficient


def _tensor(x: Array, like: Array) -> Tensor:
    """Copies x to a tensor of the dtype of `like`."""
    if isinstance(x, Tensor):
        return x.to(like.dtype, copy=True)
    return torch.from_numpy(x.astype(like.dtype))


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


def _refuse_nan(next_value: Array, skipped: Array) -> None:
    # One number tells whether any element is NaN, at a fraction of the cost of a look at each.
    if isinstance(next_value, Tensor):
        probe = float(next_value.detach().sum())
    else:
        probe = float(next_value.max(initial=-np.inf))
    if not math.isnan(probe):
        return
    bad = torch.as_tensor((next_value != next_value) & ~skipped).nonzero()
    if len(bad):
        row = bad[0].tolist()
        where = f"nan at row {row[0] if len(row) == 1 else tuple(row)}"
        raise _broken("next_value", "not be NaN at a row that bootstraps from it", where)


def _check_reward(reward: Tensor) -> None:
    if not isinstance(reward, Tensor):
        raise _broken("reward", "be a torch.Tensor", type(reward).__name__)
    if not reward.dtype.is_floating_point:
        raise _broken("reward", "have a floating dtype", reward.dtype)
    if not reward.shape:
        raise _broken("reward", "have the shape [..., T], time last", "()")


def _check_like(reward: Tensor, dtype: torch.dtype, **tensors: Tensor | None) -> None:
    shape, device = reward.shape, reward.device
    for name, tensor in tensors.items():
        if tensor is None and name == "end":
            continue
        if not isinstance(tensor, Tensor):
            raise _broken(name, "be a torch.Tensor", type(tensor).__name__)
        if tensor.shape != shape:
            rule = f"have the shape {tuple(shape)} of `reward`, time last"
            raise _broken(name, rule, tuple(tensor.shape))
        if tensor.dtype != dtype:
            raise _broken(name, f"have the dtype {dtype}", tensor.dtype)
        if tensor.device != device:
            raise _broken(name, f"be on {device}, the device of `reward`", tensor.device)


def _check_fraction(name: str, value: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise _broken(name, "be a number in [0, 1]", repr(value))
    return float(value)


def _broken(name: str, rule: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"`{name}` must {rule}, got {value}")
