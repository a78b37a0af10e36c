"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347), in one file.

Without arguments it trains CartPole-v1, evaluates the trained policy over 100 episodes, films one
and says where everything went; --help lists all settings. Any id with a Discrete or Box action
space will do (--env-id HalfCheetah-v5). [n] marks core detail n, [c n] one for continuous actions,
of Huang et al., "The 37 implementation details of proximal policy optimization" (ICLR blog, 2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import gymnasium as gym
import torch
import tyro
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.optim import Adam, Optimizer, lr_scheduler

import gymtask
from gymtask.config import DataLoaderConfig, DatasetConfig, EnvironmentConfig


@dataclass
class PPOConfig(gymtask.ReinforcementLearningTaskConfig):
    """PPO's own settings beside those of every task."""

    name: str = "ppo"
    max_samples: int | None = 200_000
    env_id: str = "CartPole-v1"  # Id of the environment.
    gamma: float = 0.99  # Discount of rewards.
    gae_lambda: float = 0.95  # λ of generalized advantage estimation.
    clip_coef: float = 0.2  # How far the ratio of new to old probabilities may leave 1.
    clip_value: bool = True  # Whether the change of a value is clipped like the ratio.
    value_coef: float = 0.5  # Weight of the value loss.
    entropy_coef: float = 0.0  # Weight of the entropy bonus.
    learning_rate: float = 1e-3  # Of Adam, at the start; the trainer's has no part here.
    anneal: bool = True  # Whether the learning rate falls to 0 over `max_samples`.
    hidden: int = 64  # Units of each of the two hidden layers.
    normalize_observation: bool = True  # [c 6, c 7] If actions and observations are float Boxes.
    normalize_reward: bool = True  # [c 8, c 9] Under the same condition.
    # [1] Eight environments; actions outside a Box are clipped for the environment alone [c 5].
    environment: EnvironmentConfig = field(default_factory=lambda: EnvironmentConfig(
        num_envs=8, env_worker_mode="sync", env_seed=1, action_clip=True
    ))  # fmt: skip
    # [6] 16 minibatches of 256 are 4 passes over the 1024 rows of a collection.
    dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(
        num_update_steps=16, replacement=False))  # fmt: skip
    train_dl: DataLoaderConfig = field(default_factory=lambda: DataLoaderConfig(batch_size=256))


@dataclass
class Arguments:
    """The command line."""

    task: Annotated[PPOConfig, tyro.conf.arg(name="")] = field(default_factory=PPOConfig)
    trainer: gymtask.TrainerConfig = field(default_factory=lambda: gymtask.TrainerConfig(
        sampling=gymtask.SamplingConfig(num_epoch_samples=1024),
        clip_grad_norm=0.5, checkpoint_interval=20,  # [11]
    ))  # fmt: skip
    resume: str | None = None  # A checkpoint, a run directory, or "auto", to go on with.
    clip: bool = True  # Whether to film the trained policy.


