"""learning_curve.png: how a run has learnt so far, drawn from its metrics.csv."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gymtask.training.logs import METRICS_FILE, NUM_RECENT, read_rows

CURVE_FILE = "learning_curve.png"

logger = logging.getLogger(__name__)


class LearningCurve:
    """learning_curve.png: episode returns against samples, drawn from metrics.csv.

    Args:
        run_dir: Holds both files.
        interval: Seconds between two drawings at least, and before the first one, unless forced.

    Attributes:
        drawn: Whether it was drawn before.
    """

    def __init__(self, run_dir: Path, interval: float = 30.0) -> None:
        self._run_dir = run_dir
        self._interval = interval
        self.drawn = False
        self._last = time.monotonic()
        self._possible = importlib.util.find_spec("matplotlib") is not None
        if not self._possible:
            logger.info("no %s is drawn: pip install matplotlib", CURVE_FILE)

    def draw(self, *, force: bool = False) -> None:
        """Draws the curve anew, where that is possible and it is time."""
        now = time.monotonic()
        metrics = self._run_dir / METRICS_FILE
        if self._possible and metrics.exists() and (force or now - self._last >= self._interval):
            self.drawn, self._last = True, now
            _draw_curve(read_rows(metrics), self._run_dir / CURVE_FILE)


def _draw_curve(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional, and slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.subplots()
    x, low, high = _columns(rows, "episode/return_min", "episode/return_max")
    axes.fill_between(x, low, high, alpha=0.15, linewidth=0, label="range of an epoch")
    x, mean = _columns(rows, "episode/return_mean")
    axes.plot(x, mean, alpha=0.4, linewidth=1, label="mean of an epoch")
    x, recent = _columns(rows, f"episode/return_mean_{NUM_RECENT}")
    axes.plot(x, recent, linewidth=2, label=f"mean of the last {NUM_RECENT} episodes")
    x, evaluated = _columns(rows, "eval/return_mean")
    if x:
        axes.plot(x, evaluated, "o", color="black", markersize=4, label="mean of an evaluation")
    axes.set_xlabel("environment samples")
    axes.set_ylabel("episode return")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    temporary = path.with_name(f".tmp-{path.name}")
    figure.savefig(temporary)
    os.replace(temporary, path)


def _columns(rows: Sequence[Mapping[str, float]], *names: str) -> list[list[float]]:
    """num_samples and the named columns, of the rows that have them."""
    found = [row for row in rows if all(name in row for name in names)]
    return [[row[name] for row in found] for name in ("num_samples", *names)]
