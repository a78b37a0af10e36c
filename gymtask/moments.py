"""Count, mean and variance of rows that come by and by, in this process or in several.

With torch.distributed initialised, what is counted is what all processes were given, and the result
is equal bit for bit in each. Counting then waits for the others: every process must count equally
often, be it no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, distributed, nn

from gymtask.config import raise_if_any, require_int
from gymtask.errors import ConfigurationError

__all__ = ["RunningStatistics"]

_CHUNK = 2**22
"""Numbers that are widened to float64 at a time: a collection of images would not fit."""


class Wide(nn.Module):
    """Keeps float64 buffers in float64: who casts a task, or sets a precision, means parameters."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self.get_buffer(name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self


class RunningStatistics(Wide):
    """Count, mean and variance of all rows given so far.

    The moments of new rows, computed in two passes, are merged with those before by

        delta = mean_b - mean_a
        mean  = mean_a + delta * n_b / (n_a + n_b)
        m2    = m2_a + m2_b + delta**2 * n_a * n_b / (n_a + n_b)

    Chan, Golub & LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", equation 2.1. No sum of squares is ever taken, so a large mean costs no digits of
    the variance. It begins with no rows; Gymnasium and Stable-Baselines3 begin with 1e-4 of a row.

    Args:
        shape: Shape of a row, () for numbers.

    Attributes:
        count: Number of rows, int64 ().
        mean: Mean, float64 [*shape]; 0 before the first row.
        m2: Sum of the squared distances from the mean, float64 [*shape].
        variance: m2 / count, float64 [*shape]; 1 before the first row. It follows from the others,
            and is not in `state_dict()`.

    Raises:
        ConfigurationError: `shape` is no tuple of whole numbers.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    variance: Tensor

    def __init__(self, shape: Sequence[int] = ()) -> None:
        super().__init__()
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise ConfigurationError(f"`shape` must be a tuple of whole numbers, got {shape!r}")
        raise_if_any([each for size in shape for each in require_int("shape", size, 0)])
        self.shape = tuple(shape)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(self.shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(self.shape, dtype=torch.float64))
        # Kept, as it is asked for in every step.
        variance = torch.ones(self.shape, dtype=torch.float64)
        self.register_buffer("variance", variance, persistent=False)

    @property
    def std(self) -> Tensor:
        """Standard deviation, float64 [*shape]; 1 before the first row."""
        return self.variance.sqrt()

    def update(self, values: Tensor) -> None:
        """Counts rows [..., *shape] of any real dtype, those of all processes together.

        Raises:
            ConfigurationError: The shape is another, or a value is not finite.
        """
        count_rows([self], [values], ["values"])

    @torch.no_grad()
    def merge(self, new: Moments) -> None:
        """Takes in the moments of rows that were not counted yet."""
        merged = _merged(Moments(self.count.double(), self.mean, self.m2), new)
        self.count.copy_(merged.n)
        self.mean.copy_(merged.mean)
        self.m2.copy_(merged.m2)
        self._refresh()

    def _refresh(self) -> None:
        self.variance.copy_(torch.where(self.count > 0, self.m2 / self.count.clamp(min=1), 1.0))

    def _load_from_state_dict(self, *args: Any, **keywords: Any) -> None:
        super()._load_from_state_dict(*args, **keywords)
        with torch.no_grad():
            self._refresh()

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"shape={self.shape}"


class Moments(NamedTuple):
    """Of some rows: their number (float64 ()), their mean and m2 (float64 [*shape])."""

    n: Tensor
    mean: Tensor
    m2: Tensor


@torch.no_grad()
def count_rows(
    statistics: Sequence[RunningStatistics], values: Sequence[Tensor], names: Sequence[str]
) -> None:
    """Lets each of the statistics count its rows [..., *shape], those of all processes together.

    Raises:
        ConfigurationError: A shape is another, or a value is not finite; nothing has been counted.
    """
    moments = [_moments_of(*each) for each in zip(values, statistics, names, strict=True)]
    for of_rank in _of_all_ranks(moments):
        for each, new in zip(statistics, of_rank, strict=True):
            each.merge(new)


def check_shape(value: object, shape: tuple[int, ...], name: str) -> None:
    """Checks that a value is a tensor [..., *shape].

    Raises:
        ConfigurationError: It is something else.
    """
    if not isinstance(value, Tensor):
        raise ConfigurationError(f"`{name}` must be a torch.Tensor, got {type(value).__name__}")
    if value.shape[max(0, value.ndim - len(shape)) :] != shape:
        wanted = ", ".join(["...", *map(str, shape)])
        raise ConfigurationError(
            f"`{name}` must have the shape [{wanted}], got {list(value.shape)}"
        )


def _moments_of(values: Tensor, statistics: RunningStatistics, name: str) -> Moments:
    check_shape(values, statistics.shape, name)
    like, leading = statistics.mean, values.ndim - len(statistics.shape)
    rows = values.flatten(0, leading - 1) if leading else values.unsqueeze(0)
    total = Moments(like.new_zeros(()), torch.zeros_like(like), torch.zeros_like(like))
    size = max(1, _CHUNK // max(1, like.numel()))
    for start in range(0, len(rows), size):
        part = rows[start : start + size].to(like)
        mean = part.mean(0)
        distance = part - mean
        # The mean is rounded, so the distances do not quite add up to 0: the same paper, section 3.
        m2 = distance.square().sum(0) - distance.sum(0).square() / len(part)
        total = _merged(total, Moments(like.new_tensor(len(part)), mean, m2))
    # One look at the sums, as a look at each number costs more.
    if not bool((total.mean.sum() + total.m2.sum()).isfinite()):
        place = (~values.isfinite()).nonzero()
        got = "numbers whose squares are not"
        if len(place):
            got = f"{values[tuple(place[0])].item()} at {place[0].tolist()}"
        raise ConfigurationError(f"`{name}` must be finite, got {got}")
    return total


def _merged(a: Moments, b: Moments) -> Moments:
    """Those of both; a side without rows leaves the other one exactly as it is."""
    n = a.n + b.n
    weight, delta = b.n / n.clamp(min=1.0), b.mean - a.mean
    m2 = a.m2 + b.m2 + delta.square() * (a.n * weight)
    return Moments(n, a.mean + delta * weight, m2)


def _of_all_ranks(moments: Sequence[Moments]) -> list[list[Moments]]:
    """The moments that each process was given, in the order of ranks."""
    if not distributed.is_available() or not distributed.is_initialized():
        return [list(moments)]
    flat = torch.cat([part.flatten() for each in moments for part in each])
    table = flat.new_zeros(distributed.get_world_size(), len(flat))
    table[distributed.get_rank()] = flat
    # A sum with zeros is a gather, which Gloo has not for CUDA tensors.
    distributed.all_reduce(table)
    gathered: list[list[Moments]] = []
    for row in table:
        of_rank, start = [], 0
        for each in moments:
            size = each.mean.numel()
            n, mean, m2 = torch.tensor_split(row[start : start + 1 + 2 * size], (1, 1 + size))
            of_rank.append(Moments(n[0], mean.view_as(each.mean), m2.view_as(each.m2)))
            start += 1 + 2 * size
        gathered.append(of_rank)
    return gathered
