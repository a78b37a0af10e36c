"""Tasks whose hooks are given as functions, over environments that count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor

import gymtask
from gymtask.testing import ScriptedEnv

TAXI = "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"  # the newest that there is

A, B = 3, 5
"""Lengths of the episodes of environments with even and odd numbers."""


def make_task(
    num_envs: int = 2,
    workers: int = 2,
    mode: str = "sync",
    env: Callable[..., Any] | str | None = None,
    config: dict[str, Any] | None = None,
    **hooks: Any,
) -> gymtask.ReinforcementLearningTask:
    """A task over ScriptedEnv (or `env`) with these hooks; the policy is a fixed rule."""

    def get_environment(self: Any) -> gymtask.Environment:
        return gymtask.Environment(env or (lambda: ScriptedEnv((A, B))))

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        return (states["step"] + states["env_id"]) % 2

    methods = {
        "get_environment": get_environment,
        "get_actions": get_actions,
        "run_model": lambda self, model, batch, state: None,
        "compute_loss": lambda self, model, batch, state, output: torch.zeros(()),
        **hooks,
    }
    kind = type("Task", (gymtask.ReinforcementLearningTask,), methods)
    environment = gymtask.EnvironmentConfig(
        **{
            "num_env_workers": workers,
            "num_envs": num_envs,
            "env_worker_mode": mode,
            "env_seed": 0,
            **(config or {}),
        }
    )
    dataset = gymtask.DatasetConfig(num_update_steps=1)
    task: gymtask.ReinforcementLearningTask = kind(
        gymtask.ReinforcementLearningTaskConfig(
            name="test", environment=environment, dataset=dataset
        )
    )
    return task


def collect(
    task: gymtask.ReinforcementLearningTask, total: int, model: Any = None, **keywords: Any
) -> gymtask.MultiReplaySamples:
    """One collection from a pool of its own."""
    with task.get_worker_pool() as pool:
        return task.collect_samples(model, pool, total, use_tqdm=False, **keywords)
