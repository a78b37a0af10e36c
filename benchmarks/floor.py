"""How fast it could be: loops by hand that do the work of a step and nothing else.

Noise is drawn beforehand, and log-probabilities are computed once a rollout. They know no final
observations, no episodes, no seeds, no errors and no interrupts, and reach nothing but a rollout of
observations, actions, rewards, flags and log-probabilities. What is faster than they are would need
a faster policy, a faster environment or more cores.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from alternate import Build, Close, Rollout
from envs import Work
from hand import Policy, make_native
from numpy.typing import NDArray
from ready_set import Shared, shared_array

POLLING = 1e-3  # seconds before a worker sleeps
MakeEnv = Callable[[], gym.Env[Any, Any]]


class Floor:
    """A rollout; `step` is given actions and leaves what follows in the arrays of `now`.

    Args:
        work: What is collected.
        step: Steps all environments.
        now: Arrays of all environments: "observation", "reward", "terminated", "truncated".
        close: Gives the environments up.
        spends_steps: Whether a reset takes a step.
    """

    def __init__(
        self,
        work: Work,
        step: Callable[[NDArray[Any]], None],
        now: Shared,
        close: Close,
        *,
        spends_steps: bool = False,
    ) -> None:
        torch.manual_seed(0)
        env = work.make_env()
        self.policy = Policy(env.observation_space, env.action_space)
        self.num_steps, self.step, self.now, self.close = work.num_steps, step, now, close
        self.spends_steps = spends_steps
        self.low, self.high = (getattr(env.action_space, name, None) for name in ("low", "high"))
        rows = (work.num_steps, work.num_envs)
        outputs = self.policy.log_std.shape
        uniform = torch.rand(*rows, *outputs)
        self.noise = -(-uniform.log()).log() if self.policy.discrete else torch.randn_like(uniform)
        self.std = self.policy.log_std.exp().detach()
        self.kept = {
            name: np.zeros((work.num_steps, *now[name].shape), now[name].dtype) for name in now
        }
        self.kept["observation"] = self.kept["observation"].astype(np.float32)
        shape = rows if self.policy.discrete else (*rows, *outputs)
        self.action = torch.zeros(
            shape, dtype=torch.int64 if self.policy.discrete else torch.float32
        )
        self.observation = torch.from_numpy(self.kept["observation"])
        self.log_prob = torch.zeros(rows)
        env.close()

    def __call__(self) -> int:
        """Collects one rollout and returns its real transitions."""
        kept, now, names = self.kept, self.now, ("reward", "terminated", "truncated")
        with torch.no_grad():
            for t in range(self.num_steps):
                kept["observation"][t] = now["observation"]
                output = self.policy.net(self.observation[t])
                if self.policy.discrete:
                    action = (output + self.noise[t]).argmax(-1)
                    values = action.numpy()
                else:
                    action = output + self.std * self.noise[t]
                    values = np.clip(action.numpy(), self.low, self.high)
                self.action[t] = action
                self.step(values)
                for name in names:
                    kept[name][t] = now[name]
            self.log_prob = self.policy.log_prob(self.policy.net(self.observation), self.action)
        resets = int((kept["terminated"] | kept["truncated"]).sum()) if self.spends_steps else 0
        return self.log_prob.numel() - resets


def processes(work: Work, num_workers: int = 2) -> Build:
    """Over forked workers, each with a share of the environments, in lock step."""

    def build() -> tuple[Rollout, Close]:
        shared = _shared(work)
        context = multiprocessing.get_context("fork")
        orders = [shared_array((1,), np.int64) for _ in range(num_workers)]
        sleeps = [os.eventfd(0) for _ in range(num_workers)]
        dones = [os.eventfd(0) for _ in range(num_workers)]
        asleep = [shared_array((1,), np.bool_) for _ in range(num_workers)]
        shares = np.array_split(np.arange(work.num_envs), num_workers)
        for place in zip(shares, orders, asleep, sleeps, dones, strict=True):
            arguments = (work.make_env, place[0].tolist(), shared, *place[1:])
            context.Process(target=_work, args=arguments, daemon=True).start()
        for done in dones:
            os.eventfd_read(done)

        def order(number: int) -> None:
            for each, sleeper, wake in zip(orders, asleep, sleeps, strict=True):
                each[0] += number
                if sleeper[0] or number < 0:
                    os.eventfd_write(wake, 1)

        def step(actions: NDArray[Any]) -> None:
            shared["action"][...] = actions
            order(1)
            for done in dones:
                os.eventfd_read(done)

        now = {name: shared[name] for name in shared if name != "action"}
        floor = Floor(work, step, now, lambda: order(-(1 << 40)))
        return floor, floor.close

    return build


def _shared(work: Work) -> Shared:
    env = work.make_env()
    n, observation, action = work.num_envs, env.observation_space, env.action_space
    env.close()
    return {
        "observation": shared_array((n, *(observation.shape or ())), observation.dtype),
        "action": shared_array((n, *(action.shape or ())), action.dtype),
        "reward": shared_array((n,), np.float64),
        "terminated": shared_array((n,), np.bool_),
        "truncated": shared_array((n,), np.bool_),
    }


def _work(
    make_env: MakeEnv,
    indices: Sequence[int],
    shared: Shared,
    order: NDArray[Any],
    asleep: NDArray[Any],
    wake: int,
    done: int,
) -> None:
    envs = [(index, make_env()) for index in indices]
    for index, env in envs:
        shared["observation"][index] = env.reset(seed=index)[0]
    observations, actions = shared["observation"], shared["action"]
    rewards, terminations, truncations = shared["reward"], shared["terminated"], shared["truncated"]
    count = 0
    while True:
        os.eventfd_write(done, 1)
        count += 1
        limit = time.perf_counter() + POLLING
        while order[0] == count - 1:
            os.sched_yield()
            if time.perf_counter() > limit:
                asleep[0] = True
                if order[0] == count - 1:
                    os.eventfd_read(wake)
                asleep[0] = False
        if order[0] < 0:
            return
        for index, env in envs:
            observation, reward, terminated, truncated, _ = env.step(actions[index])
            rewards[index] = reward
            terminations[index] = terminated
            truncations[index] = truncated
            if terminated or truncated:
                observation, _ = env.reset()
            observations[index] = observation


def native(work: Work) -> Build:
    """Over the vector environment that the id itself names."""

    def build() -> tuple[Rollout, Close]:
        envs = make_native(work)
        now: Shared = {"observation": envs.reset(seed=0)[0]}
        for name, kind in (
            ("reward", np.float64),
            ("terminated", np.bool_),
            ("truncated", np.bool_),
        ):
            now[name] = np.zeros(work.num_envs, kind)

        def step(actions: NDArray[Any]) -> None:
            answer = envs.step(actions)
            for name, values in zip(
                ("observation", "reward", "terminated", "truncated"), answer, strict=False
            ):
                now[name] = values

        floor = Floor(work, step, now, envs.close, spends_steps=True)
        return floor, floor.close

    return build


def one_process(work: Work) -> Build:
    """Over environments in this process, one after another."""

    def build() -> tuple[Rollout, Close]:
        envs = [work.make_env() for _ in range(work.num_envs)]
        now = _shared(work)
        del now["action"]
        for index, env in enumerate(envs):
            now["observation"][index] = env.reset(seed=index)[0]

        def step(actions: NDArray[Any]) -> None:
            for index, env in enumerate(envs):
                observation, reward, terminated, truncated, _ = env.step(actions[index])
                now["reward"][index] = reward
                now["terminated"][index] = terminated
                now["truncated"][index] = truncated
                if terminated or truncated:
                    observation, _ = env.reset()
                now["observation"][index] = observation

        def close() -> None:
            for env in envs:
                env.close()

        floor = Floor(work, step, now, close)
        return floor, floor.close

    return build
