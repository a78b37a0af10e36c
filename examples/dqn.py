"""Double deep Q-learning (van Hasselt et al. 2016, arXiv:1509.06461), in one file.

    python examples/dqn.py
    python examples/dqn.py --prioritized
    python examples/dqn.py --env-id Acrobot-v1 --max-samples 50000

Without arguments it trains CartPole-v1, evaluates the trained policy over 100 episodes, films one
and says where everything went; --help lists all settings. Any id with a Box observation space and
a Discrete action space will do. Sources of the details:

[1] Mnih et al. 2015, "Human-level control through deep reinforcement learning", Methods: replay of
    uniformly drawn transitions, a target network copied every C updates, errors clipped to 1 (the
    gradient of the Huber loss), random actions before the first update, ε falling linearly.
[2] van Hasselt et al. 2016, "Double DQN": the online network chooses the next action, the target
    network values it.
[3] Schaul et al. 2016, arXiv:1511.05952, sections 3.3 and 3.4 and algorithm 1: priorities |δ|, new
    rows with the largest so far, importance weights over their largest, β rising linearly to 1.
[4] Hessel et al. 2018, arXiv:1710.02298, "Multi-step learning": n rewards, then the value of the
    state that follows, without a correction for the actions in between.
[5] Pardo et al. 2018, arXiv:1712.00378: a time limit is no end, so only `terminated` zeroes values.
[6] RL Baselines3 Zoo, hyperparams/dqn.yml, CartPole-v1: few large rounds of updates (256 steps,
    then 128 updates), batches of 64; Stable-Baselines3, dqn.py: gradients of a norm of 10 at most.
    Our own, as tried there: γ = 0.995, since with 0.99 a cart that drifts off in 300 steps is worth
    almost as much as one that stays; n = 10, with which values of up to 200 rise quickly although
    targets are copied seldom: every 500 updates, as with 100 values rose without end for some
    seeds; a Huber loss linear from 10 on, not from 1 on, as nearly all errors of such values would
    count as outliers; and a learning rate that falls to 0, as the last policy counts and not the
    best one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, TypeAlias

import gymnasium as gym
import torch
import tyro
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import gymtask

Output: TypeAlias = "tuple[Tensor, Tensor]"


@dataclass
class DQNConfig(gymtask.ReinforcementLearningTaskConfig):
    """DQN's own settings beside those of every task."""

    name: str = "dqn"
    max_samples: int | None = 100_000
    env_id: str = "CartPole-v1"  # Id of the environment.
    gamma: float = 0.995  # Discount of rewards.
    target_interval: int = 500  # Updates from one copy to the target network to the next.
    huber_delta: float = 10.0  # Size of an error beyond which the loss grows linearly.
    final_epsilon: float = 0.04  # Chance of a random action in the end; 1 at first.
    exploration_samples: int = 16_000  # Transitions over which it falls.
    learning_rate: float = 1e-3  # Of Adam, at the start; the trainer's has no part here.
    anneal: bool = True  # Whether the learning rate falls to 0 over `max_samples`.
    prioritized: bool = False  # Whether transitions are replayed by priority.
    priority_alpha: float = 0.6  # How far priorities count, 0 to 1.
    priority_beta: float = 0.4  # How far weights correct for that; rises to 1 over `max_samples`.
    n_step: int = 10  # Rewards that are summed up before a value is used.
    hidden: int = 128  # Units of each of the two hidden layers.
    environment: gymtask.EnvironmentConfig = field(
        default_factory=lambda: gymtask.EnvironmentConfig(
            num_envs=8, env_worker_mode="sync", env_seed=1
        )
    )
    dataset: gymtask.DatasetConfig = field(  # [6]
        default_factory=lambda: gymtask.DatasetConfig(
            off_policy=True, replay_buffer_sample_size=100_000, num_update_steps=128
        )
    )
    train_dl: gymtask.DataLoaderConfig = field(
        default_factory=partial(gymtask.DataLoaderConfig, batch_size=64)
    )


@dataclass
class Arguments:
    """The command line."""

    task: Annotated[DQNConfig, tyro.conf.arg(name="")] = field(default_factory=DQNConfig)
    trainer: gymtask.TrainerConfig = field(
        default_factory=lambda: gymtask.TrainerConfig(
            sampling=gymtask.SamplingConfig(num_epoch_samples=256, num_warmup_samples=1000),
            log_interval=10,
            checkpoint_interval=100,
            clip_grad_norm=10.0,
        )
    )
    resume: str | None = None  # A checkpoint, a run directory, or "auto", to go on with.
    clip: bool = True  # Whether to film the trained policy.


class QNetwork(nn.Module):
    """The value of every action, [..., K], for observations [..., *shape]."""

    def __init__(self, observation_space: gym.spaces.Box, num_actions: int, hidden: int) -> None:
        super().__init__()
        self.num_dims = len(observation_space.shape)
        self.layers = nn.Sequential(
            nn.Linear(gym.spaces.flatdim(observation_space), hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_actions),
        )

    def forward(self, observation: Tensor) -> Tensor:
        batch = observation.shape[: observation.ndim - self.num_dims]
        q: Tensor = self.layers(observation.reshape(*batch, -1).float())
        return q


