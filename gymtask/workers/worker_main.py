"""What a worker process runs: steps in shared memory, everything else over a pipe."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver, process, reduction
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from gymtask.maker import EnvironmentMaker
from gymtask.workers.slots import EnvironmentStepper, Slots

COMMAND = (
    1 << 32
)  # added to the "go" counter, beside the 1 of a step, so that one read tells which of the two came
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


class Descriptor:
    """A descriptor on its way to a child, where it arrives as a plain int."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


@dataclass(frozen=True)
class WorkerTask:
    """Everything a worker is started with.

    Attributes:
        recipe: The pickled `EnvironmentMaker`, observation space and action space.
        env_ids: The environments it runs.
        num_envs: Environments of the whole pool.
        memory: Descriptor of the shared memory of the slots; as the next two, a `Descriptor` until
            it has arrived.
        go: Descriptor of an eventfd: 1 asks to step the requested environments, COMMAND to read the
            pipe.
        done: Descriptor of an eventfd that counts finished steps.
        pipe: Commands in; answers, infos and failures out.
    """

    recipe: bytes
    env_ids: tuple[int, ...]
    num_envs: int
    memory: Any
    go: Any
    done: Any
    pipe: Connection


def run_worker(task: WorkerTask) -> None:
    """The main function of a worker process."""
    _live_no_longer_than_the_parent()
    stepper: EnvironmentStepper | None = None
    try:
        stepper = _make_stepper(task)
        _send(task.pipe, "answer", None)
        _serve(task, stepper)
        stepper.close()
    except BaseException as error:  # of every kind: the parent raises it
        current = -1 if stepper is None else stepper.current
        text = "".join(traceback.format_exception(error))
        _send(task.pipe, "failure", (pack_exception(error), text, current))
    finally:
        # Children that an environment left behind would keep this process waiting for them.
        for child in multiprocessing.active_children():
            child.kill()


def _serve(task: WorkerTask, stepper: EnvironmentStepper) -> None:
    """Steps and answers until it is told to close."""
    go, done = task.go, task.done
    requested = stepper.slots.requested
    infos = stepper.slots.infos if stepper.keeps_infos else None
    while True:
        asked = os.eventfd_read(go)
        if asked % COMMAND:
            for index in task.env_ids:
                if requested[index]:
                    stepper.step(index)
                    requested[index] = (
                        False  # only now, so that the parent can tell where a dead worker stood
                    )
            if infos is None:
                os.eventfd_write(done, 1)
            else:
                _send(task.pipe, "infos", {index: infos[index] for index in task.env_ids})
        if asked >= COMMAND:
            method, args, kwargs = pickle.loads(task.pipe.recv_bytes())
            if method == "close":
                return
            _send(task.pipe, "answer", stepper.run(method, task.env_ids, args, kwargs))


def _make_stepper(task: WorkerTask) -> EnvironmentStepper:
    maker_bytes, observation_space, action_space = pickle.loads(task.recipe)
    maker = EnvironmentMaker.from_bytes(maker_bytes)
    memory = mmap.mmap(task.memory, Slots.nbytes(observation_space, action_space, task.num_envs))
    os.close(task.memory)
    slots = Slots(observation_space, action_space, task.num_envs, memory)
    return EnvironmentStepper(slots, dict.fromkeys(task.env_ids, maker))


def _send(pipe: Connection, kind: str, content: Any) -> None:
    pipe.send_bytes(cloudpickle.dumps((kind, content)))


def pack_exception(error: BaseException) -> bytes:
    """An exception as bytes, by its class, its `args` and its attributes.

    Pickle itself would call the class with `args`, which fails for every exception whose
    constructor takes something else than what it hands on to its base class.
    """
    for state in (error.__dict__, {}):
        try:
            return bytes(cloudpickle.dumps((type(error), error.args, state)))
        except (
            Exception
        ):  # something in it cannot be pickled: then without its attributes, then as text
            continue
    return bytes(cloudpickle.dumps((RuntimeError, (f"{type(error).__name__}: {error}",), {})))


def unpack_exception(data: bytes) -> BaseException:
    """The exception that `pack_exception` packed."""
    kind, args, state = pickle.loads(data)
    error: BaseException = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _live_no_longer_than_the_parent() -> None:
    """Makes sure that this process and its children end with the parent, also if it is killed.

    A thread watches the pipe that the parent holds open. Where it cannot run, since an environment
    holds the interpreter's lock, the kernel's parent-death signal acts: the fork server ends with
    the parent, as soon as no worker holds its "alive" pipe open.
    """
    # A group of its own: signals of the terminal reach the parent alone, and children die with it.
    os.setsid()
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = process.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="gymtask-parent-watch", daemon=True).start()
