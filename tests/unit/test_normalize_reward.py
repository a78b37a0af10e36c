"""Normalised rewards: values by hand, a plain loop as oracle, and Gymnasium's wrapper."""

from __future__ import annotations

import math
import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeReward

import gymtask
from gymtask import ObservationNormalizer, RewardNormalizer
from gymtask.errors import ConfigurationError
from tests.unit.trajectories import (
    INF,
    assert_counted,
    assert_same,
    counted,
    piece,
    running_returns,
)


def test_rewards_by_hand() -> None:
    normalize = RewardNormalizer(1, gamma=0.5, epsilon=1e-8)
    normalize.update(piece(1, 1, 4))  # R is 1, 1.5, 4.75
    assert counted(normalize) == pytest.approx((3, 7.25 / 3, np.var([1, 1.5, 4.75])))
    scale = math.sqrt(np.var([1, 1.5, 4.75]) + 1e-8)
    result = normalize(torch.tensor([[1.0], [-2.0]]))  # no mean is taken off
    torch.testing.assert_close(result, torch.tensor([[1 / scale], [-2 / scale]]))
    assert result.dtype == torch.float32
    assert torch.equal(normalize(torch.tensor([1e6, -1e6])), torch.tensor([10.0, -10.0]))
    assert torch.equal(RewardNormalizer(1)(torch.tensor([3.0, 30.0])), torch.tensor([3.0, 10.0]))


def test_an_open_episode_goes_on_in_the_next_collection() -> None:
    normalize = RewardNormalizer(1, gamma=0.5)
    normalize.update([piece(1, 2)])  # 1, 2.5
    normalize.update([piece(4, step=2)])  # 5.25
    normalize.update([piece(8, step=3, end="terminated"), piece(3, trajectory_id=1)])  # 10.625, 3
    assert_counted(normalize, [1, 2.5, 5.25, 10.625, 3])
    assert normalize.running_returns.value.tolist() == [3]


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_returns_begin_anew_after_both_kinds_of_ends(end: str) -> None:
    together, apart = RewardNormalizer(1, gamma=0.5), RewardNormalizer(1, gamma=0.5)
    first, second = piece(1, 2, end=end), piece(7, 1, trajectory_id=1)
    together.update([first, second])
    apart.update(first)
    assert apart.running_returns.trajectory_id.tolist() == [-1]
    apart.update(second)
    for normalize in (together, apart):
        assert_counted(normalize, [1, 2.5, 7, 4.5])


def test_flags_end_an_episode_whatever_the_numbers_say() -> None:
    normalize = RewardNormalizer(1, gamma=0.5)
    normalize.update([piece(1, 2, end="truncated"), piece(4, step=2)])
    assert_counted(normalize, [1, 2.5, 4])


def test_returns_begin_anew_where_rows_were_not_seen() -> None:
    normalize = RewardNormalizer(2, gamma=0.5)
    normalize.update([piece(1, 2), piece(10, env_id=1)])
    # Row 2 of environment 0 was dropped; environment 1 went on in an episode that nobody saw begin.
    normalize.update([piece(4, step=3), piece(20, env_id=1, trajectory_id=3, step=5)])
    assert_counted(normalize, [1, 2.5, 10, 4, 20])
    # The pool was reset: the numbers of rows begin again.
    normalize.update([piece(6, trajectory_id=4)])
    assert_counted(normalize, [1, 2.5, 10, 4, 20, 6])
    assert normalize.running_returns.value.tolist() == [6, 20]


def test_one_environment_that_ends_leaves_the_returns_of_others() -> None:
    """O-59."""
    normalize = RewardNormalizer(2, gamma=1.0)
    normalize.update([piece(1, 2, 3, end="terminated"), piece(1, 2, 3, env_id=1, trajectory_id=1)])
    assert normalize.running_returns.value.tolist() == [0, 6]
    normalize.update([piece(1, trajectory_id=2)])
    assert normalize.running_returns.value.tolist() == [1, 6]


def test_pieces_in_any_order_and_any_form_count_the_same() -> None:
    pieces = [
        piece(1, 2, env_id=0),
        piece(3, 5, env_id=0, step=2, end="terminated"),
        piece(8, env_id=0, trajectory_id=2),
        piece(13, 21, env_id=1, trajectory_id=1),
    ]
    whole = gymtask.MultiReplaySamples(pieces)
    forms: list[Any] = [pieces, pieces[::-1], iter(pieces), whole, whole.rows]
    found = [RewardNormalizer(2) for _ in forms]
    for normalize, form in zip(found, forms, strict=True):
        normalize.update(form)
        assert_same(normalize, found[0])
    assert_counted(found[0], running_returns(*pieces, gamma=0.99))
    observations = [ObservationNormalizer((2,)) for _ in range(2)]
    observations[0].update(pieces)
    observations[1].update(whole)
    assert_same(*observations)


