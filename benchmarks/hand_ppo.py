"""PPO written by hand in the style of CleanRL's ppo.py and ppo_continuous_action.py.

    python benchmarks/hand_ppo.py --env-id CartPole-v1 --seed 1

One file, one loop, Gymnasium's SyncVectorEnv and its wrappers: what gymtask's example is compared
with, in learning as in wall time. It does what those scripts do, also where gymtask's example does
otherwise: a time limit ends an episode like a failure, so the value of its last state does not
count; observations and rewards are normalised by statistics that change in every step. It leaves
out what they log, and checks no argument of a distribution.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from report import Help
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

AnyEnv = gym.Env[Any, Any]
AnyVectorEnv = gym.vector.VectorEnv[Any, Any, Any]
OnRollout = Callable[[int, list[float]], bool]
"""Is given the steps so far and the returns of the episodes that a rollout ended; True stops."""


@dataclass(frozen=True)
class Settings:
    """Hyperparameters; the defaults are those of CleanRL's ppo.py."""

    env_id: str = "CartPole-v1"
    total_steps: int = 500_000
    num_envs: int = 4
    num_steps: int = 128  # Of each environment in a rollout.
    learning_rate: float = 2.5e-4  # Falls linearly to 0.
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    num_passes: int = 4  # Over the rows of a rollout.
    clip_coef: float = 0.2
    entropy_coef: float = 0.01
    value_coef: float = 0.5
    max_grad_norm: float = 0.5


def make_env(settings: Settings) -> AnyEnv:
    """One environment in CleanRL's wrappers."""
    env: AnyEnv = gym.make(settings.env_id, disable_env_checker=True)
    env = gym.wrappers.RecordEpisodeStatistics(env)
    if not isinstance(env.action_space, gym.spaces.Box):
        return env
    env = gym.wrappers.ClipAction(env)
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.TransformObservation(env, clipped, env.observation_space)
    env = gym.wrappers.NormalizeReward(env, gamma=settings.gamma)
    return gym.wrappers.TransformReward(env, clipped)


def clipped(value: Any) -> Any:
    return np.clip(value, -10, 10)


def make_envs(settings: Settings, num_envs: int) -> AnyVectorEnv:
    mode = gym.vector.AutoresetMode.SAME_STEP
    return gym.vector.SyncVectorEnv([lambda: make_env(settings)] * num_envs, autoreset_mode=mode)


def network(inputs: int, outputs: int, last_std: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, std in zip(layers, (2**0.5, 2**0.5, last_std), strict=True):
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """Actor and critic."""

    def __init__(self, envs: AnyVectorEnv) -> None:
        super().__init__()
        space = envs.single_action_space
        self.discrete = isinstance(space, gym.spaces.Discrete)
        inputs, outputs = (
            gym.spaces.flatdim(each) for each in (envs.single_observation_space, space)
        )
        self.critic = network(inputs, 1, 1.0)
        self.actor = network(inputs, outputs, 0.01)
        self.log_std = nn.Parameter(torch.zeros(outputs), requires_grad=not self.discrete)

    def distribution(self, observation: Tensor) -> Distribution:
        output = self.actor(observation)
        if self.discrete:
            return Categorical(logits=output, validate_args=False)
        normal = Normal(output, self.log_std.exp(), validate_args=False)
        return Independent(normal, 1, validate_args=False)

    def value(self, observation: Tensor) -> Tensor:
        found: Tensor = self.critic(observation)
        return found.squeeze(-1)


class Rollout:
    """Rows [T, N] of one rollout after another, in tensors that are made once."""

    def __init__(self, settings: Settings, envs: AnyVectorEnv) -> None:
        shape = (settings.num_steps, settings.num_envs)
        action, observation = envs.single_action_space, envs.single_observation_space
        kind = torch.int64 if isinstance(action, gym.spaces.Discrete) else torch.float32
        self.observation = torch.zeros(shape + (observation.shape or ()))
        self.action = torch.zeros(shape + (action.shape or ()), dtype=kind)
        self.log_prob, self.reward, self.done, self.value = (torch.zeros(shape) for _ in range(4))

    def advantage(self, last_value: Tensor, settings: Settings) -> Tensor:
        """Generalized advantage estimates [T, N], given the value of what came last."""
        advantage, running = torch.zeros_like(self.reward), torch.zeros_like(last_value)
        following = last_value
        for t in reversed(range(settings.num_steps)):
            goes_on = 1.0 - self.done[t]
            delta = self.reward[t] + settings.gamma * goes_on * following - self.value[t]
            running = delta + settings.gamma * settings.gae_lambda * goes_on * running
            advantage[t], following = running, self.value[t]
        return advantage


def train(settings: Settings, seed: int, on_rollout: OnRollout) -> tuple[Agent, AnyVectorEnv]:
    """Trains until `on_rollout` says so or the steps are done.

    Returns:
        The trained agent and its environments, whose wrappers know the statistics.
    """
    torch.manual_seed(seed)
    np.random.seed(seed)
    envs = make_envs(settings, settings.num_envs)
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=settings.learning_rate, eps=1e-5)
    rollout = Rollout(settings, envs)
    now = torch.as_tensor(envs.reset(seed=seed)[0], dtype=torch.float32)
    size = settings.num_envs * settings.num_steps
    num_iterations = settings.total_steps // size
    for iteration in range(num_iterations):
        rate = settings.learning_rate * (1.0 - iteration / num_iterations)
        optimizer.param_groups[0]["lr"] = rate
        now, returns = collect(envs, agent, rollout, now)
        if on_rollout((iteration + 1) * size, returns):
            break
        learn(agent, optimizer, rollout, now, settings)
    return agent, envs


