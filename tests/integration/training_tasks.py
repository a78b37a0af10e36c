"""Small tasks that the tests of training share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gymtask import sampling
from gymtask.config import (
    DataLoaderConfig,
    DatasetConfig,
    EnvironmentConfig,
    ReinforcementLearningTaskConfig,
)
from gymtask.environment import Environment
from gymtask.returns import discounted_returns
from gymtask.task import ReinforcementLearningTask, State
from gymtask.testing import ScriptedEnv
from gymtask.trainer import SamplingConfig, Trainer, TrainerConfig


def make_config(
    num_envs: int = 2,
    updates: int = 3,
    window: int = 1,
    name: str = "task",
    workers: int = 0,
    **limits: Any,
) -> ReinforcementLearningTaskConfig:
    return ReinforcementLearningTaskConfig(
        name=name,
        environment=EnvironmentConfig(num_env_workers=workers, num_envs=num_envs),
        dataset=DatasetConfig(num_samples=window, num_update_steps=updates),
        train_dl=DataLoaderConfig(batch_size=8),
        **limits,
    )


def make_trainer(run_dir: Path | None, num_epoch_samples: int = 10, **fields: Any) -> Trainer:
    sampling_fields = {
        name: fields.pop(name) for name in list(fields) if hasattr(SamplingConfig, name)
    }
    return Trainer(
        TrainerConfig(
            sampling=SamplingConfig(num_epoch_samples=num_epoch_samples, **sampling_fields),
            run_dir=None if run_dir is None else str(run_dir),
            accelerator="cpu",
            **fields,
        )
    )


class ScriptedTask(ReinforcementLearningTask):
    """Steps `ScriptedEnv` at random, and trains without a purpose."""

    env_kwargs: dict[str, Any] = {"lengths": 4}  # noqa: RUF012

    def get_environment(self) -> Environment:
        return Environment(ScriptedEnv, **self.env_kwargs)

    def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
        logits = model(states["observation"] / 100)
        return logits.argmax(-1) if optimal else sampling.categorical(logits, states)

    def run_model(self, model: nn.Module, batch: TensorDict, state: State) -> Tensor:
        return model(batch["observation"] / 100)

    def compute_loss(
        self, model: nn.Module, batch: TensorDict, state: State, output: Tensor
    ) -> Tensor:
        return output.square().mean()


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


class CartPole(ReinforcementLearningTask):
    """REINFORCE on CartPole-v1, with a schedule."""

    def get_environment(self) -> Environment:
        return Environment("CartPole-v1")

    def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
        logits = model(states["observation"])
        return logits.argmax(-1) if optimal else sampling.categorical(logits, states)

    def postprocess_trajectory(self, trajectory: TensorDict) -> TensorDict:
        reward = trajectory["next", "reward"]
        trajectory["return"] = discounted_returns(
            reward,
            next_value=torch.zeros_like(reward),  # what comes after a cut is neglected
            terminated=trajectory["next", "terminated"],
            truncated=trajectory["next", "truncated"],
            gamma=0.99,
        )
        return trajectory

    def run_model(self, model: nn.Module, batch: TensorDict, state: State) -> Tensor:
        return model(batch["observation"]).log_softmax(-1)

    def compute_loss(
        self, model: nn.Module, batch: TensorDict, state: State, output: Tensor
    ) -> Tensor:
        log_prob = output.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        return -(log_prob * batch["return"]).mean()

    def get_lr_schedulers(self, optimizers: Any) -> list[Any]:
        return [torch.optim.lr_scheduler.ExponentialLR(optimizers["main"], 0.99)]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def parameters(module: nn.Module) -> list[float]:
    return [number for parameter in module.parameters() for number in parameter.flatten().tolist()]


def run(
    tmp_path: Path, task: ScriptedTask, num_epoch_samples: int = 10, **fields: Any
) -> tuple[State, Trainer]:
    """Trains a small model in tmp_path/run."""
    trainer = make_trainer(tmp_path / "run", num_epoch_samples, **fields)
    return trainer.train(task, linear()), trainer
