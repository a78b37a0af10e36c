"""Returns and advantages of a few rows, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gymtask.returns import (
    discounted_returns,
    generalized_advantage_estimate,
    lambda_returns,
    n_step_returns,
    vtrace,
)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def flags(*rows: int, length: int) -> Tensor:
    """True at the given rows."""
    return torch.tensor([row in rows for row in range(length)], dtype=torch.bool)


# Discounted returns and generalized advantages.


def test_truncated_row_bootstraps_from_its_true_next_observation() -> None:
    advantage, target = generalized_advantage_estimate(
        floats(1, 1, 1, 1),
        value=floats(2, 2, 50, 2),
        next_value=floats(2, 2, 2, 2),
        terminated=flags(length=4),
        truncated=flags(1, length=4),
        gamma=0.9,
        gae_lambda=0.8,
    )
    # Row 2 begins the next episode: 1 + 0.9 * 2 - 50 + 0.72 * 0.8.
    torch.testing.assert_close(advantage, floats(1.376, 0.8, -46.624, 0.8))
    torch.testing.assert_close(target, floats(3.376, 2.8, 3.376, 2.8))


def test_terminated_row_ends_its_own_episode_and_not_its_neighbours() -> None:
    advantage, _ = generalized_advantage_estimate(
        floats(1, 1, 1),
        value=floats(2, 2, 50),
        next_value=floats(2, 50, 2),
        terminated=flags(1, length=3),
        truncated=flags(length=3),
        gamma=0.9,
        gae_lambda=0.8,
    )
    torch.testing.assert_close(advantage, floats(0.08, -1.0, -47.2))


def test_returns_do_not_leak_into_the_episode_before() -> None:
    result = discounted_returns(
        floats(1, 2, 4, 8),
        terminated=flags(1, 3, length=4),
        truncated=flags(length=4),
        gamma=0.5,
    )
    torch.testing.assert_close(result, floats(2, 2, 8, 8))


def test_cut_after_the_terminated_row_leaves_the_bare_reward() -> None:
    terminated = flags(2, length=3)
    result = discounted_returns(
        floats(1, 2, 3),
        terminated=terminated,
        truncated=flags(length=3),
        gamma=0.5,
        next_value=floats(70, 80, 90),
    )
    torch.testing.assert_close(result, floats(2.75, 3.5, 3))
    assert terminated.tolist() == [False, False, True]


def test_cut_before_the_episode_is_over_bootstraps() -> None:
    result = discounted_returns(
        floats(1, 2),
        terminated=flags(length=2),
        truncated=flags(length=2),
        gamma=0.5,
        next_value=floats(70, 10),
    )
    torch.testing.assert_close(result, floats(4.5, 7))


def test_end_bootstraps_each_piece() -> None:
    result = discounted_returns(
        floats(1, 2, 4, 8),
        terminated=flags(length=4),
        truncated=flags(length=4),
        gamma=0.5,
        next_value=floats(100, 16, 100, 32),
        end=flags(1, length=4),
    )
    torch.testing.assert_close(result, floats(6, 10, 16, 24))


@pytest.mark.filterwarnings("ignore::gymtask.errors.CutReturnWarning")
def test_without_next_value_a_truncated_row_counts_as_followed_by_nothing() -> None:
    result = discounted_returns(
        floats(1, 2, 4, 8),
        terminated=flags(length=4),
        truncated=flags(1, 3, length=4),
        gamma=0.5,
    )
    torch.testing.assert_close(result, floats(2, 2, 8, 8))


# Lambda returns, of gamma = lambda = 0.5: each next value counts a quarter, as does the next row.


def lambdas(*, terminated: Tensor, truncated: Tensor, end: Tensor | None = None) -> Tensor:
    return lambda_returns(
        floats(1, 2, 4),
        next_value=floats(10, 20, 30),
        terminated=terminated,
        truncated=truncated,
        gamma=0.5,
        lambda_=0.5,
        end=end,
    )


def test_lambda_return_mixes_next_value_and_next_row_up_to_the_last_row() -> None:
    result = lambdas(terminated=flags(length=3), truncated=flags(length=3))
    # 1 + (10 + 11.75) / 4, 2 + (20 + 19) / 4, 4 + 30 / 2.
    torch.testing.assert_close(result, floats(6.4375, 11.75, 19))


def test_lambda_return_of_a_terminated_row_is_its_reward() -> None:
    result = lambdas(terminated=flags(1, length=3), truncated=flags(1, length=3))
    # 1 + (10 + 2) / 4.
    torch.testing.assert_close(result, floats(4, 2, 19))


def test_lambda_return_of_a_row_that_is_cut_counts_half_of_the_next_value() -> None:
    # 1 + (10 + 12) / 4, 2 + 20 / 2.
    expected = floats(6.5, 12, 19)
    none, cut = flags(length=3), flags(1, length=3)
    torch.testing.assert_close(lambdas(terminated=none, truncated=cut), expected)
    torch.testing.assert_close(lambdas(terminated=none, truncated=none, end=cut), expected)


# Sums of n rows, of gamma = 0.5.


def sums(n: int, *, terminated: Tensor, truncated: Tensor, end: Tensor | None = None) -> Tensor:
    return n_step_returns(
        floats(1, 2, 4, 8),
        next_value=floats(16, 32, 64, 128),
        terminated=terminated,
        truncated=truncated,
        gamma=0.5,
        n=n,
        end=end,
    )


def test_n_step_return_takes_the_next_value_of_its_last_row() -> None:
    none = flags(length=4)
    # r + 16 / 2 and so on.
    torch.testing.assert_close(sums(1, terminated=none, truncated=none), floats(9, 18, 36, 72))
    # 1 + 2 / 2 + 32 / 4, 2 + 4 / 2 + 64 / 4, 4 + 8 / 2 + 128 / 4, 8 + 128 / 2.
    torch.testing.assert_close(sums(2, terminated=none, truncated=none), floats(10, 20, 40, 72))
    # 1 + 2 / 2 + 4 / 4 + 64 / 8, 2 + 4 / 2 + 8 / 4 + 128 / 8.
    torch.testing.assert_close(sums(3, terminated=none, truncated=none), floats(11, 22, 40, 72))


@pytest.mark.parametrize("n", [4, 5, 100, 10**9])
def test_n_step_return_of_all_rows_takes_the_last_next_value(n: int) -> None:
    result = sums(n, terminated=flags(length=4), truncated=flags(length=4))
    # 1 + 2 / 2 + 4 / 4 + 8 / 8 + 128 / 16.
    torch.testing.assert_close(result, floats(12, 22, 40, 72))


def test_n_step_return_ends_at_a_terminated_row_without_a_next_value() -> None:
    result = sums(3, terminated=flags(1, length=4), truncated=flags(1, length=4))
    # 1 + 2 / 2; row 2 begins another episode.
    torch.testing.assert_close(result, floats(2, 2, 40, 72))


def test_n_step_return_ends_at_a_row_that_is_cut_with_its_next_value() -> None:
    none, cut = flags(length=4), flags(1, length=4)
    # 1 + 2 / 2 + 32 / 4, 2 + 32 / 2.
    expected = floats(10, 18, 40, 72)
    torch.testing.assert_close(sums(3, terminated=none, truncated=cut), expected)
    torch.testing.assert_close(sums(3, terminated=none, truncated=none, end=cut), expected)


# V-trace, of gamma = 0.5 and ratios 0.5, 2 and 1.


def traces(
    *,
    terminated: Tensor,
    truncated: Tensor,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    lambda_: float = 1.0,
    end: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return vtrace(
        floats(1, 2, 4),
        value=floats(2, 2, 2),
        next_value=floats(2, 2, 6),
        log_prob=floats(math.log(0.25), math.log(0.5), -1),
        behaviour_log_prob=floats(math.log(0.5), math.log(0.25), -1),
        terminated=terminated,
        truncated=truncated,
        gamma=0.5,
        rho_clip=rho_clip,
        c_clip=c_clip,
        lambda_=lambda_,
        end=end,
    )


def test_vtrace_weights_td_errors_by_the_clipped_ratios() -> None:
    advantage, target = traces(terminated=flags(length=3), truncated=flags(length=3))
    # TD errors 1 + 1 - 2, 2 + 1 - 2, 4 + 3 - 2; weighted 0, 1, 5; the error of row 2 reaches row 1
    # by 0.5 * 1, that of row 1 row 0 by 0.5 * 0.5: 0.25 * 3.5, 1 + 0.5 * 5, 5.
    torch.testing.assert_close(target, floats(2.875, 5.5, 7))
    # 0.5 * (1 + 5.5 / 2 - 2), 2 + 7 / 2 - 2, 4 + 6 / 2 - 2.
    torch.testing.assert_close(advantage, floats(0.875, 3.5, 5))


def test_rho_clip_limits_the_weight_of_a_rows_own_td_error() -> None:
    none = flags(length=3)
    advantage, target = traces(terminated=none, truncated=none, rho_clip=2.0)
    # Row 1 counts twice: 2 * 1 + 0.5 * 5, and row 0 gets 0.25 of it.
    torch.testing.assert_close(target, floats(3.125, 6.5, 7))
    # 0.5 * (1 + 6.5 / 2 - 2), 2 * (2 + 7 / 2 - 2).
    torch.testing.assert_close(advantage, floats(1.125, 7, 5))


def test_c_clip_and_lambda_limit_what_flows_back() -> None:
    none = flags(length=3)
    advantage, target = traces(terminated=none, truncated=none, c_clip=0.5)
    # 0.5 * 0.5 of the error of row 2 in row 1, 1 + 1.25, and 0.25 of that in row 0.
    torch.testing.assert_close(target, floats(2.5625, 4.25, 7))
    torch.testing.assert_close(advantage, floats(0.5625, 3.5, 5))
    advantage, target = traces(terminated=none, truncated=none, lambda_=0.5)
    # The same in row 1, but only 0.125 of its error in row 0, whose ratio is 0.5.
    torch.testing.assert_close(target, floats(2.28125, 4.25, 7))
    torch.testing.assert_close(advantage, floats(0.5625, 3.5, 5))


def test_vtrace_at_a_terminated_row_counts_neither_next_value_nor_next_row() -> None:
    advantage, target = traces(terminated=flags(1, length=3), truncated=flags(1, length=3))
    # The TD error of row 1 is 2 - 2.
    torch.testing.assert_close(target, floats(2, 2, 7))
    torch.testing.assert_close(advantage, floats(0, 0, 5))


def test_vtrace_at_a_row_that_is_cut_counts_its_next_value() -> None:
    none, cut = flags(length=3), flags(1, length=3)
    for given in ({"truncated": cut}, {"truncated": none, "end": cut}):
        advantage, target = traces(terminated=none, **given)
        # Row 1: 2 + 2 / 2 - 2 in both; row 0 gets a quarter, and 0.5 * (1 + 3 / 2 - 2).
        torch.testing.assert_close(target, floats(2.25, 3, 7))
        torch.testing.assert_close(advantage, floats(0.25, 1, 5))


def test_an_action_that_is_impossible_now_counts_nothing() -> None:
    log_prob = floats(-1, -math.inf, -1).requires_grad_()
    advantage, target = vtrace(
        floats(1, 2, 4),
        value=floats(2, 2, 2),
        next_value=floats(2, 2, 6),
        log_prob=log_prob,
        behaviour_log_prob=floats(-1, -1, -1),
        terminated=flags(length=3),
        truncated=flags(length=3),
        gamma=0.5,
    )
    torch.testing.assert_close(target, floats(2, 2, 7))
    torch.testing.assert_close(advantage, floats(0, 0, 5))
    (gradient,) = torch.autograd.grad((target + advantage).sum(), log_prob)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("grad", [False, True])
def test_a_ratio_that_overflows_is_clipped_and_has_no_gradient(grad: bool) -> None:
    log_prob = floats(2000, -1).requires_grad_(grad)
    advantage, target = vtrace(
        floats(1, 1),
        value=floats(0, 0),
        next_value=floats(0, 0),
        log_prob=log_prob,
        behaviour_log_prob=floats(-2000, -1),
        terminated=flags(length=2),
        truncated=flags(length=2),
        gamma=0.5,
        rho_clip=3.0,
    )
    # 3 * 1 + 0.5 * 1, 3 * (1 + 0.5 * 1).
    torch.testing.assert_close(target, floats(3.5, 1))
    torch.testing.assert_close(advantage, floats(4.5, 1))
    if grad:
        (gradient,) = torch.autograd.grad((target + advantage).sum(), log_prob)
        assert gradient[0].item() == 0.0
        assert gradient.isfinite().all()
