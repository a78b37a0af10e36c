"""One worker process, seen from the parent: its descriptors, and what its end says."""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from gymtask.errors import WorkerTraceback
from gymtask.workers.launch import ONE_THREAD, WorkerProcess
from gymtask.workers.waiting import Events, num_cores
from gymtask.workers.worker_main import (
    COMMAND,
    Control,
    Descriptor,
    WorkerTask,
    run_worker,
    unpack_exception,
)


@dataclass(eq=False)  # an exception is told apart by what it is
class Failure(Exception):
    """What went wrong in a worker, on its way to who closes all of them and raises it.

    Attributes:
        error: What is to be raised.
        worker: The worker's number.
        env_id: The environment that raised it, or -1.
        text: The traceback in the worker, "" where there is none.
    """

    error: BaseException
    worker: int
    env_id: int = -1
    text: str = ""

    @property
    def cause(self) -> WorkerTraceback | None:
        """The traceback as an exception."""
        return WorkerTraceback(self.text) if self.text else None


class Handle:
    """The parent's end of one worker.

    Attributes:
        index: The worker's number.
        env_ids: Its environments.
        running: Environments that it is stepping now.
        queued: Environments to step as soon as it has finished those.
        progress: Holds the environment that it is at, -1 for none.
        core: Holds the core that it was on at the end of its last step, -1 before the first.
        ended: Holds when its last step ended, in nanoseconds of `time.perf_counter_ns`.
        go: Descriptor of the eventfd that tells it to step.
        done: Descriptor of the eventfd that tells that it has finished.
        pipe: Everything else.
        process: The process.
    """

    def __init__(self, index: int, env_ids: Sequence[int], control: Control) -> None:
        self.index = index
        self.env_ids = list(env_ids)
        self.running: list[int] = []
        self.queued: list[int] = []
        self.progress, self.core = control.progress[index], control.cores[index]
        self.ended = control.ends[index]
        self.core[0] = -1
        self.go, self.done = os.eventfd(0), os.eventfd(0)
        self.pipe, self._theirs = Pipe()
        self._poll: Any = None

    def start(
        self, recipe: bytes, num_workers: int, num_envs: int, memory: int, daemon: bool
    ) -> None:
        """Starts the process."""
        task = WorkerTask(
            recipe=recipe,
            index=self.index,
            env_ids=tuple(self.env_ids),
            num_workers=num_workers,
            num_envs=num_envs,
            may_spin=num_workers <= num_cores(),
            environ={**ONE_THREAD, **os.environ},
            memory=Descriptor(memory),
            go=Descriptor(self.go),
            done=Descriptor(self.done),
            pipe=self._theirs,
        )
        try:
            name = f"gymtask-worker-{self.index}"
            self.process = WorkerProcess(run_worker, (task,), name, daemon)
            self.process.start()
        except BaseException:
            self.release()
            raise
        finally:
            self._theirs.close()

    def wait(self, timeout: float) -> Events:
        """What this worker has to say, within so many seconds."""
        if self._poll is None:
            self._poll = select.poll()
            for source in (self.done, self.pipe.fileno(), self.process.sentinel):
                self._poll.register(source, select.POLLIN)
        events: Events = self._poll.poll(timeout * 1000)
        return events

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


def failure_of(handle: Handle, packed: bytes, text: str, env_id: int) -> Failure:
    """The failure that a worker has sent."""
    error: BaseException
    try:
        error = unpack_exception(packed)
    except Exception:  # its class can be found in the worker only; the cause tells all
        error = RuntimeError(text.rstrip().rpartition("\n")[2])
    return Failure(error, handle.index, env_id, text)


def how_it_ended(code: int | None) -> str:
    """What the exit code of a process means."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"killed by {name}, exit code {code}" + (
        ", possibly out of memory" if code == -signal.SIGKILL else ""
    )


def left_over(pipe: Connection) -> list[tuple[str, Any]]:
    """Messages that can be read without waiting, up to the first that cannot be read."""
    messages = []
    try:
        while pipe.poll():
            messages.append(pickle.loads(pipe.recv_bytes()))
    except Exception:  # the end of the pipe; or its class is not known here, or not all came
        return messages
    return messages
