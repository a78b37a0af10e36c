"""Worker processes over one block of memory: how they are started, woken, heard and ended.

What is the same for a `ProcessPool` and a `ProcessVectorEnv` lives here. What a worker makes of its
environments, and what lies in the memory, is the business of the program that it is started with.

A step is one eventfd write to each worker and one back. A pipe carries the rest: commands and their
answers, failures, and what a step has to say beside the memory. Nothing has a name in the file
system, so nothing can be left behind there, however the processes end.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import time
from collections.abc import Sequence
from multiprocessing import util
from multiprocessing.connection import wait
from typing import Any

from gymtask.errors import WorkerDiedError
from gymtask.workers.fork_server import PATIENCE
from gymtask.workers.handle import (
    Failure,
    Handle,
    failure_of,
    how_it_ended,
    left_over,
)
from gymtask.workers.launch import server
from gymtask.workers.spreading import Spreader, make_getcpu
from gymtask.workers.waiting import Events, Waiter, num_cores
from gymtask.workers.worker_main import STEP_ALL, STEP_SOME, Control

LOOK_AROUND = 0.2  # seconds of waiting for one worker, until the others are looked at
CLOSE = pickle.dumps(("close", {}, {}))


def is_supported() -> bool:
    """Whether this system has eventfd, memfd and epoll, which are Linux's."""
    return hasattr(os, "eventfd") and hasattr(os, "memfd_create") and hasattr(select, "epoll")


