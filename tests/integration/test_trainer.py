"""Training runs: limits, counters, hooks, files, signals."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensordict import TensorDict
from torch import Tensor, nn
from training_tasks import (
    CartPole,
    ScriptedTask,
    linear,
    make_config,
    make_trainer,
    network,
    parameters,
)

from gymtask.checkpoint import list_checkpoints, load_checkpoint
from gymtask.errors import ConfigurationError, HookError, WindowError
from gymtask.logs import read_rows
from gymtask.task import State
from gymtask.trainer import Trainer

# ---- limits --------------------------------------------------------------------------------------


def run(
    tmp_path: Path, task: ScriptedTask, num_epoch_samples: int = 10, **fields: Any
) -> tuple[State, Trainer]:
    trainer = make_trainer(tmp_path / "run", num_epoch_samples, **fields)
    return trainer.train(task, linear()), trainer


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


def test_episodes_too_short_for_a_window_are_an_error_that_names_both_lengths(
    tmp_path: Path,
) -> None:
    task = ScriptedTask(make_config(window=5, max_epochs=1))
    with pytest.raises(WindowError, match=r"a window of 5 rows .* the longest of \d+ has 4"):
        run(tmp_path, task, 20)


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
        assert type(model) is not nn.Linear  # wrapped
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

    with pytest.raises(HookError, match=rf"`{name}` must be finite, got {bad} in update 4 "):
        run(tmp_path, Spoilt(make_config(max_epochs=5)))
    # What was spoilt was not saved.
    (folder,) = list_checkpoints(tmp_path / "run")
    assert load_checkpoint(folder)[0]["state"]["num_steps"] == 3


def test_training_is_repeatable_and_its_seed_matters(tmp_path: Path) -> None:
    def train(name: str, seed: int | None) -> list[float]:
        model = network()
        make_trainer(tmp_path / name, 64, seed=seed).train(CartPole(make_config(max_epochs=2)), model)
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


# ---- files ---------------------------------------------------------------------------------------


def test_a_run_leaves_config_metrics_events_curve_checkpoints_and_clips(tmp_path: Path) -> None:
    task = ScriptedTask(make_config(max_epochs=2))
    _, trainer = run(tmp_path, task, eval_interval=2, num_eval_episodes=3, clip_interval=2)
    folder = tmp_path / "run"
    assert trainer.run_dir == folder
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "metrics.csv", "learning_curve.png", "checkpoints", "clips"} <= names
    assert len([name for name in names if name.startswith("events.out.tfevents")]) == 1
    assert not [name for name in names if name.startswith(".tmp")]
    assert [path.name for path in (folder / "clips").iterdir()] == ["epoch-000002.mp4"]
    assert [path.name for path in list_checkpoints(folder)] == [
        "epoch-000001-samples-000000010",
        "epoch-000002-samples-000000020",
    ]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["task"]["dataset"]["num_update_steps"] == 3
    assert config["trainer"]["sampling"]["num_epoch_samples"] == 10
    first, second = read_rows(folder / "metrics.csv")
    assert (first["num_epochs"], second["num_epochs"]) == (1, 2)
    assert first["episode/count"] == 2  # 5 rows from each of 2 environments with episodes of 4
    assert first["episode/return_mean"] == 1 + 2 + 3 + 4
    assert "eval/count" not in first
    assert second["eval/count"] == 3
    assert second["eval/return_mean"] == 10.0
    assert second["eval/length_max"] == 4
    assert second["learning_rate"] == 1e-3
    assert {"loss", "grad_norm", "samples_per_second", "seconds/eval"} <= second.keys()


def test_intervals_count_epochs_and_the_end_is_always_logged_and_saved(tmp_path: Path) -> None:
    task = ScriptedTask(make_config(max_epochs=5))
    run(tmp_path, task, log_interval=2, checkpoint_interval=3)
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    assert [row["num_epochs"] for row in rows] == [2, 4, 5]
    # 5 rows an epoch and environment, episodes of 4 rows: 2, 5, 7, 10 and 12 episodes have ended.
    assert [row["episode/count"] for row in rows] == [4, 6, 2]
    epochs = [path.name[:12] for path in list_checkpoints(tmp_path / "run")]
    assert epochs == ["epoch-000003", "epoch-000005"]


def test_without_an_interval_no_checkpoint_is_written(tmp_path: Path) -> None:
    run(tmp_path, ScriptedTask(make_config(max_epochs=2)), checkpoint_interval=None)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_directory_that_holds_a_run_is_not_used_for_a_new_one(tmp_path: Path) -> None:
    run(tmp_path, ScriptedTask(make_config(max_epochs=1)))
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    with pytest.raises(ConfigurationError, match="`run_dir` must be without a run for a new one"):
        run(tmp_path, ScriptedTask(make_config(max_epochs=1)))
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before


def test_a_checkpoint_is_read_by_a_process_that_imported_only_torch(tmp_path: Path) -> None:
    task = CartPole(make_config(max_epochs=1))
    make_trainer(tmp_path / "run", 32, eval_interval=1, num_eval_episodes=2).train(task, network())
    (folder,) = list_checkpoints(tmp_path / "run")
    code = (
        "import sys, torch\n"
        f"state = torch.load({str(folder / 'state.pt')!r})\n"
        f"rank = torch.load({str(folder / 'rank-0.pt')!r})\n"
        "assert 'gymtask' not in sys.modules\n"
        "print(sorted(state), sorted(rank), state['state']['num_steps'], state['num_evaluations'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = [
        "config",
        "environment",
        "format",
        "model",
        "name",
        "num_clips",
        "num_envs",
        "num_evaluations",
        "num_resumes",
        "optimizers",
        "recent_returns",
        "schedulers",
        "state",
        "task",
        "task_class",
    ]
    assert done.stdout.strip() == f"{expected} ['pool', 'rng'] 3 1"
    state = load_checkpoint(folder)[0]
    assert state["environment"]["id"] == "CartPole-v1"
    assert '"CartPole-v1"' in state["environment"]["spec"]


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"when": object()}

        def set_extra_state(self, state: Any) -> None: ...

    trainer = make_trainer(tmp_path / "run")
    with pytest.raises(Exception, match=re.escape("`model._extra_state.when` must be made of")):
        trainer.train(ScriptedTask(make_config(max_epochs=1)), Odd(3, 2))
    assert list_checkpoints(tmp_path / "run") == []


def test_the_bar_goes_to_stderr_and_leaves_a_clean_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, ScriptedTask(make_config(max_epochs=2)))
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/2" in err
    assert "return 10" in err
    assert err.endswith("\n")


# ---- signals -------------------------------------------------------------------------------------


class Signalled(ScriptedTask):
    """Sends its own process a signal, once, at a chosen place."""

    at: str = ""
    signal: int = signal.SIGINT

    def send(self, place: str) -> None:
        if self.at == place:
            self.at = ""
            os.kill(os.getpid(), self.signal)

    def get_actions(self, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        if self.state.num_epochs == 1 and int(states["run_step"].min()) == 7:
            self.send("collect")
        if self.state.phase == "eval":
            self.send("eval")
        return super().get_actions(model, states, optimal)

    def on_update_end(self, model: Any, state: State) -> None:
        if state.num_steps == 5:
            self.send("train")


def test_a_signal_in_an_epoch_stops_after_the_update_and_saves(tmp_path: Path) -> None:
    task = Signalled(make_config(max_epochs=100))
    task.at = "train"
    handler = signal.getsignal(signal.SIGINT)
    state, trainer = run(tmp_path, task)
    assert signal.getsignal(signal.SIGINT) is handler
    assert trainer.stopped_by == "SIGINT"
    assert (state.num_steps, state.num_epochs, state.num_samples) == (5, 2, 20)
    saved = load_checkpoint(list_checkpoints(tmp_path / "run")[-1])[0]["state"]
    assert (saved["num_steps"], saved["num_samples"]) == (5, 20)
    assert [row["num_epochs"] for row in read_rows(tmp_path / "run" / "metrics.csv")] == [1, 2]


def test_a_signal_in_a_collection_stops_between_two_steps_and_counts_what_was_stepped(
    tmp_path: Path,
) -> None:
    task = Signalled(make_config(max_epochs=100))
    task.at, task.signal = "collect", signal.SIGTERM
    state, trainer = run(tmp_path, task)
    assert trainer.stopped_by == "SIGTERM"
    # 5 steps each in the first epoch; the signal came before the 8th of both was taken.
    assert (state.num_steps, state.num_epochs, state.num_samples) == (3, 1, 16)
    folder = list_checkpoints(tmp_path / "run")[-1]
    assert folder.name == "epoch-000001-samples-000000016"
    saved, rank = load_checkpoint(folder)
    assert saved["state"]["num_samples"] == 16
    assert rank["pool"]["run_step"] == [8, 8]


def test_a_signal_in_an_evaluation_ends_it(tmp_path: Path) -> None:
    class Long(Signalled):
        env_kwargs = {"lengths": 100_000}  # noqa: RUF012

    task = Long(make_config(max_epochs=100))
    task.at = "eval"
    started = time.monotonic()
    state, trainer = run(tmp_path, task, eval_interval=1)
    assert time.monotonic() - started < 5
    assert trainer.stopped_by == "SIGINT"
    assert state.num_epochs == 1
    (row,) = read_rows(tmp_path / "run" / "metrics.csv")
    assert "eval/count" not in row


def test_a_second_signal_interrupts_at_once(tmp_path: Path) -> None:
    class Twice(Signalled):
        def on_update_end(self, model: Any, state: State) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Twice(make_config(max_epochs=100)))
    assert signal.getsignal(signal.SIGINT) is handler


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from training_tasks import CartPole, make_config, make_trainer, network

class Loud(CartPole):
    def on_epoch_start(self, model, state):
        if state.num_epochs == 1:
            print("going", flush=True)

trainer = make_trainer({run_dir!r}, 256, eval_interval=3)
state = trainer.train(Loud(make_config(num_envs=4, workers=2, updates=20)), network())
print(trainer.stopped_by, state.num_epochs, state.num_steps, state.num_samples)
"""


