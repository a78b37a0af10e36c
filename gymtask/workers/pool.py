"""`WorkerPool`: N environments that are sent actions and give rows back when they are ready.

What is the same in every mode lives here, and in `queue.py`. A mode adds how the environments are
run: `_post` starts steps, `_wait` lets finished ones in, `_run` does everything else.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, TypeAlias

import numpy as np

from gymtask.errors import (
    CollectionInterrupted,
    ConfigurationError,
    PoolStateError,
    note_others,
)
from gymtask.workers.arguments import (
    action_arrays,
    check_limits,
    check_workers,
    checked_ids,
    checked_seed,
)
from gymtask.workers.layout import Array, Space
from gymtask.workers.resumable import ResumableQueue
from gymtask.workers.slots import Slots
from gymtask.workers.worker import BaseEnvironmentWorker, Steps, spaces_of, take_rows

Failures: TypeAlias = "list[tuple[int, BaseException]]"

_POOLS = {
    "sync": "gymtask.workers.sync:SyncPool",
    "thread": "gymtask.workers.thread:ThreadPool",
    "process": "gymtask.workers.process:ProcessPool",
    "native": "gymtask.workers.native:NativePool",
}


class WorkerPool(ResumableQueue):
    """N environments behind `send` and `recv`; a context manager.

    Each row that `recv` gives is one real transition: an environment whose episode ended has
    already begun the next one. The loop that drives a pool::

        steps = pool.reset()
        while True:
            pool.send(policy(steps.observation), steps.env_ids)
            steps = pool.recv(min_envs=1, max_envs=None, timeout=None)

    Actions are in the environment's own units here: those of a Discrete space count from its
    `start`, not from 0 as what `get_actions` returns.

    Attributes:
        num_envs: N.
        observation_space: The space of one environment.
        action_space: The space of one environment.
        seed: Seed of the first worker; environment i is first reset with its worker's seed + i (+
            `first_env`).
        run_step: int64 [N], steps of each environment in the run.
        episode: int64 [N], episodes that each environment began before its present one; -1 before
            the first.
        num_pending: Environments that were sent an action whose row was not given yet.
        was_reset: Whether the pool was reset at least once.
        closed: Whether it is closed.
        records_starts: Whether it is noted how each episode begins.
        keeps_starts: Whether that is kept of episodes that ended.
        first_env: The index of environment 0 among those of all processes of a run; it tells seeds
            and ids apart. May be set before the first reset, as the next.
        total_envs: Environments of all processes.
        workers: What it was started from.
        steps_together: Whether a step is one of all environments, as in native mode.
        reset_seeds: Seeds of the first reset, where they are not `seed + i`; may be set before it.
        interrupt: Asked while waiting; True ends the wait with
            `gymtask.errors.CollectionInterrupted`.
        agree: With several processes, tells each whether one of them was interrupted; all call it
            at the end of a collection, before hooks in which they may wait for each other.
        memory: The collector's own, as all that follow: what it keeps between two collections;
            dropped by `reset`.
        noise: The action noise, made from `noise_key`.
        noise_key: (seed, purpose, count) of the action noise.
        cursor: The environment whose turn it is to give a row more than others.
        num_handed_out: Rows that were handed out, where all step together.
        held: Of the environments that `take` gave, those whose episode ended and which their next
            step only resets, whatever their action is, int64 [n].
        began: Of the environments that `take` gave, those whose step was no transition but began an
            episode, int64 [n]; None where there are none.
        silent_info_keys: Info keys that no step has given yet.
        slots: The memory that rows lie in.
    """

    steps_together = False

    def __init__(self, workers: Sequence[BaseEnvironmentWorker], slots: Slots) -> None:
        self.workers = list(workers)
        self.slots = slots
        super().__init__([worker.env_ids for worker in workers])
        self.observation_space: Space = slots.observation_space
        self.action_space: Space = slots.action_space
        self.seed = workers[0].seed
        self.cleanup_time = max(worker.cleanup_time for worker in workers)
        self.reset_seeds: list[int] | None = None
        self.noise: Any = None
        self.noise_key = (self.seed, "noise", 0)
        self.held: Array = np.empty(0, np.int64)
        self.began: Array | None = None
        self.num_handed_out = 0
        self.silent_info_keys = set(workers[0].maker.info_keys)

    @staticmethod
    def from_workers(workers: Sequence[BaseEnvironmentWorker]) -> WorkerPool:
        """Starts workers.

        Their env_ids must be 0 … N−1 in order, and their modes and spaces the same. Whatever keeps
        the first environment from being made raises here, once, before any worker starts.

        Raises:
            ConfigurationError: The workers do not fit together.
            Exception: What making an environment raised.
        """
        check_workers(workers, list(_POOLS))
        module, _, name = _POOLS[workers[0].mode].partition(":")
        kind = getattr(importlib.import_module(module), name)  # now: it builds on this module
        pool: WorkerPool = kind.start(workers)
        return pool

    @classmethod
    def start(cls, workers: Sequence[BaseEnvironmentWorker]) -> Self:
        """Starts workers of this mode; see `from_workers`."""
        started: Any = cls
        pool: Self = started(workers, *spaces_of(workers[0].maker))
        return pool

    # ---- what a user calls -----------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> Steps:
        """Starts a new episode in all environments and waits for them.

        Args:
            seed: Environment i is reset with `seed + i`. None: with the seed of its worker the
                first time, and with no seed afterwards, so that its random stream goes on.

        Raises:
            ConfigurationError: The seed is no integer, or negative.
            PoolStateError: Actions are pending.
        """
        self._require_idle("reset")
        if seed is not None:
            first = checked_seed(seed)
            seeds: list[int | None] = [first + index for index in range(self.num_envs)]
        elif self.was_reset:
            seeds = [None] * self.num_envs
        else:
            seeds = list(
                self.reset_seeds
                or [w.seed + self.first_env + index for w in self.workers for index in w.env_ids]
            )
        self.memory = None
        self._on_all("reset", [(number,) for number in seeds])
        self.slots.infos[:] = [{} for _ in range(self.num_envs)]
        self.episode += 1
        self.was_reset = True
        return take_rows(self.slots, self.all_ids)

    def send(self, actions: Any, env_ids: Sequence[int] | Array | None = None) -> None:
        """Sends actions to environments and returns at once.

        Args:
            actions: In the environment's own units: [n, *shape], or dicts and tuples of such
                arrays.
            env_ids: Indices of the n environments; None: all of them.

        Raises:
            PoolStateError: An environment has not been reset, or has an action pending already.
            ConfigurationError: The indices or the shapes do not fit.
        """
        self._require_open()
        ids = self.all_ids if env_ids is None else checked_ids(env_ids, self.num_envs)
        if not self.was_reset:
            raise PoolStateError("cannot send before the first reset; call reset() first")
        pending = ids[self._is_pending()[ids]]
        if len(pending):
            raise PoolStateError(
                f"cannot send to environments {pending.tolist()}, as their last"
                " action is pending; call recv() first"
            )
        arrays = action_arrays(self.action_space, actions, len(ids))
        for target, array in zip(self.slots.action, arrays, strict=True):
            target[ids] = array
        self.post(ids)

    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None
    ) -> Steps:
        """Gives the rows of environments that are ready, first come, first served.

        Args:
            min_envs: Returns as soon as so many rows are ready; more than are pending counts as all
                that are.
            max_envs: Gives at most so many; the rest stay for the next call, first come, first
                served.
            timeout: Seconds after which fewer rows than `min_envs` are given, but never none.

        Returns:
            Copies that the caller owns.

        Raises:
            NothingPendingError: No environment was sent an action.
            Exception: What an environment raised; the pool is then closed.
        """
        self._require_open()
        check_limits(min_envs, max_envs, timeout)
        limit = self.num_envs if max_envs is None else max_envs
        return take_rows(self.slots, self.take(min_envs, limit, timeout))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each environment, or reads an attribute, and gives N results.

        As with all that environments do, an exception reaches the caller and closes the pool.
        """
        self._require_idle("call")
        return tuple(self._on_all("call", [(name, *args)] * self.num_envs, kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute of each environment, N of them."""
        self._require_idle("get_attr")
        return tuple(self._on_all("get_attr", [(name,)] * self.num_envs))

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute on the wrapper that has it, else on the innermost environment.

        `values` is a list or tuple with one value for each environment, or one value for all.
        """
        self._require_idle("set_attr")
        listed = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(listed) != self.num_envs:
            raise ConfigurationError(
                f"`values` must hold {self.num_envs} values, got {len(listed)}"
            )
        self._on_all("set_attr", [(name, value) for value in listed])

    def render(self) -> tuple[Any, ...]:
        """What `render()` of each environment gives."""
        self._require_idle("render")
        return tuple(self._on_all("render", [()] * self.num_envs))

    def close(self, timeout: float | None = None) -> None:
        """Ends all workers; does nothing the second time.

        Args:
            timeout: Seconds that environments get to close before their workers are killed; None:
                the config's `env_cleanup_time`.
        """
        if failures := self._end(timeout):
            env_id, error = failures[0]
            error.add_note("raised while the pool was closing")
            if env_id >= 0:
                error.add_note(self._raised_by(env_id))
            try:
                raise error
            finally:
                del error, failures  # as in `_fail`

    def _end(self, timeout: float | None = None) -> Failures:
        """Closes the pool, if it is open, and gives what environments raised meanwhile."""
        if self.closed:
            return []
        self.closed = True
        self.memory = None  # it refers to the pool, which would keep both until some collection
        return self._close(self.cleanup_time if timeout is None else timeout)

    @property
    def num_samples(self) -> int:
        """Transitions so far: all that were asked for, or with `steps_together`, handed out.

        There some steps are ahead of what was asked for, and some only begin an episode.
        """
        return self.num_handed_out if self.steps_together else self.num_posted

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- what a mode adds ------------------------------------------------------------------------

    @abstractmethod
    def _run(
        self, method: str, args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Runs a method on every environment, with its own arguments, and gives the N results."""

    @abstractmethod
    def _close(self, timeout: float) -> Failures:
        """Ends all workers within `timeout` + 1 seconds.

        Returns:
            What environments raised in calls that were under way, and closing them, with -1; where
            all are in one worker, the latter may be raised instead.
        """

    def _fail(
        self, error: BaseException, env_id: int, cause: BaseException | None = None
    ) -> NoReturn:
        """Closes the pool, so that the others stop, and raises what environment `env_id` raised."""
        if env_id >= 0:
            error.add_note(self._raised_by(env_id))
        try:
            failures = self._end()
        except Exception as raised:
            failures = [(-1, raised)]
        note_others(error, failures, "closing the pool then")
        try:
            if cause is None:
                raise error  # with the cause that it has
            raise error from cause
        finally:
            # The exception's traceback keeps this frame. Kept by it in turn, it would stay until a
            # garbage collection, and the pool's memory with it.
            del error, cause, failures

    def _give_up(self, error: KeyboardInterrupt) -> NoReturn:
        try:
            self._fail(error, -1)
        finally:
            del error  # as in `_fail`

    def _raised_by(self, env_id: int) -> str:
        return f"raised by environment {env_id} of {self.num_envs}, in {self.workers[0].mode} mode"

    def _on_all(
        self, method: str, args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        try:
            return self._run(method, args, kwargs)
        except KeyboardInterrupt as error:
            # Answers are on their way that must not be read as those of a later call.
            self._give_up(error)

    def _check_interrupt(self) -> None:
        """Closes the pool and raises, if it was asked to stop during something else than a step."""
        if self.interrupt is not None and self.interrupt():
            self.close()
            raise CollectionInterrupted("asked to stop while workers were busy; the pool is closed")

    def _require_idle(self, call: str) -> None:
        self._require_open()
        if self.num_pending:
            raise PoolStateError(
                f"cannot {call} while actions of environments"
                f" {np.flatnonzero(self._is_pending()).tolist()} are pending; call recv() first"
            )