class Crew:
    """The workers.

    Attributes:
        num_envs: Environments of all of them.
        num_workers: How many they are.
        memory: What the program lies in, as every worker sees it.
        handles: The workers.
        leaves_a_core: Whether there are more cores than workers.
    """

    def __init__(self, groups: Sequence[Sequence[int]], nbytes: int) -> None:
        """Makes the memory; `start` starts the workers.

        Args:
            groups: The environments of each worker.
            nbytes: Bytes of memory that the program needs.
        """
        self._groups = groups
        self.num_workers = len(groups)
        self.num_envs = sum(map(len, groups))
        self.handles: list[Handle] = []
        start = Control.nbytes(self.num_workers, self.num_envs)
        self._descriptor = os.memfd_create("gymtask")
        try:
            os.ftruncate(self._descriptor, start + max(nbytes, 1))
            whole = memoryview(mmap.mmap(self._descriptor, 0))
        except BaseException:
            os.close(self._descriptor)
            raise
        self._control = Control(whole[:start], self.num_workers)
        self.memory = whole[start:]
        # With a worker on every core this process must not poll, as workers do: the last of them to
        # finish wakes it, on a core that is awake.
        self.leaves_a_core = self.num_workers < num_cores()
        self._waiter = Waiter(self.leaves_a_core)
        self._spreader = Spreader(self.leaves_a_core) if self.num_workers <= num_cores() else None
        self._getcpu = make_getcpu()
        self._last_first: list[Handle] = self.handles  # in what order to wait for all
        self._sources: dict[int, tuple[Handle, str]] = {}
        self._answers: dict[int, Any] = {}
        self._dismissed: set[int] = set()

    def start(self, recipes: Sequence[bytes], daemon: Sequence[bool]) -> None:
        """Starts the workers and waits until they have made their environments.

        Args:
            recipes: What `pack_program` made, for each worker.
            daemon: Whether its process is daemonic, likewise.

        Raises:
            Failure: One could not; `close` is still to be called.
        """
        server.acquire()
        # Runs when the crew is closed or collected as garbage, and at the interpreter's exit before
        # children are waited for.
        arguments = (self.handles, self._waiter)
        self._finalizer = util.Finalize(self, _kill_all, arguments, exitpriority=10)
        try:
            for index, (recipe, env_ids) in enumerate(zip(recipes, self._groups, strict=True)):
                handle = Handle(index, env_ids, self._control)
                sizes = (self.num_workers, self.num_envs)
                handle.start(recipe, *sizes, self._descriptor, daemon[index])
                self.handles.append(handle)
                self._watch(handle)
        finally:
            os.close(self._descriptor)
        self.wait_for_answers()

    def _watch(self, handle: Handle) -> None:
        sources = {
            handle.done: "done",
            handle.pipe.fileno(): "pipe",
            handle.process.sentinel: "death",
        }
        for descriptor, kind in sources.items():
            self._sources[descriptor] = (handle, kind)
            self._waiter.watch(descriptor)

    # ---- steps -----------------------------------------------------------------------------------

    def begin(self, handles: Sequence[Handle]) -> None:
        """Lets those that are idle step what is queued for them.

        One that was last on the core of the caller comes last: if it sleeps, it is woken there, and
        takes the core at once. It is also the last to finish, as it cannot begin while the caller
        is busy.
        """
        idle = [handle for handle in handles if not handle.running]
        if self._spreader is not None and len(idle) > 1:
            here = self._getcpu()
            idle.sort(key=lambda handle: handle.core[0] == here)
            if len(idle) == self.num_workers:
                self._last_first = idle[::-1]
        for handle in idle:
            self.step(handle)

    def step(self, handle: Handle) -> None:
        """Lets an idle worker step what is queued for it.

        A busy one must not see new requests before it is done: whether it took them in the same
        pass could not be told.
        """
        handle.running, handle.queued = handle.queued, []
        if len(handle.running) == len(handle.env_ids):
            os.eventfd_write(handle.go, STEP_ALL)
            return
        requested = self._control.requested
        for index in handle.running:
            requested[index] = True
        os.eventfd_write(handle.go, STEP_SOME)

    def poll(self, timeout: float, *, for_all: bool = False) -> Events:
        """Waits up to `timeout` seconds for something that `accept` is to see.

        An exception such as Ctrl-C leaves all as it was.

        Args:
            timeout: Seconds after which there may be nothing; negative waits for ever, or with
                `for_all` for a while.
            for_all: Whether to wait until all that are stepping have something to say. Then one is
                waited for after the other, and first for that which is likely to be the last: where
                every core has a worker, to wake for another would only take the core from it.
        """
        if not for_all or self._waiter.may_spin:
            return self._waiter.poll(timeout)
        deadline = time.monotonic() + (timeout if timeout >= 0.0 else LOOK_AROUND)
        events: Events = []
        for handle in self._last_first:
            if handle.running:
                found = handle.wait(max(0.0, deadline - time.monotonic()))
                if not found:  # others may have something to say, if only that they have died
                    return self._waiter.poll(0.0)
                events += found
        return events

    def accept(self, events: Events) -> list[tuple[list[int], Any]]:
        """The environments that have finished a step, in order of arrival.

        Returns:
            For each worker that has finished its environments and what it has to say of the step,
            None for nothing. What was queued for it has begun.

        Raises:
            Failure: A worker failed or died.
        """
        finished: list[tuple[list[int], Any]] = []
        for descriptor, _ in events:
            handle, kind = self._sources[descriptor]
            news = None
            if kind == "pipe":
                news = self._receive(handle)
            elif kind == "death":
                raise self._death(handle)
            else:
                os.eventfd_read(descriptor)
            finished.append((handle.running, news))
            handle.running = []
            if handle.queued:
                self.step(handle)
        if self._spreader is not None and self._spreader.count(len(finished)):
            self._spreader.look(
                [(handle.process.pid or 0, handle.core[0]) for handle in self.handles]
            )
        return finished

    # ---- commands --------------------------------------------------------------------------------

    def command(self, messages: Sequence[bytes]) -> None:
        """Sends one command to each worker.

        Args:
            messages: Pickled (method, arguments of each environment, keywords).

        Raises:
            Failure: One has died.
        """
        for handle, message in zip(self.handles, messages, strict=True):
            try:
                handle.command(message)
            except OSError:  # nobody reads the pipe any more
                raise self._death(handle) from None

    def wait_for_answers(self, timeout: float = -1.0) -> list[Any] | None:
        """Waits for an answer of each worker.

        Args:
            timeout: Seconds after which None is given; the next call goes on waiting. Negative: for
                ever.

        Raises:
            Failure: A worker failed or died.
        """
        deadline = time.monotonic() + timeout
        while len(self._answers) + len(self._dismissed) < self.num_workers:
            events = self._waiter.poll(
                timeout if timeout <= 0 else max(0.0, deadline - time.monotonic())
            )
            if not events:
                return None
            for descriptor, _ in events:
                handle, kind = self._sources[descriptor]
                if kind == "pipe":
                    self._answers[handle.index] = self._receive(handle)
                elif kind == "death":
                    raise self._death(handle)
        answers, self._answers = self._answers, {}
        return [answers.get(index) for index in range(self.num_workers)]

    @property
    def is_stepping(self) -> bool:
        """Whether a worker has not finished its step."""
        # No generator: Ctrl-C that strikes as one is thrown away is lost.
        for handle in self.handles:  # noqa: SIM110
            if handle.running:
                return True
        return False

    # ---- failures and the end --------------------------------------------------------------------

    def _receive(self, handle: Handle) -> Any:
        """Reads a message and gives its content; if it is a failure, that is raised."""
        try:
            data = handle.pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._death(handle) from None
        try:
            kind, content = pickle.loads(data)
        except Exception as error:
            error.add_note(f"raised while reading what worker {handle.index} sent")
            raise Failure(error, handle.index) from error
        if kind == "failure":
            raise failure_of(handle, *content)
        return content

    def _death(self, handle: Handle) -> Failure:
        """Why a worker ended: the failure that it sent, or the signal that killed it."""
        for kind, content in left_over(handle.pipe):
            if kind == "failure":
                return failure_of(handle, *content)
        stepping = handle.progress[0] if handle.running else -1
        where = f" in step() of environment {stepping}" if stepping >= 0 else ""
        handle.process.join(2 * PATIENCE)
        how = how_it_ended(handle.process.exitcode)
        message = f"worker {handle.index}, which runs environments {handle.env_ids}, died{where}"
        return Failure(WorkerDiedError(f"{message} ({how})"), handle.index)

    def dismiss(self, worker: int) -> None:
        """Expects nothing more of a worker that has failed."""
        if worker not in self._dismissed:
            self._dismissed.add(worker)
            handle = self.handles[worker]
            handle.running = []
            for descriptor in (handle.done, handle.pipe.fileno(), handle.process.sentinel):
                self._waiter.ignore(descriptor)

    def close(self, timeout: float) -> list[Failure]:
        """Ends all workers; those that have not closed after `timeout` seconds are killed.

        Returns:
            What went wrong meanwhile: in calls that were under way, or with -1 as its environment
            in closing them.
        """
        deadline = time.monotonic() + timeout
        failures: list[Failure] = []
        try:
            if timeout > 0:
                for handle in self.handles:
                    _ask_to_close(handle)
                _wait_for_exit(self.handles, deadline, failures)
        finally:
            self._finalizer()
        return failures


