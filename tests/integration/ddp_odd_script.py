"""Two processes that are unlike each other train together: <out>/<scenario>-<rank>.pt."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gymtask.environment import Environment
from gymtask.normalize import ObservationNormalizer
from gymtask.task import State
from gymtask.testing import ScriptedEnv
from gymtask.trainer import SamplingConfig, Trainer, TrainerConfig
from tests.integration.training_tasks import CartPole, ScriptedTask, make_config


def rank() -> int:
    return torch.distributed.get_rank()


class Normed(nn.Module):
    """Has running statistics, and a layer that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.hidden, self.out = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.hidden.requires_grad_(False)
        self.register_buffer("table", torch.randn(4, 4)[:, 1])  # a slice, another one in each

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.hidden(self.norm(x.reshape(-1, 4)).tanh()))
        return y.view(*x.shape[:-1], 2)


class Odd(CartPole):
    """What one process does the other does not."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.words = nn.Embedding(5, 3, sparse=True)
        self.register_buffer("slice", torch.randn(4, 4)[:, 1])
        self.register_buffer("same", torch.randn(1, 3).expand(4, 3))

    def get_optimizers(self, model: nn.Module) -> Any:
        return torch.optim.SGD([*model.parameters(), *self.words.parameters()], lr=0.1)

    def get_lr_schedulers(self, optimizers: Any) -> Any:
        return []

    def on_epoch_start(self, model: Any, state: State) -> None:
        if state.num_epochs == 1:
            model.hidden.requires_grad_(True)

    def compute_loss(self, model: nn.Module, batch: Any, state: State, output: Any) -> Any:
        loss = super().compute_loss(model, batch, state, output)
        losses = {"policy": loss, "words": self.words(torch.tensor([rank()])).square().sum()}
        if rank() == 1 and state.num_epoch_steps == 1:
            losses["rare"] = 0.0 * loss + 3.0
        return losses

    def epoch_is_over(self, state: State) -> bool:
        return super().epoch_is_over(state) or (rank() == 1 and state.num_epoch_steps == 2)


class Normalized(ScriptedTask):
    """The statistics are those of both processes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = ObservationNormalizer(self.get_environment_cached().observation_space)

    def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
        self.norm.update(trajectories)
        return trajectories


class Slow(Normalized):
    """Steps take longer in the second process, which is therefore called off in a collection."""

    def get_environment(self) -> Environment:
        return Environment(ScriptedEnv, wrappers=(Slowly,))


class Slowly(gym.Wrapper[Any, Any, Any, Any]):
    """See `Slow`."""

    def step(self, action: Any) -> Any:
        time.sleep(0.05 * rank())
        return self.env.step(action)


class Short(Normalized):
    """Episodes of the second process become too short to be kept."""

    def get_environment(self) -> Environment:
        return Environment(ScriptedEnv, lengths=5, wrappers=(Shortened,))


class Shortened(gym.Wrapper[Any, Any, Any, Any]):
    """See `Short`."""

    num_steps = 0

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        observation, reward, terminated, *rest = self.env.step(action)
        return observation, reward, terminated or (rank() == 1 and self.num_steps > 12), *rest


def main(out: Path, scenario: str) -> None:
    torch.manual_seed(0)
    config: Any = make_config(max_epochs=3, updates=4)
    sampling: dict[str, Any] = {"num_epoch_samples": 40}
    if scenario == "odd":
        task, model = Odd(config), Normed()
    elif scenario == "slow":
        config.max_epochs, config.max_seconds = None, 3.0
        task, model = Slow(config), nn.Linear(3, 2)
    else:
        config.dataset.off_policy = True
        config.environment.env_seed = 0
        sampling |= {"min_trajectory_length": 3, "num_warmup_samples": 40}
        task, model = Short(config), nn.Linear(3, 2)
    trainer = Trainer(
        TrainerConfig(
            sampling=SamplingConfig(**sampling),
            run_dir=str(out / scenario),
            accelerator="cpu",
            devices=2,
            strategy="ddp",
        )
    )
    state = trainer.train(task, model)
    modules = {
        f"{i}.{k}": v for i, m in enumerate((model, task)) for k, v in m.state_dict().items()
    }
    told = {"state": modules, "num_steps": state.num_steps, "stopped_by": trainer.stopped_by}
    torch.save(told, out / f"{scenario}-{rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
