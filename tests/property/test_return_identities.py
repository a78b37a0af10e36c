"""What the returns and advantages have to do with each other."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.rollouts import Rollout, assert_near, fractions, rollouts, thorough


@thorough
@given(rollouts(), fractions)
def test_lambda_one_is_the_bootstrapped_return(rollout: Rollout, gamma: float) -> None:
    rollout = rollout.on_policy()
    result = rollout.discounted(gamma)
    advantage, target = rollout.gae(gamma, 1.0)
    assert_near(advantage, result.double() - rollout.value.double())
    assert_near(target, result.double())
    assert_near(rollout.lambda_returns(gamma, 1.0), result.double())


@thorough
@given(rollouts(), fractions)
def test_lambda_zero_and_sums_of_one_row_are_the_td_target(rollout: Rollout, gamma: float) -> None:
    bootstrap = torch.where(rollout.terminated, 0.0, rollout.next_value.double())
    target = rollout.reward + gamma * bootstrap
    advantage, value_target = rollout.gae(gamma, 0.0)
    assert_near(advantage, target - rollout.value)
    assert_near(value_target, target)
    assert_near(rollout.lambda_returns(gamma, 0.0), target)
    assert_near(rollout.n_step(gamma, 1), target)


@thorough
@given(rollouts(), fractions, st.integers(0, 3))
def test_sums_of_all_rows_are_the_bootstrapped_return(
    rollout: Rollout, gamma: float, more: int
) -> None:
    rows = rollout.reward.shape[-1]
    assert_near(rollout.n_step(gamma, rows + more), rollout.discounted(gamma).double())


@thorough
@given(rollouts(), fractions, st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_lambda_returns_are_the_weighted_mean_of_the_sums_of_all_numbers_of_rows(
    rollout: Rollout, gamma: float, lambda_: float
) -> None:
    rows = rollout.reward.shape[-1]
    mean = lambda_ ** (rows - 1) * rollout.n_step(gamma, rows).double()
    for n in range(1, rows):
        mean += (1 - lambda_) * lambda_ ** (n - 1) * rollout.n_step(gamma, n)
    assert_near(rollout.lambda_returns(gamma, lambda_), mean)


@thorough
@given(rollouts(), fractions, fractions)
def test_lambda_returns_are_the_value_targets_of_gae_where_next_values_are_values(
    rollout: Rollout, gamma: float, lambda_: float
) -> None:
    rollout = rollout.on_policy()
    exact = rollout.gae(gamma, lambda_)[1].double()
    assert_near(rollout.lambda_returns(gamma, lambda_), exact)


@thorough
@given(rollouts(), fractions, fractions)
def test_vtrace_of_the_policy_that_acted_is_gae(
    rollout: Rollout, gamma: float, lambda_: float
) -> None:
    rollout = replace(rollout.on_policy(), rho_clip=1.0, c_clip=1.0)
    assert_near(rollout.vtrace(gamma, lambda_)[1], rollout.gae(gamma, lambda_)[1].double())
    assert_near(rollout.vtrace(gamma, 1.0)[0], rollout.gae(gamma, 1.0)[0].double())


@settings(deadline=None, max_examples=25)
@given(rollouts(), st.sampled_from([0.5, 0.99, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_vtrace_targets_are_the_sums_of_equation_1(
    rollout: Rollout, gamma: float, lambda_: float
) -> None:
    _, targets = rollout.vtrace(gamma, lambda_)
    lanes = rollout.map(lambda t: t.reshape(-1, t.shape[-1])[0])
    stops, reward, value, next_value, log_prob, behaviour_log_prob = (
        t.double().tolist() for t in (lanes.stops(), *lanes.leaves())
    )
    exact = []
    for s in range(len(reward)):
        trace, total = 1.0, value[s]
        for t in range(s, len(reward)):
            ratio = math.exp(log_prob[t] - behaviour_log_prob[t])
            after = 0.0 if lanes.terminated[t] else gamma * next_value[t]
            total += trace * min(rollout.rho_clip, ratio) * (reward[t] + after - value[t])
            trace *= gamma * lambda_ * min(rollout.c_clip, ratio)
            if stops[t]:
                break
        exact.append(total)
    assert_near(targets.reshape(-1, len(exact))[0], torch.tensor(exact, dtype=torch.float64))
