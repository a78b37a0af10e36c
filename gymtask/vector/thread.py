"""`ThreadVectorEnv`: Gymnasium's SyncVectorEnv, stepped by threads."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from gymtask.errors import ConfigurationError, note_others
from gymtask.vector.arguments import (
    checked_autoreset_mode,
    checked_makers,
    checked_num_workers,
    checked_seeds,
    listed_values,
    split_options,
)
from gymtask.vector.rows import Batches
from gymtask.workers.copies import copied_numbers
from gymtask.workers.vector_stepper import Row, VectorProgram, VectorStepper

CLOSE_LIMIT = 5.0  # seconds that threads get to finish
Job = Callable[[], Any]


class ThreadVectorEnv(SyncVectorEnv):  # no [...]: Gymnasium 1.2 has none
    """A SyncVectorEnv stepped by daemon threads, each environment always in the same one.

    It pays where environments let go of the interpreter's lock. An environment is made, stepped,
    called and closed in its own thread.

    Attributes:
        close_limit: Seconds that environments get to close, unless `close` says otherwise; None: 5.
    """

    close_limit: float | None = None

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        copy: bool = True,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        num_workers: int | None = None,
    ) -> None:
        """Makes the environments in their threads.

        Args:
            env_fns: Functions that make the N environments.
            copy: Whether `reset` and `step` give copies of the observations; else the arrays that
                the next call writes again.
            observation_mode: "same", "different", or the batched and the single space.
            autoreset_mode: When an ended episode is reset.
            num_workers: Threads; None: one for each core that this process may use, at most N.

        Raises:
            ConfigurationError: A value breaks its rule.
            RuntimeError: The spaces of the environments do not fit together.
        """
        self.closed = True  # until there is something to close
        count, mode = len(checked_makers(env_fns)), checked_autoreset_mode(autoreset_mode)
        number = checked_num_workers(num_workers, count)
        parts = [part.tolist() for part in np.array_split(np.arange(count), number)]
        self._threads = [_Thread(index) for index in range(number)]
        owners = np.repeat(np.arange(number), [len(part) for part in parts]).tolist()
        made: list[tuple[_Thread, Any]] = []
        makers = [
            partial(_make, self._threads[owner], env_fn, made)
            for owner, env_fn in zip(owners, env_fns, strict=True)
        ]
        self._steppers: list[VectorStepper] = []
        try:
            super().__init__(makers, copy, observation_mode, mode)
            self.env_fns = env_fns
            self._lay_out(parts)
        except BaseException:
            for thread, env in made:
                thread.begin(env.close)  # nobody asks how that went: what failed first is told
            self._stop()
            raise
        self.closed = False

    def _lay_out(self, parts: Sequence[list[int]]) -> None:
        self._parts = parts
        program = VectorProgram(
            makers={},
            observation_space=self.single_observation_space,
            action_space=self.single_action_space,
            num_envs=self.num_envs,
            autoreset_mode=self.autoreset_mode,
            same_spaces=True,
            shared_memory=True,
        )
        slots, _ = program.lay_out(memoryview(bytearray(max(program.nbytes, 1))))
        self._batches = Batches(program, slots)
        for env_ids in parts:
            # With others beside it, who may share what it gives, and be stepped before it is read.
            keep = copied_numbers if self.num_envs > 1 else None
            stepper = VectorStepper(program, slots, None, keep)
            stepper.envs = {index: self.envs[index] for index in env_ids}
            self._steppers.append(stepper)

    def _begin(self, jobs: Sequence[Job]) -> None:
        """Gives each thread a job."""
        for thread, job in zip(self._threads, jobs, strict=True):
            thread.begin(job)

    def _end(self, deadline: float = math.inf) -> list[Any]:
        """The answers of all threads; who has not answered by the deadline is left out.

        The first exception is raised when all have answered, with what the others raised.
        """
        answers, failures = [], []
        for thread, stepper in zip(self._threads, self._steppers, strict=True):
            try:
                answers.append(thread.end(deadline))
            except Empty:
                continue
            except Exception as error:
                failures.append((stepper.current, error))
        try:
            if failures:
                note_others(failures[0][1], failures[1:], "another environment also")
                raise failures[0][1]
            return answers
        finally:
            # The traceback keeps this frame. Kept by it in turn, the exceptions would stay until a
            # garbage collection.
            failures.clear()

    def _run(self, method: str, args: Mapping[int, Any], **kwargs: Any) -> list[Any]:
        """Runs a method of the steppers on all their environments."""
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        self._begin(
            [
                partial(stepper.run, method, list(stepper.envs), args, kwargs)
                for stepper in self._steppers
            ]
        )
        return [part for answer in self._end() for part in answer]

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Starts new episodes.

        Args:
            seed: s for s + i in environment i, or a list of one for each.
            options: What each environment gets; with "reset_mask", bool [N], only those for which
                it is True are reset.
        """
        seeds = checked_seeds(seed, self.num_envs)
        rest, asked = split_options(options, self.num_envs)
        self._autoreset_envs[asked] = False
        rows: dict[int, Row] = {}
        for part in self._run("reset", {index: (seeds[index], rest) for index in asked}):
            rows.update(part)
        return self._observe(rows), self._batches.infos(rows, self._add_info)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Takes an action in each environment.

        Args:
            actions: A batch of `action_space`, or anything that it can be iterated over as.

        Returns:
            Observations, rewards float64 [N], terminations bool [N], truncations bool [N], infos.

        Raises:
            ConfigurationError: There are not N actions.
            AssertionError: With DISABLED autoreset, an episode has ended that was not reset.
        """
        listed = list(iterate(self.action_space, actions))
        if len(listed) != self.num_envs:
            raise ConfigurationError(
                f"`actions` must hold one for each of {self.num_envs} environments, got"
                f" {len(listed)}"
            )
        disabled = self.autoreset_mode == AutoresetMode.DISABLED
        if disabled and self._autoreset_envs.any():
            raise AssertionError(f"{self._autoreset_envs=}")
        rows: dict[int, Row] = {}
        for part in self._run("step", dict(enumerate(listed))):
            rows.update(part)
        rewards, terminated, truncated = self._batches.outcome()
        if disabled:
            self._autoreset_envs = terminated | truncated
        infos = self._batches.step_infos(rows, terminated, truncated, self._add_info)
        return self._observe(rows), rewards, terminated, truncated, infos

    def _observe(self, rows: Mapping[int, Row]) -> Any:
        observations = self._batches.observations(rows, copy=self.copy)
        self._observations = self._batches.observation
        return observations

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each environment, or reads an attribute, and gives N results."""
        return tuple(
            self._run("call", dict.fromkeys(range(self.num_envs), (name, *args)), **kwargs)
        )

    def render(self) -> tuple[Any, ...]:
        """What `render()` of each environment gives."""
        return tuple(self._run("render", dict.fromkeys(range(self.num_envs), ())))

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute on the wrapper that has it, else on the innermost environment.

        Args:
            name: The attribute.
            values: A list or tuple of one for each environment, or one for all.
        """
        listed = listed_values(values, self.num_envs)
        self._run("set_attr", {i: (name, value) for i, value in enumerate(listed)})

    def close_extras(self, timeout: float | None = None, **kwargs: Any) -> None:
        """Closes the environments and ends the threads.

        Args:
            timeout: Seconds that the environments get to finish what they do and to close, before
                their threads are abandoned; None: `close_limit`.
            **kwargs: Are ignored.
        """
        limit = CLOSE_LIMIT if self.close_limit is None else self.close_limit
        limit = limit if timeout is None else timeout
        deadline = time.monotonic() + limit
        self.closed = True  # whatever comes now, the threads end
        for stepper in self._steppers:
            stepper.current = -1  # it may tell of a step that failed, and closing is none
        self._begin([stepper.close for stepper in self._steppers])
        self._stop()
        try:
            self._end(deadline)
        finally:
            self._abandon(deadline, limit)

    def _stop(self) -> None:
        """Ends the threads after the jobs that they have."""
        for thread in self._threads:
            thread.jobs.put(None)

    def _abandon(self, deadline: float, limit: float) -> None:
        """Waits for the threads until the deadline, and names what is left of them."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        pairs = zip(self._threads, self._parts, strict=True)
        stuck = [env_ids for thread, env_ids in pairs if thread.is_alive()]
        if stuck:
            warnings.warn(
                f"{len(stuck)} worker threads did not finish within {limit} s and were abandoned,"
                f" with environments {stuck}",
                ResourceWarning,
                stacklevel=4,
            )


