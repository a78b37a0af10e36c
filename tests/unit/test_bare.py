"""Updates with and without Fabric's wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision.amp import _optimizer_handles_unscaling
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


def make_optimizer(model: Any, precision: str = "32-true") -> Any:
    task = Task(lambda model: next(model.parameters()).sum())
    updater = Updater(cpu(), Ranks(), task, model, TrainerConfig(precision=precision))
    return updater.optimizers["main"]


def test_the_trainers_own_adam_is_fused_where_that_is_possible() -> None:
    assert make_optimizer(nn.Linear(2, 1)).param_groups[0]["fused"] is True
    complex_one = nn.Linear(2, 1, dtype=torch.complex64)
    assert make_optimizer(complex_one).param_groups[0]["fused"] is False


def test_gradients_scaled_for_float16_are_unscaled_before_they_are_clipped() -> None:
    """As Fabric does it with a fused optimizer, which would rather do that in its step."""
    gradients = []
    for scale in (None, 1024.0):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = make_optimizer(model, "16-mixed")
        assert optimizer.param_groups[0]["fused"] is True
        assert not _optimizer_handles_unscaling(optimizer)  # else it refuses
        loss = 100 * model(torch.ones(3)).square().sum()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        gradients.append([model.weight.detach().clone(), model.weight.grad])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs)
