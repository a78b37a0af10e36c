"""The README's commands and snippet do what they say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gymtask
from gymtask.testing import ScriptedEnv
from tests.tasks import TAXI, collect, make_task

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_snippet_trains_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snippet, *more = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    snippet += "\ntask = Reinforce(config)\n" + "".join(more)
    assert snippet.count("max_epochs=20") == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet.replace("max_epochs=20", "max_epochs=2"), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert (tmp_path / "clip.mp4").exists()
    assert (tmp_path / "best.mp4").exists()
    run, recorded = sorted((tmp_path / "runs" / "reinforce").iterdir())
    assert not (run / "episodes").exists()
    assert len(list((recorded / "episodes").iterdir())) == 2
    assert printed.endswith(f"steps; everything is in {run}\n")
    assert int(printed.split()[0]) >= 2 * 2048


def test_every_file_and_command_that_it_names_exists() -> None:
    for link in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / link).exists(), link
    for script in re.findall(r"(?:python|bash) ([\w./]+)", README):
        assert (ROOT / script).exists(), script


def test_the_table_of_a_row_names_every_key_shape_and_dtype() -> None:
    def get_environment(self: Any) -> gymtask.Environment:
        return gymtask.Environment(lambda: ScriptedEnv((3, 5), start=2), info_keys=("t",))

    task = make_task(
        get_environment=get_environment,
        get_values=lambda self, model, states: states["observation"][:, 0],
    )
    rows = collect(task, 12)[0].samples
    table = README.partition("## What a row holds")[2].partition("\n## ")[0].replace("lives", "t")
    said: dict[Any, tuple[str, str]] = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            keys, shape, dtype = line.strip("| ").split(" | ")
            for key in re.findall("`([^`]+)`", keys):
                if key.startswith(('"', "(")) and key not in ('"0"', '"1"', '"log_prob"'):
                    said[ast.literal_eval(key)] = (shape, dtype)
    found = {key: rows[key] for key in rows.keys(include_nested=True, leaves_only=True)}
    assert found.keys() == said.keys()
    for key, (shape, dtype) in said.items():
        if shape == "()":
            assert (found[key].shape, f"torch.{dtype}") == ((len(rows),), str(found[key].dtype))
    assert set(rows["action"].tolist()) == {0, 1}  # the environment got 2 and 3


@pytest.mark.parametrize("extra", ["examples", "test", "dev"])
def test_every_extra_that_it_installs_is_declared(extra: str) -> None:
    if extra != "dev":
        assert f'".[{extra}]"' in README
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("ppo.py", ["--max-samples", "2048", "--trainer.run-dir", "RUN"]),
        ("ppo.py", ["--env-id", "Pendulum-v1", "--max-samples", "1024", "--no-clip",
                    "--trainer.run-dir", "RUN"]),
        ("ppo.py", ["--env-id", TAXI, "--max-samples", "1024", "--no-clip",
                    "--trainer.run-dir", "RUN"]),
        ("ppo.py", ["--env-id", "Blackjack-v1", "--max-samples", "1024", "--no-clip",
                    "--train-dl.batch-size", "1", "--dataset.num-update-steps", "2",
                    "--trainer.run-dir", "RUN"]),
        ("reinforce.py", ["--max-samples", "2000", "--trainer.run-dir", "RUN"]),
        ("own_loop.py", ["--max-samples", "1024"]),
    ],
)  # fmt: skip
def test_an_example_runs_on_a_tiny_budget(
    tmp_path: Path, script: str, arguments: list[str]
) -> None:
    run = tmp_path / "run"
    words = [str(run) if word == "RUN" else word for word in arguments]
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / script), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "mean return over 100 episodes" in done.stdout
    if "RUN" not in arguments:
        return
    for name in ("config.yaml", "metrics.csv", "learning_curve.png", "checkpoints"):
        assert (run / name).exists(), name
    assert list(run.glob("events.out.tfevents.*"))
    assert (run / "clips" / "final.mp4").exists() == ("--no-clip" not in arguments)


@pytest.mark.parametrize("script", ["ppo.py", "reinforce.py"])
def test_every_config_field_is_on_the_command_line(script: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / script), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    for flag in (
        "--env-id", "--max-epochs", "--max-seconds", "--gamma", "--environment.env-seed",
        "--environment.num-env-workers", "--environment.env-worker-mode", "--dataset.num-samples",
        "--dataset.stride", "--train-dl.batch-size", "--errors.on-worker-failure",
        "--trainer.learning-rate", "--trainer.clip-grad-norm", "--trainer.eval-interval",
        "--trainer.sampling.num-epoch-samples", "--trainer.sampling.max-wait-time", "--resume",
    ):  # fmt: skip
        assert flag in text, flag


def test_examples_are_short_enough_to_read() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 250, path.name
