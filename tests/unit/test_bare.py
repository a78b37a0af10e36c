"""Updates with and without Fabric's wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import Adam

from gymtask.task import State
from gymtask.training import updates
from gymtask.training.bare import BareFabric, without_wrappers
from gymtask.training.config import TrainerConfig
from gymtask.training.ranks import Ranks
from gymtask.training.updates import Updater
from tests.unit.test_updates import Task


def cpu(**keywords: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, **keywords)


def test_wrappers_are_left_out_only_where_they_have_nothing_to_do() -> None:
    assert isinstance(without_wrappers(cpu()), BareFabric)
    for fabric in (cpu(precision="bf16-mixed"), cpu(precision="64-true"), cpu(strategy="ddp")):
        assert without_wrappers(fabric) is fabric


@pytest.mark.parametrize("clip_grad_norm", [None, 0.1])
@pytest.mark.parametrize("several", [False, True])
def test_updates_are_the_same_bit_for_bit(
    clip_grad_norm: float | None, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))

        def loss(model: Any) -> Any:
            output = model(torch.randn(6, 5))
            losses = {"a": output[:, 0].square().mean(), "b": (output[:, 1] - 1).square().mean()}
            return losses if several else sum(losses.values())

        def optimizers(model: Any) -> Any:
            parts = {"a": model[0].parameters(), "b": model[2].parameters()}
            return {name: Adam(part, lr=0.01) for name, part in parts.items()} if several else None

        task = Task(loss, optimizers)
        task.run_model = lambda module, batch, state: module  # type: ignore[method-assign, assignment]
        task.compute_loss = lambda model, batch, state, output: loss(output)  # type: ignore[method-assign]
        config = TrainerConfig(clip_grad_norm=clip_grad_norm)
        updater = Updater(cpu(), Ranks(), task, model, config)
        values = [updater.update([None] * 2, State()) for _ in range(5)]
        numbers = [value for each in values for value in each.values()]
        return [parameter.detach() for parameter in model.parameters()] + numbers

    bare = train()
    monkeypatch.setattr(updates, "without_wrappers", lambda fabric: fabric)
    for ours, theirs in zip(bare, train(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_trainers_own_adam_is_fused_where_that_is_possible() -> None:
    def is_fused(precision: str, model: Any) -> Any:
        config = TrainerConfig(precision=precision)
        task = Task(lambda model: next(model.parameters()).sum())
        updater = Updater(cpu(), Ranks(), task, model, config)
        return updater.optimizers["main"].param_groups[0]["fused"]

    assert is_fused("32-true", nn.Linear(2, 1)) is True
    assert is_fused("16-mixed", nn.Linear(2, 1)) is False
    assert is_fused("32-true", nn.Linear(2, 1, dtype=torch.complex64)) is False
