"""How fast environments are stepped by a policy: gymtask beside a loop written by hand.

    python benchmarks/collect.py --num-envs 8 --rounds 7 --out collect.json

The loop by hand is CleanRL's rollout over Gymnasium's SyncVectorEnv (or AsyncVectorEnv), into
preallocated tensors. All candidates use the same 2 x 64 tanh policy and keep observation, action,
reward, flags and log-probability of every row. They run alternately, round by round, in one
process; only the ratios of one round are compared. A vector environment in NEXT_STEP mode spends
a call on each reset: such calls are not counted as steps.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

import gymtask

Rollout = Callable[[], int]


def make_env(env_id: str) -> gym.Env[Any, Any]:
    """One environment, the same for all candidates."""
    return gym.make(env_id, disable_env_checker=True)


class Policy(nn.Module):
    """Two hidden layers of 64 tanh units; a categorical or a diagonal normal distribution."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__()
        space, shape = env.action_space, env.observation_space.shape
        assert shape is not None
        self.discrete = isinstance(space, gym.spaces.Discrete)
        outputs = (
            int(space.n)
            if isinstance(space, gym.spaces.Discrete)
            else int(np.prod(space.shape or ()))
        )
        self.net = nn.Sequential(
            nn.Linear(int(np.prod(shape)), 64),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.Linear(64, outputs),
        )
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Action and log-probability, as CleanRL draws them."""
        output = self.net(observation)
        if self.discrete:
            categorical = Categorical(logits=output, validate_args=False)
            action = categorical.sample()
            return action, categorical.log_prob(action)
        normal = Normal(output, self.log_std.exp(), validate_args=False)
        action = normal.sample()
        return action, normal.log_prob(action).sum(-1)


class HandLoop:
    """CleanRL's rollout (ppo.py and ppo_continuous_action.py), without learning."""

    def __init__(
        self, envs: gym.vector.VectorEnv[Any, Any, Any], policy: Policy, num_steps: int
    ) -> None:
        self.envs, self.policy, self.num_steps = envs, policy, num_steps
        shape = (num_steps, envs.num_envs)
        space = envs.single_action_space
        self.low, self.high = getattr(space, "low", None), getattr(space, "high", None)
        observation_shape = envs.single_observation_space.shape or ()
        self.observation = torch.zeros(shape + observation_shape)
        self.action = torch.zeros(
            shape + (space.shape or ()), dtype=torch.int64 if policy.discrete else torch.float32
        )
        self.reward, self.log_prob = torch.zeros(shape), torch.zeros(shape)
        self.terminated, self.truncated = (
            torch.zeros(shape, dtype=torch.bool),
            torch.zeros(shape, dtype=torch.bool),
        )
        self.now = torch.as_tensor(envs.reset(seed=0)[0], dtype=torch.float32)

    def __call__(self) -> int:
        """Collects one rollout and returns its real transitions."""
        for t in range(self.num_steps):
            self.observation[t] = self.now
            with torch.no_grad():
                action, self.log_prob[t] = self.policy.act(self.now)
            self.action[t] = action
            values = (
                action.numpy()
                if self.policy.discrete
                else np.clip(action.numpy(), self.low, self.high)
            )
            observation, reward, terminated, truncated, _ = self.envs.step(values)
            self.reward[t] = torch.as_tensor(reward)
            self.terminated[t] = torch.as_tensor(terminated)
            self.truncated[t] = torch.as_tensor(truncated)
            self.now = torch.as_tensor(observation, dtype=torch.float32)
        return self.reward.numel() - int((self.terminated | self.truncated).sum())


class Task(gymtask.ReinforcementLearningTask):
    """Acts with the policy; `engine_only` draws actions as the loop by hand does."""

    def __init__(
        self, config: gymtask.ReinforcementLearningTaskConfig, env_id: str, engine_only: bool
    ) -> None:
        super().__init__(config)
        self.env_id, self.engine_only = env_id, engine_only

    def get_environment(self) -> gymtask.Environment:
        return gymtask.Environment(self.env_id, disable_env_checker=True)

    def get_actions(
        self, model: nn.Module, states: TensorDict, optimal: bool
    ) -> Tensor | TensorDict:
        assert isinstance(model, Policy)
        if self.engine_only:
            action, log_prob = model.act(states["observation"])
            return TensorDict(
                {"action": action, "log_prob": log_prob}, batch_size=states.batch_size
            )
        output = model.net(states["observation"])
        if model.discrete:
            return gymtask.sampling.categorical(output, states)
        return gymtask.sampling.gaussian(output, model.log_std.exp(), states)

    def run_model(self, model: nn.Module, batch: TensorDict, state: gymtask.State) -> None:
        """Not used: nothing is learnt here."""

    def compute_loss(
        self, model: nn.Module, batch: TensorDict, state: gymtask.State, output: Any
    ) -> Tensor:
        return torch.zeros(())


