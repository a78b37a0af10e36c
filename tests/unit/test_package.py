"""The package's public face, its imports and its files."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gymtask

ROOT = Path(gymtask.__file__).parent
ABOVE_THE_LINE = [
    "gymtask",
    "gymtask.errors",
    "gymtask.config",
    "gymtask.maker",
    "gymtask.wrappers",
    "gymtask.testing",
    *(f"gymtask.workers.{path.stem}" for path in sorted((ROOT / "workers").glob("[a-z]*.py"))),
    *(f"gymtask.vector.{path.stem}" for path in sorted((ROOT / "vector").glob("[a-z]*.py"))),
]
ORDER = [
    "errors", "config", "maker", "wrappers", "workers", "vector", "spaces", "video", "environment",
    "tape", "trajectory", "masks", "sampling", "states", "joining", "recurrent", "options", "plan",
    "together", "random_actions", "acting", "cursors", "episode_actions", "windows", "replay",
    "rollout", "collector", "episodes", "samples", "scans", "return_arguments", "returns",
    "moments", "running_returns", "normalize", "clips", "hooks", "logged", "task", "resuming",
    "training", "trainer", "testing",
]  # fmt: skip
"""Imports go from later names to earlier ones only, but for type annotations."""


def run(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def test_all_names_what_there_is() -> None:
    assert sorted(gymtask.__all__) == gymtask.__all__ or len(set(gymtask.__all__)) == len(
        gymtask.__all__
    )
    for name in gymtask.__all__:
        assert getattr(gymtask, name) is not None
    assert dir(gymtask) == sorted(gymtask.__all__)


def test_every_public_name_has_a_docstring() -> None:
    for name in gymtask.__all__:
        value = getattr(gymtask, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert (value.__doc__ or "").strip(), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gymtask' has no attribute 'Trainr'"):
        gymtask.Trainr  # noqa: B018


def test_the_version_is_that_of_the_installed_package_and_does_not_import_torch() -> None:
    found = run("import sys, gymtask; print(gymtask.__version__, 'torch' in sys.modules)")
    assert found.stdout == f"{importlib.metadata.version('gymtask')} False\n"


@pytest.mark.parametrize("module", ABOVE_THE_LINE)
def test_what_a_worker_imports_does_not_import_torch(module: str) -> None:
    found = run(f"import sys, {module}; print('torch' in sys.modules, 'tensordict' in sys.modules)")
    assert found.stdout == "False False\n"


def test_import_gymtask_does_not_import_torch() -> None:
    assert "torch" not in run("import gymtask", "-X", "importtime").stderr


def test_imports_go_one_way() -> None:
    for path in ROOT.rglob("*.py"):
        first = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if first == "__init__":
            continue
        text = path.read_text().split("if TYPE_CHECKING:")
        for line in "".join(
            [text[0], *(part.split("\n\n", 1)[1] for part in text[1:])]
        ).splitlines():
            if line.startswith(("from gymtask.", "import gymtask.")):
                imported = line.split()[1].split(".")[1]
                assert ORDER.index(imported) <= ORDER.index(first), f"{path.name}: {line}"


def test_no_file_is_longer_than_400_lines_of_100_characters() -> None:
    for path in ROOT.rglob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path
        assert max(map(len, lines), default=0) <= 100, path


def test_seed_documents_names_all_exist() -> None:
    names: dict[Any, list[str]] = {
        gymtask.EnvironmentConfig: ["num_env_workers", "env_worker_mode", "env_seed"],
        gymtask.DatasetConfig: ["num_samples", "stride", "replay_buffer_sample_size"],
        gymtask.ReinforcementLearningTaskConfig: ["max_epochs", "max_steps", "max_samples"],
        gymtask.ReinforcementLearningTask: [
            "get_actions", "get_environment", "run_model", "compute_loss", "build_rl_dataset",
            "get_environment_cached", "get_environment_workers", "get_worker_pool",
            "postprocess_trajectory", "postprocess_trajectories", "iter_samples",
            "collect_samples", "epoch_is_over", "sample_clip",
        ],
        gymtask.MultiReplaySamples: ["partition", "sample", "__getitem__", "__iter__"],
        gymtask.ReplaySamples: ["sample", "__getitem__", "__iter__"],
    }  # fmt: skip
    for owner, members in names.items():
        fields = getattr(owner, "__dataclass_fields__", {})
        for member in members:
            assert member in fields or hasattr(owner, member), member
