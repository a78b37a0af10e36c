"""Environments that run in this process, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymtask.workers.layout import Array, Space
from gymtask.workers.pool import Failures, WorkerPool
from gymtask.workers.slots import EnvironmentStepper, Slots
from gymtask.workers.worker import BaseEnvironmentWorker


class SyncPool(WorkerPool):
    """Runs all environments in the calling thread.

    Counts as one worker, whose rows arrive together.
    """

    def __init__(
        self,
        workers: Sequence[BaseEnvironmentWorker],
        observation_space: Space,
        action_space: Space,
    ) -> None:
        makers = {index: worker.maker for worker in workers for index in worker.env_ids}
        super().__init__(workers, Slots(observation_space, action_space, len(makers)))
        self._stepper = EnvironmentStepper(self.slots, makers)
        self._posted: list[int] = []
        try:
            self._stepper.make()
        except BaseException as error:
            self._fail(error, self._stepper.current)

    def _post(self, env_ids: Array) -> None:
        self._posted += self.all_listed if env_ids is self.all_ids else env_ids.tolist()

    def _wait(self, timeout: float, for_all: bool = False) -> None:
        if timeout <= 0.0:
            return  # nothing finishes by itself here: steps are made when somebody waits for them
        posted, self._posted = self._posted, []
        try:
            self._stepper.step_all(posted)
        except BaseException as error:  # Ctrl-C too: it leaves an environment within its step
            self._fail(error, self._stepper.current)
        self._ready += posted

    def _run(
        self, method: str, args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        try:
            return self._stepper.run(method, range(self.num_envs), args, kwargs or {})
        except BaseException as error:
            self._fail(error, self._stepper.current)

    def _close(self, timeout: float) -> Failures:
        self._stepper.close()
        return []
