"""Forbidden actions: never drawn, without probability, entropy and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributions import Categorical

from gymtask import sampling
from gymtask.errors import ConfigurationError
from gymtask.sampling import BLOCK, NoiseStreams
from tests.unit.test_sampling import Inside, inside_many, states, within

N = 40_000


def random_masks(n: int, k: int, seed: int) -> Tensor:
    """Masks bool [n, k] of which each allows something, some of them one action alone."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(n, 1, generator=generator)
    mask = torch.rand(n, k, generator=generator) < share
    mask[torch.arange(n), torch.randint(k, (n,), generator=generator)] = True
    return mask


def random_logits(n: int, k: int, seed: int) -> Tensor:
    """Logits of which some are far below the others."""
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 30


# ---- masked --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.int64])
def test_forbidden_logits_become_minus_infinity_and_the_rest_stay(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    found = sampling.masked(logits, torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype))
    assert found.tolist() == [[1.0, -math.inf, 3.0], [-math.inf, -math.inf, 6.0]]
    assert logits.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_log_probabilities_are_those_of_the_allowed_actions_alone() -> None:
    mask, logits = random_masks(500, 7, seed=0), random_logits(500, 7, seed=1)
    found = sampling.masked(logits, mask).log_softmax(-1)
    assert (found[~mask] == -math.inf).all()
    for row, allowed, log_prob in zip(logits, mask, found, strict=True):
        assert torch.allclose(log_prob[allowed], row[allowed].log_softmax(-1), atol=1e-5)
        assert sampling.masked(row, allowed).argmax() == allowed.nonzero()[row[allowed].argmax()]


def test_several_axes_of_actions_are_masked_one_by_one() -> None:
    mask, logits = random_masks(60, 4, 0).view(30, 2, 4), torch.randn(30, 2, 4)
    drawn = sampling.categorical(sampling.masked(logits, mask), states(30))
    assert drawn.shape == (30, 2)
    assert mask.gather(-1, drawn.unsqueeze(-1)).all()


def test_forbidden_logits_get_no_gradient_and_the_rest_that_of_a_smaller_policy() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True, False]])
    distribution = Categorical(logits=sampling.masked(logits, mask))
    distribution.log_prob(torch.tensor([2])).sum().backward()
    assert logits.grad is not None
    small = torch.tensor([0.5, 2.0], requires_grad=True)
    small.log_softmax(-1)[1].backward()
    assert small.grad is not None
    expected = torch.tensor([[small.grad[0], 0.0, small.grad[1], 0.0]])
    assert torch.allclose(logits.grad, expected, atol=1e-7)


