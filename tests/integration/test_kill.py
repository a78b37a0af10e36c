"""SIGKILL at random moments: a run that goes on is, bit for bit, the one that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gymtask
from gymtask.training.checkpoint import list_checkpoints
from gymtask.training.logs import read_rows
from tests.integration.kill_script import RUNS
from tests.integration.test_signals import lives

SCRIPT = Path(__file__).with_name("kill_script.py")
ROOT = SCRIPT.parents[2]
KILLS_IN_A_ROW = 4
OF_THE_CLOCK = ("elapsed_time", "samples_per_second", "seconds/", "time_share/")


class Trainings:
    """Trains in processes that can be killed."""

    def __init__(self, folder: Path) -> None:
        self.errors = folder / "errors"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(self.errors, "w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )

    def ask(self, line: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, self.errors.read_text()
        return int(answer)

    def train(self, name: str, run_dir: Path, limit: float = 100.0) -> float | None:
        """Trains, and kills that after so many seconds; how many it took, None if it was killed."""
        pid = self.ask(json.dumps([name, str(run_dir)]))
        began = time.monotonic()
        while (took := time.monotonic() - began) < limit and lives(pid):
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)  # where it has ended, its number is still its own
        code = self.ask("")
        assert code in (0, -signal.SIGKILL), self.errors.read_text()
        return took if code == 0 else None

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    made = Trainings(tmp_path_factory.mktemp("trainings"))
    yield made
    made.close()


def assert_same(ours: Any, theirs: Any, place: str = "") -> None:
    """Compares what two checkpoints hold; clocks and the number of resumes may differ."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), place
        for key in ours.keys() - {"elapsed_time", "num_resumes", "config"}:
            assert_same(ours[key], theirs[key], f"{place}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), place
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{place}.{number}")
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), place
    else:
        assert ours == theirs, place


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(OF_THE_CLOCK)}
        for row in read_rows(run_dir / "metrics.csv")
    ]


def assert_equals_the_unbroken(run_dir: Path, unbroken: Path) -> None:
    assert not list(run_dir.rglob(".tmp-*"))
    mine, other = (list_checkpoints(each)[-1] for each in (run_dir, unbroken))
    assert mine.name == other.name
    for name in ("state.pt", "rank-0.pt"):
        assert_same(torch.load(mine / name), torch.load(other / name), name)
    if (other / "replay-0").exists():
        buffers = [gymtask.ReplayBuffer.load(each / "replay-0") for each in (mine, other)]
        assert [len(each) for each in buffers] == [600, 600]
        first, second = (each.sample(2000).to_dict() for each in buffers)
        assert_same(first, second, "replay")
    assert metrics(run_dir) == metrics(unbroken)
    assert [row["num_epochs"] for row in metrics(run_dir)] == list(range(1, 13))


def kill_again_and_again(
    trainings: Trainings, name: str, folder: Path, num_kills: int
) -> list[float]:
    """Compares with the unbroken run whenever one has come to its end.

    Returns:
        After how many seconds the runs were killed.
    """
    # The first one is slow, as it reads from the disk what all import while they train.
    whole = min(trainings.train(name, folder / each) or 0.0 for each in ("first", "whole"))
    assert whole
    moments: list[float] = []
    for number in range(100):
        run_dir, killed, took = folder / f"run-{number}", 0, None
        while took is None and killed < KILLS_IN_A_ROW:
            moment = random.uniform(0, whole)
            took = trainings.train(name, run_dir, moment)
            if took is None:
                moments.append(moment)
                killed += 1
        if took is None:
            assert trainings.train(name, run_dir)
        assert_equals_the_unbroken(run_dir, folder / "whole")
        if len(moments) >= num_kills:
            break
    return moments


@pytest.mark.parametrize("name", ["ppo CartPole-v1", "sac Pendulum-v1"])
def test_a_few_kills(trainings: Trainings, name: str, tmp_path: Path) -> None:
    assert len(kill_again_and_again(trainings, name, tmp_path, 3)) >= 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNS)
def test_twenty_kills(trainings: Trainings, name: str, tmp_path: Path) -> None:
    assert len(kill_again_and_again(trainings, name, tmp_path, 20)) >= 20
