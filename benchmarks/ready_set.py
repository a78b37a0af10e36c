"""A loop by hand for stragglers: the policy acts for whichever environments are ready.

One forked worker an environment; observations, actions, rewards and flags in shared memory; a byte
over a pipe each way. About what somebody writes who found lock step too slow.
"""

from __future__ import annotations

import multiprocessing
import select
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from hand import Policy
from numpy.typing import DTypeLike, NDArray

MakeEnv = Callable[[], gym.Env[Any, Any]]
Shared = dict[str, NDArray[Any]]


def shared_array(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Zeros that forked processes see too."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = multiprocessing.get_context("fork").RawArray("b", size)
    return np.frombuffer(memory, dtype).reshape(shape)


def work(make_env: MakeEnv, index: int, pipe: Connection, shared: Shared) -> None:
    """The life of a worker."""
    env = make_env()
    shared["observation"][index] = env.reset()[0]
    pipe.send_bytes(b"r")
    while pipe.recv_bytes() == b"s":
        observation, reward, terminated, truncated, _ = env.step(shared["action"][index])
        shared["reward"][index] = reward
        shared["terminated"][index] = terminated
        shared["truncated"][index] = truncated
        if terminated or truncated:
            observation, _ = env.reset()
        shared["observation"][index] = observation
        pipe.send_bytes(b"r")


class ReadySetLoop:
    """Rollouts of rows in the order in which they are complete."""

    def __init__(self, make_envs: Sequence[MakeEnv], num_steps: int) -> None:
        space = (env := make_envs[0]()).observation_space
        torch.manual_seed(0)
        self.policy = Policy(space, env.action_space)
        n, shape = len(make_envs), space.shape or ()
        self.shared: Shared = {
            "observation": shared_array((n, *shape), np.float32),
            "action": shared_array((n,), np.int64),
            "reward": shared_array((n,), np.float64),
            "terminated": shared_array((n,), np.bool_),
            "truncated": shared_array((n,), np.bool_),
        }
        self.total = n * num_steps
        rows = self.total + n  # the last batch may go beyond the total
        self.pending = self._rows(n, shape)
        self.kept = self._rows(rows, shape)
        self.kept["reward"] = torch.zeros(rows)
        for key in ("terminated", "truncated"):
            self.kept[key] = torch.zeros(rows, dtype=torch.bool)
        self._start(make_envs)
        self._act(list(range(n)))

    def _rows(self, rows: int, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """What is known of a row before its step has been made."""
        return {
            "observation": torch.zeros(rows, *shape),
            "action": torch.zeros(rows, dtype=torch.int64),
            "log_prob": torch.zeros(rows),
        }

    def _start(self, make_envs: Sequence[MakeEnv]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes, self.poll, self.env_of = [], select.epoll(), {}
        for index, make_env in enumerate(make_envs):
            ours, theirs = context.Pipe()
            context.Process(
                target=work, args=(make_env, index, theirs, self.shared), daemon=True
            ).start()
            self.pipes.append(ours)
            self.poll.register(ours.fileno(), select.EPOLLIN)
            self.env_of[ours.fileno()] = index
        for pipe in self.pipes:
            pipe.recv_bytes()

    def _act(self, ready: list[int]) -> None:
        observation = torch.from_numpy(self.shared["observation"][ready])
        with torch.no_grad():
            action, log_prob = self.policy.act(observation)
        self.pending["observation"][ready] = observation
        self.pending["action"][ready] = action
        self.pending["log_prob"][ready] = log_prob
        self.shared["action"][ready] = action.numpy()
        for index in ready:
            self.pipes[index].send_bytes(b"s")

    def __call__(self) -> int:
        """Collects one rollout and returns its rows."""
        count = 0
        while count < self.total:
            ready = [self.env_of[number] for number, _ in self.poll.poll()]
            for index in ready:
                self.pipes[index].recv_bytes()
            rows = slice(count, count + len(ready))
            for key in ("observation", "action", "log_prob"):
                self.kept[key][rows] = self.pending[key][ready]
            for key in ("reward", "terminated", "truncated"):
                self.kept[key][rows] = torch.from_numpy(self.shared[key][ready])
            self._act(ready)
            count += len(ready)
        return count

    def close(self) -> None:
        """Ends the workers, each after the step that it is in."""
        for pipe in self.pipes:
            pipe.send_bytes(b"q")