@pytest.mark.parametrize(
    ("logits", "mask", "message"),
    [
        (torch.zeros(2, 3), torch.ones(3, dtype=torch.bool), r"`mask` must have the shape \(2, 3\)"
         r" of the logits, got \(3,\)"),
        (torch.zeros(2, 3), torch.ones(2, 3), "`mask` must be bool or integer, got torch.float32;"
         " pass mask > 0.5"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3) > 0, "must be floats, got torch"),
        (torch.zeros(3, 2), torch.tensor([[0, 0], [1, 0], [0, 0]]),
         r"`mask` must allow an action in each row, got none in 2 of 3 rows: \[0, 2\]; where"),
        (torch.zeros(1, 2, 2), torch.tensor([[[0, 1], [0, 0]]]), r"1 of 2 rows: \[\(0, 1\)\]; wh"),
    ],
)  # fmt: skip
def test_what_breaks_the_rules_is_named(logits: Tensor, mask: Tensor, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sampling.masked(logits, mask)


def test_on_another_device_rows_are_not_looked_at() -> None:
    logits = torch.zeros(2, 3, device="meta")  # where looking at a value raises
    mask = torch.zeros(2, 3, dtype=torch.bool, device="meta")
    assert sampling.masked(logits, mask).shape == (2, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits() -> None:
    logits = torch.randn(8, 3, device="cuda", requires_grad=True)
    mask = torch.ones(8, 3, dtype=torch.int8, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampling.entropy(sampling.masked(logits, mask)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- entropy -------------------------------------------------------------------------------------


def test_the_entropy_is_that_of_the_allowed_actions_alone() -> None:
    mask, logits = random_masks(200, 6, seed=2), torch.randn(200, 6)
    found = sampling.entropy(sampling.masked(logits, mask))
    for row, allowed, entropy in zip(logits, mask, found, strict=True):
        expected = Categorical(logits=row[allowed]).entropy()
        assert torch.allclose(entropy, expected, atol=1e-6)
    assert torch.equal(found[mask.sum(-1) == 1], torch.zeros(int((mask.sum(-1) == 1).sum())))
    assert torch.allclose(found, Categorical(logits=sampling.masked(logits, mask)).entropy())


@pytest.mark.parametrize("weight", [0.01, 1.0, 1000.0])
def test_the_gradient_of_the_entropy_is_finite_whatever_its_weight(weight: float) -> None:
    logits = torch.randn(50, 6, dtype=torch.float64, requires_grad=True)
    mask = random_masks(50, 6, seed=3)
    (weight * sampling.entropy(sampling.masked(logits, mask))).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[~mask] == 0).all()
    for row, allowed, gradient in zip(logits, mask, logits.grad, strict=True):
        small = row.detach()[allowed].requires_grad_()
        (weight * Categorical(logits=small).entropy()).backward()
        assert small.grad is not None
        assert torch.allclose(gradient[allowed], small.grad, atol=1e-9 * weight)


# ---- categorical ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_no_forbidden_action_is_ever_drawn(seed: int) -> None:
    mask, logits = random_masks(64, 5, seed), random_logits(64, 5, seed)
    streams = NoiseStreams((seed, "noise", 0), 64)
    for step in range(0, 4 * BLOCK, 5):
        with Inside(streams, list(range(64)), [step] * 64) as given:
            drawn = sampling.categorical(sampling.masked(logits, mask), given)
            explored = sampling.epsilon_greedy(logits, 0.5, given, mask=mask)
        outside = sampling.categorical(sampling.masked(logits, mask), states(64))
        for actions in (drawn, explored, outside):
            assert mask.gather(-1, actions.unsqueeze(-1)).all()


@pytest.mark.parametrize("inside", [False, True])
def test_allowed_actions_are_drawn_with_their_renormalised_probabilities(inside: bool) -> None:
    logits, mask = torch.tensor([0.0, 2.0, -1.0, 1.0]), torch.tensor([1, 0, 1, 1])
    row = sampling.masked(logits, mask)

    def draw(given: TensorDict) -> Tensor:
        return sampling.categorical(row.expand(len(given), 4), given)

    actions = inside_many(draw) if inside else draw(states(N))
    for action, probability in enumerate([0.0, *logits[[0, 2, 3]].softmax(-1).tolist()]):
        action = (1, 0, 2, 3)[action]
        frequency = (actions == action).float().mean().item()
        assert abs(frequency - probability) <= within(N, probability)


# ---- epsilon-greedy ------------------------------------------------------------------------------

MASKS = [
    ([1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
    ([0, 1, 0, 1, 1], [1, 3, 4]),
    ([1, 0, 0, 0, 1], [0, 4]),
    ([0, 0, 1, 0, 0], [2]),
]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("mask", "allowed"), MASKS)
def test_random_actions_are_uniform_over_the_allowed_ones(
    mask: list[int], allowed: list[int], inside: bool
) -> None:
    def draw(given: TensorDict) -> Tensor:
        rows = torch.tensor(mask, dtype=torch.int8).expand(len(given), 5)
        return sampling.epsilon_greedy(torch.zeros(len(given), 5), 1.0, given, mask=rows)

    actions = inside_many(draw) if inside else draw(states(N))
    for action in range(5):
        probability = 1 / len(allowed) if action in allowed else 0.0
        frequency = (actions == action).float().mean().item()
        assert abs(frequency - probability) <= within(N, probability)


def test_the_best_allowed_action_is_taken_but_for_epsilon() -> None:
    values = torch.tensor([9.0, 0.0, 3.0, 1.0]).expand(N, 4)
    mask = torch.tensor([False, True, True, True]).expand(N, 4)
    assert (sampling.epsilon_greedy(values, 0.0, states(N), mask=mask) == 2).all()
    epsilon = torch.full((N,), 0.3)
    actions = sampling.epsilon_greedy(values, epsilon, states(N), mask=mask)
    for action, probability in [(0, 0.0), (1, 0.1), (2, 0.8), (3, 0.1)]:
        frequency = (actions == action).float().mean().item()
        assert abs(frequency - probability) <= within(N, probability)


def drawn(mask: Tensor | None, env_ids: list[int], step: int, values: Tensor) -> Tensor:
    streams = NoiseStreams((11, "noise", 0), 16)
    with Inside(streams, env_ids, [step] * len(env_ids)) as given:
        keywords: dict[str, Any] = {} if mask is None else {"mask": mask}
        return sampling.epsilon_greedy(values, 0.5, given, **keywords)


def test_a_mask_that_allows_all_changes_no_draw_and_none_is_what_it_always_was() -> None:
    ids, values = list(range(16)), torch.randn(16, 5)
    for step in range(40):
        free = drawn(None, ids, step, values)
        assert torch.equal(free, drawn(torch.ones(16, 5, dtype=torch.bool), ids, step, values))
        with Inside(NoiseStreams((11, "noise", 0), 16), ids, [step] * 16) as given:
            draws = sampling.uniform(given, 2)
        random = (draws[:, 1] * 5).long().clamp(max=4)
        assert torch.equal(free, torch.where(draws[:, 0] < 0.5, random, values.argmax(-1)))


def test_a_row_draws_the_same_whoever_shares_its_batch() -> None:
    mask, values = random_masks(16, 5, seed=1), torch.randn(16, 5)
    together = drawn(mask, list(range(16)), 300, values)
    for env_id in range(16):
        alone = drawn(mask[[env_id]], [env_id], 300, values[[env_id]])
        assert torch.equal(alone, together[[env_id]])


def test_a_mask_may_lie_in_memory_in_any_way() -> None:
    mask, values = random_masks(16, 5, seed=1), torch.randn(16, 5)
    expected = drawn(mask, list(range(16)), 0, values)
    turned = mask.T.contiguous().T
    assert not turned.is_contiguous()
    assert torch.equal(drawn(turned, list(range(16)), 0, values), expected)


def test_a_row_that_allows_nothing_is_named() -> None:
    mask = torch.tensor([[1, 0], [0, 0]])
    with pytest.raises(ConfigurationError, match=r"none in 1 of 2 rows: \[1\]"):
        sampling.epsilon_greedy(torch.zeros(2, 2), 0.1, states(2), mask=mask)