def test_no_trajectories_change_nothing() -> None:
    reward, observation = RewardNormalizer(2), ObservationNormalizer((2,))
    for empty in ([], gymtask.MultiReplaySamples([])):
        reward.update(empty)
        observation.update(empty)
    assert_same(reward, RewardNormalizer(2))
    assert_same(observation, ObservationNormalizer((2,)))


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_a_long_stream_agrees_with_a_loop(gamma: float) -> None:
    random = np.random.default_rng(0)
    pieces, numbers, steps = [], [0, 1, 2], [0, 0, 0]
    normalize = RewardNormalizer(3, gamma=gamma)
    for _ in range(40):  # collections
        collection = []
        for env_id in range(3):
            for _ in range(random.integers(0, 4)):
                end = ["", "terminated", "truncated"][random.integers(3)]
                rewards = random.normal(1, 2, random.integers(1, 30))
                place = {"env_id": env_id, "trajectory_id": numbers[env_id], "step": steps[env_id]}
                collection.append(piece(*rewards, end=end, **place))
                steps[env_id] = 0 if end else steps[env_id] + len(rewards)
                numbers[env_id] += 3 if end else 0
        normalize.update(collection)
        pieces += collection
    assert_counted(normalize, running_returns(*pieces, gamma=gamma))


REWARDS = [(1.0, 2.0, 3.0), (5.0, 1.0), (2.0, 2.0, 7.0, 1.0), (4.0,)]


class Paid(gym.Env[np.ndarray[Any, Any], int]):
    """Pays REWARDS, an episode each; those with odd numbers are truncated, others terminated."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.num_steps = self.episode + 1, 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        rewards = REWARDS[self.episode % len(REWARDS)]
        self.num_steps += 1
        done, reward = self.num_steps == len(rewards), rewards[self.num_steps - 1]
        truncated = done and self.episode % 2 == 1
        return np.zeros(2, np.float32), reward, done and not truncated, truncated, {}


def test_running_returns_are_those_of_gymnasium_but_for_what_it_does_at_ends() -> None:
    """It pays a terminated row its reward alone, and carries an episode's last R into the next."""
    env, carried = NormalizeReward(Paid(), gamma=0.9), 0.0
    normalize = RewardNormalizer(1, gamma=0.9)
    exact: list[float] = []
    for episode in range(8):
        env.reset()
        rewards, theirs = REWARDS[episode % len(REWARDS)], []
        for _ in rewards:
            _, _, terminated, _, _ = env.step(0)
            theirs.append(float(env.discounted_reward[0]))
        whole = piece(
            *rewards, trajectory_id=episode, end="terminated" if terminated else "truncated"
        )
        normalize.update([*whole.split(2)])
        ours = running_returns(whole, gamma=0.9)
        exact += ours
        expected = [value + 0.9 ** (row + 1) * carried for row, value in enumerate(ours)]
        if terminated:
            expected[-1] = rewards[-1]
        assert theirs == pytest.approx(expected)
        carried = theirs[-1]
    assert_counted(normalize, exact)
    assert abs(float(env.return_rms.var) - np.var(exact)) > 0.1


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ([{"observation": 1}], "`trajectories[0]` must be a TensorDict [T], got dict"),
        (piece(1).unsqueeze(0), "`trajectories` must have a batch shape [T], got [1, 1]"),
        (
            [piece(1), piece(1).exclude("step")],
            "`trajectories[1].get('step')` must be a tensor, got the keys",
        ),
        (
            [piece(1).set(("next", "reward"), torch.ones(1, 1))],
            "`trajectories[0].get(('next', 'reward'))` must have the shape [T], got [1, 1]",
        ),
        ([piece(1, env_id=2)], "`num_envs` must be above each env_id (2 is one), got 2"),
        (
            [piece(1), piece(2, INF, trajectory_id=4, step=7)],
            "`reward` must be finite, got inf at step 8 of trajectory 4",
        ),
    ],
)
def test_a_bad_trajectory_is_named_and_nothing_counted(trajectories: Any, message: str) -> None:
    normalize = RewardNormalizer(2)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        normalize.update(trajectories)
    assert_same(normalize, RewardNormalizer(2))
