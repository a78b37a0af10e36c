"""The policy of all candidates, and the loop that people write by hand around it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from alternate import Build, Close, Rollout
from envs import Work
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

AnyVectorEnv = gym.vector.VectorEnv[Any, Any, Any]


class Trunk(nn.Module):
    """Two hidden layers of 64 tanh units; frames are flattened and divided by 255."""

    def __init__(self, shape: tuple[int, ...], outputs: int, gain: float = 0.01) -> None:
        super().__init__()
        self.dims = len(shape)
        self.net = nn.Sequential(
            nn.Linear(int(np.prod(shape)), 64),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.Linear(64, outputs),
        )
        for layer, scale in ((self.net[0], 2**0.5), (self.net[2], 2**0.5), (self.net[4], gain)):
            assert isinstance(layer, nn.Linear)
            nn.init.orthogonal_(layer.weight, scale)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.float().div_(255)
        elif x.dtype != torch.float32:
            x = x.float()
        if self.dims > 1:
            x = x.flatten(-self.dims)
        output: Tensor = self.net(x)
        return output


class Policy(nn.Module):
    """A categorical or a diagonal normal distribution over actions."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.discrete = hasattr(action_space, "n")
        outputs = int(action_space.n) if self.discrete else int(action_space.shape[0])
        self.net = Trunk(observation_space.shape, outputs)
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def distribution(self, output: Tensor) -> Any:
        """Of the actions, given what the network says."""
        if self.discrete:
            return Categorical(logits=output, validate_args=False)
        return Normal(output, self.log_std.exp(), validate_args=False)

    def log_prob(self, output: Tensor, action: Tensor) -> Tensor:
        if self.discrete:
            return output.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        found: Tensor = self.distribution(output).log_prob(action).sum(-1)
        return found

    def act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Action and log-probability, as CleanRL draws them."""
        distribution = self.distribution(self.net(observation))
        action = distribution.sample()
        log_prob = distribution.log_prob(action)
        return action, log_prob if self.discrete else log_prob.sum(-1)


class HandLoop:
    """CleanRL's rollout (ppo.py, ppo_continuous_action.py) into preallocated tensors, no learning.

    Args:
        envs: Any vector environment that resets in the call after an episode's end.
        num_steps: Rows of each environment in a rollout.
        to_env: What becomes of actions on their way to the environments.
    """

    def __init__(
        self, envs: Any, num_steps: int, to_env: Callable[[Any], Any] | None = None
    ) -> None:
        torch.manual_seed(0)
        self.envs, self.num_steps, self.to_env = envs, num_steps, to_env
        observation_space, action_space = envs.single_observation_space, envs.single_action_space
        self.policy = Policy(observation_space, action_space)
        self.low, self.high = (
            getattr(action_space, "low", None),
            getattr(action_space, "high", None),
        )
        shape = (num_steps, envs.num_envs)
        pixels = observation_space.dtype == np.uint8
        self.dtype = torch.uint8 if pixels else torch.float32
        self.observation = torch.zeros(shape + observation_space.shape, dtype=self.dtype)
        self.action = (
            torch.zeros(shape, dtype=torch.int64)
            if self.policy.discrete
            else torch.zeros(shape + action_space.shape)
        )
        self.reward, self.log_prob = torch.zeros(shape), torch.zeros(shape)
        self.terminated = torch.zeros(shape, dtype=torch.bool)
        self.truncated = torch.zeros(shape, dtype=torch.bool)
        self.now = torch.as_tensor(envs.reset(seed=0)[0], dtype=self.dtype)

    def __call__(self) -> int:
        """Collects one rollout and returns its real transitions."""
        for t in range(self.num_steps):
            self.observation[t] = self.now
            with torch.no_grad():
                action, self.log_prob[t] = self.policy.act(self.now)
            self.action[t] = action
            values = action.numpy()
            if not self.policy.discrete:
                values = np.clip(values, self.low, self.high)
            if self.to_env is not None:
                values = self.to_env(values)
            observation, reward, terminated, truncated, _ = self.envs.step(values)
            self.reward[t] = torch.as_tensor(reward)
            self.terminated[t] = torch.as_tensor(terminated)
            self.truncated[t] = torch.as_tensor(truncated)
            self.now = torch.as_tensor(observation, dtype=self.dtype)
        # The call after an end is a reset, no transition.
        return self.reward.numel() - int((self.terminated | self.truncated).sum())


def over(
    make: Callable[[], Any], num_steps: int, to_env: Callable[[Any], Any] | None = None
) -> Build:
    """Builds the loop over what `make` returns."""

    def build() -> tuple[Rollout, Close]:
        envs = make()
        return HandLoop(envs, num_steps, to_env), envs.close

    return build


def make_native(work: Work) -> AnyVectorEnv:
    """The vector environment that the id itself names."""
    return gym.make_vec(
        work.env_id, num_envs=work.num_envs, vectorization_mode="vector_entry_point"
    )


def make_ale(num_envs: int, num_threads: int) -> AnyVectorEnv:
    """ALE's own vector environment with the preprocessing of `envs.make_atari`."""
    envs: AnyVectorEnv = import_module("ale_py.vector_env").AtariVectorEnv(
        "pong",
        num_envs,
        num_threads=num_threads,
        repeat_action_probability=0.0,
        reward_clipping=False,
    )
    return envs
