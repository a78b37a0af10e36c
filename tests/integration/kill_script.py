"""Trains on request, each time in a process of its own that may be killed.

It reads lines of JSON, [name of the run, its directory], and answers each with the number of the
process that trains; an empty line follows, which it answers with how that ended. The processes are
forked from this one, which has imported everything and started nothing, so that they begin to train
at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import ale_py
import gymnasium as gym
import matplotlib.figure  # noqa: F401
import torch

import gymtask
from tests.integration.test_off_policy_examples import load_example

ppo: Any = load_example("ppo")
sac: Any = load_example("sac")


def in_environment(task: Any, env_id: str, **keywords: Any) -> Any:
    """The example's task, in one with short episodes."""

    class Task(task):  # type: ignore[misc]
        def get_environment(self) -> gymtask.Environment:
            return gymtask.Environment(env_id, **keywords)

    return Task


def make_ppo(env_id: str, **keywords: Any) -> tuple[Any, gymtask.SamplingConfig]:
    config = ppo.PPOConfig(max_epochs=12, hidden=32)
    config.environment.num_envs = 4
    config.dataset.num_update_steps, config.train_dl.batch_size = 8, 64
    task = in_environment(ppo.PPO, env_id, **keywords)(config)
    return task, gymtask.SamplingConfig(num_epoch_samples=250)


def make_sac(env_id: str, **keywords: Any) -> tuple[Any, gymtask.SamplingConfig]:
    config = sac.SACConfig(max_epochs=12, hidden=32)
    config.dataset.num_update_steps, config.dataset.replay_buffer_sample_size = 16, 600
    config.train_dl.batch_size = 32
    task = in_environment(sac.SAC, env_id, **keywords)(config)
    return task, gymtask.SamplingConfig(num_epoch_samples=90, num_warmup_samples=200)


RUNS: dict[str, Callable[[], tuple[Any, gymtask.SamplingConfig]]] = {
    "ppo CartPole-v1": lambda: make_ppo("CartPole-v1"),
    "ppo HalfCheetah-v5": lambda: make_ppo("HalfCheetah-v5", max_episode_steps=100),
    "ppo LunarLander-v3": lambda: make_ppo("LunarLander-v3"),
    "ppo ALE/Pong-v5": lambda: make_ppo("ALE/Pong-v5", obs_type="ram", max_episode_steps=100),
    "sac Pendulum-v1": lambda: make_sac("Pendulum-v1"),
    "sac HalfCheetah-v5": lambda: make_sac("HalfCheetah-v5", max_episode_steps=50),
    "sac LunarLander-v3": lambda: make_sac("LunarLander-v3", continuous=True),
}


def train(name: str, run_dir: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task, sampling = RUNS[name]()
    model = task.get_model()
    trainer = gymtask.Trainer(
        gymtask.TrainerConfig(
            sampling,
            run_dir,
            clip_grad_norm=0.5,
            accelerator="cpu",
            eval_interval=5,
            num_eval_episodes=2,
            keep_checkpoints=2,
        )
    )
    trainer.train(task, model, resume="auto")


def main() -> None:
    gym.register_envs(ale_py)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                train(*json.loads(line))
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        print(pid, flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