class DQN(gymtask.ReinforcementLearningTask[DQNConfig, QNetwork]):
    """The task. The target network is a part of it, so checkpoints hold it."""

    batch_keys = ("observation", "action", "next")

    def __init__(self, config: DQNConfig) -> None:
        super().__init__(config)
        self.target = self.get_model().requires_grad_(False)
        self.errors: list[tuple[Tensor, Tensor]] = []  # of this update: rows and priorities

    def get_environment(self) -> gymtask.Environment:
        return gymtask.Environment(self.config.env_id)

    def get_model(self) -> QNetwork:
        spaces = self.get_environment_cached()
        observation, action = spaces.observation_space, spaces.action_space
        if not isinstance(observation, gym.spaces.Box) or not isinstance(
            action, gym.spaces.Discrete
        ):
            raise gymtask.ConfigurationError(
                f"the spaces of {self.config.env_id!r} must be Box and Discrete, "
                f"got {observation} and {action}"
            )
        return QNetwork(observation, int(action.n), self.config.hidden)

    def get_replay_buffer(self) -> gymtask.ReplayBuffer:
        config = self.config
        alpha, beta = config.priority_alpha, config.priority_beta
        return gymtask.ReplayBuffer(
            config.dataset.replay_buffer_sample_size,
            prioritized=gymtask.Prioritization(alpha, beta) if config.prioritized else None,
            n_step=config.n_step,
            gamma=config.gamma,
            seed=config.environment.env_seed,
        )

    def get_optimizers(self, model: QNetwork) -> Optimizer:
        return Adam(model.parameters(), lr=self.config.learning_rate)

    def get_lr_schedulers(self, optimizers: Mapping[str, Optimizer]) -> Sequence[LambdaLR]:
        if not self.config.anneal:
            return ()
        return [LambdaLR(each, lambda _: 1.0 - self._progress()) for each in optimizers.values()]

    def _progress(self) -> float:
        """From 0 to 1 over `max_samples`; without that it stays at 0."""
        limit = self.config.max_samples
        return min(1.0, self.state.num_samples / limit) if limit else 0.0

    def epsilon(self) -> float:
        """[1] Falls linearly, by the transitions collected so far."""
        progress = min(1.0, self.state.num_samples / max(1, self.config.exploration_samples))
        return 1.0 + progress * (self.config.final_epsilon - 1.0)

    def get_actions(self, model: QNetwork, states: TensorDict, optimal: bool) -> Tensor:
        q = model(states["observation"])
        return (
            q.argmax(-1) if optimal else gymtask.sampling.epsilon_greedy(q, self.epsilon(), states)
        )

    def on_epoch_start(self, model: QNetwork, state: gymtask.State) -> None:
        if state.num_steps == 0:
            self.target.load_state_dict(model.state_dict())
        self.log("epsilon", self.epsilon())
        if self.config.prioritized and self.replay_buffer is not None:  # [3]
            beta = self.config.priority_beta
            self.replay_buffer.beta = beta + (1.0 - beta) * self._progress()

    def run_model(self, model: QNetwork, batch: TensorDict, state: gymtask.State) -> Output:
        """The value of the action taken, and what it should be, [B, W] both."""
        q = model(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        following = batch["next"]
        with torch.no_grad():
            best = model(following["observation"]).argmax(-1, keepdim=True)  # [2]
            value = self.target(following["observation"]).gather(-1, best).squeeze(-1)
            value = value.masked_fill(following["terminated"], 0.0)  # [5]
            # [4] γ to the power of the rewards summed up, fewer than n where an episode ends.
            discount = following["discount"] if self.config.n_step > 1 else self.config.gamma
            return q, following["reward"] + discount * value

    def compute_loss(
        self, model: QNetwork, batch: TensorDict, state: gymtask.State, output: Output
    ) -> Tensor:
        q, target = output
        loss = nn.functional.huber_loss(q, target, "none", self.config.huber_delta)  # [1]
        if self.config.prioritized:  # [3]
            self.errors.append((batch["index"], (q - target).detach().abs()))
            loss = batch["weight"] * loss
        return loss.mean()

    def on_update_end(self, model: QNetwork, state: gymtask.State) -> None:
        while self.errors and self.replay_buffer is not None:  # [3]
            self.replay_buffer.update_priorities(*self.errors.pop())
        if state.num_steps % self.config.target_interval == 0:  # [1]
            self.target.load_state_dict(model.state_dict())


def main() -> None:
    """Trains, evaluates and films."""
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(1)  # networks as small as these are fastest so
    torch.manual_seed(arguments.task.environment.env_seed)
    task = DQN(arguments.task)
    model = task.get_model()
    trainer = gymtask.Trainer(arguments.trainer)
    state = trainer.train(task, model, resume=arguments.resume)
    if trainer.rank or trainer.stopped_by in ("SIGINT", "SIGTERM"):
        return  # of several processes the first one tells; what was stopped, --resume goes on with
    print(f"{state.num_samples} steps in {state.elapsed_time:.0f} s, until {trainer.stopped_by}")
    print(f"run directory: {trainer.run_dir}")
    for optimal in (True, False):  # in fresh environments, with seeds that were not trained on
        episodes = gymtask.evaluate(task, model, num_episodes=100, optimal=optimal)
        mean = statistics.fmean(each.episode_return for each in episodes)
        print(f"mean return over 100 episodes, {'greedy' if optimal else 'sampled'}: {mean:.1f}")
    if arguments.clip and trainer.run_dir is not None:
        task.sample_clip(save_path=trainer.run_dir / "clips" / "final.mp4", model=model)
        print(f"clip: {trainer.run_dir / 'clips' / 'final.mp4'}")


if __name__ == "__main__":
    main()
