"""What the update phase of PPO costs: `Trainer` beside the same updates written by hand.

    python benchmarks/update.py --rounds 5 --seconds 2 --out DIR

The model, losses and settings are those of examples/ppo.py: 16 updates (4 passes of 4 minibatches
of 256) over 1024 rows of CartPole-v1, two networks of 2 × 64, Adam, gradients clipped at 0.5. Each
candidate trains on the same rows, which were collected beforehand. A phase begins when these are
handed to training and ends when losses, gradient norms, KL divergences and fractions of clipped
ratios have been read. By hand
that is a dict of tensors, `torch.randperm`, an index per key, and no line that is not needed.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import report
import torch
from alternate import Candidate, Close, Metrics, alternate, choose, preload
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import gymtask

sys.path.append(str(Path(__file__).parents[1] / "examples"))
ppo: Any = import_module("ppo")

NUM_ROWS, BATCH_SIZE, NUM_PASSES, MAX_NORM = 1024, 256, 4, 0.5
WARM_UP = 5  # phases that are not counted
BASE = "by hand"
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "update_plain": ("Adam", {}),
    "update_fused": ("Adam(fused=True)", {"fused": True}),
}


def make_task(optimizer: dict[str, Any]) -> Any:
    """The task of the example, which trains on the same samples again and again, and is timed."""

    class Task(ppo.PPO):  # type: ignore[misc]
        def get_optimizers(self, model: nn.Module) -> Optimizer:
            return Adam(model.parameters(), self.config.learning_rate, eps=1e-5, **optimizer)

        def collect_samples(self, *_: Any, **__: Any) -> Any:
            return self.samples

        def build_rl_dataset(self, samples: Any) -> Any:
            self.began = time.perf_counter()
            return super().build_rl_dataset(samples)

        def on_epoch_end(self, model: nn.Module, state: gymtask.State) -> None:
            self.seconds.append(time.perf_counter() - self.began)

    config = ppo.PPOConfig(anneal=False, max_samples=None)
    config.environment.num_envs = 8
    config.dataset.num_update_steps = NUM_PASSES * NUM_ROWS // BATCH_SIZE
    config.train_dl.batch_size = BATCH_SIZE
    task = Task(config)
    task.seconds = []
    torch.manual_seed(0)
    task.model = task.get_model()
    with task.get_worker_pool() as pool:
        collect = gymtask.ReinforcementLearningTask.collect_samples
        task.samples = collect(task, task.model, pool, NUM_ROWS, use_tqdm=False)
    return task


def by_trainer(optimizer: dict[str, Any], seconds: float) -> list[float]:
    """The seconds of each phase, with `Trainer`."""
    task = make_task(optimizer)
    model = task.model
    del task.model
    task.config.max_seconds = seconds
    with tempfile.TemporaryDirectory() as folder:
        config = gymtask.TrainerConfig(
            sampling=gymtask.SamplingConfig(num_epoch_samples=NUM_ROWS),
            run_dir=folder,
            clip_grad_norm=MAX_NORM,
            accelerator="cpu",
            log_interval=10**9,
            checkpoint_interval=None,
        )
        gymtask.Trainer(config).train(task, model)
    return task.seconds  # type: ignore[no-any-return]


class ByHand:
    """The same updates as people write them."""

    def __init__(self, task: Any, optimizer: dict[str, Any]) -> None:
        self.config, self.model = task.config, task.model
        self.optimizer = Adam(
            self.model.parameters(), self.config.learning_rate, eps=1e-5, **optimizer
        )

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Of policy, value and entropy; and the KL divergence and the fraction clipped."""
        config, clip = self.config, self.config.clip_coef
        log_prob, entropy, value = self.model(batch["observation"], batch["action"])
        log_ratio = log_prob - batch["log_prob"]
        ratio = log_ratio.exp()
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        surrogate = torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip))
        old, target = batch["state_value"], batch["value_target"]
        clipped = (old + (value - old).clamp(-clip, clip) - target) ** 2
        error = torch.max((value - target) ** 2, clipped)
        with torch.no_grad():
            kl = (ratio - 1 - log_ratio).mean()
            fraction = ((ratio - 1).abs() > clip).float().mean()
        value_loss = config.value_coef * 0.5 * error.mean()
        return -surrogate.mean(), value_loss, entropy.mean(), kl, fraction

    def phase(self, rows: dict[str, Tensor]) -> Tensor:
        parameters = list(self.model.parameters())
        numbers = []
        for _ in range(NUM_PASSES):
            permutation = torch.randperm(NUM_ROWS)
            for start in range(0, NUM_ROWS, BATCH_SIZE):
                chosen = permutation[start : start + BATCH_SIZE]
                losses = self.losses({key: value[chosen] for key, value in rows.items()})
                policy, error, entropy, *_ = losses
                loss = policy + error - self.config.entropy_coef * entropy
                self.optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
                self.optimizer.step()
                numbers.append(torch.stack([each.detach() for each in (*losses, loss, norm)]))
        return torch.stack(numbers).mean(0)


def by_hand(optimizer: dict[str, Any], seconds: float) -> list[float]:
    """The seconds of each phase, by hand."""
    task = make_task(optimizer)
    hand = ByHand(task, optimizer)
    rows = {key: task.samples.rows[key] for key in task.batch_keys}
    spent = []
    deadline = time.perf_counter() + seconds
    while (began := time.perf_counter()) < deadline:
        hand.phase(rows).tolist()
        spent.append(time.perf_counter() - began)
    return spent


def measured(
    way: Callable[[dict[str, Any], float], list[float]], optimizer: dict[str, Any], seconds: float
) -> tuple[Metrics, Close]:
    """The median of all phases but the first ones."""
    spent = way(optimizer, seconds)
    return {"milliseconds": 1000 * statistics.median(spent[WARM_UP:] or spent)}, lambda: None


def candidates(optimizer: dict[str, Any], seconds: float) -> list[Candidate]:
    """Both ways, with the same optimizer."""
    return [
        Candidate(name, partial(measured, way, optimizer, seconds))
        for name, way in ((BASE, by_hand), ("gymtask.Trainer", by_trainer))
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=report.Help)
    report.add_options(parser, seconds=2.0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    preload([])
    columns = (
        report.Column("ms a phase", "milliseconds", ",.2f"),
        report.Column(f"ratio to {BASE}", "milliseconds", ".2f", ratio=True),
    )
    for stem, (name, optimizer) in OPTIMIZERS.items():
        chosen = choose(candidates(optimizer, options.seconds), BASE, options.only)
        outcomes = alternate(chosen, options.rounds)
        title = f"One update phase of PPO: 16 updates of 256 rows, 2 × 64, {name}"
        made = report.Report(stem, title, BASE, columns, outcomes, vars(options))
        made.write(options.out)


if __name__ == "__main__":
    main()
