"""When a run stops."""

from __future__ import annotations

import math
import time
from typing import Any

from gymtask.config import ReinforcementLearningTaskConfig
from gymtask.task import ReinforcementLearningTask, State
from gymtask.training.config import TrainerConfig, longest_piece, shortest_piece
from gymtask.training.ranks import Ranks
from gymtask.training.stopping import StopRequests

# The processes of a run agree on the highest of their numbers.
REASONS = (None, "max_steps", "max_seconds", "SIGINT", "SIGTERM")


class Limits:
    """The limits of a run and the requests to stop; all processes of a run come to one answer."""

    def __init__(
        self,
        config: TrainerConfig,
        task: ReinforcementLearningTask[Any, Any],
        requests: StopRequests,
        ranks: Ranks,
        total_envs: int,
    ) -> None:
        self._config, self._limits = config, task.config
        self._state: State = task.state
        self._requests, self._ranks, self._total_envs = requests, ranks, total_envs
        self.begin()

    def begin(self) -> None:
        """Starts the clock."""
        limit = self._limits.max_seconds
        # What the clock would have shown when this run, resumed parts included, began.
        self._began = time.monotonic() - self._state.elapsed_time
        self._deadline = math.inf if limit is None else self._began + limit

    @property
    def elapsed_time(self) -> float:
        """Seconds of training, over all resumed parts of the run."""
        return time.monotonic() - self._began

    def is_called_off(self) -> bool:
        """Whether this process is to stop at the next step; asked between any two steps."""
        return self._requests.signal is not None or time.monotonic() >= self._deadline

    def ends_epoch(self, is_over: bool) -> bool:
        """Whether an epoch does not go on: as one of the tasks says, or for a reason to stop."""
        return self._ranks.any(is_over or self._own_reason() is not None)

    def _own_reason(self) -> str | None:
        """Why this process would end an epoch."""
        reason = None
        if self._limits.max_steps is not None and self._state.num_steps >= self._limits.max_steps:
            reason = "max_steps"
        if self.is_called_off():
            reason = self._requests.signal or "max_seconds"
        return reason

    def reason(self, last_evaluation: float | None) -> str | None:
        """Why no other epoch is to begin; None where one is.

        Args:
            last_evaluation: Its mean return; None before there was one.
        """
        limits = self._limits
        reason = REASONS[self._ranks.largest(REASONS.index(self._own_reason()))]
        if reason is not None:
            return reason
        if limits.max_epochs is not None and self._state.num_epochs >= limits.max_epochs:
            return "max_epochs"
        target = self._config.target_return
        if target is not None and last_evaluation is not None and last_evaluation >= target:
            return "target_return"
        return None if self._is_enough_left(limits) else "max_samples"

    def _is_enough_left(self, limits: ReinforcementLearningTaskConfig) -> bool:
        wanted = self.num_wanted(self._config.sampling.num_epoch_samples)
        longest = longest_piece(self._config.sampling, self._total_envs, wanted)
        needed = shortest_piece(self._config.sampling, limits.dataset)
        return wanted >= self._ranks.size and (longest is None or longest >= needed)

    def num_wanted(self, number: int) -> int:
        """How many of so many samples of all processes are within max_samples."""
        limit = self._limits.max_samples
        return number if limit is None else min(number, limit - self._state.num_samples)
