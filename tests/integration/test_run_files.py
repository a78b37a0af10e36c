"""What a run leaves in its directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from gymtask.errors import ConfigurationError
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
        "best",
        "config",
        "config_class",
        "config_texts",
        "environment",
        "format",
        "last_evaluation",
        "logged",
        "model",
        "name",
        "num_clips",
        "num_envs",
        "num_evaluations",
        "num_ranks",
        "num_resumes",
        "optimizers",
        "schedulers",
        "state",
        "statistics",
        "task",
        "task_class",
    ]
    assert done.stdout.strip() == f"{expected} ['episodes', 'pool', 'rng'] 3 1"
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
