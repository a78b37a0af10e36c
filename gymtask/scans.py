"""Sums that run back over time, without a loop over it: what the functions of `returns` share.

They solve `y[t] = x[t] + c[t] * y[t + 1]` over rows [..., T], time last. Nothing flows back from
what comes after a row that stops, not even a NaN or a gradient; the last row of time always stops.

Arguments are Tensors, or numpy arrays where these can do the work at a third of the cost. Sums are
in float64 for any dtype of the arguments, since an advantage is often a small difference of large
values.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

Array = TypeVar("Array", Tensor, NDArray[Any])
Floats: TypeAlias = NDArray[np.float64]

_SMALL = 512
"""Rows below which doubling, with its fewer calls, beats halving, with its fewer operations."""
_CACHED = 32768
"""Rows at a time that stay in a core's cache."""
_TAME = 1e290
"""Sums of smaller numbers than this stay finite."""
_SHORT = 4096
"""Numbers whose squares are summed in less time than the largest and the smallest are found."""
_TAME_SQUARES = 1e300
"""Numbers whose squares sum to less than this are tame."""
_TINY = 1e-290
"""What smaller numbers than this are factors of is left out; theirs may be denormal, and slow."""


def to_tensor(x: Array, like: Array) -> Tensor:
    """Copies x to a tensor of the dtype of `like`."""
    if isinstance(x, Tensor):
        return x.to(like.dtype, copy=True)
    return torch.from_numpy(x.astype(like.dtype))


def stops(terminated: Array, truncated: Array, end: Array | None) -> Array:
    """Tells after which rows nothing flows back; the last row of time is always one."""
    stopped: Array = terminated | truncated
    if end is not None:
        stopped |= end
    stopped[..., -1:] = True
    return stopped


def window_ends(stopped: Array, n: int) -> Array:
    """Tells which rows are the last of n rows of one piece."""
    # How many rows stop before row t, for t = 0 to T.
    counts = pad(torch.as_tensor(stopped).cumsum(-1), (1, 0))
    ends = torch.zeros(stopped.shape, dtype=torch.bool, device=counts.device)
    # Row t is the last of rows t - n + 1 to t, of which those before t must not stop.
    ends[..., n - 1 :] = counts[..., n - 1 : -1] == counts[..., : counts.shape[-1] - n]
    return ends if isinstance(stopped, Tensor) else ends.numpy()


def may_hold_nan(x: Array) -> bool:
    """Tells whether an element may be NaN, from one number: a look at each costs much more."""
    if isinstance(x, Tensor):
        return math.isnan(float(x.detach().sum()))
    return bool(x.size) and math.isnan(float(x.max()))


def nan_row(x: Array, unused: Array) -> int | tuple[int, ...] | None:
    """Gives the first row that is NaN and used, if there is one."""
    if not may_hold_nan(x):
        return None
    rows = torch.as_tensor((x != x) & ~unused).nonzero()
    if not len(rows):
        return None
    row: list[int] = rows[0].tolist()
    return row[0] if len(row) == 1 else tuple(row)


def is_tame(x: Array) -> bool:
    """Tells of an array whether 0 * y is 0 for all sums y of its elements; of a Tensor, nothing."""
    if isinstance(x, Tensor):
        return False
    if x.ndim == 1 and x.size <= _SHORT:
        # One call instead of two. Neither a NaN nor an infinity is below anything.
        return bool(np.dot(x, x) < _TAME_SQUARES)
    return bool(x.min(initial=0.0) > -_TAME and x.max(initial=0.0) < _TAME)


def select(condition: Array, yes: Array | float, no: Array | float, like: Array) -> Array:
    """Gives in float64 `yes` where the condition holds, else `no`; both may be numbers."""
    if isinstance(like, Tensor):
        dtype = _wide(like)
        yes = yes if isinstance(yes, Tensor) else like.new_full((), yes, dtype=dtype)
        no = no if isinstance(no, Tensor) else like.new_full((), no, dtype=dtype)
        return torch.where(condition, yes, no)
    # In half the time that np.where takes.
    result: NDArray[Any] = np.empty(like.shape)
    result[...] = no
    np.copyto(result, yes, where=condition)
    return result