@torch.no_grad()
def collect(
    envs: AnyVectorEnv, agent: Agent, rollout: Rollout, now: Tensor
) -> tuple[Tensor, list[float]]:
    """Fills the rollout; returns what is observed then, and the returns of ended episodes."""
    returns: list[float] = []
    for t in range(len(rollout.reward)):
        rollout.observation[t] = now
        distribution = agent.distribution(now)
        action = distribution.sample()
        rollout.action[t], rollout.log_prob[t] = action, distribution.log_prob(action)
        rollout.value[t] = agent.value(now)
        observation, reward, terminated, truncated, info = envs.step(action.numpy())
        rollout.reward[t] = torch.as_tensor(reward, dtype=torch.float32)
        rollout.done[t] = torch.as_tensor(terminated | truncated)
        now = torch.as_tensor(observation, dtype=torch.float32)
        returns += ended(info)
    return now, returns


def ended(info: dict[str, Any]) -> list[float]:
    """The returns of the episodes that ended in a step."""
    if "final_info" not in info:
        return []
    final = info["final_info"]
    found: list[float] = final["episode"]["r"][final["_episode"]].tolist()
    return found


def learn(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    now: Tensor,
    settings: Settings,
) -> None:
    """All passes over a rollout."""
    with torch.no_grad():
        advantage = rollout.advantage(agent.value(now), settings).flatten()
    old_value = rollout.value.flatten()
    rows = Rows(
        rollout.observation.flatten(0, 1),
        rollout.action.flatten(0, 1),
        rollout.log_prob.flatten(),
        advantage,
        old_value,
        advantage + old_value,
    )
    order = np.arange(len(advantage))
    for _ in range(settings.num_passes):
        np.random.shuffle(order)
        for part in np.split(order, settings.num_minibatches):
            index = torch.from_numpy(part)
            loss = compute_loss(agent, Rows(*(column[index] for column in rows)), settings)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(agent.parameters(), settings.max_grad_norm)
            optimizer.step()


class Rows(NamedTuple):
    """What is learnt from, each [B, ...]."""

    observation: Tensor
    action: Tensor
    log_prob: Tensor
    advantage: Tensor
    value: Tensor
    target: Tensor


def compute_loss(agent: Agent, rows: Rows, settings: Settings) -> Tensor:
    """The loss of policy, value and entropy together."""
    clip, gain = settings.clip_coef, rows.advantage
    distribution, value = agent.distribution(rows.observation), agent.value(rows.observation)
    ratio = (distribution.log_prob(rows.action) - rows.log_prob).exp()
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(1 - clip, 1 + clip)).mean()
    near = rows.value + (value - rows.value).clamp(-clip, clip)
    errors = torch.max((value - rows.target) ** 2, (near - rows.target) ** 2)
    entropy = distribution.entropy().mean()
    value_loss = settings.value_coef * 0.5 * errors.mean()
    return policy_loss - settings.entropy_coef * entropy + value_loss


@torch.no_grad()
def evaluate(
    agent: Agent, trained: AnyVectorEnv, settings: Settings, num_episodes: int, seed: int
) -> list[float]:
    """Greedy returns of so many episodes, by the statistics of the first trained environment."""
    env = make_env(settings)
    copy_statistics(trained.envs[0], env)  # type: ignore[attr-defined]
    returns: list[float] = []
    observation, _ = env.reset(seed=seed)
    while len(returns) < num_episodes:
        output = agent.actor(torch.as_tensor(observation, dtype=torch.float32))
        action = output.argmax(-1) if agent.discrete else output
        observation, _, terminated, truncated, info = env.step(action.numpy())
        if terminated or truncated:
            returns.append(float(info["episode"]["r"]))
            observation, _ = env.reset()
    env.close()
    return returns


def copy_statistics(trained: AnyEnv, env: AnyEnv) -> None:
    """Lets the wrapper of one environment normalise as another's does, and stay so."""
    while isinstance(trained, gym.Wrapper) and isinstance(env, gym.Wrapper):
        if isinstance(trained, gym.wrappers.NormalizeObservation):
            assert isinstance(env, gym.wrappers.NormalizeObservation)
            env.obs_rms, env.update_running_mean = trained.obs_rms, False
        trained, env = trained.env, env.env


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--env-id", default="CartPole-v1", help="the environment")
    parser.add_argument("--steps", type=int, default=500_000, help="of all environments together")
    parser.add_argument("--seed", type=int, default=1, help="of everything")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = Settings(env_id=options.env_id, total_steps=options.steps)
    start, recent = time.perf_counter(), deque[float](maxlen=100)

    def show(num_steps: int, returns: list[float]) -> bool:
        recent.extend(returns)
        if recent:
            rate = num_steps / (time.perf_counter() - start)
            print(f"{num_steps} steps, return {np.mean(recent):.1f}, {rate:.0f} steps/s")
        return False

    train(settings, options.seed, show)


if __name__ == "__main__":
    main()
