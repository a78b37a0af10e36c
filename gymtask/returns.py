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
https://arxiv.org/abs/1712.00378. A row stops where it is one of the first three. All functions are
differentiable (backward, and by torch.func), compute in float64 for any dtype of the arguments, and
never change an argument.
"""

from __future__ import annotations

import warnings

import numpy as np
from torch import Tensor

from gymtask.errors import CutReturnWarning
from gymtask.return_arguments import (
    broken,
    checked_clip,
    checked_count,
    checked_fraction,
    checked_rows,
)
from gymtask.scans import (
    Array,
    clipped_ratio,
    is_tame,
    may_hold_nan,
    nan_row,
    one_later,
    one_step,
    scan,
    scan_windows,
    select,
    stops,
    to_tensor,
    window_ends,
)

__all__ = [
    "discounted_returns",
    "generalized_advantage_estimate",
    "lambda_returns",
    "n_step_returns",
    "vtrace",
]

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
    gamma = checked_fraction("gamma", gamma)
    others = {} if next_value is None else {"next_value": next_value}
    r, *values, term, trunc, last = checked_rows(reward, terminated, truncated, end, others)
    n = values[0] if values else None
    stopped = stops(term, trunc, last)
    unused = term | ~stopped
    if n is None:
        _warn_of_cut(stopped & ~(term | trunc))
    with np.errstate(all="ignore"):
        x = one_step(r, n, unused, gamma)
        y = scan(x, stopped, gamma, reward.dtype, tame=_is_tame(x, n, unused))
        return to_tensor(y, r)


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
    gamma, gae_lambda = checked_fraction("gamma", gamma), checked_fraction("gae_lambda", gae_lambda)
    values = {"value": value, "next_value": next_value}
    r, v, n, term, trunc, last = checked_rows(reward, terminated, truncated, end, values)
    stopped = stops(term, trunc, last)
    with np.errstate(all="ignore"):
        x = one_step(r, n, term, gamma)
        x -= v
        x = scan(x, stopped, gamma * gae_lambda, reward.dtype, tame=_is_tame(x, n, term))
        advantage = to_tensor(x, r)
        x += v
        return advantage, to_tensor(x, r)


def lambda_returns(
    reward: Tensor,
    *,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lambda_: float,
    end: Tensor | None = None,
) -> Tensor:
    """Mixes, at each row, what the next value promises with the return that came: TD(lambda).

        G[t] = r[t]                                                              terminated
        G[t] = r[t] + gamma * next_value[t]                                      any other stop
        G[t] = r[t] + gamma * ((1 - lambda_) * next_value[t] + lambda_ * G[t + 1])    anything else

    This is the mean of the n-step returns of all n with weights (1 - lambda_) * lambda_**(n - 1).

    Sutton & Barto, "Reinforcement Learning: An Introduction", 2nd edition, equation 12.18.

    Args:
        reward: Reward of each row, floating [..., T]; T = 0 gives an empty result.
        next_value: Value of each row's true next observation, [..., T], dtype of `reward`; used
            everywhere but where terminated, with `lambda_` = 1 only where the row stops.
        terminated: Whether the environment ended the episode at this row, bool [..., T].
        truncated: Whether a limit ended the episode at this row, bool [..., T].
        gamma: Discount of one step, in [0, 1].
        lambda_: Weight of the return, in [0, 1]: 0 is the one-step target, 1 the discounted return.
        end: Whether the row is the last of its piece, bool [..., T]; row T - 1 always is.

    Returns:
        The return of each row, [..., T], dtype of `reward`.

    Raises:
        ConfigurationError: An argument breaks its rule, or a `next_value` that is used is NaN.
    """
    gamma, lambda_ = checked_fraction("gamma", gamma), checked_fraction("lambda_", lambda_)
    values = {"next_value": next_value}
    r, n, term, trunc, last = checked_rows(reward, terminated, truncated, end, values)
    stopped = stops(term, trunc, last)
    unused = term | ~stopped if lambda_ == 1.0 else term
    with np.errstate(all="ignore"):
        x = one_step(r, n, unused, select(stopped, gamma, gamma * (1.0 - lambda_), n))
        y = scan(x, stopped, gamma * lambda_, reward.dtype, tame=_is_tame(x, n, unused))
        return to_tensor(y, r)


def n_step_returns(
    reward: Tensor,
    *,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    n: int,
    end: Tensor | None = None,
) -> Tensor:
    """Sums the discounted rewards of n rows, with a bootstrap from the value after the last one.

        G[t] = r[t] + ... + gamma**(k - 1) * r[t + k - 1] + gamma**k * next_value[t + k - 1]

    with k = n, or less where a row stops before: row t + k - 1 is then the first from t on that
    does. A sum whose last row is terminated has no next_value.

    Sutton & Barto, "Reinforcement Learning: An Introduction", 2nd edition, equation 7.1.

    Args:
        reward: Reward of each row, floating [..., T]; T = 0 gives an empty result.
        next_value: Value of each row's true next observation, [..., T], dtype of `reward`; used
            where a sum has its last row, and that is not terminated.
        terminated: Whether the environment ended the episode at this row, bool [..., T].
        truncated: Whether a limit ended the episode at this row, bool [..., T].
        gamma: Discount of one step, in [0, 1].
        n: Number of rows of a sum, from 1, the one-step target; T or more is the discounted return.
        end: Whether the row is the last of its piece, bool [..., T]; row T - 1 always is.

    Returns:
        The return of each row, [..., T], dtype of `reward`.

    Raises:
        ConfigurationError: An argument breaks its rule, or a `next_value` that is used is NaN.
    """
    gamma, n = checked_fraction("gamma", gamma), checked_count("n", n)
    values = {"next_value": next_value}
    r, after, term, trunc, last = checked_rows(reward, terminated, truncated, end, values)
    n = min(n, r.shape[-1])
    stopped = stops(term, trunc, last)
    if may_hold_nan(after):
        _refuse_nan(after, term | ~(stopped | window_ends(stopped, n)))
    with np.errstate(all="ignore"):
        bootstrapped = one_step(r, after, term, gamma)
        x = select(stopped, bootstrapped, r, bootstrapped)
        return to_tensor(scan_windows(x, bootstrapped, stopped, gamma, n), r)


def vtrace(
    reward: Tensor,
    *,
    value: Tensor,
    next_value: Tensor,
    log_prob: Tensor,
    behaviour_log_prob: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    lambda_: float = 1.0,
    end: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimates values of the policy that learns, and its advantages, from one that acted: V-trace.

        ratio[t] = exp(log_prob[t] - behaviour_log_prob[t])
        rho[t], c[t] = min(rho_clip, ratio[t]), lambda_ * min(c_clip, ratio[t])
        delta[t] = rho[t] * (r[t] + gamma * next_value[t] - value[t])
        vs[t] = value[t] + delta[t] + gamma * c[t] * (vs[t + 1] - value[t + 1])
        advantage[t] = rho[t] * (r[t] + gamma * vs[t + 1] - value[t])

    Where the row stops, the last term of vs is left out and next_value[t] is the vs[t + 1] of the
    advantage; where terminated, both are 0. `value_target` is vs.

    Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-
    Learner Architectures", https://arxiv.org/abs/1802.01561, equation 1 and section 4. There both
    results are constants in the loss. Here gradients flow, unless the arguments are detached.

    Args:
        reward: Reward of each row, floating [..., T]; T = 0 gives empty results.
        value: Value of the observation each row started from, [..., T], dtype of `reward`.
        next_value: Value of each row's true next observation, [..., T], dtype of `reward`; used
            everywhere but where terminated.
        log_prob: Log-probability of the action of each row under the policy that learns, in nats,
            [..., T], dtype of `reward`.
        behaviour_log_prob: The same under the policy that acted.
        terminated: Whether the environment ended the episode at this row, bool [..., T].
        truncated: Whether a limit ended the episode at this row, bool [..., T].
        gamma: Discount of one step, in [0, 1].
        rho_clip: Largest weight of a TD error, above 0, inf for no limit: towards 0 the values are
            those of the policy that acted, towards inf those of the policy that learns.
        c_clip: Largest weight with which later errors flow back, above 0, inf for no limit; it sets
            variance and speed, not the values that are learnt. At most `rho_clip` in the paper.
        lambda_: Weight of later errors beside c_clip, in [0, 1].
        end: Whether the row is the last of its piece, bool [..., T]; row T - 1 always is.

    Returns:
        The advantage and the value target of each row, each [..., T], dtype of `reward`.

    Raises:
        ConfigurationError: An argument breaks its rule, or a `next_value` that is used is NaN.
    """
    gamma, lambda_ = checked_fraction("gamma", gamma), checked_fraction("lambda_", lambda_)
    rho_clip, c_clip = checked_clip("rho_clip", rho_clip), checked_clip("c_clip", c_clip)
    values = {"value": value, "next_value": next_value}
    values |= {"log_prob": log_prob, "behaviour_log_prob": behaviour_log_prob}
    r, v, n, log_p, log_mu, term, trunc, last = checked_rows(
        reward, terminated, truncated, end, values
    )
    stopped = stops(term, trunc, last)
    with np.errstate(all="ignore"):
        rho = clipped_ratio(log_p, log_mu, rho_clip)
        c = rho if c_clip == rho_clip else clipped_ratio(log_p, log_mu, c_clip)
        bootstrapped = one_step(r, n, term, gamma)
        x, weight = rho * (bootstrapped - v), gamma * lambda_
        tame, bound = _is_tame(x, n, term), weight * c_clip
        target = v + scan(x, stopped, weight * c, reward.dtype, tame=tame, bound=bound)
        followed = select(stopped, bootstrapped, r + gamma * one_later(target), target)
        return to_tensor(rho * (followed - v), r), to_tensor(target, r)


def _warn_of_cut(cut: Array) -> None:
    global _cut_return_warned
    if not _cut_return_warned and bool(cut.any()):
        _cut_return_warned = True
        warnings.warn(
            "a piece ends with neither flag and no `next_value` says what comes after it: its "
            "returns are too low; give `next_value`, or collect with whole_episodes=True",
            CutReturnWarning,
            stacklevel=3,
        )


def _is_tame(x: Array, next_value: Array | None, unused: Array) -> bool:
    """Tells whether x, with all used next values in it, `is_tame`; refuses a NaN among these."""
    if is_tame(x):
        return True
    if next_value is not None:
        _refuse_nan(next_value, unused)
    return False


def _refuse_nan(next_value: Array, unused: Array) -> None:
    if (row := nan_row(next_value, unused)) is not None:
        rule = "not be NaN at a row that bootstraps from it"
        raise broken("next_value", rule, f"nan at row {row}")
