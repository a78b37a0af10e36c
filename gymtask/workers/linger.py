"""Whether to wait for workers that are about to finish, where some have finished already.

A policy costs nearly the same for a few environments as for all, and where every core has a worker
it takes the time of one. There it is cheaper to wait for the last of them than to act once more, as
long as they take nearly the same time; else the quick ones would be kept waiting. Which it is shows
in how far apart they finish.
"""

from __future__ import annotations

MOST = 8  # successes that count at most, so that a change shows soon
LOSS = 2  # successes that one failure weighs up
LONGEST_PAUSE = 4096  # times that nobody is waited for, until the next try


class Linger:
    """Goes by how it went the last times, and tries again ever more seldom where it fails.

    Attributes:
        usual: Seconds that such waits took lately.
    """

    def __init__(self) -> None:
        self.usual = 0.0
        self._credit = 1
        self._pause = self._left = 1

    def is_wanted(self) -> bool:
        """Whether to wait for all this time."""
        self._left -= 1
        return self._credit > 0 or self._left <= 0

    def learn(self, paid: bool, seconds: float) -> None:
        """Told how a wait went.

        Args:
            paid: Whether all finished, and the last soon enough after the first.
            seconds: How long it took.
        """
        self.usual += (seconds - self.usual) / 8
        if paid:
            self._credit, self._pause = min(self._credit + 1, MOST), max(self._pause // 2, 1)
        else:
            self._pause *= 1 if self._credit else 2
            self._credit = max(self._credit - LOSS, 0)
        self._left = self._pause = min(self._pause, LONGEST_PAUSE)
