"""What a worker process runs: steps in shared memory, everything else over a pipe."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Protocol

import cloudpickle
import numpy as np

from gymtask.maker import EnvironmentMaker
from gymtask.workers.info_cells import InfoCells
from gymtask.workers.registry import register_all
from gymtask.workers.slots import EnvironmentStepper, Slots
from gymtask.workers.spreading import make_getcpu
from gymtask.workers.waiting import Waiter

# What is written to "go". A worker gets no second order to step before it has finished the first,
# but a command may come on top of one: they add up, and one read tells what there is.
STEP_SOME, STEP_ALL, COMMAND = 1, 2, 1 << 32
LINE = 64  # bytes: a cache line, so that what different processes write never shares one


class Descriptor:
    """A descriptor on its way to a child, where it arrives as a plain int."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


class Stepper(Protocol):
    """The environments of one worker."""

    progress: Any

    def make(self) -> None:
        """Makes the environments."""

    def step_all(self, env_ids: Sequence[int]) -> None:
        """Steps some of them."""

    def news(self, env_ids: Sequence[int]) -> Any:
        """What the parent must be told after a step and cannot read in shared memory, or None."""

    def run(self, method: str, env_ids: Sequence[int], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs something else on some of them, and gives the answer."""

    def close(self) -> None:
        """Closes them."""


class Program(Protocol):
    """What a worker is to do, as it travels to it."""

    def __call__(self, memory: memoryview, env_ids: Sequence[int]) -> Stepper:
        """Lays out the memory that all workers share."""


class Control:
    """The part of the shared memory by which workers are told what to do.

    Attributes:
        progress: For each worker int64 [1] in a cache line of its own: what its stepper is at.
        cores: Likewise the core that it was on at the end of its last step.
        ends: Likewise when that was, in nanoseconds of `time.perf_counter_ns`, which all processes
            share.
        requested: bool [N]: the environments to be stepped, where not all of a worker are.
    """

    def __init__(self, memory: memoryview, num_workers: int) -> None:
        lines = memory[: num_workers * LINE].cast("q")
        starts = range(0, len(lines), LINE // 8)
        self.progress = [lines[start : start + 1] for start in starts]
        self.cores = [lines[start + 1 : start + 2] for start in starts]
        self.ends = [lines[start + 2 : start + 3] for start in starts]
        self.requested = memory[num_workers * LINE :].cast("?")

    @staticmethod
    def nbytes(num_workers: int, num_envs: int) -> int:
        """Bytes of memory that it takes, a multiple of a cache line."""
        return num_workers * LINE + -(-num_envs // LINE) * LINE


@dataclass(frozen=True)
class WorkerTask:
    """Everything a worker is started with.

    Attributes:
        recipe: What `pack_program` made.
        index: Which worker it is.
        env_ids: The environments it runs.
        num_workers: Workers in all.
        num_envs: Environments of all of them.
        may_spin: Whether it may poll before it blocks.
        environ: The environment variables it is to have.
        memory: Descriptor of the shared memory, which begins with a `Control`; as the next two, a
            `Descriptor` until it has arrived.
        go: Descriptor of an eventfd: STEP_ALL asks to step all environments, STEP_SOME the
            requested ones, COMMAND to read the pipe.
        done: Descriptor of an eventfd that counts finished steps.
        pipe: Commands in; answers, news and failures out.
    """

    recipe: bytes
    index: int
    env_ids: tuple[int, ...]
    num_workers: int
    num_envs: int
    may_spin: bool
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
    stepper: Stepper | None = None
    try:
        stepper, control = _make_stepper(task)
        stepper.make()
        _send(task.pipe, "answer", None)
        _serve(task, stepper, control)
        stepper.close()
    except Exception as error:
        _report(task.pipe, error, -1 if stepper is None else stepper.progress[0])
    finally:
        if stepper is not None:
            # After a failure, which is what the parent raises, whatever comes now.
            with contextlib.suppress(Exception):
                stepper.close()
        # Children that an environment left behind would keep this process waiting for them.
        for child in multiprocessing.active_children():
            child.kill()


def _serve(task: WorkerTask, stepper: Stepper, control: Control) -> None:
    """Steps and answers until it is told to close."""
    go, done, requested = task.go, task.done, control.requested
    core, getcpu = control.cores[task.index], make_getcpu()
    ended, clock = control.ends[task.index], time.perf_counter_ns
    waiter = Waiter(task.may_spin)
    waiter.watch(go)
    while True:
        waiter.poll()
        asked = os.eventfd_read(go)
        if orders := asked % COMMAND:
            env_ids = task.env_ids
            if orders == STEP_SOME:
                env_ids = tuple(index for index in env_ids if requested[index])
                for index in env_ids:
                    requested[index] = False
            stepper.step_all(env_ids)
            news = stepper.news(env_ids)
            core[0], ended[0] = getcpu(), clock()
            if news is None:
                os.eventfd_write(done, 1)
            else:
                _send(task.pipe, "news", news)
        if asked >= COMMAND:
            method, args, kwargs = pickle.loads(task.pipe.recv_bytes())
            if method == "close":
                return
            _send(task.pipe, "answer", stepper.run(method, task.env_ids, args, kwargs))


def pack_program(program: Program, registered: bytes) -> bytes:
    """What a worker needs to make its environments, as bytes.

    Args:
        program: What it is to do.
        registered: What `registry.pickle_registry` made.
    """
    return pickle.dumps((registered, bytes(cloudpickle.dumps(program))))


def _make_stepper(task: WorkerTask) -> tuple[Stepper, Control]:
    registered, packed = pickle.loads(task.recipe)
    register_all(registered)  # first: the program may ask for what is registered
    program: Program = pickle.loads(packed)
    memory = memoryview(mmap.mmap(task.memory, 0))
    os.close(task.memory)
    start = Control.nbytes(task.num_workers, task.num_envs)
    control = Control(memory[:start], task.num_workers)
    stepper = program(memory[start:], task.env_ids)
    stepper.progress = control.progress[task.index]
    stepper.progress[0] = -1
    return stepper, control


@dataclass(frozen=True)
class PoolProgram:
    """Steps environments into the slots of a pool.

    Attributes:
        maker: Makes each of them.
        observation_space: The space that each must have.
        action_space: The space that each must have.
        num_envs: Environments of the pool.
        num_info_keys: Info keys that one of them asks for at most.
    """

    maker: EnvironmentMaker
    observation_space: Any
    action_space: Any
    num_envs: int
    num_info_keys: int

    def __call__(self, memory: memoryview, env_ids: Sequence[int]) -> Stepper:
        """See `Program`."""
        sizes = (self.observation_space, self.action_space, self.num_envs)
        cells = InfoCells(
            dict.fromkeys(env_ids, self.maker.info_keys),
            self.num_info_keys,
            memory[Slots.nbytes(*sizes) :],
        )
        slots = Slots(*sizes, memory)
        return _PoolStepper(slots, dict.fromkeys(env_ids, self.maker), cells)


class _PoolStepper(EnvironmentStepper):
    def __init__(
        self, slots: Slots, makers: Mapping[int, EnvironmentMaker], cells: InfoCells
    ) -> None:
        super().__init__(slots, makers)
        self.isolates = len(makers) > 1
        self._cells = cells

    def news(self, env_ids: Sequence[int]) -> Any:
        """The infos, where some are kept that do not all fit into their cells."""
        infos = self.slots.infos
        if not self.keeps_infos or all(self._cells.write(i, infos[i]) for i in env_ids):
            return None
        return {index: infos[index] for index in env_ids}


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
