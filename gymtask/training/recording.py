"""The episodes of a run on disk: how each began and what was done in it, to be played again.

    <run directory>/episodes/
        epoch-000011-samples-000022528.pt           episodes that ended since the file before
        epoch-000012-samples-000024576.pt
        epoch-000012-samples-000024576-rank-1.pt    those of another process of the run

They are plain values, as in checkpoints. A run that goes on from a checkpoint deletes what is newer
than it, and comes to it again.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gymtask.episodes import RecordedEpisode
from gymtask.errors import CheckpointError, EpisodeError
from gymtask.maker import EnvironmentMaker
from gymtask.task import State
from gymtask.training.checkpoint import (
    TEMPORARY,
    checkpoint_name,
    moment_of,
    to_arrays,
    to_plain,
)
from gymtask.training.snapshot import describe_environment
from gymtask.workers.pool import WorkerPool

FORMAT = 1
FOLDER = "episodes"


class Recorder:
    """Takes the episodes of a pool with `keeps_starts`, and writes them.

    Args:
        run_dir: Of the run.
        pool: Where they are played.
        rank: Number of this process.
        action_clip: As the config has it.
    """

    def __init__(self, run_dir: Path, pool: WorkerPool, rank: int, *, action_clip: bool) -> None:
        self._folder, self._pool, self._rank = run_dir / FOLDER, pool, rank
        self._environment = _describe(pool.workers[0].maker) | {"action_clip": action_clip}
        self._episodes: list[dict[str, Any]] = []

    def write(self, state: State) -> None:
        """Writes what has ended since the last time; a file is whole or not there.

        Args:
            state: Names the file.
        """
        self._take()
        if not self._episodes:
            return
        name = checkpoint_name(state.num_epochs, state.num_samples)
        name += f"-rank-{self._rank}.pt" if self._rank else ".pt"
        self._folder.mkdir(exist_ok=True)
        content = {"format": FORMAT, "environment": self._environment, "episodes": self._episodes}
        temporary = self._folder / f"{TEMPORARY}{name}"
        try:
            torch.save(content, temporary)
            os.replace(temporary, self._folder / name)
        finally:
            temporary.unlink(missing_ok=True)
        self._episodes = []

    def _take(self) -> None:
        rollout = self._pool.memory
        if rollout is None or not rollout.played or self._pool.num_pending or self._pool.closed:
            return
        starts = self._pool.take_starts()
        for record, actions in rollout.played:
            more = {"start": starts[record.env_id].pop(0), "actions": actions}
            self._episodes.append(asdict(record) | to_plain(more, "episode"))
        rollout.played.clear()


def load_episodes(path: str | Path) -> list[RecordedEpisode]:
    """Reads the episodes that a run recorded with `TrainerConfig(record_actions=True)`.

    Args:
        path: A run directory, or one of the files in its folder of episodes.

    Returns:
        In the order of the files; in a file they are in the order in which they ended.

    Raises:
        EpisodeError: There are none, or a file cannot be read.
    """
    given = Path(path)
    files = [given] if given.is_file() else sorted(_files(given), key=_in_order)
    if not files:
        raise EpisodeError(
            f"`path` must be a run directory with episodes, got {str(path)!r}, which"
            f" {'has none' if given.exists() else 'does not exist'}; episodes are recorded with"
            " TrainerConfig(record_actions=True)"
        )
    return [episode for file in files for episode in _read(file)]


def tidy_episodes(run_dir: Path, resumed: Path | None) -> None:
    """Deletes what was half-written, and where a run goes on what is newer than its checkpoint."""
    for leftover in run_dir.glob(f"{FOLDER}/{TEMPORARY}epoch-*.pt"):
        leftover.unlink()
    for file in _files(run_dir):
        if resumed is not None and moment_of(file) > moment_of(resumed):
            file.unlink()


def _files(run_dir: Path) -> list[Path]:
    return list(run_dir.glob(f"{FOLDER}/epoch-*-samples-*.pt"))


def _in_order(file: Path) -> tuple[tuple[int, ...], str]:
    return moment_of(file), file.name


def _read(file: Path) -> list[RecordedEpisode]:
    try:
        content = to_arrays(torch.load(file, map_location="cpu"))
    except Exception as error:  # what torch makes of a damaged file can be anything
        raise EpisodeError(f"cannot read {file}: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise EpisodeError(f"{file} must hold recorded episodes of format {FORMAT}, got others")
    return [
        RecordedEpisode(**each, environment=content["environment"]) for each in content["episodes"]
    ]


def _describe(maker: EnvironmentMaker) -> dict[str, Any]:
    """What an environment can be made of again, so far as it is plain values."""
    try:
        kwargs = to_plain(maker.kwargs, "kwargs")
    except CheckpointError:
        kwargs = None
    return {
        **describe_environment(maker),
        "kwargs": kwargs,
        "max_episode_steps": maker.max_episode_steps,
        "wrappers": len(maker.wrappers),
    }