def network(inputs: int, hidden: int, outputs: int, last_std: float) -> nn.Sequential:
    """Two tanh layers and a linear one; [2] orthogonal weights, and biases of 0."""
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for linear, std in zip(layers, (2**0.5, 2**0.5, last_std), strict=True):
        nn.init.orthogonal_(linear.weight, std)
        nn.init.zeros_(linear.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def features(space: gym.Space[Any], value: Any) -> Tensor:
    """An observation as floats [..., flatdim(space)], as Gymnasium flattens it."""
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        parts = space.items() if isinstance(space, gym.spaces.Dict) else enumerate(space)
        return torch.cat([features(part, value[str(key)]) for key, part in parts], -1)
    if isinstance(space, gym.spaces.Discrete):
        return nn.functional.one_hot(value - int(space.start), int(space.n)).float()
    if isinstance(space, gym.spaces.MultiDiscrete):
        columns = (value - value.new_tensor(space.start)).long().flatten(-space.nvec.ndim)
        sizes = zip(columns.unbind(-1), space.nvec.flat, strict=True)
        return torch.cat([nn.functional.one_hot(each, int(n)) for each, n in sizes], -1).float()
    flat: Tensor = value.reshape(*value.shape[: value.ndim - len(space.shape or ())], -1).float()
    return flat / 255 if value.dtype == torch.uint8 else flat


class ActorCritic(nn.Module):
    """[13] Policy and value in two networks of two tanh layers each."""

    def __init__(self, observation_space: Any, action_space: Any, hidden: int) -> None:
        super().__init__()
        if not isinstance(action_space, (gym.spaces.Discrete, gym.spaces.Box)):
            raise ValueError(f"the action space must be Discrete or a Box, got {action_space}")
        self.space, self.action_shape = observation_space, action_space.shape or ()
        self.discrete = isinstance(action_space, gym.spaces.Discrete)
        inputs, outputs = gym.spaces.flatdim(observation_space), gym.spaces.flatdim(action_space)
        self.actor = network(inputs, hidden, outputs, last_std=0.01)
        self.critic = network(inputs, hidden, 1, last_std=1.0)
        # [c 2] No function of the state; [c 3] an action's parts are independent.
        self.log_std = nn.Parameter(torch.zeros(self.action_shape), requires_grad=not self.discrete)

    def run(self, layers: nn.Sequential, observation: Any) -> Tensor:
        seen = features(self.space, observation)  # of windows, [B, W, n]; layers like [B, n] best
        output: Tensor = layers(seen.reshape(-1, seen.shape[-1]))
        return output.view(*seen.shape[:-1], -1)

    def policy(self, observation: Any) -> Tensor:
        """Logits [..., n], or the mean of the action [..., *shape]."""
        output = self.run(self.actor, observation)
        return output if self.discrete else output.unflatten(-1, self.action_shape)

    def value(self, observation: Any) -> Tensor:
        return self.run(self.critic, observation).squeeze(-1)

    def judge(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of an action and entropy, both [...], from what `policy` gave."""
        if self.discrete:  # what Categorical does, in half as many operations
            log_p = output.log_softmax(-1)
            return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(
                -1
            )
        normal = Normal(output, self.log_std.exp(), validate_args=False)  # [c 1]
        joint = Independent(normal, len(self.action_shape), validate_args=False)
        return joint.log_prob(action), joint.entropy()

    def forward(self, observation: Any, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *self.judge(self.policy(observation), action), self.value(observation)


class PPO(gymtask.ReinforcementLearningTask[PPOConfig, ActorCritic]):
    """The task."""

    batch_keys = ("observation", "action", "log_prob", "advantage", "value_target", "state_value")

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        environment, num_envs = self.get_environment_cached(), config.environment.total_envs
        self.spaces = environment.observation_space, environment.action_space
        boxes = all(isinstance(s, gym.spaces.Box) and s.dtype.kind == "f" for s in self.spaces)
        self.normalize_observation = self.normalize_reward = nn.Identity()
        if boxes and config.normalize_observation:
            self.normalize_observation = gymtask.ObservationNormalizer(self.spaces[0])
        if boxes and config.normalize_reward:
            self.normalize_reward = gymtask.RewardNormalizer(num_envs, gamma=config.gamma)

    def get_environment(self) -> gymtask.Environment:
        return gymtask.Environment(self.config.env_id)

    def get_model(self) -> ActorCritic:
        return ActorCritic(*self.spaces, self.config.hidden)

    def get_optimizers(self, model: ActorCritic) -> Optimizer:
        return Adam(model.parameters(), lr=self.config.learning_rate, eps=1e-5, fused=True)  # [3]

    def get_lr_schedulers(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Any]:
        def rate(_: int) -> float:  # [4] falls linearly, by what was collected before this epoch
            return max(0.0, 1.0 - (self.state.num_samples - self.state.num_epoch_samples) / limit)

        limit = self.config.max_samples if self.config.anneal else None
        return [lr_scheduler.LambdaLR(each, rate) for each in optimizers.values() if limit]

    def get_actions(self, model: ActorCritic, states: TensorDict, optimal: bool) -> Tensor:
        output = model.policy(self.normalize_observation(states["observation"]))
        if model.discrete:
            return output.argmax(-1) if optimal else gymtask.sampling.categorical(output, states)
        return output if optimal else gymtask.sampling.gaussian(output, model.log_std.exp(), states)

    def get_values(self, model: ActorCritic, states: TensorDict) -> Tensor:
        # All at once, as it would cost more step by step; a piece has one state more than rows.
        seen = self.normalize_observation(states["observation"])
        self.old_policy = model.judge, model.policy(seen)
        return model.value(seen)

    @torch.no_grad()
    def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
        rows, lengths = torch.cat(trajectories), [len(each) for each in trajectories]
        judge, output = self.old_policy
        output = torch.cat([each[:-1] for each in output.split([n + 1 for n in lengths])])
        rows["log_prob"] = judge(output, rows["action"].to(output.device))[0].cpu()
        # The new policy is to see what the old one saw, by statistics without this collection.
        rows["observation"] = self.normalize_observation(rows["observation"])
        for each in (self.normalize_observation, self.normalize_reward):
            if not isinstance(each, nn.Identity):
                each.update(trajectories)
        rows["advantage"], rows["value_target"] = gymtask.generalized_advantage_estimate(  # [5]
            self.normalize_reward(rows["next", "reward"]),
            value=rows["state_value"],
            next_value=rows["next", "state_value"],  # of the final observation at a time limit
            terminated=rows["next", "terminated"],
            truncated=rows["next", "truncated"],
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
            end=torch.cat([torch.arange(n) == n - 1 for n in lengths]),
        )
        self.log("explained_variance", 1 - rows["advantage"].var() / rows["value_target"].var())
        return list(rows.split(lengths))

    def run_model(self, model: ActorCritic, batch: TensorDict, state: gymtask.State) -> Any:
        return model(batch["observation"], batch["action"])

    def compute_loss(
        self, model: ActorCritic, batch: TensorDict, state: gymtask.State, output: Any
    ) -> dict[str, Tensor]:
        (log_prob, entropy, value), clip = output, self.config.clip_coef
        advantage, old, target = (batch[k] for k in ("advantage", "state_value", "value_target"))
        log_ratio = log_prob - batch["log_prob"]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - clip, 1 + clip)
        if advantage.numel() > 1:  # [7] within the minibatch; one row alone has no deviation
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        surrogate = torch.min(advantage * ratio, advantage * clipped)  # [8]
        error = (value - target) ** 2
        if self.config.clip_value:  # [9]
            error = torch.max(error, (old + (value - old).clamp(-clip, clip) - target) ** 2)
        self.log("kl", (ratio - 1 - log_ratio).mean())  # [12] http://joschu.net/blog/kl-approx.html
        self.log("clip_fraction", (ratio != clipped).float().mean())
        return {  # [10] one loss of all three
            "policy": -surrogate.mean(),
            "value": self.config.value_coef * 0.5 * error.mean(),
            "entropy": -self.config.entropy_coef * entropy.mean(),
        }


def main() -> None:
    """Trains, evaluates and films."""
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(1)  # networks as small as these are fastest so
    task, trainer = PPO(arguments.task), gymtask.Trainer(arguments.trainer)
    torch.manual_seed(arguments.task.environment.env_seed)
    model = task.get_model()
    state = trainer.train(task, model, resume=arguments.resume)
    if trainer.rank or trainer.stopped_by in ("SIGINT", "SIGTERM"):
        return  # of several processes the first one tells; what was stopped, --resume goes on with
    print(f"{state.num_samples} steps in {state.elapsed_time:.0f} s, until {trainer.stopped_by}")
    print(f"run directory: {trainer.run_dir}")
    for optimal in (True, False):  # in fresh environments, with seeds that were not trained on
        episodes = gymtask.evaluate(task, model, num_episodes=100, optimal=optimal)
        mean = sum(each.episode_return for each in episodes) / len(episodes)
        print(f"mean return over 100 episodes, {'greedy' if optimal else 'sampled'}: {mean:.1f}")
    if arguments.clip and trainer.run_dir is not None:
        task.sample_clip(save_path=trainer.run_dir / "clips" / "final.mp4", model=model)


if __name__ == "__main__":
    main()