class SamplingTask(Task):
    """Draws actions with gymtask's sampler, and log-probabilities once for the collection."""

    def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
        """Log-probabilities in one pass over the whole collection."""
        rows = torch.cat(trajectories)
        with torch.no_grad():
            output = self.policy.net(rows["observation"])
            if self.policy.discrete:
                log_prob = Categorical(logits=output, validate_args=False).log_prob(rows["action"])
            else:
                std = self.policy.log_std.exp()
                log_prob = Normal(output, std, validate_args=False).log_prob(rows["action"]).sum(-1)
        for trajectory, part in zip(
            trajectories, log_prob.split([len(each) for each in trajectories]), strict=True
        ):
            trajectory["log_prob"] = part
        return trajectories


def gymtask_rollout(
    env_id: str,
    policy: Policy,
    mode: str,
    num_envs: int,
    workers: int,
    num_steps: int,
    engine_only: bool,
) -> tuple[Rollout, Callable[[], None]]:
    """A gymtask collection of the same size."""
    environment = gymtask.EnvironmentConfig(
        num_env_workers=workers, num_envs=num_envs, env_worker_mode=mode, action_clip=True
    )
    dataset = gymtask.DatasetConfig(num_update_steps=1)
    config = gymtask.ReinforcementLearningTaskConfig(
        name="bench", environment=environment, dataset=dataset
    )
    task = (Task if engine_only else SamplingTask)(config, env_id, engine_only)
    object.__setattr__(task, "policy", policy)
    pool = task.get_worker_pool()

    def rollout() -> int:
        samples = task.collect_samples(policy, pool, num_envs * num_steps, use_tqdm=False)
        return samples.num_transitions

    return rollout, pool.close


def hand_rollout(
    env_id: str, policy: Policy, kind: Any, num_envs: int, num_steps: int
) -> tuple[Rollout, Callable[[], None]]:
    """The loop by hand over one of Gymnasium's vector environments."""
    envs = kind([partial(make_env, env_id)] * num_envs)
    return HandLoop(envs, policy, num_steps), envs.close


def measure(rollout: Rollout, seconds: float) -> float:
    """Real transitions a second over at least so many seconds."""
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        count += rollout()
    return count / spent


def main() -> None:
    """Runs all candidates alternately and prints the ratios to the loop over SyncVectorEnv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument(
        "--num-steps", type=int, default=128, help="steps of each environment in a rollout"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of each candidate in each round"
    )
    parser.add_argument("--out", type=Path, help="where to write JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    env = make_env(options.env_id)
    policy = Policy(env)
    ours = partial(
        gymtask_rollout,
        options.env_id,
        policy,
        num_envs=options.num_envs,
        num_steps=options.num_steps,
    )
    hand = partial(
        hand_rollout, options.env_id, policy, num_envs=options.num_envs, num_steps=options.num_steps
    )
    candidates = {
        "by hand, SyncVectorEnv": hand(gym.vector.SyncVectorEnv),
        "by hand, AsyncVectorEnv": hand(gym.vector.AsyncVectorEnv),
        "gymtask sync": ours("sync", workers=1, engine_only=False),
        "gymtask sync, actions as by hand": ours("sync", workers=1, engine_only=True),
        "gymtask process": ours("process", workers=options.workers, engine_only=False),
    }
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    for _, (rollout, _) in candidates.items():
        rollout()  # warm-up, outside the clock
    for _ in range(options.rounds):
        for name, (rollout, _) in candidates.items():
            rates[name].append(measure(rollout, options.seconds))
    for _, close in candidates.values():
        close()
    report(options, rates)


def report(options: argparse.Namespace, rates: dict[str, list[float]]) -> None:
    """Prints a table and writes JSON."""
    base = rates["by hand, SyncVectorEnv"]
    print(f"\n{options.env_id}, {options.num_envs} environments, {options.rounds} rounds\n")
    print("| candidate | steps/s, median | ratio to by hand, SyncVectorEnv: median (min to max) |")
    print("|---|---:|---:|")
    for name, found in rates.items():
        ratios = sorted(rate / other for rate, other in zip(found, base, strict=True))
        middle = statistics.median(ratios)
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"| {name} | {statistics.median(found):,.0f} | {middle:.2f} ({span}) |")
    if options.out:
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gymnasium": gym.__version__,
        }
        record = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "versions": versions,
        }
        options.out.write_text(json.dumps({**record, "steps_per_second": rates}, indent=2))


if __name__ == "__main__":
    main()
