"""Soft actor-critic (Haarnoja et al. 2018b, arXiv:1812.05905), in one file.

    python examples/sac.py
    python examples/sac.py --env-id HalfCheetah-v5 --max-samples 100000 --hidden 256

Without arguments it trains Pendulum-v1, evaluates the trained policy over 100 episodes, films one
and says where everything went; --help lists all settings. Any id with Box spaces will do, if that
of the actions has bounds. Sources of the details:

[1] Haarnoja et al. 2018b, section 4 and algorithm 1: two critics, the lesser value counts; target
    critics that follow slowly. Table 1: one update a transition, γ, τ; 256 units, batches of 256.
[2] The same, section 5, equation 18: a temperature α that keeps the entropy at a target, which is
    minus the number of the action's parts (table 1).
[3] The same, appendix C: the tanh of a Gaussian, and its density; its slope in the form of OpenAI
    Spinning Up, sac/core.py, which loses no digits where tanh is flat.
[4] CleanRL, sac_continuous_action.py: bounds of log σ, the critics' learning rate (here that of
    all) and their loss without the factor ½, densities in the action's own units.
[5] Pardo et al. 2018, arXiv:1712.00378: a time limit is no end, so only `terminated` zeroes values.
[6] Acme, agents/jax/sac/learning.py: the three losses are differentiated at the same parameters,
    then all are stepped; in [1] and [4] the actor sees critics that were stepped already.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, TypeAlias

import gymnasium as gym
import torch
import tyro
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import gymtask

Output: TypeAlias = "tuple[Tensor, Tensor, Tensor]"
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0  # [4]


@dataclass
class SACConfig(gymtask.ReinforcementLearningTaskConfig):
    """SAC's own settings beside those of every task."""

    name: str = "sac"
    max_samples: int | None = 20_000
    env_id: str = "Pendulum-v1"  # Id of the environment.
    gamma: float = 0.99  # Discount of rewards.
    tau: float = 0.005  # How far the target critics follow in one update.
    learning_rate: float = 1e-3  # Of the three Adams; the trainer's has no part here.
    hidden: int = 128  # Units of each of the two hidden layers of a network.
    environment: gymtask.EnvironmentConfig = field(  # Rounding may leave the bounds; clipped.
        default_factory=lambda: gymtask.EnvironmentConfig(
            num_envs=4, env_worker_mode="sync", env_seed=1, action_clip=True
        )
    )
    dataset: gymtask.DatasetConfig = field(
        default_factory=lambda: gymtask.DatasetConfig(
            off_policy=True, replay_buffer_sample_size=1_000_000, num_update_steps=64
        )
    )
    train_dl: gymtask.DataLoaderConfig = field(
        default_factory=partial(gymtask.DataLoaderConfig, batch_size=128)
    )


@dataclass
class Arguments:
    """The command line."""

    task: Annotated[SACConfig, tyro.conf.arg(name="")] = field(default_factory=SACConfig)
    trainer: gymtask.TrainerConfig = field(
        default_factory=lambda: gymtask.TrainerConfig(
            sampling=gymtask.SamplingConfig(num_epoch_samples=64, num_warmup_samples=1000),
            log_interval=10,
            checkpoint_interval=100,
        )
    )
    resume: str | None = None  # A checkpoint, a run directory, or "auto", to go on with.
    clip: bool = True  # Whether to film the trained policy.


