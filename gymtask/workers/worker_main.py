"""What a worker process runs: steps in shared memory, everything else over a pipe."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from gymtask.maker import EnvironmentMaker
from gymtask.workers.registry import register_all
from gymtask.workers.slots import EnvironmentStepper, Slots

# Added to the "go" counter, beside the 1 of a step, so that one read tells which of the two came.
COMMAND = 1 << 32


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
        recipe: What `pickle_recipe` made.
        env_ids: The environments it runs.
        num_envs: Environments of the whole pool.
        environ: The environment variables it is to have.
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
    environ: Mapping[str, str]
    memory: Any
    go: Any
    done: Any
    pipe: Connection


def run_worker(task: WorkerTask) -> None:
    """The main function of a worker process.

    An `Exception` goes to the parent, which raises it; what asks a process to end, as SystemExit
    does, ends the worker.
    """
    os.environ.clear()
    os.environ.update(task.environ)
    # The fork server's global stream would be the same one in all workers.
    np.random.seed()
    stepper: EnvironmentStepper | None = None
    try:
        stepper = _make_stepper(task)
        stepper.make()
        _send(task.pipe, "answer", None)
        _serve(task, stepper)
        stepper.close()
    except Exception as error:
        _report(task.pipe, error, -1 if stepper is None else stepper.current)
    finally:
        if stepper is not None:
            # After a failure, which is what the parent raises, whatever comes now.
            with contextlib.suppress(Exception):
                stepper.close()
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
            stepped = [index for index in task.env_ids if requested[index]]
            for index in stepped:
                stepper.step(index)
                requested[index] = False  # only now: the parent can tell where a dead worker stood
            if infos is None:
                os.eventfd_write(done, 1)
            else:
                _send(task.pipe, "infos", {index: infos[index] for index in stepped})
        if asked >= COMMAND:
            method, args, kwargs = pickle.loads(task.pipe.recv_bytes())
            if method == "close":
                return
            _send(task.pipe, "answer", stepper.run(method, task.env_ids, args, kwargs))


def pickle_recipe(
    maker: EnvironmentMaker, observation_space: Any, action_space: Any, registered: bytes
) -> bytes:
    """What a worker needs to make its environments, as bytes.

    Args:
        maker: Makes each of them.
        observation_space: The space that each must have.
        action_space: The space that each must have.
        registered: What `registry.pickle_registry` made.
    """
    parts = (registered, maker.to_bytes(), observation_space, action_space)
    return bytes(cloudpickle.dumps(parts))


def _make_stepper(task: WorkerTask) -> EnvironmentStepper:
    registered, maker_bytes, observation_space, action_space = pickle.loads(task.recipe)
    register_all(registered)
    maker = EnvironmentMaker.from_bytes(maker_bytes)
    memory = mmap.mmap(task.memory, Slots.nbytes(observation_space, action_space, task.num_envs))
    os.close(task.memory)
    slots = Slots(observation_space, action_space, task.num_envs, memory)
    return EnvironmentStepper(slots, dict.fromkeys(task.env_ids, maker))


def _send(pipe: Connection, kind: str, content: Any) -> None:
    pipe.send_bytes(cloudpickle.dumps((kind, content)))


def _report(pipe: Connection, error: Exception, env_id: int) -> None:
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):  # the parent has stopped listening
        _send(pipe, "failure", (pack_exception(error), text, env_id))


def pack_exception(error: BaseException) -> bytes:
    """An exception as bytes that `unpack_exception` reads.

    Pickle calls the class with `args`, which fails, or says something else, for exceptions whose
    constructor does not hand on what it takes. Such a one travels as its class, its `args` and its
    attributes; one that holds something that cannot be pickled, without its attributes; and if that
    cannot be either, as the text of a RuntimeError.
    """
    kind, args = type(error), error.args
    for packed in ((error,), (kind, args, error.__dict__), (kind, args, {})):
        with contextlib.suppress(Exception):
            data = bytes(cloudpickle.dumps((packed, _text(error))))
            again = unpack_exception(data)
            if type(again) is kind and str(again) == str(error):
                return data
    return bytes(cloudpickle.dumps(((RuntimeError, (_text(error),), {}), _text(error))))


def unpack_exception(data: bytes) -> BaseException:
    """The exception that `pack_exception` packed."""
    packed, _ = pickle.loads(data)
    if len(packed) == 1:
        whole: BaseException = packed[0]
        return whole
    kind, args, state = packed
    error: BaseException = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose text cannot be made"
