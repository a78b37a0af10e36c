"""examples/ppo.py in two processes, started by its command line alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gymtask.training.logs import read_rows

SCRIPT = Path(__file__).with_name("ddp_ppo_script.py")
ROOT = SCRIPT.parents[2]
# 128 rows from each of two processes are 256 an update, as of one process.
TWO = ["--trainer.devices", "2", "--trainer.strategy", "ddp", "--train-dl.batch-size", "128"]


def learn(tmp_path: Path, num_samples: int, *words: str) -> tuple[list[dict[str, Any]], str]:
    """What each process wrote down, and what was printed."""
    command = [sys.executable, str(SCRIPT), "--max-samples", str(num_samples), "--no-clip", *words]
    command += ["--trainer.accelerator", "cpu", "--trainer.run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env={**environment, "OUT": str(tmp_path / "rank")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(path) for path in sorted(tmp_path.glob("rank-*.pt"))], done.stdout


def check(tmp_path: Path, ranks: list[dict[str, Any]], printed: str, num_samples: int) -> None:
    first, second = ranks
    for ours, theirs in zip(first["parameters"], second["parameters"], strict=True):
        assert torch.equal(ours, theirs)
    assert first["num_rows"] == second["num_rows"] == num_samples // 2
    assert not set(first["ids"].tolist()) & set(second["ids"].tolist())
    starts = [set(map(tuple, each["observations"].tolist())) for each in ranks]
    assert all(starts)
    assert not starts[0] & starts[1]
    assert second["greedy"] is None  # the first one evaluates
    lines = printed.splitlines()
    assert len([line for line in lines if line.startswith(f"{num_samples} steps in ")]) == 1
    assert len([line for line in lines if line.startswith("mean return over 100 episodes")]) == 2
    assert read_rows(tmp_path / "run" / "metrics.csv")[-1]["num_samples"] == num_samples


def test_two_processes_run_the_example_and_the_first_one_tells(tmp_path: Path) -> None:
    ranks, printed = learn(tmp_path, 4096, *TWO)
    check(tmp_path, ranks, printed, 4096)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_processes_balance_the_pole_with_as_many_samples_as_one(
    tmp_path: Path, seed: int
) -> None:
    words = ["--environment.env-seed", str(seed)]
    for number, more in ((1, []), (2, TWO)):
        folder = tmp_path / str(number)
        folder.mkdir()
        ranks, printed = learn(folder, 200_000, *words, *more)
        assert len(ranks) == number
        assert ranks[0]["greedy"] >= 475
    check(folder, ranks, printed, 200_000)