def children(pid: int) -> set[int]:
    """All processes below a process."""
    found: set[int] = set()
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            found |= {child} | children(child)
    return found


def lives(pid: int) -> bool:
    """Whether a process exists, and not only as an entry that nobody has read yet."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("attempt", range(3))
def test_ctrl_c_at_any_moment_ends_within_5_seconds_leaves_nothing_and_can_be_resumed(
    attempt: int, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    script = SCRIPT.format(folder=str(Path(__file__).parent), run_dir=str(run_dir))
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        time.sleep(random.uniform(0.0, 1.0))
        workers = children(process.pid)
        assert workers
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
        took = time.monotonic() - sent
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert took < 5
    reason, *counts = output.split()
    assert reason == "SIGINT"
    time.sleep(0.5)
    assert not [pid for pid in workers if lives(pid)]
    epochs, steps, samples = map(int, counts)
    config = make_config(num_envs=4, updates=20, max_epochs=epochs + 2)
    trainer = make_trainer(None, 256)
    state = trainer.train(CartPole(config), network(1), resume=run_dir)
    assert trainer.run_dir == run_dir
    assert (state.num_steps, state.num_samples) == (steps + 40, samples + 512)
    rows = read_rows(run_dir / "metrics.csv")
    assert [row["num_epochs"] for row in rows] == list(range(1, epochs + 3))
    assert torch.isfinite(torch.tensor([row["loss"] for row in rows])).all()
