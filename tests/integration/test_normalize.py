"""Normalisation in a task: what counts, what leaves statistics alone, and what is resumed."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import gymtask
from gymtask import ObservationNormalizer, RewardNormalizer
from gymtask.testing import ScriptedEnv
from gymtask.training.logs import read_rows
from tests.integration.training_tasks import (
    CartPole,
    make_config,
    make_trainer,
    network,
    parameters,
)
from tests.tasks import collect, make_task
from tests.unit.trajectories import (
    assert_counted,
    assert_same,
    running_returns,
)


def counting_task(**hooks: Any) -> tuple[Any, ObservationNormalizer, RewardNormalizer, list[Any]]:
    """A task that normalises, over environments of 3 and of 5 steps, and the rows that it saw."""
    observation, reward = ObservationNormalizer((3,)), RewardNormalizer(2, gamma=0.5)
    seen: list[TensorDict] = []

    def postprocess_trajectories(self: Any, trajectories: list[TensorDict]) -> list[TensorDict]:
        observation.update(trajectories)
        reward.update(trajectories)
        seen.extend(trajectory.clone() for trajectory in trajectories)
        return trajectories

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        return (observation(states["observation"])[:, 0] > 0).long()

    hooks = {"postprocess_trajectories": postprocess_trajectories, "get_actions": get_actions}
    task = make_task(**hooks)
    task.normalize_observation, task.normalize_reward = observation, reward
    return task, observation, reward, seen


@pytest.mark.parametrize(
    "options", [{}, {"max_trajectory_length": 2}, {"min_trajectory_length": 3}]
)
def test_every_row_of_many_collections_is_counted_once(options: dict[str, Any]) -> None:
    task, observation, reward, seen = counting_task()
    with task.get_worker_pool() as pool:
        for total in (7, 12, 1, 30, 5):
            task.collect_samples(None, pool, total, use_tqdm=False, **options)
    rows = torch.cat(seen)
    if not options:
        assert len(rows) == 55
    statistics = observation.statistics[0]
    assert statistics.count == len(rows)
    exact = rows["observation"].double().numpy()
    np.testing.assert_allclose(statistics.mean, exact.mean(0), rtol=1e-12)
    np.testing.assert_allclose(statistics.variance, exact.var(0), rtol=1e-12)
    assert_counted(reward, running_returns(*seen, gamma=0.5))
    assert next(iter(task.state_dict())) == "normalize_observation.statistics.0.count"


def test_evaluation_and_clips_leave_the_statistics_alone() -> None:
    task, observation, reward, _ = counting_task()
    collect(task, 20)
    before = copy.deepcopy(observation), copy.deepcopy(reward)
    gymtask.evaluate(task, nn.Linear(3, 2), num_episodes=4)
    task.sample_clip(return_images=False, return_states=True, model=nn.Linear(3, 2))
    assert_same(observation, before[0])
    assert_same(reward, before[1])


def test_rows_in_a_replay_buffer_stay_raw() -> None:
    task, observation, _, seen = counting_task()
    buffer = gymtask.ReplayBuffer(100, seed=0)
    buffer.extend(collect(task, 40))
    batch = buffer.sample(64)
    raw = torch.cat(seen)["observation"]
    assert (batch["observation"].reshape(-1, 1, 3) == raw).all(-1).any(-1).all()
    assert ScriptedEnv().observation_space.contains(batch["observation"][0, 0].numpy())
    assert observation(batch["observation"]).abs().max() <= 10


# ---- in training ---------------------------------------------------------------------------------


class Normalized(CartPole):
    """CartPole whose rows are normalised when they are read."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.normalize_observation = ObservationNormalizer(self.get_environment().observation_space)
        self.normalize_reward = RewardNormalizer(config.environment.total_envs, gamma=0.9)

    def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
        seen = states.copy().set("observation", self.normalize_observation(states["observation"]))
        return super().get_actions(model, seen, optimal)

    def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
        self.normalize_observation.update(trajectories)
        self.normalize_reward.update(trajectories)
        return trajectories

    def run_model(self, model: nn.Module, batch: TensorDict, state: Any) -> Tensor:
        output: Tensor = model(self.normalize_observation(batch["observation"])).log_softmax(-1)
        return output


def trained(run_dir: Path | None, max_epochs: int, resume: Any = None) -> tuple[Any, nn.Module]:
    task, model = Normalized(make_config(max_epochs=max_epochs)), network()
    trainer = make_trainer(run_dir, 30, eval_interval=1, num_eval_episodes=2)
    trainer.train(task, model, resume=resume)
    return task, model


def test_a_resumed_run_ends_as_an_unbroken_one_to_the_last_bit(tmp_path: Path) -> None:
    whole, model = trained(None, 4)
    trained(tmp_path / "run", 2)
    parts, again = trained(None, 4, resume=tmp_path / "run")
    assert_same(parts, whole)
    assert parameters(again) == parameters(model)
    assert whole.normalize_observation.statistics[0].count == 4 * 30
    assert whole.normalize_reward.running_returns.value.abs().max() > 0


# ---- in the example ------------------------------------------------------------------------------


def load_example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "ppo.py"
    spec = importlib.util.spec_from_file_location("ppo_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


def test_ppo_begins_each_epoch_with_the_policy_that_acted(tmp_path: Path) -> None:
    ppo = load_example()
    ratios: list[float] = []

    class Watched(ppo.PPO):  # type: ignore[name-defined, misc]
        def compute_loss(self, model: Any, batch: TensorDict, state: Any, output: Any) -> Any:
            if state.num_epoch_steps == 0:
                log_ratio = output[0] - batch["log_prob"]
                ratios.append(float(log_ratio.detach().exp().sub(1).abs().max()))
            return super().compute_loss(model, batch, state, output)

    task = Watched(ppo.PPOConfig(env_id="Pendulum-v1", max_samples=None, max_epochs=3))
    model = task.get_model()
    trainer = make_trainer(tmp_path / "run", 1024)
    trainer.train(task, model)
    assert len(ratios) == 3
    assert max(ratios) < 1e-5
    assert task.normalize_observation.statistics[0].count == 3 * 1024
    assert task.normalize_reward.statistics.count == 3 * 1024
    # What is logged is what the environments paid: 200 rewards of about -6.
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    logged = [row["episode/return_mean"] for row in rows if "episode/return_mean" in row]
    assert logged
    assert all(float(value) < -500 for value in logged)


@pytest.mark.parametrize(
    ("env_id", "flags", "kinds"),
    [
        ("Pendulum-v1", {}, (ObservationNormalizer, RewardNormalizer)),
        ("Pendulum-v1", {"normalize_reward": False}, (ObservationNormalizer, nn.Identity)),
        ("CartPole-v1", {}, (nn.Identity, nn.Identity)),
        ("CarRacing-v3", {}, (nn.Identity, nn.Identity)),
    ],
)
def test_ppo_normalises_where_all_spaces_are_boxes_of_floats(
    env_id: str, flags: dict[str, bool], kinds: tuple[type, type]
) -> None:
    ppo = load_example()
    task = ppo.PPO(ppo.PPOConfig(env_id=env_id, **flags))
    assert (type(task.normalize_observation), type(task.normalize_reward)) == kinds
