"""Programs written for Gymnasium's vector environments run with ours put in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from torch import nn
from torch.distributions import Categorical

import gymtask

NUM_ENVS, NUM_STEPS, NUM_UPDATES = 4, 32, 3


class Agent(nn.Module):
    """A policy and a value."""

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        super().__init__()
        space: Any = envs.single_action_space
        size = int(np.prod(envs.single_observation_space.shape or ()))
        self.actor = nn.Sequential(nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, int(space.n)))
        self.critic = nn.Sequential(nn.Linear(size, 32), nn.Tanh(), nn.Linear(32, 1))

    def act(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        policy = Categorical(logits=self.actor(x))
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.critic(x).squeeze(-1)


def train(envs: VectorEnv[Any, Any, Any]) -> tuple[list[float], list[float]]:
    """Proximal policy optimisation in one function, as CleanRL writes it.

    Returns:
        The returns of the episodes that ended, and the losses.
    """
    torch.manual_seed(1)
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    returns, losses = [], []
    shape = (NUM_STEPS, envs.num_envs)
    obs = torch.zeros(*shape, *(envs.single_observation_space.shape or ()))
    actions, logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(5))
    next_obs, next_done = torch.as_tensor(envs.reset(seed=1)[0]), torch.zeros(envs.num_envs)
    for _ in range(NUM_UPDATES):
        for step in range(NUM_STEPS):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                actions[step], logprobs[step], _, values[step] = agent.act(next_obs)
            observed, reward, terminated, truncated, infos = envs.step(
                actions[step].long().cpu().numpy()
            )
            rewards[step] = torch.as_tensor(reward)
            next_obs = torch.as_tensor(observed)
            next_done = torch.as_tensor(np.logical_or(terminated, truncated)).float()
            if "episode" in infos:
                returns += infos["episode"]["r"][infos["_episode"]].tolist()
        with torch.no_grad():
            advantages, last = torch.zeros(shape), torch.zeros(envs.num_envs)
            following, alive = agent.act(next_obs)[3], 1.0 - next_done
            for t in reversed(range(NUM_STEPS)):
                delta = rewards[t] + 0.99 * following * alive - values[t]
                advantages[t] = last = delta + 0.99 * 0.95 * alive * last
                following, alive = values[t], 1.0 - dones[t]
            targets = advantages + values
        _, new_logprob, entropy, new_value = agent.act(obs.flatten(0, 1), actions.flatten())
        ratio = (new_logprob - logprobs.flatten()).exp()
        gain = torch.min(advantages.flatten() * ratio, advantages.flatten() * ratio.clamp(0.8, 1.2))
        error = (new_value - targets.flatten()).pow(2)
        loss = (0.5 * error - gain - 0.01 * entropy).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    envs.close()
    return returns, losses


def make_env(env_id: str, index: int) -> Callable[[], Any]:
    def thunk() -> Any:
        env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))
        env.action_space.seed(index)
        return env

    return thunk


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_a_script_over_sync_vector_env_learns_the_same(num_workers: int) -> None:
    env_fns = [make_env("CartPole-v1", index) for index in range(NUM_ENVS)]
    expected = train(SyncVectorEnv(env_fns))
    assert expected[0]
    assert train(gymtask.ProcessVectorEnv(env_fns, num_workers=num_workers)) == expected


@pytest.mark.parametrize("mode", ["process", "thread", "sync"])
def test_a_script_over_make_vec_learns_the_same(mode: str) -> None:
    def wrapped(make_vec: Any, mode: str) -> Any:
        envs = make_vec("CartPole-v1", num_envs=NUM_ENVS, vectorization_mode=mode)
        return gym.wrappers.vector.RecordEpisodeStatistics(envs)

    expected = train(wrapped(gym.make_vec, "sync"))
    assert expected[0]
    assert train(wrapped(gymtask.make_vec, mode)) == expected
