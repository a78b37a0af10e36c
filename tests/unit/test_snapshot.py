"""What each process of a run puts into a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
from lightning_fabric import Fabric
from torch import nn

from gymtask.task import State
from gymtask.training.config import TrainerConfig
from gymtask.training.logs import Statistics
from gymtask.training.ranks import Ranks
from gymtask.training.snapshot import Snapshot
from gymtask.training.updates import Updater
from tests.integration.training_tasks import ScriptedTask, linear, make_config


def take(rank: int, model: nn.Module) -> dict[str, dict[str, Any]]:
    task, config = ScriptedTask(make_config()), TrainerConfig()
    updater = Updater(Fabric(accelerator="cpu", devices=1), Ranks(), task, model, config)
    ranks = Ranks(rank=rank, size=2)
    snapshot = Snapshot(config, task, model, updater, State(), Statistics(), ranks)
    with task.get_worker_pool() as pool:
        return snapshot.take(pool)


def test_the_first_process_writes_what_all_have_and_each_what_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = take(0, linear())
    assert set(first) == {"state.pt", "rank-0.pt"}
    assert set(first["rank-0.pt"]) == {"rng", "pool", "episodes"}
    model = linear()
    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "state_dict", None)  # is not asked
        second = take(1, model)
    assert set(second) == {"rank-1.pt"}
    assert set(second["rank-1.pt"]) == {"rng", "pool", "episodes", "task"}
