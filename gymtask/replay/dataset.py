"""Batches of windows, for a training loop or a torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from gymtask.config import raise_if_any, require_bool, require_int
from gymtask.errors import ConfigurationError
from gymtask.replay.buffer import ReplayBuffer
from gymtask.replay.pieces import Key, MultiReplaySamples, new_stream, window_problems
from gymtask.replay.sources import source_of

BatchT = TypeVar("BatchT")


class ReplayDataset(IterableDataset[TensorDict]):
    """Batches of windows, TensorDict [B, W], uniform over all `num_windows` windows of all pieces.

    With replacement each window is drawn anew: a batch may hold one twice, and more than there
    are. Without, each pass visits every window once, its last batch may be short, and `num_batches`
    takes as many passes as it needs. Every `iter` goes on with new random numbers. A batch is a
    copy that belongs to whoever takes it. Observations that were collected with `frame_stack` are
    shown as stacks, [B, W, frame_stack, *shape].

    A torch DataLoader must leave batches alone (its default takes them apart). Its workers share
    the rows where they are forked, draw different windows, and together give what one would::

        DataLoader(dataset, batch_size=None, num_workers=2, collate_fn=ReplayDataset.collate)

    Args:
        buffer: The pieces, or a ReplayBuffer: then a prioritised one draws by its priorities, and
            an iterator draws from what the buffer holds at that moment.
        clip_size: Window length W, in rows.
        stride: Gap between the rows of a window, in steps.
        batch_size: Windows a batch, B.
        replacement: Whether windows are drawn with replacement.
        num_batches: Batches of one iteration; None is endless with replacement, one pass without.
        shuffle: Without replacement: whether a pass has a random order, or that of the store.
        drop_last: Without replacement: whether a pass leaves out a last batch that is short.
        batch_keys: Keys to gather, tuples where nested, with all that lies below; None for all.
        seed: Seed of the draws; None takes one from torch's global generator.
        pin_memory: Whether batches lie in page-locked memory.

    Raises:
        ConfigurationError: An argument breaks its rule.
        WindowError: No piece is long enough for a window.
    """

    def __init__(
        self,
        buffer: MultiReplaySamples | ReplayBuffer,
        clip_size: int,
        stride: int,
        batch_size: int,
        replacement: bool = True,
        num_batches: int | None = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        batch_keys: Sequence[Key] | None = None,
        seed: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        problems = [
            *window_problems(clip_size, stride),
            *require_int("batch_size", batch_size, 1),
            *(() if num_batches is None else require_int("num_batches", num_batches, 1)),
            *(() if seed is None else require_int("seed", seed, 0)),
            *require_bool("replacement", replacement),
            *require_bool("shuffle", shuffle),
            *require_bool("drop_last", drop_last),
            *require_bool("pin_memory", pin_memory),
        ]
        if not isinstance(buffer, MultiReplaySamples | ReplayBuffer):
            rule = "must be MultiReplaySamples or a ReplayBuffer"
            problems.append(f"`buffer` {rule}, got {type(buffer).__name__}")
        if pin_memory is True and not torch.accelerator.is_available():
            problems.append("`pin_memory` must be False without an accelerator, got True")
        raise_if_any(problems)
        self._source = source_of(buffer, clip_size, stride, batch_keys)
        if drop_last and not replacement and batch_size > self.num_windows:
            rule = f"at most the number of windows ({self.num_windows}) with drop_last"
            raise ConfigurationError(f"`batch_size` must be {rule}, got {batch_size}")
        self._batch_size, self._drop_last = batch_size, drop_last
        self._replacement, self._shuffle, self._pin_memory = replacement, shuffle, pin_memory
        self._asked_batches = num_batches
        self._generator = new_stream(None, seed)
        self._before = self._generator.get_state()  # the current iteration
        self._num_given = self._num_skipped = 0

    @property
    def num_windows(self) -> int:
        """Windows that there are."""
        return self._source.num_windows

    @property
    def _pass_batches(self) -> int:
        more = 0 if self._drop_last else self._batch_size - 1
        return (self.num_windows + more) // self._batch_size

    @property
    def _num_batches(self) -> int | None:
        if self._replacement or self._asked_batches:
            return self._asked_batches
        return self._pass_batches

    def __len__(self) -> int:
        """Returns the number of batches of one iteration; without an end there is none."""
        if self._num_batches is None:
            raise TypeError("an endless ReplayDataset has no length (num_batches is None)")
        return self._num_batches

    @staticmethod
    def collate(batch: BatchT) -> BatchT:
        """Leaves a batch as it is; for a DataLoader's `collate_fn`."""
        return batch

    # ---- iterating -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDict]:
        self._before, skipped = self._generator.get_state(), self._num_skipped
        self._num_skipped, self._num_given = 0, skipped
        # A stream of its own, which does not depend on how far other iterators have been read.
        seed = int(new_stream(self._generator).initial_seed())
        worker = get_worker_info()
        first, step = 0, 1
        if worker is not None:
            # Workers are copies: what they share is new for each iteration of the loader.
            seed ^= worker.seed - worker.id
            first, step = worker.id, worker.num_workers
        choices = self._choices(new_stream(None, seed))
        return self._batches(islice(choices, skipped + first, self._num_batches, step), step)

    def _batches(self, choices: Iterator[Tensor], step: int) -> Iterator[TensorDict]:
        for windows in choices:
            self._num_given += step
            batch = self._source.read(windows)
            yield batch.pin_memory() if self._pin_memory else batch

    def _choices(self, stream: torch.Generator) -> Iterator[Tensor]:
        """Yields the windows of one batch after the other, int64 [B], endlessly."""
        while self._replacement:
            yield self._source.draw(self._batch_size, stream)
        while True:
            windows = self._source.all_windows()
            if self._shuffle:
                windows = windows[torch.randperm(len(windows), generator=stream)]
            yield from torch.split(windows, self._batch_size)[: self._pass_batches]

    # ---- saving, and sending to other processes --------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Torch sends the state of a generator in memory that is gone before it is read.
        return {**vars(self), "_generator": self._generator.get_state().numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._generator = torch.Generator()
        self._generator.set_state(torch.from_numpy(state["_generator"]))

    def state_dict(self) -> dict[str, Any]:
        """Where the current iteration is; with the buffer as it is now, it can go on from there.

        It counts batches that were taken from the newest iterator in this process, not what a
        DataLoader's workers have read ahead.
        """
        return {"generator": self._before, "num_batches": self._num_given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iteration go on where `state_dict` was called."""
        self._generator.set_state(state["generator"])
        self._num_skipped = int(state["num_batches"])
