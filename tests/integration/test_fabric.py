"""What training takes from Fabric: precision, compiled models, loggers, accumulated batches."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric.loggers.csv_logs import CSVLogger
from lightning_fabric.loggers.logger import Logger
from torch import Tensor, nn

from gymtask.errors import ConfigurationError
from gymtask.task import State
from gymtask.trainer import Trainer
from gymtask.training.logs import read_rows
from tests.integration.training_tasks import (
    CartPole,
    ScriptedTask,
    linear,
    make_config,
    make_trainer,
    network,
    parameters,
)


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_parameters(tmp_path: Path) -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            seen.append((self.training, output.dtype))
            return output

    seen: list[tuple[bool, torch.dtype]] = []
    model = Layer(3, 2)
    trainer = make_trainer(tmp_path, precision="bf16-mixed")
    state = trainer.train(ScriptedTask(make_config(max_epochs=2)), model)
    assert {dtype for training, dtype in seen if training} == {torch.bfloat16}  # updates
    assert {dtype for training, dtype in seen if not training} == {torch.float32}  # acting
    assert model.weight.dtype is torch.float32
    assert state.num_steps == 6


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_plain_one(tmp_path: Path) -> None:
    models = network(0), network(0)
    for name, model, compiled in zip(("plain", "compiled"), models, (False, True), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own compiler
            trainer = make_trainer(tmp_path / name, 40, compile=compiled)
            trainer.train(CartPole(make_config(max_epochs=2)), model)
    assert parameters(models[1]) == pytest.approx(parameters(models[0]), rel=1e-4, abs=1e-6)
    # What is saved has the names of the plain model.
    resumed = make_trainer(None, 40).train(
        CartPole(make_config(max_epochs=3)), network(1), resume=tmp_path / "compiled"
    )
    assert resumed.num_epochs == 3


def test_an_update_takes_as_many_batches_as_are_accumulated(tmp_path: Path) -> None:
    class Count(ScriptedTask):
        def run_model(self, model: nn.Module, batch: Any, state: State) -> Tensor:
            steps.append(state.num_steps)
            return super().run_model(model, batch, state)

    steps: list[int] = []
    trainer = make_trainer(tmp_path, accumulate_grad_batches=2)
    state = trainer.train(Count(make_config(max_epochs=1, updates=3)), linear())
    assert steps == [0, 0, 1, 1, 2, 2]
    assert state.num_steps == 3


def test_given_loggers_get_each_row_and_the_configs(tmp_path: Path) -> None:
    class Remember(Logger):
        name, version, root_dir = "remember", 0, None

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            rows.append((step, metrics["num_epochs"]))

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            configs.append(params)

        def finalize(self, status: str) -> None:
            ends.append(status)

    rows: list[Any] = []
    configs: list[Any] = []
    ends: list[str] = []
    config = make_trainer(tmp_path / "run").config
    csv = CSVLogger(tmp_path / "csv", flush_logs_every_n_steps=1)
    Trainer(config, loggers=[Remember(), csv]).train(
        ScriptedTask(make_config(max_epochs=2)), linear()
    )
    assert rows == [(10, 1), (20, 2)]
    assert configs[0]["trainer"]["sampling"]["num_epoch_samples"] == 10
    assert ends == ["finished"]
    assert len(read_rows(tmp_path / "run" / "metrics.csv")) == 2  # as ever
    assert list((tmp_path / "csv").rglob("metrics.csv"))


def test_what_is_no_logger_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`loggers` must be Lightning Fabric loggers"):
        Trainer(loggers=[print])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("strategy", "fsdp", "`strategy` must be one of 'auto', 'ddp'"),
        ("precision", "8", "`precision` must be one of '32-true', '16-mixed', 'bf16-mixed'"),
        ("compile", 1, "`compile` must be True or False"),
        ("accumulate_grad_batches", 0, "`accumulate_grad_batches` must be an integer of at least"),
        ("devices", 0, "`devices` must be an integer of at least 1"),
        ("num_nodes", 0, "`num_nodes` must be an integer of at least 1"),
    ],
)
def test_fields_that_break_their_rules_are_named(field: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        make_trainer(None, **{field: value})
