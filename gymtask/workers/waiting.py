"""Waiting for a kernel object: a short while awake, then asleep.

A core that has gone idle takes 50 to 100 µs to wake, which is as long as dozens of steps of a light
environment. So whoever waits polls first, giving its core away between two polls, and blocks only
after `SPIN` seconds. What is polled is an epoll, a system call, never a plain byte of shared memory
that another core may see before the data.

Polling must cost nothing where it gains nothing:

- It stops by itself when waits are long (slow environments, an idle pool), since it goes by how
  long the last waits were, those that blocked too; and it starts again when they become short.
- With more workers than cores that this process may use, nobody polls: they would take turns at it
  while others have steps to make.
- With one core nobody polls. Where every core has a worker, only the workers do: the process that
  waits for them sleeps, and is woken on a core that the last of them keeps awake.

`sched_yield` gives way to others of the same session only (where the kernel groups tasks by it), so
workers stay in the session of the process that they belong to.
"""

from __future__ import annotations

import os
import select
import time

SPIN = 1e-3  # seconds
LONGEST = 4 * SPIN  # longer waits count as so long: one long pause is not remembered for ever
WEIGHT = 0.25  # of the last wait, in the mean of all

Events = list[tuple[int, int]]


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Waiter:
    """Waits for the first of some descriptors.

    Args:
        may_spin: Whether polling may pay at all; False blocks at once.
    """

    def __init__(self, may_spin: bool = True) -> None:
        self._epoll = select.epoll()
        self.may_spin = may_spin and num_cores() > 1
        self._mean = 0.0  # seconds that waits took lately

    def watch(self, descriptor: int) -> None:
        """Adds a descriptor to wait for: it is reported as long as there is something to read."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def ignore(self, descriptor: int) -> None:
        """Takes a descriptor out."""
        self._epoll.unregister(descriptor)

    def poll(self, timeout: float = -1.0) -> Events:
        """The descriptors that have something to say, with what kind.

        Args:
            timeout: Seconds after which there may be none; negative waits for ever.
        """
        poll = self._epoll.poll
        events: Events = poll(0)
        if events or timeout == 0.0:
            return events
        clock, pause, started = time.perf_counter, os.sched_yield, time.perf_counter()
        if self.may_spin and self._mean < SPIN:
            end = started + (SPIN if timeout < 0.0 else min(SPIN, timeout))
            while not events and clock() < end:
                pause()
                events = poll(0)
        if not events:
            events = poll(timeout if timeout < 0.0 else max(0.0, timeout + started - clock()))
        self._mean += WEIGHT * (min(clock() - started, LONGEST) - self._mean)
        return events

    def close(self) -> None:
        """Gives its descriptor back."""
        self._epoll.close()
