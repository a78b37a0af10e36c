"""Returns and advantages against a plain loop in float64, and the identities between them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gymtask import returns
from gymtask.returns import discounted_returns, generalized_advantage_estimate

SHAPES = [
    (0,),
    (0, 5),
    (3, 0),
    (1,),
    (5, 1),
    (2, 3, 4),
    (1000,),
    (3, 683),
    (2, 1025),
    (3, 2048),
    (1, 4097),
    (10_000,),
]
COEFFICIENTS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5), (0.5, 1.0)]

thorough = settings(deadline=None, max_examples=100)


@dataclass
class Rollout:
    """Arguments of both functions, with the flags that each row may have, both at once included."""

    reward: Tensor
    value: Tensor
    next_value: Tensor
    terminated: Tensor
    truncated: Tensor
    end: Tensor | None

    @classmethod
    def random(
        cls, shape: tuple[int, ...], seed: int, density: float, dtype: torch.dtype = torch.float32
    ) -> "Rollout":
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(3, *shape, generator=generator, dtype=torch.float64).to(dtype)
        flags = torch.rand(3, *shape, generator=generator) < density
        return cls(*numbers, *flags)

    def map(self, function) -> "Rollout":  # type: ignore[no-untyped-def]
        tensors: dict[str, Any] = {
            k: t if t is None else function(t) for k, t in vars(self).items()
        }
        return Rollout(**tensors)

    def last(self) -> Tensor:
        last = torch.zeros_like(self.terminated) if self.end is None else self.end.clone()
        last[..., -1:] = True
        return last

    def stops(self) -> Tensor:
        return self.terminated | self.truncated | self.last()

    def returns(self, gamma: float, bootstrap: bool = True) -> Tensor:
        return discounted_returns(
            self.reward,
            terminated=self.terminated,
            truncated=self.truncated,
            gamma=gamma,
            next_value=self.next_value if bootstrap else None,
            end=self.end,
        )

    def gae(self, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
        return generalized_advantage_estimate(
            self.reward,
            value=self.value,
            next_value=self.next_value,
            terminated=self.terminated,
            truncated=self.truncated,
            gamma=gamma,
            gae_lambda=gae_lambda,
            end=self.end,
        )

    def both(self, gamma: float, gae_lambda: float) -> list[Tensor]:
        return [self.returns(gamma), *self.gae(gamma, gae_lambda)]


def loop(x: Tensor, stops: Tensor, coefficient: float) -> Tensor:
    """The recurrence, row by row."""
    following = torch.zeros_like(x[..., 0])
    rows = []
    for row, stop in zip(reversed(x.unbind(-1)), reversed(stops.unbind(-1)), strict=True):
        following = row + coefficient * following * ~stop
        rows.append(following)
    return torch.stack(rows[::-1], -1)


def loop_returns(rollout: Rollout, gamma: float) -> Tensor:
    r, n = rollout.reward.double(), rollout.next_value.double()
    cut = (rollout.truncated | rollout.last()) & ~rollout.terminated
    return loop(r + gamma * n * cut, rollout.stops(), gamma)


def loop_gae(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    r, v, n = rollout.reward.double(), rollout.value.double(), rollout.next_value.double()
    advantage = loop(r + gamma * n * ~rollout.terminated - v, rollout.stops(), gamma * gae_lambda)
    return advantage, advantage + v


def loop_both(rollout: Rollout, gamma: float, gae_lambda: float) -> list[Tensor]:
    if rollout.reward.shape[-1] == 0:
        return [rollout.reward.double()] * 3
    return [loop_returns(rollout, gamma), *loop_gae(rollout, gamma, gae_lambda)]


def assert_near(result: Tensor, exact: Tensor, tolerance: float = 1e-5) -> None:
    """The promise: within tolerance * max(1, max |exact|)."""
    result, exact = result.detach(), exact.detach()
    assert result.shape == exact.shape
    if exact.numel():
        assert (result - exact).abs().max() <= tolerance * max(1.0, float(exact.abs().max()))


# Against the loop.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3])
def test_both_match_the_loop(shape: tuple[int, ...], density: float) -> None:
    rollout = Rollout.random(shape, seed=0, density=density)
    for gamma, gae_lambda in COEFFICIENTS[: 2 if rollout.reward.numel() > 4000 else None]:
        results = rollout.both(gamma, gae_lambda)
        for result, exact in zip(results, loop_both(rollout, gamma, gae_lambda), strict=True):
            assert_near(result, exact)


@pytest.mark.parametrize("grad", [False, True])
def test_advantages_of_a_good_critic_of_large_values_match_the_loop(grad: bool) -> None:
    # Advantages are about 1 where values are 1e5: float32 arithmetic would be off by 1e-2 a row.
    rollout = Rollout.random((2, 3000), seed=1, density=0.01)
    rollout.next_value = rollout.value + 1e5
    rollout.value = rollout.value + 1e5
    rollout.reward = (rollout.reward * 0.1).requires_grad_(grad)
    for gamma, gae_lambda in [(1.0, 1.0), (1.0, 0.95)]:
        results = rollout.both(gamma, gae_lambda)
        for result, exact in zip(results, loop_both(rollout, gamma, gae_lambda), strict=True):
            assert_near(result, exact)


def test_targets_of_a_bad_critic_of_large_values_match_the_loop() -> None:
    # Targets are about 1 where advantages are -1e5.
    rollout = Rollout.random((3000,), seed=2, density=0.0)
    rollout.terminated[-1] = True
    rollout.value = rollout.value + 1e5
    rollout.next_value = torch.cat([rollout.value[1:], rollout.value[:1]])
    advantage, target = rollout.gae(0.9, 1.0)
    exact = loop_gae(rollout, 0.9, 1.0)
    assert exact[1].abs().max() < 100
    assert_near(advantage, exact[0])
    assert_near(target, exact[1])


@pytest.mark.parametrize("shape", [(7,), (3, 4, 5), (2, 2500)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_float64_is_computed_as_float64(shape: tuple[int, ...], grad: bool) -> None:
    rollout = Rollout.random(shape, seed=3, density=0.02, dtype=torch.float64)
    rollout.reward.requires_grad_(grad)
    results = rollout.both(0.99, 0.95)
    for result, exact in zip(results, loop_both(rollout, 0.99, 0.95), strict=True):
        assert result.dtype == torch.float64
        assert_near(result, exact, tolerance=1e-13)


@pytest.mark.filterwarnings("ignore::gymtask.errors.CutReturnWarning")
def test_strided_tensors_give_what_contiguous_ones_give() -> None:
    rollout = Rollout.random((5, 40), seed=4, density=0.05)
    alone = rollout.returns(0.9, bootstrap=False)
    time_first = rollout.map(lambda t: t.t().contiguous().t())
    every_other = rollout.map(lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2])
    for other in (time_first, every_other):
        assert not other.reward.is_contiguous()
        assert torch.equal(other.returns(0.9, bootstrap=False), alone)
        for result, expected in zip(other.both(0.9, 0.8), rollout.both(0.9, 0.8), strict=True):
            assert torch.equal(result, expected)


def test_lazily_negated_tensors_are_taken() -> None:
    rollout = Rollout.random((5, 40), seed=5, density=0.05)
    negated = torch.complex(rollout.value, rollout.value).conj().imag
    assert negated.is_neg()
    rollout.value = -rollout.value
    expected = rollout.both(0.9, 0.8)
    rollout.value = negated
    for result, other in zip(rollout.both(0.9, 0.8), expected, strict=True):
        torch.testing.assert_close(result, other)


def test_one_value_expanded_over_all_rows_is_taken() -> None:
    rollout = Rollout.random((5, 40), seed=5, density=0.05)
    rollout.value = torch.ones(()).expand(5, 40)
    copied = rollout.map(torch.clone)
    for result, expected in zip(rollout.both(0.9, 0.8), copied.both(0.9, 0.8), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.filterwarnings("ignore::gymtask.errors.CutReturnWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_returns_without_next_value_are_those_with_a_next_value_of_zero(grad: bool) -> None:
    rollout = Rollout.random((4, 50), seed=6, density=0.05)
    rollout.reward.requires_grad_(grad)
    zero = Rollout(**(vars(rollout) | {"next_value": torch.zeros(4, 50)}))
    assert torch.equal(rollout.returns(0.9, bootstrap=False), zero.returns(0.9))


# Gradients.


@pytest.mark.parametrize("shape", [(1,), (9,), (2, 3, 17)], ids=str)
def test_gradients_match_those_of_the_loop(shape: tuple[int, ...]) -> None:
    def gradients(function) -> Iterator[Tensor]:  # type: ignore[no-untyped-def]
        rollout = Rollout.random(shape, seed=7, density=0.2)
        leaves = [rollout.reward, rollout.value, rollout.next_value]
        for leaf in leaves:
            leaf.requires_grad_()
        weights = torch.Generator().manual_seed(8)
        loss = sum(
            (result * torch.randn(shape, generator=weights)).sum()
            for result in function(rollout, 0.9, 0.8)
        )
        assert isinstance(loss, Tensor)
        return iter(torch.autograd.grad(loss, leaves))

    for ours, theirs in zip(gradients(Rollout.both), gradients(loop_both), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_match_finite_differences() -> None:
    rollout = Rollout.random((2, 6), seed=9, density=0.2, dtype=torch.float64)
    leaves = [rollout.reward, rollout.value, rollout.next_value]

    def results(reward: Tensor, value: Tensor, next_value: Tensor) -> tuple[Tensor, ...]:
        flags = (rollout.terminated, rollout.truncated, rollout.end)
        return tuple(Rollout(reward, value, next_value, *flags).both(0.9, 0.8))

    assert torch.autograd.gradcheck(results, [leaf.requires_grad_() for leaf in leaves])


def test_no_gradient_is_kept_where_none_is_asked_for() -> None:
    rollout = Rollout.random((3, 40), seed=10, density=0.1)
    expected = rollout.both(0.9, 0.8)
    rollout.value.requires_grad_()
    with torch.no_grad():
        results = rollout.both(0.9, 0.8)
    for result, same in zip(results, expected, strict=True):
        assert not result.requires_grad
        torch.testing.assert_close(result, same)
    assert rollout.gae(0.9, 0.8)[0].requires_grad


# Over random rollouts.

fractions = st.sampled_from([0.0, 1e-9, 0.5, 0.9, 0.99, 1.0])


@st.composite
def rollouts(draw: st.DrawFn, min_rows: int = 1) -> Rollout:
    shape = (draw(st.integers(1, 3)), draw(st.integers(min_rows, 40)))
    density = draw(st.sampled_from([0.0, 0.1, 0.5]))
    rollout = Rollout.random(shape, draw(st.integers(0, 2**32)), density)
    if draw(st.booleans()):
        rollout.end = None
    return rollout


# 1 halves down to single rows, 3 to odd numbers of rows, the real one not at all at these lengths.
smalls = st.sampled_from([1, 3, returns._SMALL])


@thorough
@given(rollouts(), fractions, fractions, smalls)
def test_both_match_the_loop_however_the_work_is_split(
    rollout: Rollout, gamma: float, gae_lambda: float, small: int
) -> None:
    with mock.patch.object(returns, "_SMALL", small):
        results = rollout.both(gamma, gae_lambda)
    for result, exact in zip(results, loop_both(rollout, gamma, gae_lambda), strict=True):
        assert_near(result, exact)


@thorough
@given(rollouts(), fractions, fractions)
def test_torch_and_numpy_agree(rollout: Rollout, gamma: float, gae_lambda: float) -> None:
    expected = rollout.both(gamma, gae_lambda)
    rollout.reward.requires_grad_()
    for result, other in zip(rollout.both(gamma, gae_lambda), expected, strict=True):
        torch.testing.assert_close(result.detach(), other, rtol=1e-6, atol=1e-6)


@thorough
@given(
    rollouts(min_rows=2),
    st.data(),
    st.sampled_from(["terminated", "truncated", "end"]),
    smalls,
    st.booleans(),
)
def test_nothing_flows_over_a_boundary(
    rollout: Rollout, data: st.DataObject, kind: str, small: int, grad: bool
) -> None:
    rows = rollout.reward.shape[-1]
    boundary = data.draw(st.integers(0, rows - 2))
    if rollout.end is None:
        rollout.end = torch.zeros_like(rollout.terminated)
    vars(rollout)[kind][..., boundary] = True
    changed = rollout.map(torch.clone)
    after = slice(boundary + 1, None)
    changed.reward[..., after] = math.nan
    changed.value[..., after] = math.inf
    changed.next_value[..., after] = -math.inf
    for flag in (changed.terminated, changed.truncated, changed.end):
        assert flag is not None
        flag[..., after] ^= True
    if grad:
        rollout.reward.requires_grad_()
        changed.reward.requires_grad_()
    with mock.patch.object(returns, "_SMALL", small):
        before, now = rollout.both(0.99, 0.95), changed.both(0.99, 0.95)
    for result, other in zip(before, now, strict=True):
        assert torch.equal(result[..., : boundary + 1], other[..., : boundary + 1])


@thorough
@given(rollouts(min_rows=2), st.data(), smalls)
def test_pieces_end_to_end_give_what_each_gives_alone(
    rollout: Rollout, data: st.DataObject, small: int
) -> None:
    rows = rollout.reward.shape[-1]
    cuts = data.draw(st.sets(st.integers(1, rows - 1), max_size=5))
    starts, stops = [0, *sorted(cuts)], [*sorted(cuts), rows]
    rollout.end = torch.zeros_like(rollout.terminated)
    rollout.end[..., [stop - 1 for stop in stops]] = True
    with mock.patch.object(returns, "_SMALL", small):
        together = rollout.both(0.99, 0.95)
    rollout.end = None
    pieces = [
        rollout.map(lambda t, a=a, b=b: t[..., a:b]) for a, b in zip(starts, stops, strict=True)
    ]
    alone = zip(*(piece.both(0.99, 0.95) for piece in pieces), strict=True)
    for result, parts in zip(together, alone, strict=True):
        torch.testing.assert_close(result, torch.cat(parts, -1), rtol=1e-6, atol=1e-6)


@thorough
@given(rollouts(), fractions)
def test_lambda_one_is_the_bootstrapped_return_minus_the_value(
    rollout: Rollout, gamma: float
) -> None:
    # Inside a piece the next value is that of the next row, as in any rollout.
    following = rollout.value.roll(-1, -1)
    rollout.next_value = torch.where(rollout.stops(), rollout.next_value, following)
    advantage, target = rollout.gae(gamma, 1.0)
    result = rollout.returns(gamma)
    assert_near(advantage, result.double() - rollout.value.double())
    assert_near(target, result.double())


@thorough
@given(rollouts(), fractions)
def test_lambda_zero_is_the_td_error(rollout: Rollout, gamma: float) -> None:
    bootstrap = torch.where(rollout.terminated, 0.0, rollout.next_value.double())
    target = rollout.reward + gamma * bootstrap
    advantage, value_target = rollout.gae(gamma, 0.0)
    assert_near(advantage, target - rollout.value)
    assert_near(value_target, target)


@thorough
@given(rollouts(), fractions, fractions)
def test_lanes_do_not_mix(rollout: Rollout, gamma: float, gae_lambda: float) -> None:
    for lane in range(rollout.reward.shape[0]):
        alone = rollout.map(lambda t, lane=lane: t[lane])
        expected = alone.both(gamma, gae_lambda)
        for result, other in zip(rollout.both(gamma, gae_lambda), expected, strict=True):
            torch.testing.assert_close(result[lane], other, rtol=1e-6, atol=1e-6)
