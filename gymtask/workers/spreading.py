"""Keeps workers from sharing a core while another core has none.

Who polls before it blocks rarely sleeps, and the kernel chooses a core when somebody wakes up; so
two workers that have come onto one core stay there for seconds, and steps take twice as long. Now
and then it is looked where workers were at the end of their last step, and one that shares its core
is moved to a free one. It is moved, not bound: its affinity is put back at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence

LOOK, LOOK_SELDOM = 16, 4096  # finished steps of workers between two looks


def make_getcpu() -> Callable[[], int]:
    """The function that gives the core that the caller is on, or -1 where nobody knows."""
    try:
        getcpu: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
    except (AttributeError, OSError):
        return lambda: -1
    return getcpu


class Spreader:
    """Looks where workers are, and moves some.

    Args:
        may_spin: Whether the process that waits for the workers polls too, and needs a core.
    """

    def __init__(self, may_spin: bool) -> None:
        self._own = make_getcpu() if may_spin else None
        self._left = LOOK
        self._pause = LOOK

    def count(self, finished: int) -> bool:
        """Counts finished steps of workers; whether it is time for a look."""
        self._left -= finished
        return self._left <= 0

    def look(self, workers: Sequence[tuple[int, int]]) -> None:
        """Moves workers that share a core, as far as there are free ones.

        Args:
            workers: For each worker its pid and the core that it was on, -1 for none yet.
        """
        taken = set() if self._own is None else {self._own()}
        doubled = []
        for pid, core in workers:
            if core in taken:
                doubled.append(pid)
            taken.add(core)
        free = list(os.sched_getaffinity(0) - taken) if doubled else []
        for pid, core in zip(doubled, free, strict=False):
            with contextlib.suppress(OSError):  # it has ended, or is not ours to move
                allowed = os.sched_getaffinity(pid)
                if core in allowed:
                    os.sched_setaffinity(pid, {core})
                    os.sched_setaffinity(pid, allowed)
        # Where it does not last, something else wants that core, and is left in peace.
        self._pause = min(2 * self._pause, LOOK_SELDOM) if doubled and free else LOOK
        self._left = self._pause
