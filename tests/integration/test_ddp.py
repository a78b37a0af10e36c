"""Two processes that train one model together, over gloo on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gymtask.errors import CheckpointError, ConfigurationError
from gymtask.training.checkpoint import list_checkpoints, load_checkpoint
from gymtask.training.logs import read_rows
from tests.integration.training_tasks import ScriptedTask, linear, make_config, make_trainer

SCRIPT = Path(__file__).with_name("ddp_script.py")
ROOT = SCRIPT.parents[2]


def run(
    out: Path,
    name: str,
    *,
    run_dir: Path | None = None,
    resume: Path | None = None,
    epochs: int = 2,
    off_policy: bool = False,
) -> list[dict[str, Any]]:
    """What each of the two processes wrote down."""
    more = [str(run_dir or "-"), str(resume or "-"), str(epochs), str(int(off_policy))]
    return run_script(SCRIPT, out, name, *more)


def run_script(script: Path, out: Path, name: str, *more: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(script), str(out), name, *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=out, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(out / f"{name}-{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ddp")
    return run(out, "run", run_dir=out / "run", epochs=3)


def test_all_processes_have_equal_parameters(both: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(both[0]["parameters"], both[1]["parameters"], strict=True):
        assert torch.equal(ours, theirs)


def test_each_process_steps_environments_of_its_own(both: list[dict[str, Any]]) -> None:
    ids = [set(one["rows"]["trajectory_id"].tolist()) for one in both]
    assert ids[0].isdisjoint(ids[1])
    assert {number % 6 for number in ids[0]} == {0, 1, 2}
    assert {number % 6 for number in ids[1]} == {3, 4, 5}
    assert not torch.equal(both[0]["batches"], both[1]["batches"])
    firsts = [one["rows"]["observation"][one["rows"]["is_init"]] for one in both]
    shared = {tuple(row) for row in firsts[0].tolist()} & {tuple(row) for row in firsts[1].tolist()}
    assert not shared


def test_samples_add_up_over_the_processes(both: list[dict[str, Any]]) -> None:
    assert [len(one["rows"]["step"]) for one in both] == [3 * 61, 3 * 60]
    assert [one["num_samples"] for one in both] == [3 * 121] * 2


def test_gradients_are_those_of_all_rows(both: list[dict[str, Any]]) -> None:
    """The task's own parameter, by hand in float64: SGD on the mean of both losses.

    In the third update of four the second process has none, which counts as 0.
    """
    scale = torch.ones((), dtype=torch.float64)
    pairs = zip(both[0]["batches"], both[1]["batches"], strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        gradient = torch.zeros((), dtype=torch.float64)
        for batch in (ours,) if number % 4 == 2 else (ours, theirs):
            mean = batch.double().abs().mean()
            gradient += 2 * (scale * mean - 1) * mean / 2
        scale -= 0.05 * gradient
    assert float(both[0]["parameters"][-2]) == pytest.approx(float(scale), rel=1e-5)


def test_logs_are_written_once_and_tell_of_all_episodes(both: list[dict[str, Any]]) -> None:
    run_dir = Path(both[0]["run_dir"])
    assert both[1]["run_dir"] == str(run_dir)
    rows = read_rows(run_dir / "metrics.csv")
    assert [row["num_samples"] for row in rows] == [121, 242, 363]
    ended = sum(int(one["rows"]["next"]["done"].sum()) for one in both)
    assert sum(row["episode/count"] for row in rows) == ended == len(both[0]["recent"])
    assert rows[1]["eval/count"] == 3
    assert (run_dir / "config.yaml").exists()


def test_checkpoints_hold_a_file_for_each_process(both: list[dict[str, Any]]) -> None:
    for folder in list_checkpoints(Path(both[0]["run_dir"])):
        names = {path.name for path in folder.iterdir()}
        assert names == {"state.pt", "rank-0.pt", "rank-1.pt"}
        steps = [load_checkpoint(folder, rank)[1]["pool"]["run_step"] for rank in range(2)]
        assert len(steps[0]) == len(steps[1]) == 3


def assert_same(resumed: list[dict[str, Any]], unbroken: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(unbroken, resumed, strict=True):
        for mine, other in zip(ours["parameters"], theirs["parameters"], strict=True):
            assert torch.equal(mine, other)
        assert torch.equal(ours["batches"][-4:], theirs["batches"])


def test_a_resumed_run_equals_an_uninterrupted_one(
    both: list[dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(both[0]["run_dir"], tmp_path / "copy", symlinks=True)
    second = list_checkpoints(tmp_path / "copy")[1]
    assert_same(run(tmp_path, "again", resume=second, epochs=3), both)


@pytest.mark.slow
def test_a_resumed_off_policy_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    run(tmp_path, "first", run_dir=tmp_path / "run", epochs=1, off_policy=True)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    unbroken = run(tmp_path, "on", resume=tmp_path / "run", epochs=3, off_policy=True)
    run(tmp_path, "next", resume=tmp_path / "copy", epochs=2, off_policy=True)
    assert_same(
        run(tmp_path, "last", resume=tmp_path / "copy", epochs=3, off_policy=True), unbroken
    )


def test_another_number_of_processes_is_refused(both: list[dict[str, Any]]) -> None:
    folder = list_checkpoints(Path(both[0]["run_dir"]))[-1]
    saved = load_checkpoint(folder)[0]
    assert saved["num_ranks"] == 2
    task = ScriptedTask(make_config(3, name="task"))
    with pytest.raises(CheckpointError, match="the number of processes is 2"):
        make_trainer(None).train(task, linear(), resume=folder)


def test_several_processes_need_a_strategy() -> None:
    with pytest.raises(ConfigurationError, match=r'`strategy` must be "ddp" for more than one'):
        make_trainer(None, devices=2)


def odd(out: Path, scenario: str) -> list[dict[str, Any]]:
    return run_script(SCRIPT.with_name("ddp_odd_script.py"), out, scenario)


def test_processes_that_are_unlike_stay_one_model(tmp_path: Path) -> None:
    first, second = odd(tmp_path, "odd")
    # Buffers, what was thawed later, sparse gradients, an epoch that one of them ended.
    assert first["num_steps"] == second["num_steps"] == 3 * 2
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    assert first["state"]["0.norm.running_mean"].any()
    rows = read_rows(tmp_path / "odd" / "metrics.csv")
    assert [row["loss/rare"] for row in rows] == [pytest.approx(3.0)] * 3


@pytest.mark.parametrize("scenario", ["slow", "short"])
def test_hooks_of_all_processes_run_equally_often(scenario: str, tmp_path: Path) -> None:
    both = odd(tmp_path, scenario)
    reason = {"slow": "max_seconds", "short": "max_epochs"}[scenario]
    assert [each["stopped_by"] for each in both] == [reason] * 2
    states = [each["state"] for each in both]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert list_checkpoints(tmp_path / scenario)
