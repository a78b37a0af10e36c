"""A training loop of your own: a task collects and gives windows, everything else is plain PyTorch.

    python examples/own_loop.py
    python examples/own_loop.py --max-samples 20000

It trains the PPO task of ppo.py on CartPole-v1 without gymtask.Trainer.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
import tyro
from ppo import PPO, PPOConfig

import gymtask


@dataclass
class Arguments:
    """The command line."""

    max_samples: int = 100_000  # Environment transitions to collect.
    num_epoch_samples: int = 1024  # Of these in each collection.
    learning_rate: float = 1e-3  # Of Adam.
    seed: int = 1  # Of environments, actions and parameters.


def main() -> None:
    """Collects, trains, and evaluates at the end."""
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(1)  # networks as small as these are fastest so
    torch.manual_seed(arguments.seed)
    config = PPOConfig()
    config.environment.env_seed = arguments.seed
    task = PPO(config)
    model = task.get_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate, eps=1e-5)
    num_samples = 0
    with task.get_worker_pool() as pool:
        while num_samples < arguments.max_samples:
            samples = task.collect_samples(model, pool, arguments.num_epoch_samples, use_tqdm=False)
            num_samples += samples.num_transitions
            for batch in task.build_rl_dataset(samples):
                output = task.run_model(model, batch, task.state)
                losses = task.compute_loss(model, batch, task.state, output)
                optimizer.zero_grad()
                torch.stack(list(losses.values())).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            kl = task.take_logged()["kl"]  # and what else ppo.py logs
            if samples.episodes:
                mean = statistics.fmean(episode.episode_return for episode in samples.episodes)
                print(f"{num_samples:7d} steps: mean return {mean:.1f}, KL {kl:.4f}")
    episodes = gymtask.evaluate(task, model, num_episodes=100)
    greedy = statistics.fmean(episode.episode_return for episode in episodes)
    print(f"mean return over 100 episodes: {greedy:.1f} greedy")


if __name__ == "__main__":
    main()
