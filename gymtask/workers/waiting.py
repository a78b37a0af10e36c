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
- Nobody polls on the core of whom it waits for: a worker blocks at once on the core of the process
  that sends the actions, and that process on the core of a worker that is stepping. `sched_yield`
  alone does not help there: workers have sessions of their own, among which the kernel shares a
  core out, and within its session a worker is alone. So each is awake on a core of its own, or
  asleep on one that the other keeps awake.
- Where somebody else wants the core, nobody polls. Who blocks is woken sooner there than who has
  used up its share by polling, or has given a whole time slice away; so after a poll that took
  long, all waits of the next while block.
- With one core nobody polls.
"""

from __future__ import annotations

import os
import select
import time

SPIN = 1e-3  # seconds
LONGEST = 4 * SPIN  # longer waits count as so long: one long pause is not remembered for ever
WEIGHT = 0.25  # of the last wait, in the mean of all
TAKEN = 2e-4  # seconds that one poll lasts only where somebody else has taken the core
REST, LONGEST_REST = 0.01, 1.28  # seconds without polling after that, doubled if it comes again

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
        self._spins = may_spin and num_cores() > 1
        self._mean = 0.0  # seconds that waits took lately
        self._rest, self._resting_until = REST, 0.0

    def watch(self, descriptor: int, *, once_a_write: bool = False) -> None:
        """Adds a descriptor to wait for.

        Args:
            descriptor: What becomes readable.
            once_a_write: Reports every write to it once, although nobody reads it; else it is
                reported for as long as there is something to read.
        """
        self._epoll.register(descriptor, select.EPOLLIN | (select.EPOLLET if once_a_write else 0))

    def ignore(self, descriptor: int) -> None:
        """Takes a descriptor out."""
        self._epoll.unregister(descriptor)

    def poll(self, timeout: float = -1.0, *, may_spin: bool = True) -> Events:
        """The descriptors that have something to say, with what kind.

        Args:
            timeout: Seconds after which there may be none; negative waits for ever.
            may_spin: False blocks at once this time.
        """
        poll = self._epoll.poll
        events: Events = poll(0)
        if events or timeout == 0.0:
            return events
        clock, started = time.perf_counter, time.perf_counter()
        if may_spin and self._spins and self._mean < SPIN and started >= self._resting_until:
            events = self._spin(started, SPIN if timeout < 0.0 else min(SPIN, timeout))
        if not events:
            events = poll(timeout if timeout < 0.0 else max(0.0, timeout + started - clock()))
        self._mean += WEIGHT * (min(clock() - started, LONGEST) - self._mean)
        return events

    def _spin(self, now: float, seconds: float) -> Events:
        """Polls for so long, or until somebody else wants the core."""
        poll, pause, clock = self._epoll.poll, os.sched_yield, time.perf_counter
        end = now + seconds
        while now < end:
            pause()
            events: Events = poll(0)
            before, now = now, clock()
            if now - before > TAKEN:
                self._resting_until = now + self._rest
                self._rest = min(2 * self._rest, LONGEST_REST)
                return events
            if events:
                self._rest = REST
                return events
        return []

    def close(self) -> None:
        """Gives its descriptor back."""
        self._epoll.close()
