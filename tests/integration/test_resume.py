"""Going on with a run: what is restored, where it writes, and what is refused."""

from __future__ import annotations

import logging
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gymtask.errors import CheckpointError, ConfigurationError
from gymtask.sampling import stream_seed
from gymtask.task import State
from gymtask.training.checkpoint import list_checkpoints, load_checkpoint
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

NUM_ENVS = 2


def train(
    run_dir: Path | None, max_epochs: int, *, resume: Any = None, seed: int = 0, **fields: Any
) -> tuple[State, CartPole, nn.Module]:
    """A run on CartPole of 40 samples and 3 updates an epoch; `seed` is that of the first model."""
    task, model = CartPole(make_config(NUM_ENVS, max_epochs=max_epochs)), network(seed)
    trainer = make_trainer(run_dir, 40, **fields)
    return trainer.train(task, model, resume=resume), task, model


def test_a_resumed_run_ends_with_the_counters_and_schedule_of_an_unbroken_one(
    tmp_path: Path,
) -> None:
    whole, _, _ = train(tmp_path / "whole", 4)
    train(tmp_path / "parts", 2)
    parts, _, _ = train(None, 4, resume=tmp_path / "parts", seed=9)
    for name in ("num_epochs", "num_steps", "num_samples", "num_epoch_steps", "num_epoch_samples"):
        assert getattr(parts, name) == getattr(whole, name)
    last = [load_checkpoint(list_checkpoints(tmp_path / d)[-1])[0] for d in ("whole", "parts")]
    assert last[0]["schedulers"] == last[1]["schedulers"]
    rates = [saved["optimizers"]["main"]["param_groups"][0]["lr"] for saved in last]
    assert rates[0] == rates[1] == pytest.approx(1e-3 * 0.99**12)


def test_model_and_optimizer_moments_go_on_where_they_stood(tmp_path: Path) -> None:
    _, _, trained = train(tmp_path / "run", 2)
    saved, _ = load_checkpoint(list_checkpoints(tmp_path / "run")[-1])

    class Look(CartPole):
        def on_epoch_start(self, model: Any, state: State) -> None:
            if state.num_epochs == 2:
                seen.extend(parameters(model))

    seen: list[float] = []
    model = network(9)
    trainer = make_trainer(None, 40)
    trainer.train(Look(make_config(NUM_ENVS, max_epochs=3)), model, resume=tmp_path / "run")
    assert seen == parameters(trained)
    after, _ = load_checkpoint(list_checkpoints(tmp_path / "run")[-1])
    before_state = saved["optimizers"]["main"]["state"][0]
    after_state = after["optimizers"]["main"]["state"][0]
    assert (float(before_state["step"]), float(after_state["step"])) == (6.0, 9.0)
    # A second moment that began anew would be small: it is a decaying sum that only 3 updates fed.
    assert (after_state["exp_avg_sq"] >= 0.99**3 * before_state["exp_avg_sq"]).all()


def test_random_generators_go_on_where_they_stood(tmp_path: Path) -> None:
    class Draw(ScriptedTask):
        def on_epoch_start(self, model: Any, state: State) -> None:
            numbers = [random.random(), np.random.random(), float(torch.rand(()))]
            drawn.setdefault(state.num_epochs, []).append(numbers)

    drawn: dict[int, list[list[float]]] = {}
    make_trainer(tmp_path / "whole").train(Draw(make_config(max_epochs=3)), linear())
    make_trainer(tmp_path / "parts").train(Draw(make_config(max_epochs=2)), linear())
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    make_trainer(None).train(Draw(make_config(max_epochs=3)), linear(), resume=tmp_path / "parts")
    assert drawn[0][0] == drawn[0][1]
    assert drawn[2][0] == drawn[2][1]


