"""Who was sent an action, who is ready, and whose rows are given next.

The life of one environment in a pool::

    idle ──post──► pending (stepping ──► ready) ──take──► idle

Environments that have finished a step stand in a queue in the order in which they did, and are
given from its front. One that was given and stepped again stands behind all that were ready then:
so none starves, however few are taken at a time and however quick the others are.

Whoever may take those that are ready can say how many seconds he would rather wait than be called
once more (`spare`): others are then waited for, too, where they lately finished that soon after the
first (`Linger`).
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from gymtask.errors import CollectionInterrupted, NothingPendingError, PoolClosedError
from gymtask.workers.layout import Array
from gymtask.workers.linger import Linger

WAIT_SLICE = 0.2  # seconds between two looks at `interrupt` while nothing is ready
# Seconds. For an end before the kernel's next tick an alarm would have to be set, and taken back
# when the worker is done: in a virtual machine 20 µs, more than a light environment takes.
SHORTEST = 4e-3
LONGEST = 16  # times `spare`: of steps that take longer, one more call is a small part


class StepQueue(ABC):
    """The per-step path of a pool, which the collector calls.

    Attributes:
        num_envs: N.
        all_ids: int64 [N], 0 to N - 1; `take` gives this very array for all.
        all_listed: The same as a list.
        blocks: Which slice of the environments all_ids are, and the ids of each worker, by the
            identity of the array.
        interrupt: Asked while waiting; True ends the wait with
            `gymtask.errors.CollectionInterrupted`.
        num_posted: Steps asked for so far.
        num_pending: Environments whose step was asked for and not taken.
        closed: Whether the pool is closed.

    Args:
        groups: The environments of each worker, 0 to N - 1 in order.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.num_envs = sum(map(len, groups))
        self.all_ids: Array = np.arange(self.num_envs)
        self.all_ids.setflags(write=False)  # `take` gives it out
        self.all_listed = list(range(self.num_envs))
        arrays = [np.array(group, np.int64) for group in groups]
        for array in arrays:
            array.setflags(write=False)
        # `take` gives these very arrays wherever it can; so they are known by their identity.
        self.blocks = {id(array): slice(int(array[0]), int(array[-1]) + 1) for array in arrays}
        self.blocks[id(self.all_ids)] = slice(None)
        self._group_of = [array for array in arrays for _ in array]
        self.interrupt: Callable[[], bool] | None = None
        self.agree: Callable[[bool], bool] | None = None
        self.num_posted = 0
        self.num_pending = 0
        self.closed = False
        self._pending: Array = np.zeros(self.num_envs, bool)
        self._ready: list[int] = []
        self._linger: Linger | None = None  # where it cannot pay
        self._began_together = False  # whether those that are pending began their steps at once

    def post(self, env_ids: Array) -> None:
        """Starts a step in `env_ids`, whose actions lie in the slots."""
        if self.closed:
            self._require_open()
        try:
            self._began_together = env_ids is self.all_ids
            if not self._began_together:
                self._is_pending()[self.blocks.get(id(env_ids), env_ids)] = True
            self.num_pending += len(env_ids)
            self.num_posted += len(env_ids)
            self._post(env_ids)
        except KeyboardInterrupt as error:  # who was not told would be waited for for ever
            self._give_up(error)

    def take(
        self, min_envs: int, max_envs: int, timeout: float | None = None, spare: float = 0.0
    ) -> Array:
        """Waits as `recv` does, and gives the indices of the environments alone, increasing.

        The rows lie in the slots.

        Args:
            min_envs: As for `recv`; likewise the next two.
            max_envs: Likewise.
            timeout: Likewise.
            spare: How many seconds longer to wait for those that are about to finish; if any,
                `SHORTEST` at least.

        Raises:
            NothingPendingError: No environment was sent an action.
            CollectionInterrupted: `interrupt` said so, and nobody finished for `WAIT_SLICE`
                seconds. What is ready stays so.
        """
        if self.closed:
            self._require_open()
        if not self.num_pending:
            raise NothingPendingError("cannot recv, as no action is pending; call send() first")
        deadline = None if timeout is None else time.monotonic() + timeout
        # Whoever has finished joins; with nobody ready there is nothing to give before somebody is.
        num_ready = -1 if self._ready else 0
        for_all = timeout is None and min_envs >= self.num_pending
        may_linger = spare and max_envs >= self.num_pending and not for_all and timeout != 0.0
        linger = self._linger if may_linger else None
        if linger is not None and linger.is_wanted():
            self._wait_for_all(spare, linger, WAIT_SLICE if timeout is None else timeout)
        else:
            self._wait(WAIT_SLICE if num_ready == 0 else 0.0, for_all)
        if len(self._ready) == self.num_envs <= max_envs:
            self._ready, self.num_pending = [], 0
            return self.all_ids
        want = min(min_envs, self.num_pending)
        while len(self._ready) < want:
            if len(self._ready) == num_ready and self.interrupt is not None and self.interrupt():
                raise CollectionInterrupted("asked to stop while waiting for environments")
            patience = WAIT_SLICE
            if deadline is not None and self._ready:
                patience = min(patience, deadline - time.monotonic())
                if patience <= 0:
                    break
            num_ready = len(self._ready)
            self._wait(patience, for_all=timeout is None and want == self.num_pending)
        return self._pop(max_envs)

    def _pop(self, max_envs: int) -> Array:
        ready, rest = self._ready[:max_envs], self._ready[max_envs:]
        ids: Array = self._group_of[ready[0]]
        block: Any = self.blocks[id(ids)]
        if ready != list(range(block.start, block.stop)):  # not just all of one worker
            block = ids = np.array(sorted(ready), np.int64)
        pending, left = self._is_pending(), self.num_pending - len(ids)
        # No call among these, so that Ctrl-C cannot come between them.
        pending[block] = False
        self._ready, self.num_pending = rest, left
        return ids

    def _is_pending(self) -> Array:
        """Whose action is pending, bool [N]."""
        if self.num_pending in (0, self.num_envs):  # no mask is kept while none is, or all are
            self._pending[:] = self.num_pending > 0
        return self._pending

    def _wait_for_all(self, spare: float, linger: Linger, limit: float) -> None:
        """Waits for all, as long as that may pay, and for `limit` and `WAIT_SLICE` at most."""
        began = time.perf_counter()
        patience = spare + (0.0 if self._ready and self._began_together else 2 * linger.usual)
        patience = max(min(patience, LONGEST * spare), SHORTEST)
        self._wait(min(patience, limit, WAIT_SLICE), for_all=True)
        are_all = len(self._ready) == self.num_pending
        # How far apart they finish tells nothing where they began apart; next time they do not.
        if self._began_together or not are_all:
            paid = are_all and self._spread() <= spare
            linger.learn(paid, time.perf_counter() - began)

    def _spread(self) -> float:
        """Seconds between the first and the last of those that have just finished."""
        return math.inf

    @abstractmethod
    def _post(self, env_ids: Array) -> None:
        """Starts a step in these environments."""

    @abstractmethod
    def _wait(self, timeout: float, for_all: bool = False) -> None:
        """Waits up to `timeout` seconds for a worker; adds rows of all finished ones to `_ready`.

        With `for_all` it may wait until all that are pending have finished.

        That the list is in the order in which they came is what first come, first served rests on.
        """

    @abstractmethod
    def _give_up(self, error: KeyboardInterrupt) -> NoReturn:
        """Closes the pool and raises Ctrl-C, which struck where an order or a row may be lost."""

    def _require_open(self) -> None:
        if self.closed:
            raise PoolClosedError(
                "cannot use the pool, as it is closed; make a new one with get_worker_pool()"
            )
