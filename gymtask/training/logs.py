"""What a run tells while it goes on: rows of metrics, TensorBoard events, a progress bar."""

from __future__ import annotations

import csv
import importlib.util
import logging
import os
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.logger import Logger
from lightning_fabric.loggers.tensorboard import TensorBoardLogger
from tqdm import tqdm

from gymtask.config import ReinforcementLearningTaskConfig
from gymtask.errors import HookError
from gymtask.replay import EpisodeRecord
from gymtask.task import State

METRICS_FILE = "metrics.csv"
NUM_RECENT = 100
"""Episodes that the running mean of returns is taken over."""

logger = logging.getLogger(__name__)


# ---- metrics -------------------------------------------------------------------------------------


class Statistics:
    """What happened since the last row of metrics, and the returns of the last 100 episodes.

    Attributes:
        recent: Returns of the last episodes, oldest first, over all epochs.
    """

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._began = time.perf_counter()
        self._clear()

    def _clear(self) -> None:
        self._episodes: list[EpisodeRecord] = []
        self._evaluated: list[EpisodeRecord] = []
        self._updates: dict[str, list[float]] = {}
        self._seconds = dict.fromkeys(("collect", "train", "eval"), 0.0)
        self._num_samples = 0
        self._num_dropped = 0

    def begin(self) -> None:
        """Lets the time of the first row begin now."""
        self._began = time.perf_counter()

    def add_collection(
        self, episodes: Sequence[EpisodeRecord], num_samples: int, num_dropped: int
    ) -> None:
        """Counts a collection and the episodes that ended in it."""
        self._episodes += episodes
        self.recent.extend(episode.episode_return for episode in episodes)
        self._num_samples += num_samples
        self._num_dropped += num_dropped

    def add_updates(self, values: Mapping[str, Sequence[float]]) -> None:
        """Adds losses and gradient norms, one number for each update."""
        for name, numbers in values.items():
            self._updates.setdefault(name, []).extend(numbers)

    def add_evaluation(self, episodes: Sequence[EpisodeRecord]) -> None:
        """Adds the episodes of an evaluation."""
        self._evaluated += episodes

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time spent inside to that of "collect", "train" or "eval"."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - started

    def state_dict(self) -> dict[str, Any]:
        """What the next row will tell of so far, but for times; plain values."""
        return {
            "recent": list(self.recent),
            "episodes": [asdict(episode) for episode in self._episodes],
            "evaluated": [asdict(episode) for episode in self._evaluated],
            "updates": self._updates,
            "num_dropped": self._num_dropped,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self.recent.extend(saved["recent"])
        self._episodes = [EpisodeRecord(**episode) for episode in saved["episodes"]]
        self._evaluated = [EpisodeRecord(**episode) for episode in saved["evaluated"]]
        self._updates = {name: list(numbers) for name, numbers in saved["updates"].items()}
        self._num_dropped = saved["num_dropped"]

    def take_row(
        self, state: State, learning_rates: Mapping[str, float], logged: Mapping[str, float]
    ) -> dict[str, float]:
        """Makes a row of metrics, and starts anew.

        Args:
            state: The counters.
            learning_rates: By column.
            logged: What the task logged, by column.

        Returns:
            Counters; count, mean, minimum and maximum of returns and lengths; means of losses and
            gradient norms; learning rates; samples a second of collection and training; seconds,
            and which share of all time since the last row they are (what is left went into logs,
            clips and checkpoints). What there is nothing to say about (no episode ended) is left
            out.

        Raises:
            HookError: The task logged something under the name of another column.
        """
        now = time.perf_counter()
        whole, self._began = now - self._began, now
        counters = asdict(state)
        del counters["phase"]
        spent = self._seconds["collect"] + self._seconds["train"]
        recent = {f"episode/return_mean_{NUM_RECENT}": _mean(self.recent)} if self.recent else {}
        row = {
            **counters,
            "num_dropped": self._num_dropped,
            **_summary("episode", self._episodes),
            **recent,
            **_summary("eval", self._evaluated),
            **{name: _mean(numbers) for name, numbers in self._updates.items()},
            **learning_rates,
            "samples_per_second": self._num_samples / spent if spent else 0.0,
            **{f"seconds/{what}": seconds for what, seconds in self._seconds.items()},
            **{f"time_share/{what}": part / whole for what, part in self._seconds.items()},
        }
        self._clear()
        if taken := sorted(row.keys() & logged.keys()):
            raise HookError(
                f"`name` of task.log() must be a column that is not there already, got {taken}"
            )
        return {**row, **logged}


def _mean(numbers: Sequence[float] | deque[float]) -> float:
    return sum(numbers) / len(numbers)


def _summary(name: str, episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    row: dict[str, float] = {f"{name}/count": len(episodes)}
    if not episodes:
        return row if name == "episode" else {}
    for what, numbers in (
        ("return", [episode.episode_return for episode in episodes]),
        ("length", [float(episode.length) for episode in episodes]),
    ):
        row[f"{name}/{what}_mean"] = _mean(numbers)
        row[f"{name}/{what}_min"] = min(numbers)
        row[f"{name}/{what}_max"] = max(numbers)
    return row


class MetricsFile(Logger):
    """metrics.csv: a row for each logged epoch, written when it is logged.

    Fabric's own CSVLogger deletes the file of the run that it is to go on with; this one keeps it.

    Args:
        path: The file.
        num_epochs: The rows of so many epochs are kept of a file that is there.
    """

    def __init__(self, path: Path, num_epochs: int) -> None:
        self._path = path
        self._columns: list[str] = []
        if path.exists():
            rows = [row for row in read_rows(path) if row["num_epochs"] <= num_epochs]
            self._columns = list(dict.fromkeys(name for row in rows for name in row))
            self._rewrite(rows)

    @property
    def name(self) -> str:
        """The file's name."""
        return self._path.name

    @property
    def version(self) -> str:
        """Empty, as a run has one file."""
        return ""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Does nothing: config.yaml holds them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Adds a row; a new column is empty in the rows before."""
        new = [name for name in metrics if name not in self._columns]
        if new:
            rows = read_rows(self._path) if self._path.exists() else []
            self._columns += new
            self._rewrite([*rows, metrics])
        else:
            with open(self._path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow(metrics)

    def _rewrite(self, rows: Sequence[Mapping[str, float]]) -> None:
        temporary = self._path.with_name(f".tmp-{self._path.name}")
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self._path)


def read_rows(path: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv, without empty cells, and without a last row that was cut short."""
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [
        {name: _number(cell) for name, cell in row.items() if cell} for row in csv.DictReader(lines)
    ]


def _number(cell: str) -> float:
    return int(cell) if cell.lstrip("-").isdigit() else float(cell)


def make_loggers(run_dir: Path, state: State) -> list[Logger]:
    """metrics.csv, and TensorBoard where it is installed; both go on behind the given state."""
    loggers: list[Logger] = [MetricsFile(run_dir / METRICS_FILE, state.num_epochs)]
    if any(importlib.util.find_spec(name) for name in ("tensorboard", "tensorboardX")):
        # purge_step hides what an earlier part of the run logged for the samples to come.
        board = TensorBoardLogger(run_dir, name="", version="", purge_step=state.num_samples + 1)
        loggers.append(board)
    else:
        logger.info("no TensorBoard events are written: pip install tensorboard")
    return loggers


# ---- the progress bar ----------------------------------------------------------------------------


class Progress:
    """A bar on stderr over the first of max_samples, max_steps and max_epochs that is set.

    Where none is, it counts samples. Behind it stands the mean return of the last episodes.
    """

    def __init__(
        self, config: ReinforcementLearningTaskConfig, state: State, *, shown: bool = True
    ) -> None:
        names = ("samples", "steps", "epochs")
        limits = {name: getattr(config, f"max_{name}") for name in names}
        self._what = next((name for name in names if limits[name] is not None), "samples")
        self._bar = tqdm(
            total=limits[self._what],
            initial=self._done(state),
            desc=config.name,
            unit=f" {self._what}",
            dynamic_ncols=True,
            disable=not shown,
        )

    def _done(self, state: State) -> int:
        return int(getattr(state, f"num_{self._what}"))

    def show(self, state: State, recent: Sequence[float] | deque[float]) -> None:
        """Moves the bar to where the run stands."""
        if recent:
            self._bar.set_postfix_str(f"return {_mean(recent):.4g}", refresh=False)
        self._bar.update(self._done(state) - self._bar.n)

    def close(self) -> None:
        """Leaves the bar as it is, and the cursor on a new line."""
        self._bar.close()
