"""Tasks over `ScriptedEnv` with environments of 3 and of 5 steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import gymtask
from gymtask.testing import ScriptedEnv
from tests.tasks import make_task


def scripted_task(
    environment: gymtask.Environment | None = None,
    mode: str = "sync",
    num_envs: int = 2,
    **hooks: Any,
) -> gymtask.ReinforcementLearningTask:
    """Always takes action 1."""
    made = environment or scripted()
    defaults = {
        "get_environment": lambda self: made,
        "get_actions": lambda self, model, states, optimal: torch.ones(
            len(states), dtype=torch.int64
        ),
    }
    return make_task(num_envs, num_envs, mode, **{**defaults, **hooks})


def scripted(lengths: Any = (3, 5), **keywords: Any) -> gymtask.Environment:
    return gymtask.Environment(ScriptedEnv, lengths=lengths, **keywords)


def informed(infos: Callable[[int, int], dict[str, Any]], **keywords: Any) -> gymtask.Environment:
    """Environment i gives infos(i, t) at step t of its life; episodes have 4 steps."""

    class Informed(ScriptedEnv):
        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            return (*rest, infos(self.number, self.life))

    return gymtask.Environment(Informed, lengths=4, **keywords)
