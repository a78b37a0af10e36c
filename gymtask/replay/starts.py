"""On which rows of a ring windows start, and draws of them.

Whether a window starts on a row is known from the row and its chain. So a draw takes any rows and
leaves out those that do not fit, which is the same as a draw from those that do; nothing is
searched or kept up to date. Only where few fit are they listed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gymtask.errors import WindowError
from gymtask.replay.links import Links
from gymtask.replay.priorities import PriorityTree
from gymtask.workers.layout import Array

TRIES = 8  # rounds of drawing any rows, before those that fit are listed


@dataclass(frozen=True)
class Wanted:
    """Which windows.

    Attributes:
        span: Rows from the first to the last.
        pad: Whether what is there of a trajectory may be shorter.
        at_start: Whether they must begin with an episode.
    """

    span: int
    pad: bool = False
    at_start: bool = False


class Starts:
    """Finds and draws rows on which windows start.

    Args:
        links: Of the ring.
        tree: The weights of rows; None draws uniformly.
        history: Rows that must be there before a row, unless its episode begins later.
    """

    _listed: tuple[Wanted | None, int, Array]

    def __init__(self, links: Links, tree: PriorityTree | None, history: int) -> None:
        self._links, self._tree, self._history = links, tree, history
        self.forget()

    def draw(self, count: int, wanted: Wanted, random: np.random.Generator) -> Array:
        """Rows on which windows start, each drawn anew, int64 [count].

        Raises:
            WindowError: There is no such window, or all of them have the priority 0.
        """
        self._require_rows()
        anywhere = wanted.span == 1 and not wanted.at_start and not self._history
        if anywhere and self._tree is None:
            return _draw_below(len(self._links), count, random)
        found: list[Array] = []
        missing = count
        for _ in range(TRIES):
            rows = self._draw_any(missing if anywhere else missing + missing // 8 + 8, random)
            if not anywhere:
                rows = rows[self._fit(rows, wanted)]
            found.append(rows[:missing])
            missing -= len(found[-1])
            if not missing:
                return np.concatenate(found) if len(found) > 1 else found[0]
        return np.concatenate([*found, self._draw_listed(missing, wanted, random)])

    def _draw_any(self, count: int, random: np.random.Generator) -> Array:
        if self._tree is None:
            return _draw_below(len(self._links), count, random)
        rows = self._tree.draw(random.random(count))
        return rows[self._tree.weights[rows] > 0.0]  # by rounding others can be among them

    def _draw_listed(self, count: int, wanted: Wanted, random: np.random.Generator) -> Array:
        starts = self.all(wanted)
        if self._tree is None:
            return starts[_draw_below(len(starts), count, random)]
        sums = self._tree.weights[starts].cumsum()
        if sums[-1] <= 0.0:
            raise WindowError(
                f"each of the {len(starts)} windows of {wanted.span} rows has the priority 0, so"
                " none can be drawn; give one a priority, or Prioritization an `epsilon` above 0"
            )
        places = sums.searchsorted(random.random(count) * sums[-1], side="right")
        drawn: Array = starts[np.minimum(places, len(sums) - 1)]
        return drawn

    def _fit(self, rows: Array, wanted: Wanted) -> Array:
        """Whether a window starts on each row, bool [n]."""
        links = self._links
        fits: Array = links.num_after(rows) >= wanted.span - 1
        if wanted.pad:
            fits |= links.is_oldest(rows)
        if wanted.at_start:
            fits &= links.begins_episode(rows)
        if self._history:
            fits &= links.has_history(rows, self._history)
        return fits

    def all(self, wanted: Wanted) -> Array:
        """All rows on which windows start, in order of arrival, int64 [number of windows].

        Raises:
            WindowError: There is none.
        """
        self._require_rows()
        before, num_added, starts = self._listed
        if (before, num_added) != (wanted, self._links.num_added):
            rows = self._links.all_rows()
            starts = rows[self._fit(rows, wanted)]
            self._listed = wanted, self._links.num_added, starts
        if not len(starts):
            longest = int(self._links.num_after(self._links.all_rows()).max()) + 1
            raise WindowError(
                f"no window of {wanted.span} rows is stored"
                + (" that begins with an episode" if wanted.at_start else "")
                + f": the longest run of rows has {longest}"
            )
        return starts

    def forget(self) -> None:
        """Lists windows anew when they are next asked for, as the rows are others."""
        self._listed = None, 0, np.empty(0, np.int64)

    def _require_rows(self) -> None:
        if not len(self._links):
            raise WindowError("cannot sample, as the ReplayBuffer is empty; call extend() first")


def _draw_below(bound: int, count: int, random: np.random.Generator) -> Array:
    """Numbers below `bound`, int64 [count], in half the time of `Generator.integers` for a batch.

    A number below 1 has 53 bits, and times a bound below 2 ** 52 is never rounded up to it.
    """
    return (random.random(count) * bound).astype(np.int64)
