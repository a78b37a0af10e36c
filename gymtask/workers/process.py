"""Environments that run in worker processes over shared memory.

Observations, actions, rewards, flags and final observations lie in one nameless block of memory
that all workers share; a step is one eventfd write to each worker and one back. A pipe carries the
rest: resets, calls, failures, and the values of `info_keys` where some are asked for. Nothing has a
name in the file system, so nothing can be left behind there, however the processes end.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import signal
import time
from collections.abc import Sequence
from multiprocessing import Pipe, util
from multiprocessing.connection import wait
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from gymtask.errors import ConfigurationError, WorkerDiedError, WorkerTraceback
from gymtask.workers.launch import WorkerProcess
from gymtask.workers.layout import Array, Space
from gymtask.workers.pool import WAIT_SLICE, WorkerPool
from gymtask.workers.slots import Slots
from gymtask.workers.worker import BaseEnvironmentWorker, split_by_owner
from gymtask.workers.worker_main import (
    COMMAND,
    Descriptor,
    WorkerTask,
    run_worker,
    unpack_exception,
)

GRACE = 1.0  # seconds that a killed worker gets to disappear


class _Handle:
    """The parent's end of one worker."""

    def __init__(
        self, index: int, worker: BaseEnvironmentWorker, recipe: bytes, memory: int, num_envs: int
    ) -> None:
        self.index = index
        self.env_ids = worker.env_ids
        self.running: list[int] = []  # environments that it is stepping now
        self.queued: list[int] = []  # environments to step as soon as it has finished those
        self.go, self.done = os.eventfd(0), os.eventfd(0)
        self.pipe, child_pipe = Pipe()
        wrapped = (Descriptor(memory), Descriptor(self.go), Descriptor(self.done))
        task = WorkerTask(recipe, worker.env_ids, num_envs, *wrapped, child_pipe)
        self.process = WorkerProcess(run_worker, (task,), f"gymtask-worker-{index}", worker.daemon)
        try:
            self.process.start()
        except BaseException:
            self.release()
            raise
        finally:
            child_pipe.close()

    def command(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Asks the worker to run a method; its answer comes over the pipe."""
        self.pipe.send_bytes(cloudpickle.dumps((method, args, kwargs or {})))
        os.eventfd_write(self.go, COMMAND)

    def kill(self) -> None:
        """Kills what is left of the worker's process group, with what its environments started."""
        if self.process.pid is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (
            ProcessLookupError
        ):  # all of the group is gone, or the worker has not made its group yet
            if self.process.is_alive():
                self.process.kill()

    def release(self) -> None:
        """Closes the parent's descriptors."""
        self.pipe.close()
        os.close(self.go)
        os.close(self.done)


class ProcessPool(WorkerPool):
    """Runs each worker's environments in a process of its own.

    Raises:
        ConfigurationError: This system has no eventfd or memfd (both are Linux's).
    """

    def __init__(
        self,
        workers: Sequence[BaseEnvironmentWorker],
        observation_space: Space,
        action_space: Space,
    ) -> None:
        if not (hasattr(os, "eventfd") and hasattr(os, "memfd_create")):
            raise ConfigurationError(
                '`environment.env_worker_mode` must be "sync" or "thread" on this system (process'
                ' mode needs Linux), got "process"'
            )
        num_envs = sum(len(worker.env_ids) for worker in workers)
        # The recipes are made first: one that cannot travel is refused before anything is started.
        recipes = [pickle_recipe(worker, observation_space, action_space) for worker in workers]
        size = Slots.nbytes(observation_space, action_space, num_envs)
        descriptor = os.memfd_create("gymtask")
        try:
            os.ftruncate(descriptor, size)
            super().__init__(
                workers,
                Slots(observation_space, action_space, num_envs, mmap.mmap(descriptor, size)),
            )
            self._owner: Array = np.repeat(
                np.arange(len(workers)), [len(worker.env_ids) for worker in workers]
            )
            self._handles: list[_Handle] = []
            self._poll = select.poll()
            self._events: dict[int, tuple[_Handle, str]] = {}
            # Runs when the pool is collected and at the interpreter's exit, before children are
            # waited for.
            self._finalizer = util.Finalize(self, _kill_all, (self._handles,), exitpriority=10)
            for index, (worker, recipe) in enumerate(zip(workers, recipes, strict=True)):
                self._handles.append(_Handle(index, worker, recipe, descriptor, num_envs))
                self._register(self._handles[-1])
            self._answers()
        except BaseException:
            if hasattr(self, "_finalizer"):
                self.close(0.0)
            raise
        finally:
            os.close(descriptor)

    def _register(self, handle: _Handle) -> None:
        for descriptor, kind in [
            (handle.done, "done"),
            (handle.pipe.fileno(), "pipe"),
            (handle.process.sentinel, "death"),
        ]:
            self._events[descriptor] = (handle, kind)
            self._poll.register(descriptor, select.POLLIN)

    def _post(self, env_ids: Array) -> None:
        for worker, ids in split_by_owner(env_ids, self._owner, len(self._handles)):
            handle = self._handles[worker]
            handle.queued += ids
            if not handle.running:
                self._start(handle)

    def _start(self, handle: _Handle) -> None:
        """Lets an idle worker step what is queued for it.

        A busy one must not see new requests before it is done:
        whether it took them in the same pass could not be told.
        """
        handle.running, handle.queued = handle.queued, []
        self.slots.requested[handle.running] = True
        os.eventfd_write(handle.go, 1)

    def _wait(self, timeout: float) -> None:
        for descriptor, _ in self._poll.poll(timeout * 1000):
            handle, kind = self._events[descriptor]
            if kind == "done":
                os.eventfd_read(descriptor)
            elif kind == "pipe":
                self._receive(handle)  # infos, or it raises
            else:
                self._raise_death(handle)
            self._ready += handle.running
            handle.running = []
            if handle.queued:
                self._start(handle)

    def _receive(self, handle: _Handle) -> Any:
        """Reads a message: infos are stored, an answer is returned, a failure is raised."""
        try:
            kind, content = pickle.loads(handle.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._raise_death(handle)
        if kind == "failure":
            packed, text, env_id = content
            self._fail(unpack_exception(packed), env_id, WorkerTraceback(text))
        if kind == "infos":
            for index, info in content.items():
                self.slots.infos[index] = info
        return content

    def _run(
        self, method: str, args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        for handle in self._handles:
            handle.command(method, args, kwargs)
        return [result for answer in self._answers() for result in answer]

    def _answers(self) -> list[Any]:
        """Waits for an answer of each worker."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._handles):
            for descriptor, _ in self._poll.poll(WAIT_SLICE * 1000):
                handle, kind = self._events[descriptor]
                if kind == "pipe":
                    answers[handle.index] = self._receive(handle)
                elif kind == "death":
                    self._raise_death(handle)
            self._check_interrupt()
        return [answers[index] for index in range(len(self._handles))]

    def _raise_death(self, handle: _Handle) -> NoReturn:
        """Raises why a worker ended: the failure that it sent, or the signal that killed it."""
        if handle.pipe.poll():
            self._receive(handle)
        handle.process.join(GRACE)
        code = handle.process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}, {how}"
        if code == -signal.SIGKILL:
            how += ", possibly out of memory"
        stepping = [index for index in handle.running if self.slots.requested[index]]
        where = f" in step() of environment {stepping[0]}" if stepping else ""
        self.close(0.0)
        raise WorkerDiedError(
            f"worker {handle.index}, which runs environments {list(handle.env_ids)}, died{where}"
            f" ({how})"
        )

    def _close(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        failures: list[BaseException] = []
        try:
            alive = [handle for handle in self._handles if handle.process.is_alive()]
            if timeout > 0:
                for handle in alive:
                    _ask_to_close(handle)
                _wait_for_exit(alive, deadline, failures)
        finally:
            self._finalizer()
        if failures:
            failures[0].add_note("raised while the pool was closing")
            raise failures[0]


def pickle_recipe(
    worker: BaseEnvironmentWorker, observation_space: Space, action_space: Space
) -> bytes:
    """What a worker needs to make its environments, as bytes."""
    return bytes(cloudpickle.dumps((worker.maker.to_bytes(), observation_space, action_space)))


def _ask_to_close(handle: _Handle) -> None:
    try:
        handle.command("close")
    except OSError:  # it is ending already, and is waited for below
        return


def _wait_for_exit(handles: list[_Handle], deadline: float, failures: list[BaseException]) -> None:
    """Waits until all have ended or the deadline is past; collects what closing raised."""
    waiting: dict[Any, _Handle] = {handle.process.sentinel: handle for handle in handles}
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(waiting), remaining):
            handle = waiting.pop(sentinel)
            while handle.pipe.poll():
                try:
                    kind, content = pickle.loads(handle.pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    break
                if kind == "failure":
                    failures.append(unpack_exception(content[0]))


def _kill_all(handles: list[_Handle]) -> None:
    """Kills what is left of all workers and gives their descriptors back; called once."""
    for handle in handles:
        handle.kill()
    for handle in handles:
        handle.process.join(GRACE)
        handle.release()
