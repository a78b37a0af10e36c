"""Evaluation: fair shares, seeds of its own, and no trace in training."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gymtask.environment import Environment
from gymtask.errors import ConfigurationError
from gymtask.sampling import stream_seed
from gymtask.trainer import evaluate
from gymtask.training.checkpoint import rng_state
from gymtask.workers.worker import BaseEnvironmentWorker
from tests.integration.training_tasks import (
    CartPole,
    ScriptedTask,
    linear,
    make_config,
    make_trainer,
    network,
    parameters,
)


class Fixed(gym.Env[Any, Any]):
    """Episodes of one length, with a reward of 1 a step; it notes the seeds it is given."""

    seeds: list[int | None] = []  # noqa: RUF012

    def __init__(self, length: int = 3) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.length = length
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        Fixed.seeds.append(seed)
        self.count = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return np.zeros(3, np.float32), 1.0, self.count >= self.length, False, {}


class FixedTask(ScriptedTask):
    """Environment i has episodes of length lengths[i]."""

    lengths = (1, 10)

    def get_environment(self) -> Environment:
        return Environment(Fixed, length=self.lengths[0])

    def get_environment_workers(self, force_sync: bool = False) -> list[BaseEnvironmentWorker]:
        workers = super().get_environment_workers(force_sync)
        return [
            replace(workers[0], env_ids=(index,), maker=Environment(Fixed, length=length).maker)
            for index, length in enumerate(self.lengths)
        ]


def test_short_episodes_are_not_favoured() -> None:
    episodes = evaluate(FixedTask(make_config()), linear(), num_episodes=10)
    assert [episode.env_id for episode in episodes] == [0] * 5 + [1] * 5
    assert sum(episode.episode_return for episode in episodes) / 10 == 5.5
    assert sum(episode.length for episode in episodes) / 10 == 5.5


def test_shares_differ_by_at_most_one() -> None:
    episodes = evaluate(ScriptedTask(make_config(num_envs=4)), linear(), num_episodes=10)
    assert [episode.env_id for episode in episodes] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]


def test_episodes_are_whole_and_in_order_of_environment_and_time() -> None:
    episodes = evaluate(ScriptedTask(make_config()), linear(), num_episodes=6)
    assert [episode.length for episode in episodes] == [4] * 6
    assert [episode.episode_return for episode in episodes] == [10.0] * 6
    assert all(episode.terminated and not episode.truncated for episode in episodes)
    assert [episode.trajectory_id for episode in episodes] == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize(
    ("num_episodes", "num_envs", "used"), [(10, None, 2), (1, None, 1), (10, 1, 1), (3, 7, 3)]
)
def test_no_more_environments_are_made_than_there_are_episodes(
    num_episodes: int, num_envs: int | None, used: int
) -> None:
    Fixed.seeds.clear()

    class Same(ScriptedTask):
        def get_environment(self) -> Environment:
            return Environment(Fixed)

    episodes = evaluate(Same(make_config()), linear(), num_episodes=num_episodes, num_envs=num_envs)
    assert len(episodes) == num_episodes
    assert len([seed for seed in Fixed.seeds if seed is not None]) == used


def test_each_evaluation_has_seeds_of_its_own() -> None:
    Fixed.seeds.clear()
    task = FixedTask(make_config())
    for _ in range(2):
        evaluate(task, linear(), num_episodes=2)
    assert [seed for seed in Fixed.seeds if seed is not None] == [
        stream_seed(1337, "eval", index, count) for count in (0, 1) for index in (0, 1)
    ]


def test_an_evaluation_can_be_repeated_by_a_new_task() -> None:
    def returns(optimal: bool) -> list[float]:
        episodes = evaluate(CartPole(make_config()), network(), num_episodes=6, optimal=optimal)
        return [episode.episode_return for episode in episodes]

    assert returns(optimal=False) == returns(optimal=False)
    assert returns(optimal=True) == returns(optimal=True)


def test_a_policy_that_draws_from_torch_itself_can_be_repeated_too() -> None:
    class Plain(CartPole):
        def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
            return torch.randint(2, states.batch_size)

    def returns() -> list[float]:
        episodes = evaluate(Plain(make_config()), network(), num_episodes=4)
        return [episode.episode_return for episode in episodes]

    torch.manual_seed(1)
    first = returns()
    torch.manual_seed(2)
    assert returns() == first


def test_an_evaluation_leaves_generators_phase_and_mode_as_they_were() -> None:
    task, model = CartPole(make_config()), network()
    task.state.phase = "train"
    model.train()
    before = rng_state()
    evaluate(task, model, num_episodes=2, optimal=False)
    after = rng_state()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]
    assert torch.equal(before["numpy"][1], after["numpy"][1])
    assert task.state.phase == "train"
    assert model.training


def test_modules_of_the_task_act_in_eval_mode_as_the_model_does() -> None:
    class Normalized(CartPole):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.norm, self.frozen = nn.BatchNorm1d(4), nn.Dropout()
            self.frozen.eval()

        def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
            modes.add((self.norm.training, model.training))
            self.norm(states["observation"])  # in train mode it refuses a batch of one
            return super().get_actions(model, states, optimal)

        def get_values(self, model: nn.Module, states: TensorDict) -> Tensor:
            modes.add((self.norm.training, model.training))
            return states["observation"].sum(-1)

    modes: set[tuple[bool, bool]] = set()
    task, model = Normalized(make_config()), network()
    evaluate(task, model, num_episodes=3)
    task.sample_clip(model=model, return_images=False, return_states=True)
    with task.get_worker_pool() as pool:
        task.collect_samples(model, pool, 10, use_tqdm=False)
        for _ in islice(task.iter_samples(model, pool, use_tqdm=False), 3):
            modes.add((not task.norm.training, not model.training))
    assert modes == {(False, False)}
    assert torch.equal(task.norm.running_mean, torch.zeros(4))  # type: ignore[arg-type]
    assert task.norm.training
    assert model.training
    assert not task.frozen.training


def test_the_phase_is_restored_when_an_environment_raises() -> None:
    class Broken(ScriptedTask):
        def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
            phases.append(self.state.phase)
            raise KeyError("policy")

    phases: list[str] = []
    task = Broken(make_config())
    with pytest.raises(KeyError, match="policy"):
        evaluate(task, linear())
    assert phases == ["eval"]
    assert task.state.phase == "collect"


def test_evaluating_during_training_does_not_change_it(tmp_path: Path) -> None:
    def train(name: str, **fields: Any) -> list[float]:
        model = network()
        trainer = make_trainer(tmp_path / name, 64, **fields)
        trainer.train(CartPole(make_config(max_epochs=3)), model)
        return parameters(model)

    assert train("with", eval_interval=1, num_eval_episodes=3) == train("without")


def test_filming_during_training_does_not_change_it(tmp_path: Path) -> None:
    def train(name: str, **fields: Any) -> list[float]:
        model = network()
        make_trainer(tmp_path / name, **fields).train(CartPole(make_config(max_epochs=2)), model)
        return parameters(model)

    assert train("with", clip_interval=1) == train("without")


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_play_the_same_episodes(workers: int) -> None:
    def returns(workers: int) -> list[float]:
        task = CartPole(make_config(workers=workers))
        return [episode.episode_return for episode in evaluate(task, network(), num_episodes=4)]

    assert returns(workers) == returns(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_episodes": 0}, "`num_episodes` must be an integer of at least 1, got 0"),
        ({"num_envs": 0}, "`num_envs` must be an integer of at least 1, got 0"),
        ({"optimal": 1}, "`optimal` must be True or False, got 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        evaluate(ScriptedTask(make_config()), linear(), **arguments)
