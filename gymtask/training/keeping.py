"""Which checkpoints of a run stay: the newest ones, and the best."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from gymtask.training.checkpoint import FOLDER, TEMPORARY, list_checkpoints, save_checkpoint
from gymtask.training.ranks import Ranks

UNKNOWN = -math.inf
"""The score of a checkpoint when too little is known to compare it with others."""
BEST = "best"
"""Name of the link to the best checkpoint, beside the checkpoints."""


class Keeper:
    """Writes the checkpoints of a run, and deletes those that are not to stay.

    Args:
        run_dir: Of the run.
        num_kept: How many of the newest ones stay; None: all. The best one stays in any case.
        best: Score and name of the best checkpoint so far; None where there is none.
        ranks: The processes that write checkpoints together.

    Attributes:
        best: As the argument, and as later checkpoints make it; None too where that one is gone.
    """

    def __init__(
        self,
        run_dir: Path,
        num_kept: int | None,
        best: tuple[float, str] | None,
        ranks: Ranks,
    ) -> None:
        self._folder, self._run_dir, self._num_kept = run_dir / FOLDER, run_dir, num_kept
        self._ranks = ranks
        self._link = self._folder / BEST
        if ranks.is_first:
            # It may lead to what a resumed run left behind; in a copy of a run it is a copy, too.
            if self._link.is_dir() and not self._link.is_symlink():
                shutil.rmtree(self._link)
            self._link.unlink(missing_ok=True)
        there = best is not None and (self._folder / best[1]).exists()
        self.best = best if there else None
        self._lead_to_best()

    def _lead_to_best(self) -> None:
        if self.best is None or not self._ranks.is_first:
            return
        link = self._folder / f"{TEMPORARY}{BEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.best[1], target_is_directory=True)
        os.replace(link, self._link)

    def is_best(self, score: float | None) -> TypeGuard[float]:
        """Whether a checkpoint of this score would be the best."""
        if score is None or math.isnan(score):
            return False
        # Of those that are not to be compared yet the newest is the best.
        return self.best is None or score > self.best[0] or score == self.best[0] == UNKNOWN

    def save(
        self,
        name: str,
        files: Mapping[str, Mapping[str, Any]],
        save_replay: Callable[[Path], None] | None,
    ) -> None:
        """Writes one; where it is the best, that was noted in `best` before.

        Args:
            name: Of its folder, which does not exist.
            files: As `save_checkpoint` takes them.
            save_replay: Writes the replay buffer into a folder; only the newest checkpoint keeps
                one, as it may take gigabytes.
        """
        save_checkpoint(self._folder / name, files, save_replay, self._ranks)
        if self.best is not None and self.best[1] == name:
            self._lead_to_best()
        if self._ranks.is_first:
            self._tidy(save_replay is not None)

    def _tidy(self, has_replay: bool) -> None:
        checkpoints, best = list_checkpoints(self._run_dir), self._link.resolve()
        if has_replay:
            for replay in [path for folder in checkpoints[:-1] for path in folder.glob("replay-*")]:
                _delete(replay)
        if self._num_kept is not None:
            for folder in checkpoints[: -self._num_kept]:
                if folder.resolve() != best:
                    _delete(folder)


def _delete(folder: Path) -> None:
    if folder.exists():
        # Renamed first: what is half deleted must not be taken for whole.
        doomed = folder.with_name(f"{TEMPORARY}{folder.name}")
        folder.rename(doomed)
        shutil.rmtree(doomed)
