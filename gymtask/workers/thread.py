"""Environments that run in daemon threads, each always in the same one."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import util
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from gymtask.workers.layout import Array, Space
from gymtask.workers.pool import Failures, WorkerPool
from gymtask.workers.queue import WAIT_SLICE
from gymtask.workers.slots import EnvironmentStepper, Slots
from gymtask.workers.worker import BaseEnvironmentWorker, split_by_owner

Job: TypeAlias = "Callable[[EnvironmentStepper], Any]"


class _Failure:
    """An exception on its way from a thread to the pool."""

    def __init__(self, error: BaseException, env_id: int) -> None:
        self.told = (error, env_id)


class _Answers(deque[tuple[int, Any]]):
    """What threads have answered and nobody has taken yet: (worker, answer), in order of arrival.

    Whoever waits looks at the first and removes it when it is kept. A queue would give it and
    forget it at once, and with Ctrl-C between the two it would be lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bell = threading.Lock()  # held, but for when somebody has rung
        self._bell.acquire()

    def add(self, worker: int, answer: Any) -> None:
        """Adds an answer and wakes who waits for one."""
        self.append((worker, answer))
        if self._bell.locked():  # else it has been rung, and not been heard yet
            try:
                self._bell.release()
            except RuntimeError:  # another thread has rung just now
                return

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most; whether there is one."""
        while not self:  # it may have been rung for one that is taken already
            if not self._bell.acquire(timeout=timeout):
                return False
        return True


class _WorkerThread(threading.Thread):
    """Makes its environments in its own thread and runs one job after another on them."""

    def __init__(
        self, index: int, worker: BaseEnvironmentWorker, slots: Slots, answers: _Answers
    ) -> None:
        super().__init__(name=f"gymtask-worker-{index}", daemon=True)
        self.index = index
        self.env_ids = worker.env_ids
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._stepper = EnvironmentStepper(slots, dict.fromkeys(worker.env_ids, worker.maker))
        self._answers = answers
        self._stopping = False

    def run(self) -> None:
        self._answer(EnvironmentStepper.make)
        while (job := self.jobs.get()) is not None and not self._stopping:
            self._answer(job)
        self._stepper.current = -1  # it may tell of a job that failed, and closing is none
        self._answer(EnvironmentStepper.close)

    def stop(self) -> None:
        """Asks it to close its environments and end, after the job that it is at."""
        self._stopping = True
        self.jobs.put(None)

    def _answer(self, job: Job) -> None:
        try:
            answer = job(self._stepper)
        except BaseException as error:  # every kind goes to the thread that waits for the answer
            # Not by a local name: the traceback keeps this frame, which would keep the exception.
            self._answers.add(self.index, _Failure(error, self._stepper.current))
        else:
            self._answers.add(self.index, answer)


class ThreadPool(WorkerPool):
    """Runs each worker's environments in a thread of its own.

    Wins where environments release the GIL.

    A thread cannot be killed: one that is inside `step` when the pool closes is abandoned, and
    named in a warning.
    """

    def __init__(
        self,
        workers: Sequence[BaseEnvironmentWorker],
        observation_space: Space,
        action_space: Space,
    ) -> None:
        num_envs = sum(len(worker.env_ids) for worker in workers)
        super().__init__(workers, Slots(observation_space, action_space, num_envs))
        self._owner: Array = np.repeat(
            np.arange(len(workers)), [len(worker.env_ids) for worker in workers]
        )
        self._answers = _Answers()
        self._threads = [
            _WorkerThread(index, worker, self.slots, self._answers)
            for index, worker in enumerate(workers)
        ]
        # Threads do not refer to the pool: they are asked to end when it is collected as garbage.
        self._finalizer = util.Finalize(self, _stop_all, (self._threads,))
        try:
            for thread in self._threads:
                thread.start()
            self._gather(len(self._threads))
        except BaseException:
            self.close()
            raise

    def _post(self, env_ids: Array) -> None:
        for worker, ids in split_by_owner(env_ids, self._owner, len(self._threads)):
            self._threads[worker].jobs.put(partial(_step_all, env_ids=ids))

    def _wait(self, timeout: float, for_all: bool = False) -> None:
        answers = self._answers
        if not answers and timeout > 0.0:
            answers.wait(timeout)  # Ctrl-C here leaves all as it was
        try:
            while answers:
                if isinstance(answers[0][1], _Failure):
                    self._fail(*answers.popleft()[1].told)
                self._ready += answers[0][1]
                del answers[0]
        except KeyboardInterrupt as error:  # an answer may have been kept and not removed
            self._give_up(error)

    def _run(
        self, method: str, args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        for thread in self._threads:
            thread.jobs.put(
                partial(
                    EnvironmentStepper.run,
                    method=method,
                    env_ids=thread.env_ids,
                    args=args,
                    kwargs=kwargs or {},
                )
            )
        answers = self._gather(len(self._threads))
        return [result for worker in range(len(self._threads)) for result in answers[worker]]

    def _gather(self, count: int) -> dict[int, Any]:
        """Waits for one answer of each worker; the first failure to arrive is raised at once."""
        answers: dict[int, Any] = {}
        while len(answers) < count:
            if not self._answers.wait(WAIT_SLICE):
                self._check_interrupt()
                continue
            if isinstance(self._answers[0][1], _Failure):
                self._fail(*self._answers.popleft()[1].told)
            worker, answer = self._answers.popleft()
            answers[worker] = answer
        return answers

    def _close(self, timeout: float) -> Failures:
        deadline = time.monotonic() + timeout
        self._finalizer()
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.env_ids for thread in started if thread.is_alive()]
        if stuck:
            warnings.warn(
                f"{len(stuck)} worker threads did not finish within {timeout} s and were abandoned,"
                f" with environments {stuck}",
                ResourceWarning,
                stacklevel=3,
            )
        answers = [self._answers.popleft()[1] for _ in range(len(self._answers))]
        return [(each.told[1], each.told[0]) for each in answers if isinstance(each, _Failure)]


def _step_all(stepper: EnvironmentStepper, env_ids: list[int]) -> list[int]:
    stepper.step_all(env_ids)
    return env_ids


def _stop_all(threads: list[_WorkerThread]) -> None:
    for thread in threads:
        thread.stop()