def _make(thread: _Thread, env_fn: Callable[[], Any], made: list[tuple[_Thread, Any]]) -> Any:
    """Makes an environment in its thread, and notes that it is there to be closed."""
    env = thread.do(env_fn)
    made.append((thread, env))
    return env


class _Thread(threading.Thread):
    """Does one job after another."""

    def __init__(self, index: int) -> None:
        super().__init__(name=f"gymtask-vector-{index}", daemon=True)
        self.jobs: SimpleQueue[tuple[int, Job] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        self._number = 0
        self.start()

    def run(self) -> None:
        while (order := self.jobs.get()) is not None:
            number, job = order
            try:
                self._answers.put((number, job(), None))
            except BaseException as error:  # every kind goes to who waits for the answer
                self._answers.put((number, None, error))

    def begin(self, job: Job) -> None:
        """Gives it a job; `end` gives the answer."""
        self._number += 1
        self.jobs.put((self._number, job))

    def end(self, deadline: float = math.inf) -> Any:
        """The answer to the last job, or its exception.

        Raises:
            queue.Empty: There is none by the deadline.
        """
        # After Ctrl-C while somebody waited, that answer comes first, and is of no use any more.
        number = 0
        while number != self._number:
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            number, answer, error = self._answers.get(timeout=left)
        try:
            if error is not None:
                raise error
            return answer
        finally:
            del error  # as in `ThreadVectorEnv._end`

    def do(self, job: Job) -> Any:
        """Does a job and waits for it."""
        self.begin(job)
        return self.end()