def test_resuming_twice_from_one_checkpoint_gives_the_same_run_twice(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    _, _, first = train(None, 4, resume=tmp_path / "run")
    _, _, second = train(None, 4, resume=tmp_path / "copy")
    assert parameters(first) == parameters(second)


def test_episodes_that_do_not_repeat_are_named_and_new_ones_get_seeds_and_ids_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Pools(ScriptedTask):  # a ScriptedEnv counts its episodes, whatever its generators do
        def get_worker_pool(self, force_sync: bool = False) -> Any:
            self.pool = super().get_worker_pool(force_sync)
            return self.pool

        def postprocess_trajectories(self, trajectories: list[Any]) -> list[Any]:
            ids.append([int(trajectory["trajectory_id"][0]) for trajectory in trajectories])
            run_steps.append(self.pool.run_step.tolist())
            seeds.append([start["seed"] for start in self.pool.get_starts()])
            return trajectories

    seeds: list[Any] = []
    ids: list[list[int]] = []
    run_steps: list[list[int]] = []
    make_trainer(tmp_path / "run", 20).train(Pools(make_config(max_epochs=1)), linear())
    for number in (2, 3):
        task = Pools(make_config(max_epochs=number))
        make_trainer(None, 20).train(task, linear(), resume=tmp_path / "run")
        assert "does not repeat its episodes" in caplog.text
        assert "the environments [0, 1] begin new ones" in caplog.text
    assert seeds == [
        [1337, 1338],
        [stream_seed(1337, "resume", index, 1) for index in range(2)],
        [stream_seed(1337, "resume", index, 2) for index in range(2)],
    ]
    assert run_steps == [[10, 10], [20, 20], [30, 30]]
    # Each environment ends two episodes of 4 rows and begins another one, each time; the open ones
    # are given up.
    assert ids == [[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11], [12, 14, 16, 13, 15, 17]]


def test_metrics_go_on_without_a_gap_or_a_doubled_row(tmp_path: Path) -> None:
    train(tmp_path / "run", 5, checkpoint_interval=3)
    shutil.rmtree(list_checkpoints(tmp_path / "run")[-1])  # as if killed after the fifth row
    before = read_rows(tmp_path / "run" / "metrics.csv")
    train(None, 6, resume=tmp_path / "run")
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    assert [row["num_epochs"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["num_samples"] for row in rows] == [40, 80, 120, 160, 200, 240]
    assert rows[:3] == before[:3]
    assert rows[3] != before[3]


def test_time_counts_over_all_parts_of_a_run(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    saved = load_checkpoint(list_checkpoints(tmp_path / "run")[-1])[0]["state"]["elapsed_time"]
    time.sleep(1.0)  # does not count
    state, _, _ = train(None, 1, resume=tmp_path / "run")
    assert 0 < saved <= state.elapsed_time < saved + 0.9


def test_counts_of_evaluations_and_clips_go_on(tmp_path: Path) -> None:
    fields = {"eval_interval": 1, "num_eval_episodes": 1, "clip_interval": 1}
    _, task, _ = train(tmp_path / "run", 1, **fields)
    assert (task.num_evaluations, task.num_clips) == (1, 1)
    _, task, _ = train(None, 2, resume=tmp_path / "run", **fields)
    assert (task.num_evaluations, task.num_clips) == (2, 2)


def test_the_mean_of_the_last_hundred_returns_goes_on(tmp_path: Path) -> None:
    def row(run_dir: Path) -> dict[str, float]:
        return read_rows(run_dir / "metrics.csv")[-1]

    def scripted(max_epochs: int) -> ScriptedTask:
        return ScriptedTask(make_config(num_envs=1, max_epochs=max_epochs))

    class Short(ScriptedTask):
        env_kwargs = {"lengths": 1}  # noqa: RUF012

    make_trainer(tmp_path / "run", 8).train(scripted(1), linear())
    task = Short(make_config(num_envs=1, max_epochs=2))
    make_trainer(None, 8).train(task, linear(), resume=tmp_path / "run")
    # 2 episodes of return 10 before, 8 of return 1 after.
    assert row(tmp_path / "run")["episode/return_mean_100"] == (2 * 10 + 8 * 1) / 10
    assert row(tmp_path / "run")["episode/return_mean"] == 1.0


def test_left_over_temporary_folders_are_ignored_and_deleted(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    (folder,) = list_checkpoints(tmp_path / "run")
    leftover = folder.with_name(".tmp-epoch-000099-samples-000000099-1")
    shutil.copytree(folder, leftover)
    (leftover / "state.pt").write_bytes(b"half a checkpoint")
    (leftover / ".tmp-replay-0").mkdir()
    (folder / ".tmp-replay-0").mkdir()
    folder.with_name(".tmp-best").symlink_to(folder.name, target_is_directory=True)
    (tmp_path / "run" / "clips").mkdir()
    mine = tmp_path / "run" / ".mine" / ".tmp-of-the-user"
    mine.parent.mkdir()
    mine.touch()
    (tmp_path / "run" / ".tmp-of-the-user").mkdir()
    for name in (".tmp-learning_curve.png", "clips/.tmp-0123.mp4"):
        (tmp_path / "run" / name).write_bytes(b"half a picture")
    state, _, _ = train(None, 2, resume=tmp_path / "run")
    assert state.num_epochs == 2
    assert {path.name for path in (tmp_path / "run").rglob(".tmp-*")} == {".tmp-of-the-user"}


def test_going_back_to_an_older_checkpoint_sets_the_newer_ones_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "run", 3)
    first = list_checkpoints(tmp_path / "run")[0]
    with caplog.at_level(logging.WARNING, logger="gymtask"):
        state, _, _ = train(None, 2, resume=first)
    assert state.num_epochs == 2
    assert [path.name[:12] for path in list_checkpoints(tmp_path / "run")] == [
        "epoch-000001",
        "epoch-000002",
    ]
    assert len([r for r in caplog.records if "newer than the resumed" in r.message]) == 2
    assert [r["num_epochs"] for r in read_rows(tmp_path / "run" / "metrics.csv")] == [1, 2]


def test_a_run_that_reached_its_limit_is_left_as_it_is(tmp_path: Path) -> None:
    first, _, model = train(tmp_path / "run", 2)
    second, _, resumed = train(None, 2, resume=tmp_path / "run", seed=9)
    assert (second.num_steps, second.num_samples) == (first.num_steps, first.num_samples)
    assert parameters(resumed) == parameters(model)
    assert len(list_checkpoints(tmp_path / "run")) == 2


def test_auto_starts_a_run_and_then_goes_on_with_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, _, _ = train(None, 1, resume="auto")
    second, _, _ = train(None, 2, resume="auto")
    assert (first.num_epochs, second.num_epochs) == (1, 2)
    assert len(list((tmp_path / "runs" / "task").iterdir())) == 1
    train(None, 1)  # a new run
    third, _, _ = train(None, 3, resume="auto")
    assert third.num_steps == 9
    rows = [
        len(read_rows(path / "metrics.csv"))
        for path in sorted((tmp_path / "runs" / "task").iterdir())
    ]
    assert rows == [2, 3]


def test_auto_with_a_run_directory_goes_on_there(tmp_path: Path) -> None:
    for number in (1, 2):
        state, _, _ = train(tmp_path / "run", number, resume="auto")
        assert state.num_epochs == number
    assert len(read_rows(tmp_path / "run" / "metrics.csv")) == 2


def test_nothing_to_resume_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"`resume` must be a checkpoint folder.*got '.*none"):
        train(None, 1, resume=tmp_path / "none")


def test_a_resumed_run_is_not_written_elsewhere(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    with pytest.raises(ConfigurationError, match="`run_dir` must be None or the run directory of"):
        train(tmp_path / "other", 2, resume=tmp_path / "run")
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_of_another_run_is_refused_and_every_difference_named(
    tmp_path: Path,
) -> None:
    make_trainer(tmp_path / "run").train(ScriptedTask(make_config(max_epochs=1)), linear())

    class Other(ScriptedTask):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("mean", torch.zeros(3))

        def get_optimizers(self, model: nn.Module) -> Any:
            return {"actor": torch.optim.SGD(model.parameters(), lr=1.0)}

        def get_lr_schedulers(self, optimizers: Any) -> Any:
            return [torch.optim.lr_scheduler.ConstantLR(optimizers["actor"])]

    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    task = Other(make_config(num_envs=3, name="other", max_epochs=2))
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    with pytest.raises(CheckpointError) as caught:
        make_trainer(None).train(task, model, resume=tmp_path / "run")
    assert str(caught.value).splitlines() == [
        "the checkpoint is of another run:",
        "`name` of the task is 'task' in the checkpoint, got 'other'",
        "the number of environments is 2 in the checkpoint, got 3",
        "the optimizers is ['main'] in the checkpoint, got ['actor']",
        "the number of learning rate schedules is 0 in the checkpoint, got 1",
        "model['0.bias'] is absent in the checkpoint, got of shape (5,)",
        "model['0.weight'] is absent in the checkpoint, got of shape (5, 3)",
        "model['1.bias'] is absent in the checkpoint, got of shape (2,)",
        "model['1.weight'] is absent in the checkpoint, got of shape (2, 5)",
        "model['bias'] is of shape (2,) in the checkpoint, got absent",
        "model['weight'] is of shape (2, 3) in the checkpoint, got absent",
        "task['mean'] is absent in the checkpoint, got of shape (3,)",
    ]
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before


def test_an_optimizer_with_other_groups_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path / "run").train(ScriptedTask(make_config(max_epochs=1)), linear())

    class Other(ScriptedTask):
        def get_optimizers(self, model: nn.Module) -> Any:
            return torch.optim.Adam([{"params": [p]} for p in model.parameters()])

    with pytest.raises(CheckpointError, match=re.escape("optimizer 'main' is another one: ")):
        make_trainer(None).train(
            Other(make_config(max_epochs=2)), linear(), resume=tmp_path / "run"
        )


@pytest.mark.parametrize("has_own", [True, False], ids=["own optimizer", "the trainer's"])
def test_a_learning_rate_given_anew_is_told_to_have_no_effect(
    tmp_path: Path, has_own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(ScriptedTask):
        def get_optimizers(self, model: nn.Module) -> Any:
            return torch.optim.SGD(model.parameters(), lr=0.25) if has_own else None

    def rate(max_epochs: int, learning_rate: float, resume: Path | None = None) -> float:
        run_dir = None if resume else tmp_path
        trainer = make_trainer(run_dir, learning_rate=learning_rate)
        trainer.train(Own(make_config(max_epochs=max_epochs)), linear(), resume=resume)
        return read_rows(tmp_path / "metrics.csv")[-1]["learning_rate"]

    with caplog.at_level(logging.WARNING, logger="gymtask"):
        first = rate(1, 0.125)
        assert rate(2, 0.125, tmp_path) == first == (0.25 if has_own else 0.125)
        assert "learning_rate" not in caplog.text
        assert rate(3, 0.5, tmp_path) == first
    told = "`learning_rate` is 0.125 in the checkpoint, which the run goes on with, got 0.5"
    assert (told in caplog.text) == (not has_own)


def test_what_the_task_itself_learnt_goes_on(tmp_path: Path) -> None:
    class Counting(ScriptedTask):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def on_update_end(self, model: Any, state: State) -> None:
            self.count += 1

    make_trainer(tmp_path / "run").train(Counting(make_config(max_epochs=1)), linear())
    task = Counting(make_config(max_epochs=2))
    make_trainer(None).train(task, linear(), resume=tmp_path / "run")
    assert int(task.count) == 6
