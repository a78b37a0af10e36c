"""Ctrl-C, SIGTERM and SIGKILL at any moment of a run."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict
from torch import Tensor

from gymtask.task import State
from gymtask.training.checkpoint import list_checkpoints, load_checkpoint
from gymtask.training.logs import read_rows
from tests.integration.training_tasks import (
    CartPole,
    ScriptedTask,
    make_config,
    make_trainer,
    network,
    run,
)


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
from tests.integration.training_tasks import CartPole, make_config, make_trainer, network

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


@contextmanager
def running(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own, with two workers, at a random moment after its first epoch."""
    script = SCRIPT.format(folder=str(Path(__file__).parents[2]), run_dir=str(run_dir))
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        time.sleep(random.uniform(0.0, 1.0))
        yield process


def go_on(run_dir: Path) -> tuple[State, State]:
    """Resumes a run for two epochs, and returns where it stood and where it stands then."""
    saved = load_checkpoint(list_checkpoints(run_dir)[-1])[0]["state"]
    config = make_config(num_envs=4, updates=20, max_epochs=saved["num_epochs"] + 2)
    trainer = make_trainer(None, 256)
    state = trainer.train(CartPole(config), network(1), resume=run_dir)
    assert trainer.run_dir == run_dir
    assert state.num_steps == saved["num_steps"] + 40
    assert state.num_samples == saved["num_samples"] + 512
    rows = read_rows(run_dir / "metrics.csv")
    assert [row["num_epochs"] for row in rows] == list(range(1, state.num_epochs + 1))
    assert all(math.isfinite(row["loss"]) for row in rows)
    return State(**saved), state


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_at_any_moment_ends_within_5_seconds_leaves_nothing_and_can_be_resumed(
    number: signal.Signals, tmp_path: Path
) -> None:
    with running(tmp_path / "run") as process:
        workers = children(process.pid)
        assert workers
        sent = time.monotonic()
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
        took = time.monotonic() - sent
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert took < 5
    time.sleep(0.5)
    assert not [pid for pid in workers if lives(pid)]
    saved, _ = go_on(tmp_path / "run")
    assert output == f"{number.name} {saved.num_epochs} {saved.num_steps} {saved.num_samples}\n"


def test_a_run_that_was_killed_goes_on_from_its_last_whole_checkpoint(tmp_path: Path) -> None:
    with running(tmp_path / "run") as process:
        process.kill()
        process.communicate(timeout=30)
    go_on(tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))
