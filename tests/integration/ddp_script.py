"""Trains with two processes, each of which writes down what it saw: <out>/<name>-<rank>.pt."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gymtask.task import State
from gymtask.trainer import SamplingConfig, Trainer, TrainerConfig
from tests.integration.training_tasks import CartPole, make_config, network


class Seen(CartPole):
    """Has two losses, and a parameter and a target network of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("target", torch.rand(3))  # another one in each process
        self.batches: list[Tensor] = []
        self.rows: list[TensorDict] = []

    def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
        self.rows += [trajectory.clone() for trajectory in trajectories]
        return trajectories

    def get_optimizers(self, model: nn.Module) -> Any:
        return {
            "model": torch.optim.SGD(model.parameters(), lr=0.05),
            "scale": torch.optim.SGD([self.scale], lr=0.05),
        }

    def get_lr_schedulers(self, optimizers: Any) -> Any:
        return []

    def compute_loss(self, model: nn.Module, batch: Any, state: State, output: Any) -> Any:
        self.batches.append(batch["observation"].clone())
        squares = model(batch["observation"]).square().mean()  # a second forward pass
        scale = (self.scale * batch["observation"].abs().mean() - 1).square()
        rests = state.num_epoch_steps == 2 and torch.distributed.get_rank() == 1
        return {"model": squares, "scale": None if rests else scale}


def main(out: Path, name: str, run_dir: str | None, resume: str | None, **fields: Any) -> None:
    off_policy = bool(fields.pop("off_policy", False))
    config = make_config(3, updates=4, **fields)
    config.dataset.off_policy = off_policy
    config.dataset.replay_buffer_sample_size = 500
    torch.manual_seed(os.getpid())  # so that only the first process's parameters can count
    task, model = Seen(config), network(os.getpid())
    trainer = Trainer(
        TrainerConfig(
            sampling=SamplingConfig(
                num_epoch_samples=121, num_warmup_samples=60 if off_policy else 0
            ),
            run_dir=run_dir,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            eval_interval=2,
            num_eval_episodes=3,
        )
    )
    state = trainer.train(task, model, resume=resume)
    rank = torch.distributed.get_rank()
    rows = torch.cat(task.rows)
    torch.save(
        {
            "parameters": [p.detach() for p in [*model.parameters(), task.scale, task.target]],
            "batches": torch.stack(task.batches),
            "rows": rows.to_dict(),
            "num_samples": state.num_samples,
            "recent": load_recent(trainer.run_dir) if rank == 0 else None,
            "run_dir": str(trainer.run_dir),
        },
        out / f"{name}-{rank}.pt",
    )


def load_recent(run_dir: Path | None) -> Any:
    from gymtask.training.checkpoint import list_checkpoints, load_checkpoint

    assert run_dir is not None
    return load_checkpoint(list_checkpoints(run_dir)[-1])[0]["statistics"]["recent"]


if __name__ == "__main__":
    out, name, run_dir, resume, epochs, off_policy = sys.argv[1:]
    main(
        Path(out),
        name,
        None if run_dir == "-" else run_dir,
        None if resume == "-" else resume,
        max_epochs=int(epochs),
        off_policy=off_policy == "1",
    )
