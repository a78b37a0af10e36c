"""A store of transitions that lives across epochs, for off-policy training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from gymtask.config import raise_if_any, require_bool, require_int, require_number
from gymtask.errors import ConfigurationError
from gymtask.replay import saving
from gymtask.replay.incoming import Incoming, Trajectories
from gymtask.replay.pieces import Key, select, window_problems
from gymtask.replay.priorities import Prioritization, PriorityTree
from gymtask.replay.reading import Reading
from gymtask.replay.records import nested
from gymtask.replay.ring import Ring
from gymtask.replay.starts import Starts, Wanted
from gymtask.windows import window_span
from gymtask.workers.layout import Array


class ReplayBuffer:
    """The last `capacity` transitions, and windows of them.

    It is a ring: rows stand in the order in which they arrived, and each new one takes the place of
    the oldest. A row knows the row that follows it, so pieces of an episode that arrive one by one
    are one trajectory again, if they have the keys "trajectory_id" and "step". Windows, n-step
    rewards and frame stacks follow it, and end where it does. One observation is stored a row; that
    under "next" is the following row's, or lies in a side table where none follows::

        buffer = ReplayBuffer(1_000_000)
        while training:
            buffer.extend(task.collect_samples(model, pool, 8))
            batch = buffer.sample(256)                 # TensorDict [256, 1]
            windows = buffer.sample(32, clip_size=8)   # TensorDict [32, 8]

    Rows are kept, and given, on the CPU. A batch is the caller's own; its tensors are cut out of
    records and so not contiguous (`reshape` them where `view` would fail).

    Attributes:
        capacity: As the argument; likewise `prioritized`.
        beta: How far importance weights correct for priorities; begins as `prioritized` says.

    Args:
        capacity: Transitions that it holds at most.
        storage: "memory", or a directory, new or empty: rows then lie in files that are mapped into
            memory and may be larger than it.
        prioritized: Draws rows in proportion to priorities. Batches then hold "index" int64, which
            `update_priorities` takes, and "weight" float32, both [B, W].
        n_step: Up to how many rewards are summed up: ("next", "reward") of a row (float32, where
            integers or flags are stored) becomes the sum of gamma ** k · reward over it and the
            rows after it, fewer where the episode or what is there of it ends. All else under
            "next" is that of the last of these rows, and the value of its observation counts with
            the factor ("next", "discount"), float32, unless it is terminated.
        gamma: The discount factor of n-step rewards.
        frame_stack: Shows an observation as a stack of so many, [frame_stack, *shape], the newest
            last, an episode's first one repeated, as
            `gymnasium.wrappers.FrameStackObservation` does. Rows whose earlier frames are gone are
            not drawn.
        seed: Of the draws; None for another one each time.

    Raises:
        ConfigurationError: An argument breaks its rule.
    """

    def __init__(
        self,
        capacity: int,
        storage: str | os.PathLike[str] = "memory",
        prioritized: Prioritization | None = None,
        n_step: int = 1,
        *,
        gamma: float = 0.99,
        frame_stack: int | None = None,
        seed: int | None = None,
    ) -> None:
        problems = [
            *require_int("capacity", capacity, 1),
            *require_int("n_step", n_step, 1),
            *require_number("gamma", gamma),
            *(() if frame_stack is None else require_int("frame_stack", frame_stack, 1)),
            *(() if seed is None else require_int("seed", seed, 0)),
        ]
        if not isinstance(prioritized, Prioritization | None):
            rule = "must be a Prioritization or None"
            problems.append(f"`prioritized` {rule}, got {prioritized!r}")
        if not isinstance(storage, (str, os.PathLike)):
            problems.append(f'`storage` must be "memory" or a directory, got {storage!r}')
        raise_if_any(problems)
        self.capacity, self.prioritized = capacity, prioritized
        self.beta = 0.0 if prioritized is None else prioritized.beta
        self._ring = Ring(capacity, None if storage == "memory" else _new_folder(Path(storage)))
        self._reading = Reading(n_step, gamma, frame_stack)
        self._random = np.random.default_rng(seed)
        self._tree = None if prioritized is None else PriorityTree(capacity)
        self._largest = 1.0  # priority so far, which new rows get
        # What `sample` was last asked for: mostly it is the same the next time.
        self._asked: tuple[Any, ...] = ()
        self._wanted = Wanted(1)
        self._starts = Starts(self._ring.links, self._tree, self._reading.history)

    def __len__(self) -> int:
        """Transitions that it holds."""
        return len(self._ring.links)

    def __repr__(self) -> str:
        where = self._ring.folder or "memory"
        return f"ReplayBuffer({len(self)} of {self.capacity} transitions, in {where})"

    @property
    def frame_stack(self) -> int | None:
        """Frames of which an observation is shown as a stack, as the argument."""
        return self._reading.frame_stack

    @property
    def num_added(self) -> int:
        """Transitions that were ever added."""
        return self._ring.links.num_added

    def extend(self, trajectories: Trajectories) -> None:
        """Adds rows; the oldest ones make room.

        Args:
            trajectories: What `collect_samples` gave, a TensorDict [T] with rows in order of time,
                or a list of those. A row leads to the next one of its trajectory unless it is
                terminated or truncated ("done"), or the keys "trajectory_id", "step" or "is_init"
                say otherwise.

        Raises:
            ConfigurationError: A trajectory has more rows than `capacity`, or other keys, shapes or
                dtypes than those stored before, or no ("next", "reward") to sum up. Nothing is
                added.
            ReplayError: The disk is full. Nothing is added.
        """
        incoming = Incoming(trajectories)
        if self._reading.n_step > 1 and incoming.pieces:
            incoming.require_rewards()
        for rows in self._ring.extend(incoming) if incoming.pieces else ():
            if self._tree is not None:
                self._tree.set(rows, self._weight(self._largest))

    # ---- sampling --------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int,
        clip_size: int = 1,
        stride: int = 1,
        *,
        pad: bool = False,
        start_at_episode_start: bool = False,
    ) -> TensorDict:
        """Draws windows, each as likely as any other, or by the priority of its first row.

        Args:
            batch_size: Windows, B.
            clip_size: Rows of a window, W.
            stride: Steps between them.
            pad: Whether what is there of a trajectory that is too short for a window is one, too,
                with zeros behind it; "mask", bool [B, W], is True for real rows.
            start_at_episode_start: Whether only windows are drawn that begin with an episode.

        Returns:
            TensorDict [B, W] of all keys that were stored.

        Raises:
            ConfigurationError: An argument breaks its rule.
            WindowError: There is no such window.
        """
        asked = (batch_size, clip_size, stride, pad, start_at_episode_start)
        if asked != self._asked or type(batch_size) is not int:  # 4.0 is equal to 4
            self._ask(*asked)
        rows = self._starts.draw(batch_size, self._wanted, self._random)
        return self._read(rows, clip_size, stride, pad)

    def _read(
        self,
        rows: Array,
        clip_size: int,
        stride: int,
        pad: bool = False,
        keys: Sequence[Key] | None = None,
    ) -> TensorDict:
        """The windows that start on these rows."""
        links = self._ring.links
        reader = self._ring.reader(self._reading, None if keys is None else _paths(keys))
        windows, offsets = rows[:, None], range(0, clip_size * stride, stride)
        consecutive = not pad and (stride == 1 or clip_size == 1)
        lie_whole = consecutive and clip_size > 1 and reader.lie_whole(rows, clip_size)
        if lie_whole and self._tree is None:
            return reader.read_whole(rows, clip_size)
        if clip_size > 1:
            windows = links.follow(rows, offsets, clamp=pad)
        more = None if self._tree is None else self._weights(windows)
        if lie_whole:
            return reader.read_whole(rows, clip_size, more)
        mask = links.num_after(rows)[:, None] >= np.asarray(offsets) if pad else None
        return reader.read(windows, consecutive=consecutive, mask=mask, more=more)

    # ---- what a ReplayDataset asks for: windows by the arrival of their first rows ---------------

    def windows(self, clip_size: int, stride: int) -> Array:
        """All windows in order of arrival, each told by the number of its first row, int64.

        Raises:
            WindowError: There is none.
        """
        return self._numbers(self._starts.all(Wanted(window_span(clip_size, stride))))

    def draw(self, count: int, clip_size: int, stride: int, random: np.random.Generator) -> Array:
        """Some windows, each drawn anew as `sample` draws them, int64 [count]."""
        wanted = Wanted(window_span(clip_size, stride))
        return self._numbers(self._starts.draw(count, wanted, random))

    def read(
        self, windows: Array, clip_size: int, stride: int, keys: Sequence[Key] | None = None
    ) -> TensorDict:
        """The rows of such windows, TensorDict [B, W], as `sample` gives them."""
        return self._read(windows % self.capacity, clip_size, stride, keys=keys)

    def check_keys(self, keys: Sequence[Key]) -> None:
        """Checks that some keys are stored.

        Raises:
            ConfigurationError: One is not.
        """
        layout = self._ring.layout
        kinds = {} if layout is None else layout.accepted
        rows = {path: torch.empty(0, *shape, dtype=dtype) for path, (dtype, shape) in kinds.items()}
        select(nested(rows, [0]), keys)

    def _numbers(self, rows: Array) -> Array:
        """The arrival numbers of rows: number n lies at n % capacity."""
        newest = self.num_added - 1
        numbers: Array = newest - (newest - rows) % self.capacity
        return numbers

    def _ask(self, batch_size: int, clip_size: int, stride: int, pad: bool, at_start: bool) -> None:
        raise_if_any(
            [
                *require_int("batch_size", batch_size, 1),
                *window_problems(clip_size, stride),
                *require_bool("pad", pad),
                *require_bool("start_at_episode_start", at_start),
            ]
        )
        self._wanted = Wanted(window_span(clip_size, stride), pad, at_start)
        self._asked = (batch_size, clip_size, stride, pad, at_start)

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all of it, draws and priorities included, to a folder.

        A folder that holds a saved buffer is replaced once the new one is whole. Rows that lie in
        files are copied.

        Raises:
            ReplayError: The disk is full or cannot be written, or something else lies there.
        """
        saving.save(self, Path(path))

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], storage: str | os.PathLike[str] = "memory"
    ) -> ReplayBuffer:
        """Reads what `save` wrote; the buffer goes on bit for bit as the saved one would.

        Args:
            path: The folder.
            storage: Where the rows are to lie, as when a buffer is made.

        Raises:
            ReplayError: It is missing, damaged, or of another version.
        """
        return saving.load(cls, Path(path), storage)

    # ---- priorities ------------------------------------------------------------------------------

    def update_priorities(self, index: Tensor | Array, priority: Tensor | Array) -> None:
        """Sets priorities of rows; of rows that were overwritten meanwhile nothing is changed.

        Args:
            index: int64, what a batch held under "index", of all its rows or some; a window is
                drawn by the priority of its first row, `batch["index"][:, 0]`.
            priority: Of the same shape; finite and at least 0, absolute TD errors for example.

        Raises:
            ConfigurationError: The buffer is not prioritised, or an argument breaks its rule.
        """
        if self._tree is None:
            raise ConfigurationError(
                "`prioritized` must be set for priorities, got None; make the buffer with"
                " ReplayBuffer(..., prioritized=Prioritization())"
            )
        numbers, values = _flat(index), np.asarray(_flat(priority), np.float64)
        if numbers.shape != values.shape or numbers.dtype.kind not in "iu":
            raise ConfigurationError(
                "`index` and `priority` must have one shape, and `index` integers, got"
                f" {numbers.dtype} {list(np.shape(index))} and {list(np.shape(priority))}"
            )
        if not len(numbers):
            return
        largest = float(values.max())  # NaN if one is
        if not 0.0 <= values.min() <= largest < np.inf:
            raise ConfigurationError("`priority` must be finite and at least 0, got other values")
        first, last, oldest = numbers.min(), numbers.max(), self.num_added - len(self)
        if not 0 <= first <= last < self.num_added:
            raise ConfigurationError(
                f"`index` must lie in 0 to {self.num_added - 1}, got {first} to {last}"
            )
        self._largest = max(self._largest, largest)
        if first < oldest:
            numbers, values = numbers[numbers >= oldest], values[numbers >= oldest]
        self._tree.set(numbers % self.capacity, self._weight(values))

    def _weight(self, priority: Any) -> Any:
        assert self.prioritized is not None
        return (priority + self.prioritized.epsilon) ** self.prioritized.alpha

    def _weights(self, windows: Array) -> dict[tuple[str, ...], Array]:
        assert self._tree is not None
        weights = self._tree.weights[windows[:, :1]]
        # (n · probability) ** -beta over the largest of the batch: all but the weights cancel out.
        relative = np.empty(windows.shape, np.float32)
        relative[:] = (weights / weights.min()) ** -self.beta
        return {("index",): self._numbers(windows), ("weight",): relative}


def _paths(keys: Sequence[Key]) -> list[tuple[str, ...]]:
    return [(key,) if isinstance(key, str) else tuple(key) for key in keys]


def _flat(values: Any) -> Array:
    array: Array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    return array.reshape(-1)


def _new_folder(path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigurationError(
            f'`storage` must be "memory", or a directory that is new or empty, got {str(path)!r};'
            " ReplayBuffer.load() reads what save() wrote; rows that an ended program left can be"
            " deleted"
        )
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()
