"""A pool whose environments run in worker processes over shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import cloudpickle

from gymtask.errors import ConfigurationError, WorkerDiedError
from gymtask.workers.crew import Crew, is_supported
from gymtask.workers.handle import Failure
from gymtask.workers.info_cells import CELL, InfoCells
from gymtask.workers.layout import Array, Space
from gymtask.workers.linger import Linger
from gymtask.workers.pool import Failures, WorkerPool
from gymtask.workers.queue import WAIT_SLICE
from gymtask.workers.registry import pickle_registry
from gymtask.workers.slots import Slots
from gymtask.workers.worker import BaseEnvironmentWorker
from gymtask.workers.worker_main import PoolProgram, pack_program


class ProcessPool(WorkerPool):
    """Runs each worker's environments in a process of its own.

    Raises:
        ConfigurationError: This system has no eventfd or memfd (both are Linux's).
        MakerError: The recipe of an environment cannot travel to a worker.
    """

    def __init__(
        self,
        workers: Sequence[BaseEnvironmentWorker],
        observation_space: Space,
        action_space: Space,
    ) -> None:
        if not is_supported():
            raise ConfigurationError(
                '`environment.env_worker_mode` must be "sync" or "thread" on this system (process'
                ' mode needs Linux), got "process"'
            )
        spaces = (observation_space, action_space)
        num_envs = sum(len(worker.env_ids) for worker in workers)
        # The recipes are made first: one that cannot travel is refused before anything is started.
        registered = pickle_registry()
        makers = {id(worker.maker): worker.maker for worker in workers}
        num_keys = max(len(maker.info_keys) for maker in makers.values())
        recipes = {
            key: pack_program(PoolProgram(maker, *spaces, num_envs, num_keys), registered)
            for key, maker in makers.items()
        }
        size = Slots.nbytes(*spaces, num_envs)
        nbytes = size + num_envs * num_keys * CELL
        self._crew = Crew([worker.env_ids for worker in workers], nbytes)
        super().__init__(workers, Slots(*spaces, num_envs, self._crew.memory))
        keys = {i: worker.maker.info_keys for worker in workers for i in worker.env_ids}
        self._keeps_infos = num_keys > 0
        self._cells = InfoCells(keys, num_keys, self._crew.memory[size:])
        try:
            self._crew.start(
                [recipes[id(worker.maker)] for worker in workers],
                [worker.daemon for worker in workers],
            )
        except Failure as failure:
            self._raise(failure)
        except BaseException:
            self.close(0.0)
            raise
        self._handles = self._crew.handles
        if not self._crew.leaves_a_core:
            self._linger = Linger()
        self._owners = [handle for handle in self._handles for _ in handle.env_ids]

    def _post(self, env_ids: Array) -> None:
        if len(env_ids) == self.num_envs:
            asked = self._handles
            for handle in asked:
                handle.queued = handle.env_ids
        else:
            asked = self._queue(env_ids)
        self._crew.begin(asked)

    def _queue(self, env_ids: Array) -> list[Any]:
        """Queues environments with their workers, which it gives."""
        asked = []
        for index in env_ids.tolist():
            handle = self._owners[index]
            if not handle.queued:
                asked.append(handle)
            handle.queued.append(index)
        return asked

    def _wait(self, timeout: float, for_all: bool = False) -> None:
        events = self._crew.poll(timeout, for_all=for_all)  # Ctrl-C here leaves all as it was
        try:
            for env_ids, infos in self._crew.accept(events):
                self._ready += env_ids
                if self._keeps_infos:
                    self._read_infos(env_ids, infos)
        except Failure as failure:
            self._raise(failure)
        except KeyboardInterrupt as error:  # a reply may be lost, and waited for for ever
            self._give_up(error)

    def _spread(self) -> float:
        ends = [handle.ended[0] for handle in self._handles]
        return (max(ends) - min(ends)) * 1e-9

    def _read_infos(self, env_ids: Sequence[int], sent: dict[int, dict[str, Any]] | None) -> None:
        for index in env_ids:
            self.slots.infos[index] = self._cells.read(index) if sent is None else sent[index]

    def _run(
        self, method: str, args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        # All are pickled before the first is sent: what cannot be is no reason to close the pool.
        messages = [
            cloudpickle.dumps((method, {i: args[i] for i in handle.env_ids}, kwargs or {}))
            for handle in self._handles
        ]
        try:
            self._crew.command(messages)
            while (answers := self._crew.wait_for_answers(WAIT_SLICE)) is None:
                self._check_interrupt()
        except Failure as failure:
            self._raise(failure)
        return [result for answer in answers for result in answer]

    def _raise(self, failure: Failure) -> NoReturn:
        error = failure.error
        try:
            if isinstance(error, WorkerDiedError):  # the others may be in any state
                self.close(0.0)
                raise error from None
            self._fail(error, failure.env_id, failure.cause)
        finally:
            error.__context__ = None  # the failure, which refers to it
            del error, failure  # as in `_fail`

    def _give_up(self, error: KeyboardInterrupt) -> NoReturn:
        # Nobody is asked to close: a message may be read or written by half.
        self.close(0.0)
        try:
            raise error
        finally:
            del error  # as in `_fail`

    def _close(self, timeout: float) -> Failures:
        return [(failure.env_id, failure.error) for failure in self._crew.close(timeout)]
