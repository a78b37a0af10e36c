"""The keywords of `iter_samples` and `collect_samples`, checked together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gymtask.config import (
    raise_if_any,
    require_bool,
    require_choice,
    require_int,
    require_number,
)


@dataclass(frozen=True)
class CollectOptions:
    """The keywords of `iter_samples` and `collect_samples`, which explain them."""

    total_samples: int | None = None
    min_trajectory_length: int = 1
    max_trajectory_length: int | None = None
    min_batch_size: int = 1
    max_batch_size: int | None = None
    max_wait_time: float | None = None
    optimal: bool = False
    use_tqdm: bool = True
    allocation: str = "equal"
    whole_episodes: bool = False
    random_actions: bool = False

    def check(self, num_envs: int) -> None:
        """Checks all values together.

        Raises:
            ConfigurationError: Names each value that breaks its rule.
        """
        raise_if_any([*self._problems(), *self._joint_problems(num_envs)])

    def _problems(self) -> Iterator[str]:
        if self.total_samples is not None:
            yield from require_int("total_samples", self.total_samples, 1)
        yield from require_int("min_trajectory_length", self.min_trajectory_length, 1)
        if self.max_trajectory_length is not None:
            yield from require_int("max_trajectory_length", self.max_trajectory_length, 1)
        yield from require_int("min_batch_size", self.min_batch_size, 1)
        if self.max_batch_size is not None:
            yield from require_int("max_batch_size", self.max_batch_size, 1)
        if self.max_wait_time is not None:
            yield from require_number("max_wait_time", self.max_wait_time)
        for flag in ("optimal", "use_tqdm", "whole_episodes", "random_actions"):
            yield from require_bool(flag, getattr(self, flag))
        yield from require_choice("allocation", self.allocation, ("equal", "first_come"))

    def _joint_problems(self, num_envs: int) -> Iterator[str]:
        if list(self._problems()):
            return
        if self.min_batch_size > num_envs:
            yield (
                f"`min_batch_size` must be at most the number of environments ({num_envs}), got"
                f" {self.min_batch_size}"
            )
        if self.max_batch_size is not None and self.min_batch_size > self.max_batch_size:
            yield (
                f"`min_batch_size` must be at most max_batch_size ({self.max_batch_size}), got"
                f" {self.min_batch_size}"
            )
        longest = self.max_trajectory_length
        if longest is not None and self.min_trajectory_length > longest:
            yield (
                f"`min_trajectory_length` must be at most max_trajectory_length ({longest}), "
                f"got {self.min_trajectory_length}"
            )
        if self.whole_episodes and longest is not None:
            yield (
                "`max_trajectory_length` must be None with whole_episodes=True (nothing is cut),"
                f" got {longest}"
            )
        if self.whole_episodes and self.total_samples is None:
            yield "`total_samples` must be set with whole_episodes=True, got None"
