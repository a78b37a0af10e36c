"""The replay buffer of an off-policy run: what joins it, and what is saved of it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from gymtask.errors import CheckpointError, ConfigurationError, HookError, ReplayError, WindowError
from gymtask.replay import MultiReplaySamples, ReplayBuffer
from gymtask.replay.saving import load_into
from gymtask.task import ReinforcementLearningTask

COLLECTED = "collected.txt"  # how many rows were collected for the buffer

logger = logging.getLogger(__name__)


class Replay:
    """The task's replay buffer, and how many of its rows are collected before any training.

    Args:
        task: Makes the buffer, which becomes its `replay_buffer`.
        num_warmup_samples: Rows that this process collects before the first update.
        longest_piece: Rows of the longest piece of a collection; None where nothing limits it.
        rank: Which process this is.

    Raises:
        HookError: `get_replay_buffer` returned something else.
        ConfigurationError: The buffer is smaller than a piece.
    """

    def __init__(
        self,
        task: ReinforcementLearningTask[Any, Any],
        num_warmup_samples: int,
        longest_piece: int | None,
        rank: int,
    ) -> None:
        buffer = task.get_replay_buffer()
        if not isinstance(buffer, ReplayBuffer):
            raise HookError(
                f"`get_replay_buffer` must return a gymtask.ReplayBuffer, got {buffer!r:.80}"
            )
        stack = task.get_environment_cached().maker.frame_stack
        if buffer.frame_stack != stack:
            raise ConfigurationError(
                f"`frame_stack` of the replay buffer must be that of the environment, {stack}, got"
                f" {buffer.frame_stack}: the policy would be trained on other observations than it"
                " sees"
            )
        if longest_piece is not None and longest_piece > buffer.capacity:
            raise ConfigurationError(
                "`dataset.replay_buffer_sample_size` must be at least the rows of the longest piece"
                f" that a collection gives ({longest_piece}), got {buffer.capacity}"
            )
        if num_warmup_samples > buffer.capacity:
            raise ConfigurationError(
                "`sampling.num_warmup_samples` must be at most the capacity of the replay buffer"
                f" ({buffer.capacity}, dataset.replay_buffer_sample_size), got {num_warmup_samples}"
            )
        self._task, self._num_warmup_samples = task, num_warmup_samples
        self._folder = f"replay-{rank}"  # in a checkpoint
        self.is_restored = self._has_warned = False
        self._num_collected = 0
        self.buffer = task.replay_buffer = buffer

    @property
    def num_missing(self) -> int:
        """Rows that this process is to collect before there is training."""
        return max(0, self._num_warmup_samples - self._num_collected)

    def add(self, samples: MultiReplaySamples) -> None:
        """Adds rows; of an episode that is longer than the buffer the last ones."""
        # Not all of them are in the buffer, where short pieces are left out.
        self._num_collected += samples.num_transitions + samples.num_dropped
        capacity = self.buffer.capacity
        if max(samples.lengths, default=0) <= capacity:
            self.buffer.extend(samples)
            return
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "an episode of %d rows is longer than the replay buffer (%d rows), which gets the"
                " last ones; set dataset.replay_buffer_sample_size higher",
                max(samples.lengths),
                capacity,
            )
        self.buffer.extend([piece.samples[-capacity:] for piece in samples])

    def dataset(self, samples: MultiReplaySamples) -> IterableDataset[Any]:
        """Adds an epoch's samples, and gives its batches, of all that is there.

        Raises:
            WindowError: No trajectory holds a window.
        """
        self.add(samples)
        try:
            return self._task.build_rl_dataset(self.buffer)
        except WindowError as error:
            error.add_note(
                f"the replay buffer has {len(self.buffer)} transitions; let more be collected"
                f" before the first update (sampling.num_warmup_samples, now"
                f" {self._num_warmup_samples})"
            )
            raise

    # ---- in checkpoints --------------------------------------------------------------------------

    def save(self, folder: Path, *, is_awaited: bool = False) -> None:
        """Writes it into a checkpoint that is being written.

        Args:
            folder: Of the checkpoint.
            is_awaited: Whether somebody waits for the run to end, and is told what it waits for.

        Raises:
            ReplayError: The disk is full, or cannot be written.
        """
        began, number = time.monotonic(), len(self.buffer)
        level = logging.WARNING if is_awaited else logging.INFO
        if is_awaited:
            logger.log(level, "writing %d transitions of replay, which may take a while", number)
        path = folder / self._folder
        self.buffer.save(path)
        (path / COLLECTED).write_text(str(self._num_collected))
        seconds = time.monotonic() - began
        megabytes = sum(each.stat().st_size for each in path.rglob("*") if each.is_file()) / 1e6
        message = "wrote %d transitions of replay (%.1f MB) in %.1f s"
        logger.log(level, message, number, megabytes, seconds)

    def restore(self, folder: Path) -> None:
        """Takes it up from a checkpoint.

        Raises:
            CheckpointError: It was saved and cannot be read, or is another one; or it is gone, as a
                later checkpoint was written.
        """
        saved = folder / self._folder
        if not saved.exists():
            logger.warning(
                "%s has no replay (it is kept with the newest checkpoint, and with"
                " checkpoint_replay=True); the buffer begins empty, and is filled with"
                " num_warmup_samples=%d rows of the policy's before training goes on",
                folder,
                self._num_warmup_samples,
            )
            return
        try:
            load_into(self.buffer, saved)
            self._num_collected = int((saved / COLLECTED).read_text())
            self.is_restored = True
        except (ReplayError, OSError, ValueError) as error:
            raise CheckpointError(f"cannot take up the replay of {folder}: {error}") from error
