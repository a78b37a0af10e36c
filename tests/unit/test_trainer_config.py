"""What `Trainer` accepts, and how it refuses the rest."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gymtask.config import (
    DatasetConfig,
    EnvironmentConfig,
    ReinforcementLearningTaskConfig,
)
from gymtask.environment import Environment
from gymtask.errors import ConfigurationError
from gymtask.task import ReinforcementLearningTask, State
from gymtask.testing import ScriptedEnv
from gymtask.trainer import SamplingConfig, Trainer, TrainerConfig
from gymtask.training.config import longest_piece, shortest_piece


class Blind(gym.Wrapper):
    """Cannot be rendered, whatever is asked of it."""

    @property
    def render_mode(self) -> None:
        return None


class Task(ReinforcementLearningTask):
    wrappers: tuple[Any, ...] = ()

    def get_environment(self) -> Environment:
        return Environment(ScriptedEnv, wrappers=self.wrappers)

    def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
        return model(states["observation"]).argmax(-1)

    def run_model(self, model: nn.Module, batch: TensorDict, state: State) -> Tensor:
        return model(batch["observation"])

    def compute_loss(
        self, model: nn.Module, batch: TensorDict, state: State, output: Tensor
    ) -> Tensor:
        return output.mean()


def make_task(window: int = 1, stride: int = 1, num_envs: int = 2, cls: type[Task] = Task) -> Task:
    return cls(
        ReinforcementLearningTaskConfig(
            name="task",
            max_epochs=1,
            environment=EnvironmentConfig(num_env_workers=0, num_envs=num_envs),
            dataset=DatasetConfig(num_samples=window, stride=stride, num_update_steps=1),
        )
    )


def test_defaults_are_those_of_the_documentation() -> None:
    assert asdict(TrainerConfig()) == {
        "sampling": {
            "num_epoch_samples": 2048,
            "min_batch_size": 1,
            "max_batch_size": None,
            "max_wait_time": None,
            "min_trajectory_length": 1,
            "max_trajectory_length": None,
            "force_sync": False,
            "optimal": False,
            "allocation": "equal",
            "whole_episodes": False,
            "num_warmup_samples": 0,
        },
        "run_dir": None,
        "learning_rate": 1e-3,
        "clip_grad_norm": None,
        "accelerator": "auto",
        "devices": 1,
        "num_nodes": 1,
        "strategy": "auto",
        "precision": "32-true",
        "compile": False,
        "accumulate_grad_batches": 1,
        "seed": None,
        "log_interval": 1,
        "eval_interval": None,
        "num_eval_episodes": 10,
        "checkpoint_interval": 1,
        "clip_interval": None,
        "keep_checkpoints": None,
        "target_return": None,
        "checkpoint_replay": True,
        "record_actions": False,
    }


def test_a_trainer_without_a_config_takes_the_defaults() -> None:
    assert Trainer().config == TrainerConfig()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_epoch_samples", 0, "must be an integer of at least 1, got 0"),
        ("num_epoch_samples", 2.0, "must be an integer of at least 1, got 2.0"),
        ("num_epoch_samples", True, "must be an integer of at least 1, got True"),
        ("min_batch_size", 0, "must be an integer of at least 1, got 0"),
        ("max_batch_size", 0, "must be an integer of at least 1, got 0"),
        ("max_wait_time", -1.0, "must be a number of at least 0, got -1.0"),
        ("max_wait_time", float("nan"), "must be a number of at least 0, got nan"),
        ("min_trajectory_length", 0, "must be an integer of at least 1, got 0"),
        ("max_trajectory_length", 0, "must be an integer of at least 1, got 0"),
        ("force_sync", 1, "must be True or False, got 1"),
        ("optimal", None, "must be True or False, got None"),
        ("whole_episodes", "yes", "must be True or False, got 'yes'"),
        ("allocation", "fair", "must be one of 'equal', 'first_come', got 'fair'"),
    ],
)
def test_a_bad_sampling_field_is_named_with_its_rule_and_value(
    field: str, value: Any, message: str
) -> None:
    config = TrainerConfig(sampling=SamplingConfig(**{field: value}))
    with pytest.raises(ConfigurationError, match=re.escape(f"`sampling.{field}` {message}")):
        Trainer(config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("run_dir", "", "must be a path or None, got ''"),
        ("run_dir", 3, "must be a path or None, got 3"),
        ("learning_rate", 0.0, "must be a number above 0, got 0.0"),
        ("learning_rate", "1e-3", "must be a number above 0, got '1e-3'"),
        ("clip_grad_norm", 0, "must be a number above 0, got 0"),
        ("clip_grad_norm", float("inf"), "must be a number above 0, got inf"),
        ("accelerator", "cpus", "must be one of 'auto', 'cpu', 'gpu', 'cuda', 'mps', got 'cpus'"),
        ("seed", -1, "must be an integer of at least 0, got -1"),
        ("log_interval", 0, "must be an integer of at least 1, got 0"),
        ("log_interval", None, "must be an integer of at least 1, got None"),
        ("eval_interval", 0, "must be an integer of at least 1, got 0"),
        ("num_eval_episodes", 0, "must be an integer of at least 1, got 0"),
        ("checkpoint_interval", 0.5, "must be an integer of at least 1, got 0.5"),
        ("clip_interval", "3", "must be an integer of at least 1, got '3'"),
    ],
)
def test_a_bad_field_is_named_with_its_rule_and_value(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"`{field}` {message}")):
        Trainer(TrainerConfig(**{field: value}))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (
            SamplingConfig(min_batch_size=5, max_batch_size=4),
            "`sampling.min_batch_size` must be at most sampling.max_batch_size (4), got 5",
        ),
        (
            SamplingConfig(min_trajectory_length=9, max_trajectory_length=8),
            "`sampling.min_trajectory_length` must be at most sampling.max_trajectory_length (8)"
            ", got 9",
        ),
        (
            SamplingConfig(whole_episodes=True, max_trajectory_length=8),
            "`sampling.max_trajectory_length` must be None with whole_episodes=True "
            "(nothing is cut), got 8",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    sampling: SamplingConfig, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        Trainer(TrainerConfig(sampling=sampling))


def test_all_bad_fields_are_named_in_one_error() -> None:
    config = TrainerConfig(
        sampling=SamplingConfig(min_batch_size=0), learning_rate=-1.0, log_interval=0
    )
    with pytest.raises(ConfigurationError) as caught:
        Trainer(config)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "`sampling.min_batch_size`",
        "`learning_rate`",
        "`log_interval`",
    ]


@pytest.mark.parametrize(
    ("sampling", "num_envs", "total", "longest"),
    [
        (SamplingConfig(), 2, 10, 5),
        (SamplingConfig(), 3, 10, 4),
        (SamplingConfig(), 4, 3, 1),
        (SamplingConfig(allocation="first_come"), 3, 10, 10),
        (SamplingConfig(max_trajectory_length=3), 2, 10, 3),
        (SamplingConfig(max_trajectory_length=30), 2, 10, 5),
        (SamplingConfig(whole_episodes=True), 2, 10, None),
    ],
)
def test_the_longest_piece_follows_from_shares_and_cuts(
    sampling: SamplingConfig, num_envs: int, total: int, longest: int | None
) -> None:
    assert longest_piece(sampling, num_envs, total) == longest


def test_the_shortest_useful_piece_is_kept_and_holds_a_window() -> None:
    dataset = DatasetConfig(num_samples=4, stride=3)
    assert shortest_piece(SamplingConfig(), dataset) == 10
    assert shortest_piece(SamplingConfig(min_trajectory_length=12), dataset) == 12


@pytest.mark.parametrize(
    ("sampling", "window", "message"),
    [
        (
            SamplingConfig(min_batch_size=3),
            1,
            "`sampling.min_batch_size` must be at most the number of environments (2), got 3",
        ),
        (
            SamplingConfig(num_epoch_samples=20),
            6,
            "`dataset.num_samples` (6), `dataset.stride` (2) and "
            "`sampling.min_trajectory_length` (1) ask for 11 rows, but the longest piece of "
            "20 samples from 2 environments has 10",
        ),
        (
            SamplingConfig(num_epoch_samples=20, min_trajectory_length=11),
            1,
            "`sampling.min_trajectory_length` (11) ask for 11 rows, but the longest piece of "
            "20 samples from 2 environments has 10",
        ),
    ],
)
def test_settings_that_do_not_fit_the_task_are_refused_before_anything_starts(
    sampling: SamplingConfig, window: int, message: str, tmp_path: Any
) -> None:
    run_dir = tmp_path / "run"
    trainer = Trainer(TrainerConfig(sampling=sampling, run_dir=str(run_dir)))
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        trainer.train(make_task(window, stride=2), nn.Linear(3, 2))
    assert not run_dir.exists()


def test_an_environment_that_cannot_be_filmed_is_refused_before_anything_starts(
    tmp_path: Any,
) -> None:
    class Unseen(Task):
        wrappers = (Blind,)

    run_dir = tmp_path / "run"
    trainer = Trainer(TrainerConfig(clip_interval=1, run_dir=str(run_dir)))
    with pytest.raises(ConfigurationError, match=r"`render_mode` must be 'rgb_array'.*got None"):
        trainer.train(make_task(cls=Unseen), nn.Linear(3, 2))
    assert not run_dir.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the accelerator")
def test_an_accelerator_that_is_not_there_is_refused_by_name() -> None:
    trainer = Trainer(TrainerConfig(accelerator="cuda"))
    rule = "must be such as this machine has, got 'cuda', 1 and '32-true'"
    with pytest.raises(ConfigurationError, match=re.escape(rule)):
        trainer.train(make_task(), nn.Linear(3, 2))


def test_what_is_no_task_or_no_module_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got Task and function"):
        Trainer().train(make_task(), lambda states: states)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="got Linear and Linear"):
        Trainer().train(nn.Linear(1, 1), nn.Linear(1, 1))  # type: ignore[arg-type]
