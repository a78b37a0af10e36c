"""Random arguments of the functions of `gymtask.returns`, and what a plain loop makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from gymtask import returns

thorough = settings(deadline=None, max_examples=100)
fractions = st.sampled_from([0.0, 1e-9, 0.5, 0.9, 0.99, 1.0])


@dataclass
class Rollout:
    """Arguments of all functions, with the flags that each row may have, both at once included."""

    reward: Tensor
    value: Tensor
    next_value: Tensor
    log_prob: Tensor
    behaviour_log_prob: Tensor
    terminated: Tensor
    truncated: Tensor
    end: Tensor | None = None
    n: int = 3
    rho_clip: float = 1.0
    c_clip: float = 1.0

    @classmethod
    def random(
        cls, shape: tuple[int, ...], seed: int, density: float, dtype: torch.dtype = torch.float32
    ) -> Rollout:
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(5, *shape, generator=generator, dtype=torch.float64)
        numbers[3:] *= 0.5
        flags = torch.rand(3, *shape, generator=generator) < density
        return cls(*numbers.to(dtype), *flags)

    def map(self, function: Callable[[Tensor], Tensor]) -> Rollout:
        """The same with the function applied to each tensor."""
        changes = {k: function(t) for k, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, **changes)

    def leaves(self) -> list[Tensor]:
        """All that a gradient can flow to."""
        return [getattr(self, name) for name in list(vars(self))[:5]]

    def last(self) -> Tensor:
        last = torch.zeros_like(self.terminated) if self.end is None else self.end.clone()
        last[..., -1:] = True
        return last

    def stops(self) -> Tensor:
        return self.terminated | self.truncated | self.last()

    def given(self, *names: str) -> dict[str, Any]:
        """The arguments that all functions take, and those named."""
        names = (*names, "reward", "terminated", "truncated", "end")
        return {name: getattr(self, name) for name in names}

    def discounted(self, gamma: float, bootstrap: bool = True) -> Tensor:
        names = ("next_value",) if bootstrap else ()
        return returns.discounted_returns(**self.given(*names), gamma=gamma)

    def gae(self, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
        given = self.given("value", "next_value")
        return returns.generalized_advantage_estimate(**given, gamma=gamma, gae_lambda=gae_lambda)

    def lambda_returns(self, gamma: float, lambda_: float) -> Tensor:
        given = self.given("next_value")
        return returns.lambda_returns(**given, gamma=gamma, lambda_=lambda_)

    def n_step(self, gamma: float, n: int | None = None) -> Tensor:
        given = self.given("next_value")
        return returns.n_step_returns(**given, gamma=gamma, n=self.n if n is None else n)

    def vtrace(self, gamma: float, lambda_: float) -> tuple[Tensor, Tensor]:
        logs = ("log_prob", "behaviour_log_prob")
        given = self.given("value", "next_value", *logs, "rho_clip", "c_clip")
        return returns.vtrace(**given, gamma=gamma, lambda_=lambda_)

    def every(self, gamma: float, lambda_: float) -> list[Tensor]:
        """What all functions give."""
        return [
            self.discounted(gamma),
            *self.gae(gamma, lambda_),
            self.lambda_returns(gamma, lambda_),
            self.n_step(gamma),
            *self.vtrace(gamma, lambda_),
        ]

    def on_policy(self) -> Rollout:
        """The same where the policy that acted learns, and next values are those of next rows."""
        following = self.value.roll(-1, -1)
        next_value = torch.where(self.stops(), self.next_value, following)
        return replace(self, next_value=next_value, behaviour_log_prob=self.log_prob)


def loop(x: Tensor, stops: Tensor, coefficient: float | Tensor) -> Tensor:
    """`y[t] = x[t] + coefficient[t] * y[t + 1]`, row by row, cut after each row that stops."""
    coefficients = torch.as_tensor(coefficient, dtype=x.dtype).expand(x.shape)
    following = torch.zeros_like(x[..., 0])
    rows = []
    for t in reversed(range(x.shape[-1])):
        carried = torch.where(stops[..., t], 0.0, following)
        following = x[..., t] + coefficients[..., t] * carried
        rows.append(following)
    return torch.stack(rows[::-1], -1)


def loop_every(rollout: Rollout, gamma: float, lambda_: float) -> list[Tensor]:
    """What `Rollout.every` must give, in float64."""
    if rollout.reward.shape[-1] == 0:
        return [rollout.reward.double()] * 7
    stops = rollout.stops()
    r, v, n, log_prob, behaviour_log_prob = (leaf.double() for leaf in rollout.leaves())
    one_step = r + gamma * n * ~rollout.terminated
    bootstrapped = torch.where(stops, one_step, r)
    advantage = loop(one_step - v, stops, gamma * lambda_)
    mixed = torch.where(stops, one_step, r + gamma * (1 - lambda_) * n * ~rollout.terminated)
    ratio = (log_prob - behaviour_log_prob).exp()
    rho, c = ratio.clamp(max=rollout.rho_clip), lambda_ * ratio.clamp(max=rollout.c_clip)
    target = v + loop(rho * (one_step - v), stops, gamma * c)
    bootstrap = torch.where(stops, one_step, r + gamma * target.roll(-1, -1))
    return [
        loop(bootstrapped, stops, gamma),
        advantage,
        advantage + v,
        loop(mixed, stops, gamma * lambda_),
        loop_n_step(r, one_step, stops, gamma, rollout.n),
        rho * (bootstrap - v),
        target,
    ]


def loop_n_step(r: Tensor, one_step: Tensor, stops: Tensor, gamma: float, n: int) -> Tensor:
    """Sums of one row, then of two, and so on."""
    sums = one_step
    for _ in range(n - 1):
        sums = torch.where(stops, one_step, r + gamma * sums.roll(-1, -1))
    return sums


def assert_near(result: Tensor, exact: Tensor, tolerance: float = 1e-5) -> None:
    """The promise: within tolerance * max(1, max |exact|)."""
    result, exact = result.detach(), exact.detach()
    assert result.shape == exact.shape
    if exact.numel():
        assert (result - exact).abs().max() <= tolerance * max(1.0, float(exact.abs().max()))


def assert_all_near(rollout: Rollout, gamma: float, lambda_: float, **options: float) -> None:
    """The promise of all functions."""
    results, exact = rollout.every(gamma, lambda_), loop_every(rollout, gamma, lambda_)
    for one, other in zip(results, exact, strict=True):
        assert_near(one, other, **options)


@st.composite
def rollouts(draw: st.DrawFn, min_rows: int = 1) -> Rollout:
    lanes = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    shape = (*lanes, draw(st.integers(min_rows, 40)))
    density = draw(st.sampled_from([0.0, 0.1, 0.5]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    rollout = Rollout.random(shape, draw(st.integers(0, 2**32)), density, dtype)
    if draw(st.booleans()):
        rollout.end = None
    rollout.n = draw(st.sampled_from([1, 2, 3, 5, 8, 39, 50]))
    rollout.rho_clip = draw(st.sampled_from([0.7, 1.0, 2.0]))
    rollout.c_clip = draw(st.sampled_from([0.7, 1.0, 2.0]))
    return rollout
