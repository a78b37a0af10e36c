"""What a vector environment owes to its worker processes: orders, answers, failures, the end."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import cloudpickle
from gymnasium import logger
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from gymtask.errors import WorkerDiedError, note_others
from gymtask.vector.rows import Batches
from gymtask.workers.crew import Crew
from gymtask.workers.handle import Failure
from gymtask.workers.vector_stepper import Row

CLOSE_LIMIT = 5.0  # seconds that environments get to close, unless `close` says otherwise
WITH_ROWS = ("step", "reset")  # orders that are answered by rows
PENDING = {  # what is waited for after an order
    "step": AsyncState.WAITING_STEP,
    "reset": AsyncState.WAITING_RESET,
    "call": AsyncState.WAITING_CALL,
    "set_attr": AsyncState.WAITING_CALL,
}
GATHER_LIMIT = 1.0  # seconds after a failure in which those of other workers are collected


class CrewVectorEnv(AsyncVectorEnv):  # no [...]: Gymnasium 1.2 has none
    """An AsyncVectorEnv whose environments a `Crew` runs; without one, Gymnasium's own.

    Attributes:
        close_limit: Seconds that environments get to close, unless `close` says otherwise; None: 5.
    """

    close_limit: float | None = None
    _crew: Crew | None = None

    def _attach(self, crew: Crew, batches: Batches) -> None:
        self._batches = batches
        self.observations = batches.observation
        self._rows: dict[int, Row] = {}  # what came over the pipes of the present step or reset
        self._asked = ""  # the last order: "step", "reset" or another
        self._by_pipe = True  # whether answers are waited for, rather than the end of a step
        self._late = False  # whether somebody gave up waiting for something
        self._state = AsyncState.DEFAULT
        self._crew = crew

    def _begin(self, call: str) -> None:
        """Checks that nothing else is under way."""
        if self.closed:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if self._state != AsyncState.DEFAULT:
            pending = str(self._state.value)
            raise AlreadyPendingCallError(
                f"Calling `{call}` while waiting for a pending call to `{pending}` to complete.",
                pending,
            )
        if self._late:  # what nobody waited for any more must not be taken for what is asked now
            self._collect(None)
            self._late = False
            if self._asked in WITH_ROWS:
                self._observe()

    def _command(self, method: str, args: dict[int, Any], kwargs: Any = None) -> None:
        """Gives an order, whose answers are then pending."""
        assert self._crew is not None
        self._rows = {}
        self._asked, self._by_pipe = method, True
        messages = []
        for handle in self._crew.handles:
            own = {index: args[index] for index in handle.env_ids if index in args}
            messages.append(cloudpickle.dumps((method, own, kwargs or {})))
        try:
            self._crew.command(messages)
            self._state = PENDING[method]
        except Failure as failure:
            self._fail(failure)
        except KeyboardInterrupt:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Kills the workers, as Ctrl-C struck where some know of an order and others do not.

        Likewise where an answer may be lost, for which somebody would wait for ever.
        """
        self._state = AsyncState.DEFAULT
        self._end(0.0)

    def _await(self, what: str, timeout: float | None) -> list[Any]:
        """Waits for what was asked for; gives the answers of all environments, if it was a call."""
        if self.closed:
            self._assert_is_running()
        if self._state.value != what:
            raise NoAsyncCallError(
                f"Calling `{what}_wait` without any prior call to `{what}_async`.", what
            )
        answers = self._collect(timeout)
        self._state = AsyncState.DEFAULT
        if answers is None:
            self._late = True
            raise multiprocessing.TimeoutError(
                f"The call to `{what}_wait` has timed out after {timeout} second(s)."
            )
        return answers

    def _collect(self, timeout: float | None) -> list[Any] | None:
        """Waits for the workers; None if that takes longer than `timeout` seconds."""
        crew = self._crew
        assert crew is not None
        try:
            if not self._by_pipe:
                return [] if self._finish_step(crew, timeout) else None
            answers = crew.wait_for_answers(-1.0 if timeout is None else max(timeout, 0.0))
            if answers is None:
                return None
            listed = [answer for part in answers for answer in part]
            if self._asked in WITH_ROWS:
                for rows in listed:
                    self._rows.update(rows)
        except Failure as failure:
            self._fail(failure)
        except KeyboardInterrupt:
            if self._by_pipe:
                self._give_up()
            raise
        return listed

    def _observe(self) -> Any:
        observations = self._batches.observations(self._rows, copy=self.copy)
        self.observations = self._batches.observation
        return observations

    def _finish_step(self, crew: Crew, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while crew.is_stepping:
            remaining = -1.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
            events = crew.poll(remaining, for_all=True)
            if not events and remaining == 0.0:
                return False
            try:
                for _, rows in crew.accept(events):
                    self._rows.update(rows or {})
            except KeyboardInterrupt:  # in the wait it does no harm, but rows may be lost here
                self._give_up()
                raise
        return True

    # ---- failures --------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> NoReturn:
        """Closes all and raises what went wrong; what the other workers raised is told too."""
        try:
            last = self._summed_up(failure)
        except KeyboardInterrupt:
            self._give_up()
            raise
        error, cause = last.error, last.cause
        try:
            raise error from cause
        finally:
            # The failure refers to the exception, and the exception to the failure: as its context,
            # and by its traceback, which keeps this frame. They would stay until a garbage
            # collection, and the shared memory with them.
            error.__context__ = None
            del error, cause, last, failure

    def _summed_up(self, failure: Failure) -> Failure:
        """Closes all, and gives the last failure, whose exception tells of the others."""
        died = isinstance(failure.error, WorkerDiedError)
        *others, last = [failure] if died else self._others(failure)
        self._state = AsyncState.DEFAULT
        if not died:
            _log([*others, last])
        if last.env_id >= 0:
            last.error.add_note(
                f"raised by environment {last.env_id} of {self.num_envs}, in a worker process"
            )
        others += self._end(0.0 if died else self._limit())
        pairs = [(other.env_id, other.error) for other in others]
        note_others(last.error, pairs, "closing the vector environment then")
        return last

    def _limit(self) -> float:
        return CLOSE_LIMIT if self.close_limit is None else self.close_limit

    def _end(self, timeout: float) -> list[Failure]:
        """Ends the workers, if it is open, and gives what went wrong meanwhile."""
        if self._crew is None or self.closed:
            return []
        self.closed = True
        return self._crew.close(timeout)

    def _others(self, first: Failure) -> list[Failure]:
        crew, failures = self._crew, [first]
        assert crew is not None
        deadline = time.monotonic() + GATHER_LIMIT
        crew.dismiss(first.worker)
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                if not self._by_pipe:
                    self._finish_step(crew, remaining)
                elif len(crew.handles) == crew.num_workers:  # else some were not started yet
                    crew.wait_for_answers(remaining)
                break
            except Failure as failure:
                # Its traceback would keep this frame, and so the crew and the failure itself.
                failures.append(failure.with_traceback(None))
                crew.dismiss(failure.worker)
        return failures

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, **kwargs: Any) -> None:
        """Closes the environments and ends the workers; does nothing the second time.

        Args:
            **kwargs: Those of `close_extras`.
        """
        if self._crew is None:
            super().close(**kwargs)
        elif not self.closed:
            self.closed = True
            self.close_extras(**kwargs)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the environments and ends the workers.

        Args:
            timeout: Seconds that the environments get to finish what they do and to close, before
                their workers are killed; None: `close_limit`.
            terminate: Kills the workers at once.

        Raises:
            Exception: What closing an environment raised.
        """
        if self._crew is None:
            return super().close_extras(timeout, terminate)
        pending, self._state = self._state, AsyncState.DEFAULT
        failures: list[Failure] = []
        try:
            if pending != AsyncState.DEFAULT:
                logger.warn(
                    f"Calling `close` while waiting for a pending call to `{pending.value}` to"
                    " complete."
                )
        finally:
            limit = self._limit() if timeout is None else timeout
            failures = self._crew.close(0.0 if terminate else limit)
        if failures:
            error = failures[0].error
            error.add_note("raised while the vector environment was closing")
            try:
                raise error
            finally:
                del error, failures  # as in `_fail`


def _log(failures: Sequence[Failure]) -> None:
    """Reports failures as AsyncVectorEnv does."""
    with contextlib.suppress(Warning):  # where warnings are errors, the exception itself tells all
        for failure in failures:
            name = failure.worker if failure.env_id < 0 else failure.env_id
            logger.error(f"Received the following error from Worker-{name} - Shutting it down")
            logger.error("%s", failure.text)
        logger.error("Raising the last exception back to the main process.")