def network(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two layers of rectified units and a linear one."""
    first, second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(hidden, outputs))


def flatten(space: gym.spaces.Box, value: Tensor) -> Tensor:
    """[..., *shape] as floats [..., d]."""
    return value.reshape(*value.shape[: value.ndim - len(space.shape)], -1).float()


def squashed_log_prob(unsquashed: Tensor, mean: Tensor, std: Tensor, scale: Tensor) -> Tensor:
    """[3] Of a = middle + scale · tanh(u), where u comes from N(mean, std); [..., d] gives [...].

    log π(a) = Σ log N(u) − log scale − log(1 − tanh²(u)), and the last of these is computed as
    2 (log 2 − u − softplus(−2u)).
    """
    log_slope = 2.0 * (math.log(2.0) - unsquashed - nn.functional.softplus(-2.0 * unsquashed))
    normal = -0.5 * ((unsquashed - mean) / std) ** 2 - std.log() - 0.5 * math.log(2.0 * math.pi)
    return torch.sum(normal - scale.log() - log_slope, -1)


class Critics(nn.Module):
    """[1] Two networks that estimate the value of an action, [2, ...]."""

    def __init__(self, observation: gym.spaces.Box, action: gym.spaces.Box, hidden: int) -> None:
        super().__init__()
        self.spaces = observation, action
        inputs = gym.spaces.flatdim(observation) + gym.spaces.flatdim(action)
        self.networks = nn.ModuleList(network(inputs, hidden, 1) for _ in range(2))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        first, second = self.spaces
        inputs = torch.cat([flatten(first, observation), flatten(second, action)], -1)
        return torch.cat([each(inputs) for each in self.networks], -1).movedim(-1, 0)


class ActorCritic(nn.Module):
    """All that is trained: actor, critics and temperature."""

    def __init__(self, observation: gym.spaces.Box, action: gym.spaces.Box, hidden: int) -> None:
        super().__init__()
        self.spaces = observation, action
        low, high = torch.tensor(action.low).flatten(), torch.tensor(action.high).flatten()
        self.scale = nn.Buffer((high - low).float() / 2)
        self.middle = nn.Buffer((high + low).float() / 2)
        self.actor = network(gym.spaces.flatdim(observation), hidden, 2 * len(low))
        self.critics = Critics(observation, action, hidden)
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def policy(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of u, [..., d] each."""
        mean, raw = self.actor(flatten(self.spaces[0], observation)).chunk(2, -1)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (raw.tanh() + 1.0)  # [4]
        return mean, log_std.exp()

    def squash(self, unsquashed: Tensor) -> Tensor:
        """The action [..., *shape] of u [..., d]."""
        action = self.middle + self.scale * unsquashed.tanh()
        return action.reshape(*action.shape[:-1], *self.spaces[1].shape)

    def sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """An action that the actor can be differentiated through, and its log-probability."""
        mean, std = self.policy(observation)
        unsquashed = mean + std * torch.randn_like(mean)
        return self.squash(unsquashed), squashed_log_prob(unsquashed, mean, std, self.scale)

    def forward(self, observation: Tensor, taken: Tensor) -> Output:
        """Values of actions taken, values of new ones, and log-probabilities of these."""
        action, log_prob = self.sample(observation)
        return self.critics(observation, taken), self.critics(observation, action), log_prob


class SAC(gymtask.ReinforcementLearningTask[SACConfig, ActorCritic]):
    """The task. The target critics are a part of it, so checkpoints hold them."""

    batch_keys = ("observation", "action", "next")
    forward_methods = ("sample",)

    def __init__(self, config: SACConfig) -> None:
        super().__init__(config)
        self.target = self.get_model().critics.requires_grad_(False)

    def get_environment(self) -> gymtask.Environment:
        return gymtask.Environment(self.config.env_id)

    def get_model(self) -> ActorCritic:
        spaces = self.get_environment_cached()
        observation, action = spaces.observation_space, spaces.action_space
        if not isinstance(observation, gym.spaces.Box):
            raise gymtask.ConfigurationError(f"observations must be in a Box, got {observation}")
        if not isinstance(action, gym.spaces.Box) or not action.is_bounded():
            raise gymtask.ConfigurationError(f"actions must be in a Box with bounds, got {action}")
        return ActorCritic(observation, action, self.config.hidden)

    def get_optimizers(self, model: ActorCritic) -> dict[str, Optimizer]:
        make = partial(Adam, lr=self.config.learning_rate, fused=True)
        actor, critic = make(model.actor.parameters()), make(model.critics.parameters())
        return {"actor": actor, "critic": critic, "alpha": make([model.log_alpha])}

    def get_actions(self, model: ActorCritic, states: TensorDict, optimal: bool) -> Tensor:
        mean, std = model.policy(states["observation"])
        return model.squash(mean if optimal else gymtask.sampling.gaussian(mean, std, states))

    def on_epoch_start(self, model: ActorCritic, state: gymtask.State) -> None:
        if state.num_steps == 0:
            self.target.load_state_dict(model.critics.state_dict())

    def run_model(self, model: ActorCritic, batch: TensorDict, state: gymtask.State) -> Output:
        output: Output = model(batch["observation"], batch["action"])
        return output

    @torch.no_grad()
    def target_value(self, model: ActorCritic, following: TensorDict) -> Tensor:
        """What the critics learn, [B, W]: [1, equations 3 and 5], also at time limits [5]."""
        action, log_prob = model.sample(following["observation"])
        q = self.target(following["observation"], action).amin(0)
        value = (q - model.log_alpha.exp() * log_prob).masked_fill(following["terminated"], 0.0)
        return torch.add(following["reward"], value, alpha=self.config.gamma)

    def compute_loss(
        self, model: ActorCritic, batch: TensorDict, state: gymtask.State, output: Output
    ) -> dict[str, Tensor]:
        """Each is differentiated with respect to the parameters of its own optimizer alone."""
        q, new_q, log_prob = output
        alpha = model.log_alpha.exp()
        target_entropy = (model.scale.log() - 1.0).sum()  # [2], of an action in (−1, 1) spread out
        self.log("alpha", alpha)
        return {  # [4] and [6]
            "actor": (alpha.detach() * log_prob - new_q.amin(0)).mean(),  # [1, equation 9]
            "critic": ((q - self.target_value(model, batch["next"])) ** 2).mean((1, 2)).sum(),
            "alpha": -(alpha * (log_prob.detach() + target_entropy)).mean(),  # [2]
        }

    @torch.no_grad()
    def on_update_end(self, model: ActorCritic, state: gymtask.State) -> None:
        pairs = zip(self.target.parameters(), model.critics.parameters(), strict=True)
        for target, parameter in pairs:  # [1, algorithm 1]
            target.lerp_(parameter, self.config.tau)


def main() -> None:
    """Trains, evaluates and films."""
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(1)  # networks as small as these are fastest so
    torch.manual_seed(arguments.task.environment.env_seed)
    task = SAC(arguments.task)
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
