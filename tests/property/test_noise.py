"""Action noise: that of a row depends on nothing but the row, whoever shares its calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from gymtask import sampling
from gymtask.sampling import NoiseKey, NoiseStreams

DRAWS: list[tuple[str, tuple[int, ...]]] = [
    ("gumbel", (3,)),
    ("normal", ()),
    ("gumbel", (3,)),
    ("uniform", (2, 2)),
]
KEY: NoiseKey = (7, "noise", 0)


@pytest.fixture(params=[256, 4, 1], autouse=True)
def block(request: pytest.FixtureRequest) -> Iterator[int]:
    """Steps that are drawn at once; small ones, so that boundaries are crossed all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "BLOCK", request.param)
        alone.cache_clear()
        yield request.param


def states_of(env_ids: Any, run_steps: Any) -> TensorDict:
    content = {"env_id": torch.tensor(env_ids), "run_step": torch.tensor(run_steps)}
    return TensorDict(content, batch_size=[len(env_ids)])


def draw(
    streams: NoiseStreams, env_ids: list[int], run_steps: list[int], num_draws: int, even: int = -1
) -> list[np.ndarray[Any, Any]]:
    """The noise of one call, copied."""
    states = states_of(env_ids, run_steps)
    streams.begin(states, np.array(env_ids), np.array(run_steps), even)
    try:
        return [streams.draw(*DRAWS[n], states).numpy().copy() for n in range(num_draws)]
    finally:
        streams.end()


@functools.cache
def alone(env_id: int, run_step: int, num_envs: int, key: NoiseKey = KEY) -> list[bytes]:
    """The noise of one row, from streams that were never asked for anything else."""
    streams = NoiseStreams(key, num_envs)
    return [part[0].tobytes() for part in draw(streams, [env_id], [run_step], len(DRAWS))]


@dataclass
class Turn:
    """One call of the policy."""

    env_ids: list[int]
    num_draws: int
    quick: bool  # whether it is said that all are there and at the same step, where that is so
    repeats: bool  # whether the same steps come once more: the call failed


@st.composite
def plays(draw: st.DrawFn) -> tuple[list[int], list[Turn]]:
    num_envs = draw(st.integers(1, 5))
    first = draw(st.sampled_from([0, 1, 250, 254, 255, 256, 511, 10**9]))
    same = draw(st.booleans())
    steps = [first + (0 if same else draw(st.integers(0, 6))) for _ in range(num_envs)]
    everyone = list(range(num_envs))
    subset = st.sets(st.sampled_from(everyone), min_size=1).map(list).flatmap(st.permutations)
    turn = st.builds(
        Turn,
        st.just(everyone) | subset,
        st.integers(0, len(DRAWS)),
        st.booleans(),
        st.integers(0, 9).map(lambda n: n == 0),
    )
    return steps, draw(st.lists(turn, min_size=1, max_size=25))


QUIET = settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@QUIET
@given(plays())
def test_the_noise_of_a_row_is_what_it_is_alone(play: tuple[list[int], list[Turn]]) -> None:
    steps, turns = play
    n = len(steps)
    streams = NoiseStreams(KEY, n)
    everyone = np.arange(n)
    for turn in turns:
        at = [steps[index] for index in turn.env_ids]
        whole = turn.env_ids == list(range(n))
        even = at[0] if whole and turn.quick and len(set(at)) == 1 else -1
        # The pool hands out one and the same array for all of them.
        states = states_of(turn.env_ids, at)
        env_ids = everyone if whole else np.array(turn.env_ids)
        streams.begin(states, env_ids, np.array(at), even)
        found = [streams.draw(*DRAWS[k], states).numpy().copy() for k in range(turn.num_draws)]
        streams.end()
        for number, part in enumerate(found):
            assert part.shape == (len(at), *DRAWS[number][1])
            assert part.dtype == np.float32
            for row, (index, step) in enumerate(zip(turn.env_ids, at, strict=True)):
                assert part[row].tobytes() == alone(index, step, n)[number]
        if not turn.repeats:
            for index in turn.env_ids:
                steps[index] += 1


@QUIET
@given(plays())
def test_rows_picked_out_of_the_states_have_their_own_noise(
    play: tuple[list[int], list[Turn]],
) -> None:
    """A policy may draw for some of its rows, in any order, in the middle of a call."""
    steps, turns = play
    n = len(steps)
    streams = NoiseStreams(KEY, n)
    everyone = np.arange(n)
    for turn in turns:
        states = states_of(everyone.tolist(), steps)
        even = steps[0] if turn.quick and len(set(steps)) == 1 else -1
        streams.begin(states, everyone, np.array(steps), even)
        first = streams.draw(*DRAWS[0], states).numpy().copy()
        some = streams.draw(*DRAWS[1], states[torch.tensor(turn.env_ids)]).numpy().copy()
        again = streams.draw(*DRAWS[2], states).numpy().copy()
        streams.end()
        for index in range(n):
            expected = alone(index, steps[index], n)
            assert first[index].tobytes() == expected[0]
            assert again[index].tobytes() == expected[2]
        for row, index in enumerate(turn.env_ids):
            assert some[row].tobytes() == alone(index, steps[index], n)[1]
        if not turn.repeats:
            steps = [step + 1 for step in steps]


def test_environments_of_another_rank_have_the_streams_of_their_global_index() -> None:
    ours = draw(NoiseStreams(KEY, 2, first_env=3), [0, 1], [5, 9], 4)
    theirs = draw(NoiseStreams(KEY, 5), [3, 4], [5, 9], 4)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.tobytes() == other.tobytes()


def series(
    key: NoiseKey = KEY, env_id: int = 0, number: int = 0, steps: int = 3000
) -> np.ndarray[Any, Any]:
    """The first number of one draw, step after step."""
    streams = NoiseStreams(key, 2)
    found = [draw(streams, [0, 1], [step] * 2, number + 1, step) for step in range(steps)]
    return np.array([part[number].reshape(2, -1)[env_id, 0] for part in found], np.float64)


@pytest.mark.parametrize("block", [256, 4], indirect=True)
def test_draws_steps_environments_seeds_and_purposes_are_independent(block: int) -> None:
    first = series()
    others = {
        "the third draw of the same kind": series(number=2),
        "another environment": series(env_id=1),
        "another seed": series((8, "noise", 0)),
        "another purpose": series((7, "eval", 0)),
        "another count": series((7, "eval", 1)),
        "the next step": np.roll(first, 1),
        "the next block": np.roll(first, block),
    }
    named = [first, *others.values()]
    correlation = np.corrcoef(named) - np.eye(len(named))
    # Of independent numbers it has a deviation of 1 / sqrt(3000), about 0.018.
    assert np.abs(correlation).max() < 0.09, list(others)
    assert len(set(first.tolist())) > 2990


@pytest.mark.parametrize("block", [256, 4], indirect=True)
@pytest.mark.usefixtures("block")
def test_noise_has_the_distribution_of_its_kind() -> None:
    gumbel, normal, uniform = series(number=0), series(number=1), series(number=3)
    # Mean and variance: Euler's constant and π² / 6; 0 and 1; 1/2 and 1/12. Five deviations each.
    for found, mean, variance in (
        (gumbel, np.euler_gamma, np.pi**2 / 6),
        (normal, 0.0, 1.0),
        (uniform, 0.5, 1 / 12),
    ):
        assert abs(found.mean() - mean) < 5 * np.sqrt(variance / 3000)
        assert abs(found.var() - variance) < 0.15 * variance
