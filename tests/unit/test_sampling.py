"""What the samplers draw, and that it does not depend on the batch."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gymtask import sampling
from gymtask.errors import ConfigurationError
from gymtask.sampling import BLOCK, NoiseStreams, stream_seed
from gymtask.testing import ScriptedEnv
from tests.tasks import make_task

N = 40_000


def states(n: int) -> TensorDict:
    return TensorDict({"env_id": torch.zeros(n, dtype=torch.int64)}, batch_size=[n])


class Inside:
    """States of n environments as `get_actions` sees them, for as long as the block lasts."""

    def __init__(self, streams: NoiseStreams, env_ids: list[int], run_steps: list[int]) -> None:
        ids, steps = np.array(env_ids), np.array(run_steps)
        content = {"env_id": torch.from_numpy(ids), "run_step": torch.from_numpy(steps)}
        self.streams, self.ids, self.steps = streams, ids, steps
        self.states = TensorDict(content, batch_size=[len(ids)])

    def __enter__(self) -> TensorDict:
        self.streams.begin(self.states, self.ids, self.steps)
        return self.states

    def __exit__(self, *_: Any) -> None:
        self.streams.end()


def within(count: int, probability: float) -> float:
    """Four standard errors of a frequency over `count` draws."""
    return float(4 * (probability * (1 - probability) / count) ** 0.5)


def inside_many(draw: Any) -> Tensor:
    """Draws of many environments over many run steps, through the streams."""
    streams = NoiseStreams((7, "noise", 0), 100)
    parts = []
    for step in range(N // 100):
        with Inside(streams, list(range(100)), [step] * 100) as given:
            parts.append(draw(given))
    return torch.cat(parts)


@pytest.mark.parametrize("inside", [False, True])
def test_categorical_draws_with_the_probabilities_of_the_softmax(inside: bool) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, float("-inf")])

    def draw(given: TensorDict) -> Tensor:
        return sampling.categorical(logits.expand(len(given), 4), given)

    actions = inside_many(draw) if inside else draw(states(N))
    for action, probability in enumerate(logits.softmax(-1).tolist()):
        frequency = (actions == action).float().mean().item()
        assert abs(frequency - probability) <= within(N, probability)


@pytest.mark.parametrize("inside", [False, True])
def test_gaussian_has_the_asked_mean_and_deviation(inside: bool) -> None:
    mean, std = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 2.0])

    def draw(given: TensorDict) -> Tensor:
        return sampling.gaussian(mean.expand(len(given), 2), std, given)

    actions = inside_many(draw) if inside else draw(states(N))
    assert torch.allclose(actions.mean(0), mean, atol=0.05)
    assert torch.allclose(actions.std(0), std, rtol=0.03)
    correlation = torch.corrcoef(actions.T)[0, 1]
    assert abs(correlation) < 4 / N**0.5


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("inside", [False, True])
def test_equal_logits_of_half_precision_are_drawn_alike(dtype: torch.dtype, inside: bool) -> None:
    torch.manual_seed(0)
    logits = torch.full((18,), 50.0, dtype=dtype)

    def draw(given: TensorDict) -> Tensor:
        return sampling.categorical(logits.expand(len(given), 18), given)

    actions = inside_many(draw) if inside else draw(states(N))
    for group in (actions < 6, actions >= 12):  # of a third each, the first 6% too often before
        assert abs(group.float().mean().item() - 1 / 3) <= within(N, 1 / 3)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_gaussians_of_half_precision_are_those_of_float32_rounded_once(
    dtype: torch.dtype, inside: bool
) -> None:
    mean, std = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 2.0])

    def draws(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        def draw(given: TensorDict) -> Tensor:
            wide = mean.to(dtype).expand(len(given), 2)
            plain = sampling.gaussian(wide, std.to(dtype), given)
            return torch.cat(
                [plain, sampling.squashed_gaussian(wide, std.to(dtype), given, low=-2.0)], -1
            )

        torch.manual_seed(0)
        drawn = inside_many(draw) if inside else draw(states(N))
        return drawn.split(2, -1)  # type: ignore[return-value,no-untyped-call]

    for found, expected in zip(draws(dtype), draws(torch.float32), strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_saturated_squashed_gaussian_stays_within_any_bounds(
    dtype: torch.dtype, as_tensor: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    edges = (torch.randn(2000, 2, generator=generator) * 2).sort(-1).values
    edges[0] = torch.tensor([-1.8975812, 0.25354323])
    for mean in (-50.0, 50.0):
        wide = torch.full((2000,), mean, dtype=dtype)
        if as_tensor:
            low, high = edges.unbind(-1)
            found = sampling.squashed_gaussian(wide, 0.1, states(2000), low=low, high=high)
            assert ((low <= found) & (found <= high)).all()
            continue
        for one, other in edges[:50].tolist():
            found = sampling.squashed_gaussian(wide[:3], 0.1, states(3), low=one, high=other)
            assert found.dtype == dtype
            assert one <= found.min().item() <= found.max().item() <= other


def test_squashed_gaussian_stays_within_its_bounds_and_is_a_tanh_in_them() -> None:
    mean = torch.zeros(N, 1)
    torch.manual_seed(0)
    actions = sampling.squashed_gaussian(mean, torch.tensor(3.0), states(N), low=0.0, high=5.0)
    torch.manual_seed(0)
    plain = sampling.gaussian(mean, torch.tensor(3.0), states(N))
    assert torch.equal(actions, (plain.tanh() + 1) * 0.5 * 5)
    assert actions.min() >= 0
    assert actions.max() <= 5


def test_epsilon_greedy_takes_the_best_action_but_for_epsilon() -> None:
    values = torch.tensor([0.0, 3.0, 1.0]).expand(N, 3)
    assert (sampling.epsilon_greedy(values, 0.0, states(N)) == 1).all()
    actions = sampling.epsilon_greedy(values, 0.3, states(N))
    for action, probability in [(0, 0.1), (1, 0.8), (2, 0.1)]:
        frequency = (actions == action).float().mean().item()
        assert abs(frequency - probability) <= within(N, probability)


@pytest.mark.parametrize(
    ("epsilon", "message"),
    [
        (torch.zeros(3, 1), r"`epsilon` must be a number or .* \(3,\), got shape \(3, 1\)"),
        (torch.zeros(2), r"`epsilon` must be a number or .* \(3,\), got shape \(2,\)"),
        (torch.tensor(1.5), "`epsilon` must lie in 0 to 1, got 1.5"),
        (torch.tensor([0.0, -0.1, 0.0]), "`epsilon` must lie in 0 to 1, got "),
        (torch.tensor([0.0, float("nan"), 0.0]), "`epsilon` must lie in 0 to 1, got "),
        (-0.5, "`epsilon` must lie in 0 to 1, got -0.5"),
        ([0.1, 0.1, 0.1], "`epsilon` must be a number or a tensor, got list"),
    ],
)
def test_an_epsilon_that_is_not_one_a_row_from_0_to_1_is_refused(
    epsilon: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sampling.epsilon_greedy(torch.zeros(3, 4), epsilon, states(3))


def test_an_epsilon_may_be_a_number_or_a_tensor_for_all_or_for_each() -> None:
    values = torch.tensor([0.0, 3.0]).expand(3, 2)
    for epsilon in (0, np.float32(0.0), torch.tensor(0.0), torch.zeros(3)):
        assert sampling.epsilon_greedy(values, epsilon, states(3)).tolist() == [1, 1, 1]


def test_uniform_fills_the_interval_from_0_to_1() -> None:
    draws = sampling.uniform(states(N), 3)
    assert draws.shape == (N, 3)
    assert draws.dtype == torch.float32
    assert 0 <= draws.min() < draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01


def test_two_draws_in_one_call_are_independent() -> None:
    def draw(given: TensorDict) -> Tensor:
        zeros = torch.zeros(len(given), 1)
        first = sampling.gaussian(zeros, torch.ones(1), given)
        return torch.cat([first, sampling.gaussian(zeros, torch.ones(1), given)], -1)

    assert abs(torch.corrcoef(inside_many(draw).T)[0, 1]) < 4 / N**0.5


def test_neighbouring_environments_and_steps_are_independent() -> None:
    draws = inside_many(lambda given: sampling.uniform(given, 1)).view(N // 100, 100)
    assert abs(torch.corrcoef(draws[:, :2].T)[0, 1]) < 4 / (N / 100) ** 0.5
    assert (
        abs(torch.corrcoef(torch.stack([draws[:-1].flatten(), draws[1:].flatten()]))[0, 1]) < 0.02
    )


def test_a_row_draws_the_same_whoever_shares_its_batch() -> None:
    steps = [0, 5, BLOCK - 1, BLOCK, 3 * BLOCK + 7]
    together, alone = NoiseStreams((3, "noise", 0), 5), NoiseStreams((3, "noise", 0), 5)
    with Inside(together, list(range(5)), steps) as given:
        batch = sampling.gaussian(torch.zeros(5, 2), torch.ones(2), given)
    for env_id in reversed(range(5)):
        with Inside(alone, [env_id], [steps[env_id]]) as given:
            row = sampling.gaussian(torch.zeros(1, 2), torch.ones(2), given)
        assert torch.equal(row[0], batch[env_id])


def test_rows_that_are_picked_from_states_draw_from_their_own_streams() -> None:
    streams = NoiseStreams((3, "noise", 0), 4)
    with Inside(streams, [0, 1, 2, 3], [9] * 4) as given:
        batch = sampling.uniform(given, 2)
    with Inside(streams, [0, 1, 2, 3], [9] * 4) as given:
        picked = sampling.uniform(given[torch.tensor([3, 1])], 2)
    assert torch.equal(picked, batch[[3, 1]])


def test_streams_of_other_seeds_purposes_and_counts_differ() -> None:
    keys = [(0, "noise", 0), (1, "noise", 0), (0, "eval", 0), (0, "eval", 1), (0, "clip", 0)]
    found = set()
    for key in keys:
        with Inside(NoiseStreams(key, 1), [0], [0]) as given:
            found.add(float(sampling.uniform(given, 1)))
    assert len(found) == len(keys)


def test_stream_seeds_differ_by_purpose_index_and_count() -> None:
    purposes = ("resume", "eval", "clip", "warmup", "restart")
    seeds = {stream_seed(7, *each) for each in itertools.product(purposes, range(5), range(5))}
    assert len(seeds) == 5 * 5 * 5
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert stream_seed(7, "eval", 1, 2) == stream_seed(7, "eval", 1, 2)


def test_logits_and_states_must_have_the_same_number_of_rows() -> None:
    with pytest.raises(
        ConfigurationError, match=r"`states` must have one row for each of the 3 rows"
    ):
        sampling.categorical(torch.zeros(3, 2), states(2))


def digest(mode: str, workers: int, num_envs: int, **keywords: Any) -> str:
    """A hash of the rows that a stochastic table policy collects, sorted."""
    table = torch.randn(64, 3, generator=torch.Generator().manual_seed(5))

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        key = (states["observation"][:, 0].long() * 7 + states["env_id"]) % 64
        return sampling.categorical(table[key], states)

    env = lambda: ScriptedEnv((3, 5, 11), num_actions=3)  # noqa: E731
    task = make_task(num_envs, workers, mode, env=env, get_actions=get_actions)
    with task.get_worker_pool() as pool:
        parts = [
            task.collect_samples(None, pool, total, use_tqdm=False, **keywords).to_tensordict()
            for total in (700, 301)
        ]
    flat = torch.cat(parts)
    place = (flat["env_id"] * 10**6 + flat["trajectory_id"]) * 10**4 + flat["step"]
    flat = flat[place.argsort()]
    columns = [flat["action"], flat["step"], flat["trajectory_id"], flat["next", "observation"]]
    return hashlib.sha256(b"".join(column.numpy().tobytes() for column in columns)).hexdigest()


def test_whole_collections_do_not_depend_on_mode_workers_or_batch_limits() -> None:
    found = {
        digest(mode, workers, 6, min_batch_size=low, max_batch_size=high)
        for mode, workers in [
            ("sync", 1),
            ("thread", 2),
            ("thread", 6),
            ("process", 2),
            ("process", 3),
        ]
        for low, high in [(1, None), (1, 1), (2, 4), (6, 6)]
    }
    assert len(found) == 1
