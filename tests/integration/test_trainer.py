"""Training runs: limits, counters, epochs, hooks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict
from torch import Tensor, nn

from gymtask.errors import ConfigurationError, HookError, WindowError
from gymtask.task import State
from gymtask.training.checkpoint import list_checkpoints, load_checkpoint
from tests.integration.training_tasks import (
    CartPole,
    ScriptedTask,
    linear,
    make_config,
    make_trainer,
    network,
    parameters,
    run,
)

# ---- limits --------------------------------------------------------------------------------------


def test_max_epochs_stops_after_so_many_epochs(tmp_path: Path) -> None:
    state, trainer = run(tmp_path, ScriptedTask(make_config(max_epochs=4)))
    assert (state.num_epochs, state.num_steps, state.num_samples) == (4, 12, 40)
    assert (state.num_epoch_steps, state.num_epoch_samples) == (3, 10)
    assert trainer.stopped_by == "max_epochs"


def test_max_steps_stops_within_an_epoch(tmp_path: Path) -> None:
    state, trainer = run(tmp_path, ScriptedTask(make_config(max_steps=7)))
    assert (state.num_epochs, state.num_steps, state.num_epoch_steps) == (3, 7, 1)
    assert trainer.stopped_by == "max_steps"


def test_max_samples_shortens_the_last_collection(tmp_path: Path) -> None:
    state, trainer = run(tmp_path, ScriptedTask(make_config(max_samples=23)))
    assert (state.num_samples, state.num_epoch_samples) == (23, 3)
    assert (state.num_epochs, state.num_steps) == (3, 9)
    assert trainer.stopped_by == "max_samples"


def test_max_samples_below_the_number_of_environments_is_exact(tmp_path: Path) -> None:
    task = ScriptedTask(make_config(num_envs=5, max_samples=12))
    assert run(tmp_path, task, 10)[0].num_samples == 12


def test_whole_episodes_may_exceed_max_samples_by_the_open_ones(tmp_path: Path) -> None:
    task = ScriptedTask(make_config(max_samples=10))
    state, _ = run(tmp_path, task, 10, whole_episodes=True)
    # 5 samples from each of two environments with episodes of 4: each begins a second episode.
    assert (state.num_samples, state.num_epochs) == (16, 1)


def test_a_rest_too_small_for_a_window_is_not_collected(tmp_path: Path) -> None:
    state, trainer = run(tmp_path, ScriptedTask(make_config(window=3, max_samples=23)))
    assert (state.num_samples, state.num_epochs) == (20, 2)
    assert trainer.stopped_by == "max_samples"


def test_a_rest_that_turns_out_to_hold_no_window_is_not_trained_on(tmp_path: Path) -> None:
    # Episodes of 4 rows: after 18 samples the last 3 are 2 rows of one and 1 row of the next.
    task = ScriptedTask(make_config(num_envs=1, window=3, max_samples=21))
    state, trainer = run(tmp_path, task, 18)
    assert (state.num_samples, state.num_epochs, state.num_steps) == (21, 1, 3)
    assert trainer.stopped_by == "max_samples"


@pytest.mark.parametrize("limits", [{"max_epochs": 1}, {"max_samples": 20}, {"max_samples": 18}])
def test_episodes_too_short_for_a_window_are_an_error_that_names_both_lengths(
    limits: dict[str, int], tmp_path: Path
) -> None:
    task = ScriptedTask(make_config(window=5, **limits))
    with pytest.raises(WindowError, match=r"a window of 5 rows .* the longest of \d+ has 4"):
        run(tmp_path, task, 20)


def test_max_samples_too_small_for_a_window_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigurationError, match=r"ask for 3 rows, .* of 4 samples from 2 .* 2$"):
        run(tmp_path, ScriptedTask(make_config(window=3, max_samples=4)))
    assert not (tmp_path / "run").exists()


def test_max_seconds_stops_within_a_collection(tmp_path: Path) -> None:
    class Slow(ScriptedTask):
        env_kwargs = {"lengths": 4, "seconds": 0.01}  # noqa: RUF012

    started = time.monotonic()
    state, trainer = run(tmp_path, Slow(make_config(num_envs=1, max_seconds=0.5)), 100_000)
    assert time.monotonic() - started < 4
    assert trainer.stopped_by == "max_seconds"
    assert (state.num_epochs, state.num_steps) == (0, 0)
    assert 10 <= state.num_samples <= 50
    assert 0.5 <= state.elapsed_time < 1.5


def test_max_seconds_stops_between_two_updates(tmp_path: Path) -> None:
    class Slow(ScriptedTask):
        def on_update_end(self, model: Any, state: State) -> None:
            time.sleep(0.05)

    state, trainer = run(tmp_path, Slow(make_config(updates=10_000, max_seconds=0.4)))
    assert trainer.stopped_by == "max_seconds"
    assert 1 <= state.num_steps <= 8
    assert state.num_epochs == 1  # cut short after an update, it counts as an epoch


@pytest.mark.parametrize("limit", ["max_epochs", "max_steps", "max_samples", "max_seconds"])
def test_a_limit_of_zero_stops_before_the_first_step(limit: str, tmp_path: Path) -> None:
    model = linear()
    before = parameters(model)
    trainer = make_trainer(tmp_path / "run")
    state = trainer.train(ScriptedTask(make_config(**{limit: 0})), model)
    assert (state.num_epochs, state.num_steps, state.num_samples) == (0, 0, 0)
    assert trainer.stopped_by == limit
    assert parameters(model) == before


def test_the_first_limit_that_is_reached_stops(tmp_path: Path) -> None:
    _, trainer = run(tmp_path, ScriptedTask(make_config(max_epochs=9, max_samples=10_000)))
    assert trainer.stopped_by == "max_epochs"


# ---- epochs and hooks ----------------------------------------------------------------------------


class Diary(ScriptedTask):
    """Writes down who was called, in which phase and at which count."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.diary: list[tuple[Any, ...]] = []

    def note(self, what: str) -> None:
        state = self.state
        entry = (what, state.phase, state.num_epochs, state.num_epoch_steps)
        if not self.diary or self.diary[-1] != entry:
            self.diary.append(entry)

    def get_actions(self, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        self.note("act")
        return super().get_actions(model, states, optimal)

    def on_epoch_start(self, model: Any, state: State) -> None:
        assert type(model) is nn.Linear
        self.note("epoch start")

    def run_model(self, model: Any, batch: TensorDict, state: State) -> Tensor:
        assert model(batch["observation"]).requires_grad
        assert state is self.state
        self.note("run")
        return super().run_model(model, batch, state)

    def on_update_end(self, model: Any, state: State) -> None:
        assert type(model) is nn.Linear
        self.note("update end")

    def epoch_is_over(self, state: State) -> bool:
        self.note("over?")
        return super().epoch_is_over(state)

    def on_epoch_end(self, model: Any, state: State) -> None:
        assert type(model) is nn.Linear
        self.note("epoch end")


def test_hooks_are_called_in_the_documented_order(tmp_path: Path) -> None:
    task = Diary(make_config(updates=2, max_epochs=2))
    run(tmp_path, task, eval_interval=2, num_eval_episodes=1)
    epoch = [
        ("epoch start", "collect", 0, 0),
        ("act", "collect", 0, 0),
        ("run", "train", 0, 0),
        ("update end", "train", 0, 1),
        ("over?", "train", 0, 1),
        ("run", "train", 0, 1),
        ("update end", "train", 0, 2),
        ("over?", "train", 0, 2),
        ("epoch end", "train", 1, 2),
    ]
    second = [(what, phase, epochs + 1, steps) for what, phase, epochs, steps in epoch]
    assert task.diary == [*epoch, *second, ("act", "eval", 2, 2)]


def test_the_task_decides_when_an_epoch_is_over(tmp_path: Path) -> None:
    class Growing(ScriptedTask):
        def epoch_is_over(self, state: State) -> bool:
            return state.num_epoch_steps > state.num_epochs

    state, _ = run(tmp_path, Growing(make_config(updates=100, max_epochs=4)))
    assert state.num_steps == 1 + 2 + 3 + 4


def test_a_dataset_that_ends_too_early_is_gone_through_again(tmp_path: Path) -> None:
    class Short(ScriptedTask):
        def build_rl_dataset(self, samples: Any) -> Any:
            return list(super().build_rl_dataset(samples))[:2]

    state, _ = run(tmp_path, Short(make_config(updates=5, max_epochs=1)))
    assert state.num_steps == 5


def test_a_dataset_without_batches_is_an_error(tmp_path: Path) -> None:
    class Empty(ScriptedTask):
        def build_rl_dataset(self, samples: Any) -> Any:
            return []

    with pytest.raises(HookError, match="`build_rl_dataset` must give at least one batch"):
        run(tmp_path, Empty(make_config(max_epochs=1)))


def test_the_model_is_in_train_mode_in_updates_and_in_eval_mode_while_acting(
    tmp_path: Path,
) -> None:
    modes: dict[str, set[bool]] = {"act": set(), "run": set()}

    class Watch(ScriptedTask):
        def get_actions(self, model: Any, states: TensorDict, optimal: bool) -> Tensor:
            modes["act"].add(model.training)
            return super().get_actions(model, states, optimal)

        def run_model(self, model: Any, batch: TensorDict, state: State) -> Tensor:
            modes["run"].add(model.training)
            return super().run_model(model, batch, state)

    model = linear().eval()
    make_trainer(tmp_path / "run", eval_interval=1, num_eval_episodes=2).train(
        Watch(make_config(max_epochs=2)), model
    )
    assert modes == {"act": {False}, "run": {True}}


@pytest.mark.parametrize(("bad", "name"), [(float("nan"), "loss"), (float("inf"), "loss")])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_update(
    bad: float, name: str, tmp_path: Path
) -> None:
    class Spoilt(ScriptedTask):
        def compute_loss(self, model: Any, batch: Any, state: State, output: Tensor) -> Tensor:
            loss = super().compute_loss(model, batch, state, output)
            return loss * bad if state.num_steps == 4 else loss

    model = linear()
    trainer = make_trainer(tmp_path / "run")
    with pytest.raises(HookError, match=rf"`{name}` must be finite, got {bad} in update 4;"):
        trainer.train(Spoilt(make_config(max_epochs=5)), model)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    # What was spoilt was not saved.
    (folder,) = list_checkpoints(tmp_path / "run")
    assert load_checkpoint(folder)[0]["state"]["num_steps"] == 3


def test_training_is_repeatable_and_its_seed_matters(tmp_path: Path) -> None:
    def train(name: str, seed: int | None) -> list[float]:
        model = network()
        make_trainer(tmp_path / name, 64, seed=seed).train(
            CartPole(make_config(max_epochs=2)), model
        )
        return parameters(model)

    assert train("a", None) == train("b", 1337)  # None is the environments' seed
    assert train("c", 3) == train("d", 3)
    assert train("e", 4) != train("f", 3)


def test_two_runs_at_the_same_time_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainers = [make_trainer(None), make_trainer(None)]
    for trainer in trainers:
        trainer.train(ScriptedTask(make_config(max_epochs=1)), linear())
    first, second = (trainer.run_dir for trainer in trainers)
    assert first is not None
    assert second is not None
    assert first != second
    assert first.parent == second.parent == tmp_path / "runs" / "task"


def test_training_works_outside_the_main_thread(tmp_path: Path) -> None:
    results: list[State] = []
    thread = threading.Thread(
        target=lambda: results.append(run(tmp_path, ScriptedTask(make_config(max_epochs=1)))[0])
    )
    thread.start()
    thread.join()
    assert results[0].num_epochs == 1
