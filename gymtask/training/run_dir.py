"""Where a run writes: a new directory each time, or that of the run that it goes on with."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from gymtask.errors import CheckpointError, ConfigurationError
from gymtask.training.checkpoint import FOLDER, find_checkpoint, list_checkpoints
from gymtask.training.logs import METRICS_FILE

RUNS = Path("runs")
"""Where run directories are made, seen from the directory that the program runs in."""


def find_start(resume: str | Path | None, name: str, run_dir: str | Path | None) -> Path | None:
    """Finds the checkpoint from which a run goes on.

    Args:
        resume: As `Trainer.train` takes it.
        name: Name of the task.
        run_dir: As `TrainerConfig` has it.

    Returns:
        Its folder; None for a new run.

    Raises:
        ConfigurationError: A new run would mix its files with those of another one, or a resumed
            run would be written elsewhere.
        CheckpointError: There is nothing to resume at `resume`.
    """
    chosen = None if run_dir is None else Path(run_dir)
    if resume is None:
        if chosen is not None and (list_checkpoints(chosen) or (chosen / METRICS_FILE).exists()):
            raise ConfigurationError(
                "`run_dir` must be without a run for a new one (resume='auto' goes on with the one "
                f"that is there), got {str(run_dir)!r}"
            )
        return None
    folder = find_checkpoint(resume, RUNS / name, chosen)
    if folder is None:
        return None
    if chosen is not None and chosen.resolve() != run_dir_of(folder):
        raise ConfigurationError(
            "`run_dir` must be None or the run directory of the checkpoint "
            f"({run_dir_of(folder)}), got {str(run_dir)!r}"
        )
    return folder


def run_dir_of(folder: Path) -> Path:
    """The run directory of a checkpoint.

    Raises:
        CheckpointError: The folder is not in one.
    """
    parent = folder.resolve().parent
    if parent.name != FOLDER:
        raise CheckpointError(
            f"`resume` must be a checkpoint in <run directory>/{FOLDER}, got {str(folder)!r}"
        )
    return parent.parent


def make_run_dir(run_dir: str | Path | None, name: str) -> Path:
    """Makes the directory of a new run.

    Args:
        run_dir: As `TrainerConfig` has it; None makes runs/<name>/<date>-<time>, with a number
            after it where another run has that name already.
        name: Name of the task.
    """
    if run_dir is not None:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        return Path(run_dir).absolute()
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = RUNS / name / (stamp if number == 1 else f"{stamp}-{number:02d}")
        try:
            path.mkdir(parents=True)  # fails where it exists, so that two runs never share one
        except FileExistsError:
            number += 1
        else:
            return path.absolute()  # the program may go elsewhere while it runs
