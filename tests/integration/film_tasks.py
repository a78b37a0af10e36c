"""A task to film."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

import gymtask
from gymtask.testing import ScriptedEnv
from tests.tasks import make_task

MODEL = nn.Identity()


def film_task(
    env: Callable[..., Any] | str = ScriptedEnv,
    act: Callable[[TensorDict], Any] = lambda states: torch.ones(len(states), dtype=torch.int64),
    *,
    config: dict[str, Any] | None = None,
    hooks: dict[str, Any] | None = None,
    **environment: Any,
) -> gymtask.ReinforcementLearningTask:
    """A task over `Environment(env, **environment)` whose policy is act(states)."""
    return make_task(
        num_envs=1,
        workers=1,
        config=config,
        get_environment=lambda self: gymtask.Environment(env, **environment),
        get_actions=lambda self, model, states, optimal: act(states),
        **(hooks or {}),
    )


def films(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
