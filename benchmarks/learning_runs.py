"""One run of `learning.py`: trains, evaluates, and tells how the returns went."""

from __future__ import annotations

import csv
import importlib
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import hand_ppo
import numpy as np
import torch
from learning_works import ppo_settings

import gymtask

EXAMPLES = Path(__file__).parents[1] / "examples"
NUM_EPISODES = 100  # of the evaluation at the end
NUM_POINTS = 100  # of a curve
LAST = 0.1  # share of the steps whose episodes tell how good a run has become


@dataclass
class Episodes:
    """The training episodes of a run, in groups that ended by a certain step."""

    steps: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)

    def add(self, steps: int, count: int, mean: float) -> None:
        if count:
            self.steps.append(steps)
            self.counts.append(count)
            self.means.append(mean)

    def between(self, low: float, high: float) -> float | None:
        """The mean return of those that ended after step `low`, by step `high`."""
        chosen = [low < step <= high for step in self.steps]
        counts = np.asarray(self.counts)[chosen]
        if not counts.sum():
            return None
        return float((np.asarray(self.means)[chosen] * counts).sum() / counts.sum())

    def curve(self, total: int) -> dict[str, list[Any]]:
        """The mean return in each of so many equal parts of the run; None where none ended."""
        edges = np.linspace(0, total, NUM_POINTS + 1)
        means = [self.between(*pair) for pair in pairwise(edges)]
        return {"steps": edges[1:].tolist(), "return": means}


def example(name: str) -> Any:
    """The module of that example."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def ppo_configs(settings: hand_ppo.Settings, seed: int) -> tuple[Any, gymtask.TrainerConfig]:
    """The configs with which gymtask's example does what the script by hand does."""
    module = example("ppo")
    size = settings.num_envs * settings.num_steps
    config = module.PPOConfig(
        env_id=settings.env_id,
        max_samples=settings.total_steps // size * size,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        clip_coef=settings.clip_coef,
        value_coef=settings.value_coef,
        entropy_coef=settings.entropy_coef,
        learning_rate=settings.learning_rate,
        environment=gymtask.EnvironmentConfig(
            num_envs=settings.num_envs, env_worker_mode="sync", env_seed=seed, action_clip=True
        ),
    )
    config.dataset.num_update_steps = settings.num_passes * settings.num_minibatches
    config.train_dl.batch_size = size // settings.num_minibatches
    trainer = gymtask.TrainerConfig(
        sampling=gymtask.SamplingConfig(num_epoch_samples=size),
        clip_grad_norm=settings.max_grad_norm,
        accelerator="cpu",
    )
    return config, trainer


def off_policy_configs(
    name: str, env_id: str, steps: int, seed: int
) -> tuple[Any, gymtask.TrainerConfig]:
    """The example's own settings."""
    arguments = example(name).Arguments()
    config, trainer = arguments.task, arguments.trainer
    config.env_id, config.max_samples, config.environment.env_seed = env_id, steps, seed
    if env_id == "HalfCheetah-v5":
        config.hidden, config.train_dl.batch_size = 256, 256
    trainer.accelerator = "cpu"
    return config, trainer


def run_example(name: str, env_id: str, steps: int, seed: int, run_dir: Path) -> dict[str, Any]:
    """Trains gymtask's example of that name."""
    if name == "ppo":
        config, trainer_config = ppo_configs(ppo_settings(env_id, steps), seed)
    else:
        config, trainer_config = off_policy_configs(name, env_id, steps, seed)
    trainer_config.run_dir, trainer_config.log_interval = str(run_dir), 1
    trainer_config.checkpoint_interval = 1_000_000  # one at the end
    task = getattr(example(name), name.upper())(config)
    torch.manual_seed(seed)
    model = task.get_model()
    trainer = gymtask.Trainer(trainer_config)
    start = time.perf_counter()
    trainer.train(task, model)
    seconds = time.perf_counter() - start
    episodes = read_episodes(run_dir / "metrics.csv")
    played = gymtask.evaluate(task, model, num_episodes=NUM_EPISODES, num_envs=10)
    settings = {"task": asdict(config), "trainer": asdict(trainer_config)}
    # Not what all seeds have in common.
    del settings["trainer"]["run_dir"], settings["task"]["environment"]["env_seed"]
    return record(episodes, steps, seconds, [each.episode_return for each in played], settings)


def read_episodes(path: Path) -> Episodes:
    """Those of a run's metrics."""
    episodes = Episodes()
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            count = int(row["episode/count"] or 0)
            episodes.add(int(row["num_samples"]), count, float(row["episode/return_mean"] or 0))
    return episodes


def run_by_hand(env_id: str, steps: int, seed: int) -> dict[str, Any]:
    """Trains PPO by hand."""
    settings, episodes = ppo_settings(env_id, steps), Episodes()

    def note(num_steps: int, returns: list[float]) -> bool:
        if returns:
            episodes.add(num_steps, len(returns), statistics.fmean(returns))
        return False

    start = time.perf_counter()
    agent, envs = hand_ppo.train(settings, seed, note)
    seconds = time.perf_counter() - start
    # Far from the seeds of training.
    greedy = hand_ppo.evaluate(agent, envs, settings, NUM_EPISODES, seed + 10_000)
    envs.close()
    return record(episodes, steps, seconds, greedy, asdict(settings))


def record(
    episodes: Episodes,
    steps: int,
    seconds: float,
    greedy: Sequence[float],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "value": episodes.between((1 - LAST) * steps, steps),
        "greedy": statistics.fmean(greedy),
        "greedy_deviation": statistics.pstdev(greedy),
        "seconds": seconds,
        "episodes": sum(episodes.counts),
        "curve": episodes.curve(steps),
        "settings": settings,
    }


def run(algorithm: str, env_id: str, steps: int, seed: int, run_dir: Path) -> dict[str, Any]:
    """Trains, evaluates and tells, whoever learns."""
    if algorithm == "hand":
        return run_by_hand(env_id, steps, seed)
    return run_example(algorithm, env_id, steps, seed, run_dir)
