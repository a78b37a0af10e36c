"""REINFORCE (Williams 1992), in one file: whole episodes, returns, and the policy gradient.

    python examples/reinforce.py
    python examples/reinforce.py --env-id Acrobot-v1
    python examples/reinforce.py --help

Without arguments it trains CartPole-v1, evaluates the trained policy over 100 episodes and films
one. Sources of the details: the gradient with reward-to-go is Sutton & Barto 2018, section 13.3
(without the factor γ^t, as is usual); returns normalised over the batch are Spinning Up's baseline
of the simplest kind ("Intro to policy optimization", 2018); episodes are never cut, since a cut
return is too low (Pardo et al. 2018, arXiv:1712.00378).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import gymnasium as gym
import torch
import tyro
from tensordict import TensorDict
from torch import Tensor, nn

import gymtask


@dataclass
class ReinforceConfig(gymtask.ReinforcementLearningTaskConfig):
    """REINFORCE's own settings beside those of every task."""

    name: str = "reinforce"
    max_samples: int | None = 490_000  # A little more, to finish episodes.
    env_id: str = "CartPole-v1"  # Its spaces must be Box and Discrete.
    gamma: float = 0.99  # Discount of rewards.
    hidden: int = 64  # Units of the hidden layer.
    environment: gymtask.EnvironmentConfig = field(
        default_factory=lambda: gymtask.EnvironmentConfig(
            num_envs=8, env_worker_mode="sync", env_seed=1
        )
    )
    # One update for each collection, with all of its rows: the gradient of the policy that acted.
    dataset: gymtask.DatasetConfig = field(
        default_factory=partial(gymtask.DatasetConfig, num_update_steps=1, replacement=False)
    )
    train_dl: gymtask.DataLoaderConfig = field(
        default_factory=partial(gymtask.DataLoaderConfig, batch_size=100_000)
    )


@dataclass
class Arguments:
    """The command line."""

    task: Annotated[ReinforceConfig, tyro.conf.arg(name="")] = field(
        default_factory=ReinforceConfig
    )
    trainer: gymtask.TrainerConfig = field(
        default_factory=lambda: gymtask.TrainerConfig(
            sampling=gymtask.SamplingConfig(num_epoch_samples=2000, whole_episodes=True),
            learning_rate=1e-2,
            clip_grad_norm=0.5,
            checkpoint_interval=50,
        )
    )
    resume: str | None = None  # A checkpoint, a run directory, or "auto", to go on with.
    clip: bool = True  # Whether to film the trained policy.


class Reinforce(gymtask.ReinforcementLearningTask[ReinforceConfig, nn.Sequential]):
    """The task."""

    batch_keys = ("observation", "action", "return")

    def get_environment(self) -> gymtask.Environment:
        return gymtask.Environment(self.config.env_id)

    def get_model(self) -> nn.Sequential:
        spaces = self.get_environment_cached()
        observation, action = spaces.observation_space, spaces.action_space
        if not isinstance(observation, gym.spaces.Box) or not isinstance(
            action, gym.spaces.Discrete
        ):
            raise ValueError(f"the spaces must be Box and Discrete, got {observation} and {action}")
        first = nn.Linear(gym.spaces.flatdim(observation), self.config.hidden)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(self.config.hidden, int(action.n)))

    def get_actions(self, model: nn.Sequential, states: TensorDict, optimal: bool) -> Tensor:
        logits = model(states["observation"])
        return logits.argmax(-1) if optimal else gymtask.sampling.categorical(logits, states)

    def postprocess_trajectory(self, trajectory: TensorDict) -> TensorDict:
        """The discounted sum of rewards from each row to its episode's end."""
        trajectory["return"] = gymtask.discounted_returns(
            trajectory["next", "reward"],
            terminated=trajectory["next", "terminated"],
            truncated=trajectory["next", "truncated"],
            gamma=self.config.gamma,
        )
        return trajectory

    def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
        """Returns less their mean, in units of their deviation: a baseline and a scale."""
        returns = torch.cat([trajectory["return"] for trajectory in trajectories])
        for trajectory in trajectories:
            trajectory["return"] = (trajectory["return"] - returns.mean()) / (returns.std() + 1e-8)
        return trajectories

    def run_model(self, model: nn.Sequential, batch: TensorDict, state: gymtask.State) -> Tensor:
        log_probs: Tensor = model(batch["observation"]).log_softmax(-1)
        return log_probs

    def compute_loss(
        self, model: nn.Sequential, batch: TensorDict, state: gymtask.State, output: Any
    ) -> Tensor:
        log_prob = output.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        loss: Tensor = -(log_prob * batch["return"]).mean()
        return loss


def main() -> None:
    """Trains, evaluates and films."""
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(1)  # networks as small as these are fastest so
    task = Reinforce(arguments.task)
    torch.manual_seed(arguments.task.environment.env_seed)
    model = task.get_model()
    trainer = gymtask.Trainer(arguments.trainer)
    state = trainer.train(task, model, resume=arguments.resume)
    if trainer.rank or trainer.stopped_by in ("SIGINT", "SIGTERM"):
        return  # of several processes the first one tells; what was stopped, --resume goes on with
    print(f"{state.num_samples} steps in {state.elapsed_time:.0f} s, until {trainer.stopped_by}")
    print(f"run directory: {trainer.run_dir}")
    for optimal in (True, False):  # in fresh environments, with seeds that were not trained on
        episodes = gymtask.evaluate(task, model, num_episodes=100, optimal=optimal)
        mean = statistics.fmean(episode.episode_return for episode in episodes)
        print(f"mean return over 100 episodes, {'greedy' if optimal else 'sampled'}: {mean:.1f}")
    if arguments.clip and trainer.run_dir is not None:
        path = trainer.run_dir / "clips" / "final.mp4"
        task.sample_clip(save_path=path, model=model)
        print(f"clip: {path}")


if __name__ == "__main__":
    main()
