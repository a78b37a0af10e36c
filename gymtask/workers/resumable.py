"""What a pool counts, and how it is taken up in another process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from gymtask.errors import ConfigurationError, PoolStateError
from gymtask.workers.layout import Array
from gymtask.workers.queue import StepQueue
from gymtask.workers.slots import Slots


class ResumableQueue(StepQueue):
    """Counts steps and episodes; `WorkerPool` explains the attributes."""

    slots: Slots

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(groups)
        self.run_step: Array = np.zeros(self.num_envs, np.int64)
        self.episode: Array = np.full(self.num_envs, -1, np.int64)
        self.memory: Any = None
        self.cursor = 0
        self.was_reset = self.records_starts = self.keeps_starts = False
        self.first_env, self.total_envs = 0, self.num_envs

    def state_dict(self) -> dict[str, Any]:
        """The counters of the run, as plain numbers and lists."""
        return {
            "run_step": self.run_step.tolist(),
            "episode": self.episode.tolist(),
            "cursor": self.cursor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on counting where another pool of the same run stood; before the first reset.

        Raises:
            ConfigurationError: The other pool had another number of environments.
            PoolStateError: This pool was reset already.
        """
        if self.was_reset:
            raise PoolStateError("cannot load counters after a reset; load them into a new pool")
        if len(state["run_step"]) != self.num_envs:
            raise ConfigurationError(
                f"`state` must be of a pool with {self.num_envs} environments, got one with"
                f" {len(state['run_step'])}"
            )
        self.run_step[:] = state["run_step"]
        self.episode[:] = state["episode"]
        self.cursor = int(state["cursor"])

    def record_starts(self, *, keep: bool = False) -> None:
        """From now on notes how each episode begins; to be called before the first reset.

        Args:
            keep: Whether that is kept when an episode ends, for `take_starts`.
        """
        self._on_all("record_starts", [(keep,)] * self.num_envs)
        self.records_starts, self.keeps_starts = True, keep

    def get_starts(self) -> list[dict[str, Any]]:
        """How the open episode of each environment began, N plain values."""
        return self._on_all("get_start", [()] * self.num_envs)

    def take_starts(self) -> list[list[dict[str, Any]]]:
        """How the episodes began that have ended since this was last asked, by environment."""
        return self._on_all("take_starts", [()] * self.num_envs)

    def restart(self, starts: Sequence[dict[str, Any]]) -> None:
        """Begins episodes as others began, of which `get_starts` told; the counters stay."""
        self.memory = None
        self._on_all("restart", [(start,) for start in starts])
        self.slots.infos[:] = [{} for _ in range(self.num_envs)]
        self.was_reset = True

    @abstractmethod
    def _on_all(
        self, method: str, args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Runs a method on every environment, with its own arguments, and gives the N results."""