def one_step(
    reward: Array, next_value: Array | None, skipped: Array, gamma: float | Array
) -> Array:
    """Adds gamma * next_value to the reward of all rows but the skipped, in float64.

    Masks by selection and not by a product, since 0 * NaN is NaN.
    """
    if isinstance(reward, Tensor):
        wide = reward.to(_wide(reward))
        if next_value is None:
            return wide
        return torch.where(skipped, wide, wide + gamma * next_value.to(wide.dtype))
    if next_value is None:
        return reward.astype(np.float64, order="C")
    total: NDArray[Any] = np.multiply(next_value, gamma, dtype=np.float64, order="C")
    np.copyto(total, 0.0, where=skipped)
    total += reward
    return total


def one_later(x: Array) -> Array:
    """Gives x[t + 1] at row t, and 0 at the last row of time."""
    if isinstance(x, Tensor):
        return pad(x[..., 1:], (0, 1))
    later = np.zeros_like(x)
    later[..., :-1] = x[..., 1:]
    return later


def clipped_ratio(log_prob: Array, behaviour_log_prob: Array, clip: float) -> Array:
    """Gives `min(clip, exp(log_prob - behaviour_log_prob))` in float64."""
    # Clipped before exp, as the gradient of an exp that overflows is 0 * inf.
    if isinstance(log_prob, Tensor):
        wide = log_prob.to(_wide(log_prob))
        return (wide - behaviour_log_prob).clamp(max=math.log(clip)).exp()
    ratio: Floats = np.subtract(log_prob, behaviour_log_prob, dtype=np.float64, order="C")
    np.minimum(ratio, math.log(clip), out=ratio)
    np.exp(ratio, out=ratio)
    return ratio


