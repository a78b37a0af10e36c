"""What importing costs: torch is loaded by those who use it, and never by a worker."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

from gymtask import workers

LIGHT = [
    "gymtask",
    "gymtask.config",
    "gymtask.errors",
    "gymtask.maker",
    "gymtask.testing",
    "gymtask.vector",
    "gymtask.vector.arguments",
    "gymtask.vector.crewed",
    "gymtask.vector.learned",
    "gymtask.vector.make",
    "gymtask.vector.process",
    "gymtask.vector.rows",
    "gymtask.vector.thread",
    "gymtask.workers",
    "gymtask.workers.arguments",
    "gymtask.workers.copies",
    "gymtask.workers.crew",
    "gymtask.workers.fork_server",
    "gymtask.workers.given_actions",
    "gymtask.workers.handle",
    "gymtask.workers.info_cells",
    "gymtask.workers.launch",
    "gymtask.workers.layout",
    "gymtask.workers.linger",
    "gymtask.workers.native",
    "gymtask.workers.pool",
    "gymtask.workers.process",
    "gymtask.workers.queue",
    "gymtask.workers.random_state",
    "gymtask.workers.registry",
    "gymtask.workers.resumable",
    "gymtask.workers.slots",
    "gymtask.workers.spreading",
    "gymtask.workers.sync",
    "gymtask.workers.thread",
    "gymtask.workers.vector_answers",
    "gymtask.workers.vector_closing",
    "gymtask.workers.vector_stepper",
    "gymtask.workers.waiting",
    "gymtask.workers.worker",
    "gymtask.workers.worker_main",
]
# What a fork server imports before it can set anything up; numpy is not among it.
LIGHTEST = ["gymtask", "gymtask.errors", "gymtask.workers.fork_server", "gymtask.workers.launch"]


def modules_after(code: str) -> set[str]:
    """Names of all modules of a fresh interpreter that ran some code, and what it wrote."""
    code = f"{code}; import sys; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert out.stderr == ""
    return set(out.stdout.split())


@pytest.mark.parametrize("module", LIGHT)
def test_a_module_above_the_line_imports_without_torch(module: str) -> None:
    found = modules_after(f"import {module}")
    assert module in found
    assert not {"torch", "tensordict", "lightning_fabric", "moviepy"} & found


@pytest.mark.parametrize("module", LIGHTEST)
def test_the_start_of_a_fork_server_imports_no_numpy(module: str) -> None:
    assert "numpy" not in modules_after(f"import {module}")


def test_importing_the_package_does_not_import_torch() -> None:
    out = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import gymtask"],
        capture_output=True,
        check=True,
        text=True,
    )
    names = {line.rpartition("|")[2].strip() for line in out.stderr.splitlines()}
    assert "gymtask" in names
    assert not {name for name in names if name.partition(".")[0] == "torch"}


def test_using_a_light_name_of_the_package_does_not_import_torch() -> None:
    assert "torch" not in modules_after(
        "import gymtask; gymtask.EnvironmentConfig, gymtask.WorkerPool, gymtask.Steps,"
        " gymtask.errors, gymtask.testing"
    )


def test_the_list_of_light_modules_is_whole() -> None:
    found = {f"gymtask.workers.{part.name}" for part in pkgutil.iter_modules(workers.__path__)}
    assert found <= set(LIGHT)
