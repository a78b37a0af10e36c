"""Q-learning (Watkins 1989) with replay, where states forbid actions, in one file.

    python examples/masked_q_learning.py
    python examples/masked_q_learning.py --no-mask

Taxi's info dict tells which of its six actions do anything: no wall is in the way, somebody is
there to be picked up. `InfoToObservation` makes this mask a part of the observation, so that it is
beside each state that the policy sees and in each row and next row of the buffer. Greedy returns
over 100 episodes, for --environment.env-seed 1, 2 and 3 (an optimal policy gets about 8):

    with the mask, 30,000 steps: 8.0, 7.7, 8.0
    --no-mask, 30,000 steps: -505, -545, -445; seed 1 with --max-samples 60000: 8.0

A run takes less than half a minute; --help lists all settings. Sources of the details:

[1] Huang & Ontañón 2022, arXiv:2006.14171: forbidden actions are left out of what the policy
    chooses from, rather than punished.
[2] Sutton & Barto 2018, section 6.5: the value of the best next action, here of those that the
    next state allows; a forbidden one is never tried, so its value means nothing.
[3] Pardo et al. 2018, arXiv:1712.00378: a time limit is no end, so only `terminated` zeroes values.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import gymnasium as gym
import torch
import tyro
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import gymtask
from gymtask.sampling import epsilon_greedy, masked

TAXI = "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"  # the newest that there is
NUM_STATES, NUM_ACTIONS = 500, 6


@dataclass
class QConfig(gymtask.ReinforcementLearningTaskConfig):
    """The algorithm's own settings beside those of every task."""

    name: str = "masked_q_learning"
    max_samples: int | None = 30_000
    mask: bool = True  # Whether the mask is heeded.
    gamma: float = 0.99  # Discount of rewards.
    epsilon: float = 0.1  # Chance of a random action.
    step_size: float = 0.2  # How far a value moves to its target.
    environment: gymtask.EnvironmentConfig = field(
        default_factory=lambda: gymtask.EnvironmentConfig(
            num_envs=8, env_worker_mode="sync", env_seed=1
        )
    )
    dataset: gymtask.DatasetConfig = field(
        default_factory=lambda: gymtask.DatasetConfig(
            off_policy=True, replay_buffer_sample_size=100_000, num_update_steps=64
        )
    )
    train_dl: gymtask.DataLoaderConfig = field(
        default_factory=partial(gymtask.DataLoaderConfig, batch_size=64)
    )


@dataclass
class Arguments:
    """The command line."""

    task: Annotated[QConfig, tyro.conf.arg(name="")] = field(default_factory=QConfig)
    trainer: gymtask.TrainerConfig = field(
        default_factory=lambda: gymtask.TrainerConfig(
            sampling=gymtask.SamplingConfig(num_epoch_samples=256),
            log_interval=10,
            checkpoint_interval=100,
        )
    )
    resume: str | None = None  # A checkpoint, a run directory, or "auto", to go on with.
    clip: bool = True  # Whether to film the trained policy.


class MaskedQLearning(gymtask.ReinforcementLearningTask[QConfig, nn.Embedding]):
    """The task. The model is a table of values, a row for each state."""

    batch_keys = ("observation", "action", "next")

    def get_environment(self) -> gymtask.Environment:
        spaces = {"action_mask": gym.spaces.MultiBinary(NUM_ACTIONS)}
        wrapper = partial(gymtask.InfoToObservation, spaces=spaces)
        return gymtask.Environment(TAXI, wrappers=(wrapper,))

    def get_model(self) -> nn.Embedding:
        table = nn.Embedding(NUM_STATES, NUM_ACTIONS)
        nn.init.zeros_(table.weight)
        return table

    def get_optimizers(self, model: nn.Embedding) -> Optimizer:
        return SGD(model.parameters(), lr=self.config.step_size)

    def allowed(self, observation: TensorDict) -> Tensor:
        """Which actions are allowed, bool [..., 6]; with --no-mask all are."""
        mask = observation["action_mask"].bool()
        return mask if self.config.mask else torch.ones_like(mask)

    def get_actions(self, model: nn.Embedding, states: TensorDict, optimal: bool) -> Tensor:
        observation = states["observation"]
        q, allowed = model(observation["observation"]), self.allowed(observation)
        epsilon = 0.0 if optimal else self.config.epsilon
        return epsilon_greedy(q, epsilon, states, mask=allowed)  # [1]

    def run_model(
        self, model: nn.Embedding, batch: TensorDict, state: gymtask.State
    ) -> tuple[Tensor, Tensor]:
        """The value of the action taken, and what it should be, [B, W] both."""
        q = model(batch["observation", "observation"])
        q = q.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        following = batch["next"]
        with torch.no_grad():
            next_q = model(following["observation", "observation"])
            value = masked(next_q, self.allowed(following["observation"])).amax(-1)  # [2]
            value = value.masked_fill(following["terminated"], 0.0)  # [3]
            return q, following["reward"] + self.config.gamma * value

    def compute_loss(
        self,
        model: nn.Embedding,
        batch: TensorDict,
        state: gymtask.State,
        output: tuple[Tensor, Tensor],
    ) -> Tensor:
        q, target = output
        # The sum, so that each row moves its value by step_size · (target − q).
        loss: Tensor = 0.5 * ((q - target) ** 2).sum()
        return loss


def main() -> None:
    """Trains, evaluates and films."""
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(1)  # models as small as these are fastest so
    torch.manual_seed(arguments.task.environment.env_seed)
    task = MaskedQLearning(arguments.task)
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
