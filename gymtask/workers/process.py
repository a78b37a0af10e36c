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
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe, util
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from gymtask.errors import ConfigurationError, WorkerDiedError, WorkerTraceback
from gymtask.workers.fork_server import PATIENCE
from gymtask.workers.launch import ONE_THREAD, WorkerProcess, server
from gymtask.workers.layout import Array, Space
from gymtask.workers.pool import WAIT_SLICE, WorkerPool
from gymtask.workers.registry import pickle_registry
from gymtask.workers.slots import Slots
from gymtask.workers.worker import BaseEnvironmentWorker, split_by_owner
from gymtask.workers.worker_main import (
    COMMAND,
    Descriptor,
    WorkerTask,
    pickle_recipe,
    run_worker,
    unpack_exception,
)


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
        environ = {**ONE_THREAD, **os.environ}
        descriptors = (Descriptor(memory), Descriptor(self.go), Descriptor(self.done))
        task = WorkerTask(recipe, worker.env_ids, num_envs, environ, *descriptors, child_pipe)
        self.process = WorkerProcess(run_worker, (task,), f"gymtask-worker-{index}", worker.daemon)
        try:
            self.process.start()
        except BaseException:
            self.release()
            raise
        finally:
            child_pipe.close()

    def command(self, message: bytes) -> None:
        """Asks the worker to run a method; its answer comes over the pipe."""
        # First the wake-up: a message that does not fit into the pipe must find somebody reading.
        os.eventfd_write(self.go, COMMAND)
        self.pipe.send_bytes(message)

    def kill(self) -> None:
        """Kills the worker's process group, with what its environments started.

        Of one that has ended nothing is left: the fork server has seen to that.
        """
        if self.process.pid is None or not self.process.is_alive():
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not made its group yet
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
        MakerError: The recipe of an environment cannot travel to a worker.
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
        spaces = (observation_space, action_space)
        registered = pickle_registry()
        makers = {id(worker.maker): worker.maker for worker in workers}
        recipes = {key: pickle_recipe(maker, *spaces, registered) for key, maker in makers.items()}
        size = Slots.nbytes(observation_space, action_space, num_envs)
        descriptor = os.memfd_create("gymtask")
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
            super().__init__(workers, Slots(observation_space, action_space, num_envs, memory))
            self._start_workers(recipes, descriptor)
        finally:
            os.close(descriptor)

    def _start_workers(self, recipes: Mapping[int, bytes], memory: int) -> None:
        self._owner: Array = np.repeat(
            np.arange(len(self.workers)), [len(worker.env_ids) for worker in self.workers]
        )
        self._handles: list[_Handle] = []
        self._poll = select.poll()
        self._events: dict[int, tuple[_Handle, str]] = {}
        server.acquire()
        # Runs when the pool is closed or collected as garbage, and at the interpreter's exit before
        # children are waited for.
        self._finalizer = util.Finalize(self, _kill_all, (self._handles,), exitpriority=10)
        try:
            for index, worker in enumerate(self.workers):
                recipe = recipes[id(worker.maker)]
                self._handles.append(_Handle(index, worker, recipe, memory, self.num_envs))
                self._register(self._handles[-1])
            self._answers()
        except BaseException:
            self.close(0.0)
            raise

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
        events = self._poll.poll(timeout * 1000)  # Ctrl-C here leaves all as it was
        try:
            for descriptor, _ in events:
                self._accept(descriptor)
        except KeyboardInterrupt:  # a reply may be lost, for which somebody would wait for ever
            self.close()
            raise

    def _accept(self, descriptor: int) -> None:
        """Lets in what a worker has to say after a step: that it is done, its infos, or its end."""
        handle, kind = self._events[descriptor]
        if kind == "done":
            os.eventfd_read(descriptor)
        elif kind == "pipe":
            for index, info in self._receive(handle).items():
                self.slots.infos[index] = info
        else:
            self._raise_death(handle)
        self._ready += handle.running
        handle.running = []
        if handle.queued:
            self._start(handle)

    def _receive(self, handle: _Handle) -> Any:
        """Reads a message and gives its content; if it is a failure, that is raised."""
        try:
            data = handle.pipe.recv_bytes()
        except (EOFError, OSError):
            self._raise_death(handle)
        try:
            kind, content = pickle.loads(data)
        except Exception as error:
            error.add_note(f"raised while reading what worker {handle.index} sent")
            self._fail(error, -1)
        if kind == "failure":
            self._raise_failure(*content)
        return content

    def _raise_failure(self, packed: bytes, text: str, env_id: int) -> NoReturn:
        error: BaseException
        try:
            error = unpack_exception(packed)
        except Exception:  # its class can be found in the worker only; the cause tells all
            error = RuntimeError(text.rstrip().rpartition("\n")[2])
        self._fail(error, env_id, WorkerTraceback(text))

    def _run(
        self, method: str, args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        # All are pickled before the first is sent: what cannot be is no reason to close the pool.
        messages = [
            cloudpickle.dumps((method, {i: args[i] for i in handle.env_ids}, kwargs or {}))
            for handle in self._handles
        ]
        for handle, message in zip(self._handles, messages, strict=True):
            try:
                handle.command(message)
            except OSError:  # nobody reads the pipe any more
                self._raise_death(handle)
        return [result for answer in self._answers() for result in answer]

    def _answers(self) -> list[Any]:
        """Waits for an answer of each worker."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._handles):
            events = self._poll.poll(WAIT_SLICE * 1000)
            if not events:
                self._check_interrupt()
            for descriptor, _ in events:
                handle, kind = self._events[descriptor]
                if kind == "pipe":
                    answers[handle.index] = self._receive(handle)
                elif kind == "death":
                    self._raise_death(handle)
        return [answers[index] for index in range(len(self._handles))]

    def _raise_death(self, handle: _Handle) -> NoReturn:
        """Raises why a worker ended: the failure that it sent, or the signal that killed it."""
        for kind, content in _left_over(handle.pipe):
            if kind == "failure":
                self._raise_failure(*content)
        # A wake-up that nobody has read was written after its end.
        asleep = select.select([handle.go], [], [], 0)[0]
        stepping = [index for index in handle.running if self.slots.requested[index]]
        where = f" in step() of environment {min(stepping)}" if stepping and not asleep else ""
        handle.process.join(2 * PATIENCE)
        how = _how(handle.process.exitcode)
        self.close(0.0)
        raise WorkerDiedError(
            f"worker {handle.index}, which runs environments {list(handle.env_ids)}, died{where}"
            f" ({how})"
        ) from None

    def _close(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        failures: list[BaseException] = []
        try:
            if timeout > 0:
                for handle in self._handles:
                    _ask_to_close(handle)
                _wait_for_exit(self._handles, deadline, failures)
        finally:
            self._finalizer()
        if failures:
            failures[0].add_note("raised while the pool was closing")
            raise failures[0]


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"killed by {name}, exit code {code}" + (
        ", possibly out of memory" if code == -signal.SIGKILL else ""
    )


def _left_over(pipe: Connection) -> list[tuple[str, Any]]:
    """Messages that can be read without waiting."""
    messages = []
    try:
        while pipe.poll():
            messages.append(pickle.loads(pipe.recv_bytes()))
    except (EOFError, OSError):  # that was the last
        return messages
    return messages


def _ask_to_close(handle: _Handle) -> None:
    try:
        handle.command(cloudpickle.dumps(("close", {}, {})))
    except OSError:  # it is ending already, and is waited for below
        return


def _wait_for_exit(handles: list[_Handle], deadline: float, failures: list[BaseException]) -> None:
    """Waits until all have ended or the deadline is past; collects what closing raised."""
    waiting: dict[Any, _Handle] = {handle.process.sentinel: handle for handle in handles}
    # Their pipes too: a worker may be sending something that nobody waits for any more.
    pipes: dict[Any, _Handle] = {handle.pipe: handle for handle in handles}
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for source in wait([*waiting, *pipes], remaining):
            handle = waiting.pop(source, None) or pipes.pop(source, None)
            messages = [] if handle is None else _left_over(handle.pipe)
            if handle is not None and messages:  # else nothing comes any more
                pipes[handle.pipe] = handle
            failures += [unpack_exception(body[0]) for kind, body in messages if kind == "failure"]


def _kill_all(handles: list[_Handle]) -> None:
    """Kills what is left of all workers and gives their descriptors back; called once."""
    for handle in handles:
        handle.kill()
    deadline = time.monotonic() + PATIENCE
    for handle in handles:
        handle.process.join(max(0.0, deadline - time.monotonic()))
        handle.release()
        if handle.process.exitcode is not None:
            handle.process.close()
    server.release()