def scan(
    x: Array,
    stopped: Array,
    c: float | Array,
    dtype: torch.dtype,
    *,
    tame: bool,
    bound: float = math.inf,
) -> Array:
    """Solves `y[t] = x[t] + c[t] * y[t + 1]`, without the last term where the row stops.

    Args:
        x: The summands [..., T], float64; may be overwritten.
        stopped: Where a row stops, as the last one of time must, bool [..., T].
        c: The coefficients, float64 [..., T], or one number for all; at least 0.
        dtype: What the result is rounded to afterwards.
        tame: Whether x is (`is_tame`); then c must have no NaN.
        bound: No coefficient is larger, where they are not one number.
    """
    bound = c if isinstance(c, float) else bound
    negligible = _negligible(dtype)
    if isinstance(x, Tensor):
        return _scan_tensor(x, stopped, c, bound, negligible)
    if not tame or bound > 1.0:
        given = (torch.from_numpy(x), torch.from_numpy(stopped))
        factor = c if isinstance(c, float) else torch.from_numpy(c)
        return _scan_tensor(*given, factor, bound, negligible).numpy()
    if x.size and bound > negligible:
        # Lanes that lie end to end are one long row, with pieces of at most T rows.
        rows, a, longest = x.reshape(-1), select(stopped, 0.0, c, x).reshape(-1), x.shape[-1]
        step = max(_CACHED // longest, 1) * longest
        for start in range(0, x.size, step):
            lanes = slice(start, start + step)
            _scan_numpy(rows[lanes], a[lanes], bound, negligible, longest)
    return x


def scan_windows(x: Array, last: Array, stopped: Array, c: float, n: int) -> Array:
    """Sums like `scan`, but over n rows at most, where the n-th row counts `last`, not `x`.

    That is `y_1 = last` and `y_n[t] = x[t] + c * y_(n - 1)[t + 1]`. Two windows of m and k rows,
    one after the other, make one of m + k rows; so the windows of 1, 2, 4, ... rows, each made of
    two of the ones before, make one of any n rows. May overwrite `x` and `stopped`.
    """
    y, span, rest = last, 1, n - 1
    while rest > 0 and c > _TINY:
        if rest % 2:
            y = _join(x, stopped, c, y, span)
        if rest > 1:
            x = _join(x, stopped, c, x, span)
            stopped = _either(stopped, span)
        span, rest, c = 2 * span, rest // 2, c * c
    # With `rest`, what is left out is a window that begins `span` rows later.
    return x if rest > 0 else y


def _scan_tensor(
    x: Tensor, stopped: Tensor, c: float | Tensor, bound: float, negligible: float
) -> Tensor:
    """Doubles (Hillis & Steele 1986): two sums of `span` rows each make one of twice as many."""
    span = 1
    while span < x.shape[-1] and bound > negligible:
        x = _join(x, stopped, c, x, span)
        c = c * c if isinstance(c, float) else _later(stopped, c, c, span)
        stopped, span, bound = _either(stopped, span), 2 * span, bound * bound
    return x


def _join(x: Array, stopped: Array, c: float | Array, y: Array, span: int) -> Array:
    """Gives x[t] + c[t] * y[t + span], without the last term where `stopped`.

    That is where one of the rows t to t + span - 1 stops, as do those without a row t + span. An
    array that is both x and y is overwritten.
    """
    if isinstance(x, Tensor):
        return x + _later(stopped, c, y, span)
    later = y[..., span:] * c
    np.copyto(later, 0.0, where=stopped[..., :-span])
    joined = x if y is x else x.copy()
    joined[..., :-span] += later
    return joined


def _later(stopped: Tensor, c: float | Tensor, y: Tensor, span: int) -> Tensor:
    """Gives c[t] * y[t + span], and 0 where `stopped`."""
    closed, y = stopped[..., :-span], y[..., span:]
    if isinstance(c, Tensor):
        # Not the product is masked but its factor: the gradient of c is y, and 0 * NaN is NaN.
        return pad(c[..., :-span] * torch.where(closed, 0.0, y), (0, span))
    return pad(torch.where(closed, 0.0, c * y), (0, span))


def _either(stopped: Array, span: int) -> Array:
    """Tells whether a row of t to t + 2 * span - 1 stops, from whether one of `span` rows does."""
    # The last rows reach the last row of time, which stops.
    if isinstance(stopped, Tensor):
        return pad(stopped[..., :-span] | stopped[..., span:], (0, span), value=True)
    either = np.ones_like(stopped)
    np.logical_or(stopped[..., :-span], stopped[..., span:], out=either[..., :-span])
    return either


def _scan_numpy(x: Floats, a: Floats, bound: float, negligible: float, longest: int) -> None:
    """Halves (Blelloch 1990) down to a small scan, in place, on one dimension and tame numbers.

    With each odd row added to the even one before it, the even rows obey the same recurrence with
    coefficients a[t] * a[t + 1]; once they are solved, an odd row needs only the even one after it.
    `a` has the coefficients, 0 where a row stops; the last one is never used. No piece has more
    rows than `longest`.
    """
    if x.size <= _SMALL or longest == 1 or bound <= negligible:
        _scan_small(x, a, bound, negligible, longest)
        return
    if x.size % 2:
        # The last row, which stops, is solved. The rows before it are even in number.
        x[-2] += a[-2] * x[-1]
        x, a = x[:-1], a[:-1]
    even, odd, a_even, a_odd = x[::2], x[1::2], a[::2], a[1::2]
    # Even row 2i is followed by odd row 2i + 1.
    y = a_even * odd
    y += even
    _scan_numpy(y, a_even * a_odd, bound * bound, negligible, (longest + 1) // 2)
    even[:] = y
    # Odd row 2i + 1 is followed by even row 2i + 2, but the last one by none.
    odd = odd[:-1]
    odd += a_odd[:-1] * y[1:]


def _scan_small(x: Floats, a: Floats, bound: float, negligible: float, longest: int) -> None:
    """Does in place, on one dimension and tame numbers, what `_scan_tensor` does."""
    # a[t] is the product of the coefficients of rows t to t + span - 1. The last rows, which have
    # no row t + span, have none.
    a, span = a[:-1], 1
    while span < longest and bound > negligible:
        if span > 1:
            a = a[: -(span // 2)] * a[span // 2 :]
        # In two steps, as `x[:-span] += ...` cuts the rows out twice.
        rows = x[:-span]
        rows += a * x[span:]
        span, bound = 2 * span, bound * bound


@functools.cache
def _negligible(dtype: torch.dtype) -> float:
    """Leaving out c[t] * y[t + 1] with a c[t] below it is no rounding error of the largest |y|."""
    return 1e-5 * torch.finfo(dtype).eps


def _wide(x: Tensor) -> torch.dtype:
    # Apple's GPUs have no float64.
    return torch.float32 if x.device.type == "mps" else torch.float64