def _ask_to_close(handle: Handle) -> None:
    try:
        handle.command(CLOSE)
    except OSError:  # it is ending already, and is waited for below
        return


def _wait_for_exit(handles: list[Handle], deadline: float, failures: list[Failure]) -> None:
    """Waits until all have ended or the deadline is past; collects what went wrong."""
    waiting: dict[Any, Handle] = {handle.process.sentinel: handle for handle in handles}
    # Their pipes too: a worker may be sending something that nobody waits for any more.
    pipes: dict[Any, Handle] = {handle.pipe: handle for handle in handles}
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for source in wait([*waiting, *pipes], remaining):
            handle = waiting.pop(source, None) or pipes.pop(source, None)
            if handle is None:
                continue
            messages = left_over(handle.pipe)
            if messages:  # else nothing comes any more
                pipes[handle.pipe] = handle
            failures += [failure_of(handle, *body) for kind, body in messages if kind == "failure"]


def _kill_all(handles: list[Handle], waiter: Waiter) -> None:
    """Kills what is left of all workers and gives their descriptors back; called once."""
    waiter.close()
    for handle in handles:
        handle.kill()
    deadline = time.monotonic() + PATIENCE
    for handle in handles:
        handle.process.join(max(0.0, deadline - time.monotonic()))
        handle.release()
        if handle.process.exitcode is not None:
            handle.process.close()
    server.release()
