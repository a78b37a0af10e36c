"""Returns and advantages against a plain loop in float64; what they may not mix, and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gymtask import scans
from tests.property.rollouts import (
    Rollout,
    assert_all_near,
    assert_near,
    fractions,
    loop_every,
    rollouts,
    thorough,
)

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


# Against the loop.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3])
def test_all_match_the_loop(shape: tuple[int, ...], density: float) -> None:
    rollout = replace(Rollout.random(shape, seed=0, density=density), n=100)
    for gamma, lambda_ in COEFFICIENTS[: 2 if rollout.reward.numel() > 4000 else None]:
        assert_all_near(rollout, gamma, lambda_)


@pytest.mark.parametrize("shape", [(9,), (2, 700)], ids=str)
@pytest.mark.parametrize("clips", [(2.0, 1.0), (1.0, 0.5), (0.5, 3.0), (math.inf, 1.0), (5.0, 2.0)])
def test_vtrace_matches_the_loop_whatever_the_clips(
    shape: tuple[int, ...], clips: tuple[float, float]
) -> None:
    rollout = Rollout.random(shape, seed=11, density=0.02)
    assert_all_near(replace(rollout, rho_clip=clips[0], c_clip=clips[1]), 0.99, 0.9)


def test_vtrace_without_any_clip_matches_the_loop() -> None:
    rollout = Rollout.random((3, 20), seed=12, density=0.1)
    assert_all_near(replace(rollout, rho_clip=math.inf, c_clip=math.inf), 0.9, 1.0)


@pytest.mark.parametrize("grad", [False, True])
def test_vtrace_matches_the_loop_where_errors_grow_on_their_way_back(grad: bool) -> None:
    # By 1.5 a row, as all ratios are 4 and the clip is 3.
    rollout = replace(Rollout.random((2, 200), seed=14, density=0.0), rho_clip=3.0, c_clip=3.0)
    rollout.log_prob = (rollout.behaviour_log_prob + math.log(4.0)).requires_grad_(grad)
    exact = loop_every(rollout, 0.5, 1.0)[-2:]
    assert exact[1].abs().max() > 1e30
    for result, other in zip(rollout.vtrace(0.5, 1.0), exact, strict=True):
        assert_near(result, other)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 63, 64, 65, 299, 300, 301, 10**12])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_sums_of_any_number_of_rows_match_the_loop(n: int, gamma: float) -> None:
    rollout = Rollout.random((2, 300), seed=13, density=0.01)
    exact = loop_every(replace(rollout, n=min(n, 300)), gamma, 1.0)[4]
    assert_near(rollout.n_step(gamma, n), exact)


def test_sums_of_many_rows_count_large_next_values_however_small_their_weight() -> None:
    rollout = replace(Rollout.random((100,), seed=15, density=0.0), n=65)
    rollout.next_value[:-1] = 1e12
    exact = loop_every(rollout, 0.6, 1.0)[4]
    assert exact.abs().max() < 10
    assert_near(rollout.n_step(0.6), exact)


@pytest.mark.parametrize("grad", [False, True])
def test_advantages_of_a_good_critic_of_large_values_match_the_loop(grad: bool) -> None:
    # Advantages are about 1 where values are 1e5: float32 arithmetic would be off by 1e-2 a row.
    rollout = Rollout.random((2, 3000), seed=1, density=0.01)
    rollout.next_value = rollout.value + 1e5
    rollout.value = rollout.value + 1e5
    rollout.reward = (rollout.reward * 0.1).requires_grad_(grad)
    for gamma, lambda_ in [(1.0, 1.0), (1.0, 0.95)]:
        assert_all_near(rollout, gamma, lambda_)


def test_targets_of_a_bad_critic_of_large_values_match_the_loop() -> None:
    # Targets are about 1 where advantages are -1e5.
    rollout = Rollout.random((3000,), seed=2, density=0.0)
    rollout.terminated[-1] = True
    rollout.value = rollout.value + 1e5
    rollout.next_value = torch.cat([rollout.value[1:], rollout.value[:1]])
    exact = loop_every(rollout, 0.9, 1.0)
    assert exact[2].abs().max() < 100
    assert_all_near(rollout, 0.9, 1.0)


@pytest.mark.parametrize("shape", [(7,), (3, 4, 5), (2, 2500)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_float64_is_computed_as_float64(shape: tuple[int, ...], grad: bool) -> None:
    rollout = Rollout.random(shape, seed=3, density=0.02, dtype=torch.float64)
    rollout.reward.requires_grad_(grad)
    assert all(result.dtype == torch.float64 for result in rollout.every(0.99, 0.95))
    assert_all_near(rollout, 0.99, 0.95, tolerance=1e-13)


@pytest.mark.filterwarnings("ignore::gymtask.errors.CutReturnWarning")
def test_strided_tensors_give_what_contiguous_ones_give() -> None:
    rollout = Rollout.random((5, 40), seed=4, density=0.05)
    alone = rollout.discounted(0.9, bootstrap=False)
    time_first = rollout.map(lambda t: t.t().contiguous().t())
    every_other = rollout.map(lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2])
    for other in (time_first, every_other):
        assert not other.reward.is_contiguous()
        assert torch.equal(other.discounted(0.9, bootstrap=False), alone)
        for result, expected in zip(other.every(0.9, 0.8), rollout.every(0.9, 0.8), strict=True):
            assert torch.equal(result, expected)


def test_lazily_negated_tensors_are_taken() -> None:
    rollout = Rollout.random((5, 40), seed=5, density=0.05)
    negated = torch.complex(rollout.value, rollout.value).conj().imag
    assert negated.is_neg()
    rollout.value = -rollout.value
    expected = rollout.every(0.9, 0.8)
    rollout.value = negated
    for result, other in zip(rollout.every(0.9, 0.8), expected, strict=True):
        torch.testing.assert_close(result, other)


def test_one_value_expanded_over_all_rows_is_taken() -> None:
    rollout = Rollout.random((5, 40), seed=5, density=0.05)
    rollout.value = torch.ones(()).expand(5, 40)
    copied = rollout.map(torch.clone)
    for result, expected in zip(rollout.every(0.9, 0.8), copied.every(0.9, 0.8), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.filterwarnings("ignore::gymtask.errors.CutReturnWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_returns_without_next_value_are_those_with_a_next_value_of_zero(grad: bool) -> None:
    rollout = Rollout.random((4, 50), seed=6, density=0.05)
    rollout.reward.requires_grad_(grad)
    zero = replace(rollout, next_value=torch.zeros(4, 50))
    assert torch.equal(rollout.discounted(0.9, bootstrap=False), zero.discounted(0.9))


# Gradients.


@pytest.mark.parametrize("shape", [(1,), (9,), (2, 3, 17)], ids=str)
@pytest.mark.parametrize("clips", [(1.0, 1.0), (3.0, 2.0)])
def test_gradients_match_those_of_the_loop(
    shape: tuple[int, ...], clips: tuple[float, float]
) -> None:
    def gradients(function: Callable[..., list[Tensor]]) -> Iterator[Tensor]:
        rollout = Rollout.random(shape, seed=7, density=0.2)
        rollout.rho_clip, rollout.c_clip = clips
        leaves = [leaf.requires_grad_() for leaf in rollout.leaves()]
        weights = torch.Generator().manual_seed(8)
        loss = sum(
            (result * torch.randn(shape, generator=weights)).sum()
            for result in function(rollout, 0.9, 0.8)
        )
        assert isinstance(loss, Tensor)
        return iter(torch.autograd.grad(loss, leaves))

    for ours, theirs in zip(gradients(Rollout.every), gradients(loop_every), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clips", [(1.0, 1.0), (3.0, 2.0)])
def test_gradients_match_finite_differences(clips: tuple[float, float]) -> None:
    rollout = Rollout.random((2, 6), seed=9, density=0.2, dtype=torch.float64)
    rollout.rho_clip, rollout.c_clip = clips
    names = list(vars(rollout))[:5]

    def results(*leaves: Tensor) -> tuple[Tensor, ...]:
        given = replace(rollout, **dict(zip(names, leaves, strict=True)))
        return tuple(given.every(0.9, 0.8))

    leaves = [leaf.requires_grad_() for leaf in rollout.leaves()]
    assert torch.autograd.gradcheck(results, leaves)


def test_no_gradient_is_kept_where_none_is_asked_for() -> None:
    rollout = Rollout.random((3, 40), seed=10, density=0.1)
    expected = rollout.every(0.9, 0.8)
    rollout.next_value.requires_grad_()
    with torch.no_grad():
        results = rollout.every(0.9, 0.8)
    for result, same in zip(results, expected, strict=True):
        assert not result.requires_grad
        torch.testing.assert_close(result, same)
    assert all(result.requires_grad for result in rollout.every(0.9, 0.8))


# Over random rollouts.

# Halved down to single rows, lane by lane; to odd numbers of rows, some lanes at a time; as it is.
splits = st.sampled_from([(1, 1), (3, 64), (scans._SMALL, scans._CACHED)])


@contextmanager
def work_split(split: tuple[int, int]) -> Iterator[None]:
    with (
        mock.patch.object(scans, "_SMALL", split[0]),
        mock.patch.object(scans, "_CACHED", split[1]),
    ):
        yield


@thorough
@given(rollouts(), fractions, fractions, splits)
def test_all_match_the_loop_however_the_work_is_split(
    rollout: Rollout, gamma: float, lambda_: float, split: tuple[int, int]
) -> None:
    with work_split(split):
        assert_all_near(rollout, gamma, lambda_)


@thorough
@given(rollouts(), fractions, fractions)
def test_torch_and_numpy_agree(rollout: Rollout, gamma: float, lambda_: float) -> None:
    expected = rollout.every(gamma, lambda_)
    rollout.next_value.requires_grad_()
    for result, other in zip(rollout.every(gamma, lambda_), expected, strict=True):
        torch.testing.assert_close(result.detach(), other, rtol=1e-6, atol=1e-6)


@thorough
@given(
    rollouts(min_rows=2),
    st.data(),
    st.sampled_from(["terminated", "truncated", "end"]),
    st.sampled_from([(math.nan, math.inf, -math.inf), (1e9, -1e9, 1e8)]),
    splits,
    st.booleans(),
)
def test_nothing_flows_over_a_boundary(
    rollout: Rollout,
    data: st.DataObject,
    kind: str,
    poison: tuple[float, float, float],
    split: tuple[int, int],
    grad: bool,
) -> None:
    rows = rollout.reward.shape[-1]
    boundary = data.draw(st.integers(0, rows - 2))
    if rollout.end is None:
        rollout.end = torch.zeros_like(rollout.terminated)
    vars(rollout)[kind][..., boundary] = True
    changed = rollout.map(torch.clone)
    after = slice(boundary + 1, None)
    changed.reward[..., after], changed.value[..., after], changed.next_value[..., after] = poison
    changed.log_prob[..., after] = poison[0]
    for flag in (changed.terminated, changed.truncated, changed.end):
        assert flag is not None
        flag[..., after] ^= True
    if grad:
        rollout.log_prob.requires_grad_()
        changed.log_prob.requires_grad_()
    with work_split(split):
        before, now = rollout.every(0.99, 0.95), changed.every(0.99, 0.95)
    # Arrays that hold NaN or infinity are added up in another order.
    near = 0.0 if math.isfinite(poison[0]) else 1e-6
    for result, other in zip(before, now, strict=True):
        kept = result[..., : boundary + 1], other[..., : boundary + 1]
        torch.testing.assert_close(*kept, rtol=near, atol=near)
    if grad:
        (gradient,) = torch.autograd.grad(sum(r[..., 0].sum() for r in now[-2:]), changed.log_prob)
        assert not gradient[..., after].any()
        assert gradient[..., : boundary + 1].isfinite().all()


@thorough
@given(rollouts(min_rows=2), st.data(), splits)
def test_pieces_end_to_end_give_what_each_gives_alone(
    rollout: Rollout, data: st.DataObject, split: tuple[int, int]
) -> None:
    rows = rollout.reward.shape[-1]
    cuts = data.draw(st.sets(st.integers(1, rows - 1), max_size=5))
    starts, stops = [0, *sorted(cuts)], [*sorted(cuts), rows]
    rollout.end = torch.zeros_like(rollout.terminated)
    rollout.end[..., [stop - 1 for stop in stops]] = True
    with work_split(split):
        together = rollout.every(0.99, 0.95)
    rollout.end = None
    pieces = [
        rollout.map(lambda t, a=a, b=b: t[..., a:b]) for a, b in zip(starts, stops, strict=True)
    ]
    alone = zip(*(piece.every(0.99, 0.95) for piece in pieces), strict=True)
    for result, parts in zip(together, alone, strict=True):
        torch.testing.assert_close(result, torch.cat(parts, -1), rtol=1e-6, atol=1e-6)


@thorough
@given(rollouts(), fractions, fractions)
def test_lanes_do_not_mix(rollout: Rollout, gamma: float, lambda_: float) -> None:
    together = rollout.every(gamma, lambda_)
    lanes = rollout.map(lambda t: t.reshape(-1, t.shape[-1]))
    for lane in range(lanes.reward.shape[0]):
        alone = lanes.map(lambda t, lane=lane: t[lane]).every(gamma, lambda_)
        for result, other in zip(together, alone, strict=True):
            kept = result.reshape(lanes.reward.shape)[lane]
            torch.testing.assert_close(kept, other, rtol=1e-6, atol=1e-6)
