"""The transitions that `replay.py` stores, tables of them by hand, and gymtask's ReplayBuffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

import gymtask

Array = NDArray[Any]
Values = dict[str, Array]  # by key, [rows, ...]

KEYS = (
    *("observation", "action", "next/observation", "next/reward"),
    *("next/terminated", "next/truncated", "next/done"),
)
IDS = ("trajectory_id", "step")  # which tell whose continuation a row is
BATCH, WIDTH = 256, 8  # windows, and rows of one
ALPHA, BETA = 0.6, 0.4  # of priorities
NUM_ENVS = 8
BLOCK, NUM_BLOCKS = 64, 256  # rows that are added before a draw, and how many different ones
NUM_PIECES = 512


class Rows:
    """The transitions; the first number of an observation tells which one it is.

    Attributes:
        capacity: Rows that fill a store; behind them are trajectories of `BLOCK` rows.
        lengths: Rows of each trajectory.
        values: By key, [number of rows, ...].
    """

    def __init__(self, capacity: int) -> None:
        random = np.random.default_rng(0)
        self.capacity, self.lengths, missing = capacity, list[int](), capacity
        while missing:
            self.lengths.append(min(int(random.integers(200, 1001)), missing))
            missing -= self.lengths[-1]
        self.lengths += [BLOCK] * NUM_BLOCKS
        count, last = sum(self.lengths), np.cumsum(self.lengths) - 1
        trajectory = np.repeat(np.arange(len(self.lengths)), self.lengths)
        # A trajectory has one observation more than rows, so its numbers follow no other's.
        self._numbers = np.arange(count) + trajectory
        observations = random.standard_normal((count + len(self.lengths), 17), np.float32)
        observations[:, 0] = np.arange(len(observations))  # exact below 2 ** 24
        done = np.zeros(count, bool)
        done[last] = True
        terminated = done & (random.random(count) < 0.5)
        self.values: Values = {
            "observation": observations[self._numbers],
            "action": random.standard_normal((count, 6), np.float32),
            "next/observation": observations[self._numbers + 1],
            "next/reward": random.standard_normal(count, np.float32),
            "next/terminated": terminated,
            "next/truncated": done & ~terminated,
            "next/done": done,
            "trajectory_id": trajectory,
            "step": np.arange(count) - (last + 1 - self.lengths)[trajectory],
        }

    def some(self, place: Any, keys: Sequence[str]) -> Values:
        """Some rows; those of a slice are not copied."""
        return {key: self.values[key][place] for key in keys}

    def trajectories(self, keys: Sequence[str], short: bool = False) -> Iterator[Values]:
        """Those that fill a store, or the short ones."""
        first = 0
        for length in self.lengths:
            if short == (first >= self.capacity):
                yield self.some(slice(first, first + length), keys)
            first += length

    def pieces(self, width: int, keys: Sequence[str]) -> Iterator[Values]:
        """The next rows of each of `NUM_ENVS` environments, so many of each, again and again."""
        share = self.capacity // NUM_ENVS
        for step in range(0, min(share - width + 1, NUM_PIECES * width), width):
            firsts = np.arange(NUM_ENVS)[:, None] * share + step
            yield self.some((firsts + np.arange(width)).ravel(), keys)

    def starts(self, width: int) -> Array:
        """The rows on which a window starts in a store that holds the first `capacity` rows."""
        numbers = self._numbers[: self.capacity]
        spans = numbers[width - 1 :] - numbers[: len(numbers) - width + 1]
        found: Array = np.flatnonzero(spans == width - 1)
        return found

    def check(self, batch: dict[str, Any], width: int, keys: set[str]) -> None:
        """Raises unless a batch has these keys, and holds windows of rows as they are."""
        if set(batch) != keys:
            raise ValueError(f"a batch has the keys {sorted(batch)}")
        shapes = {key: self.values[key].shape[1:] for key in keys}
        got = {key: np.asarray(batch[key]).reshape(-1, *shapes[key]) for key in keys}
        numbers = got["observation"][:, 0].astype(np.int64)
        places = self._numbers.searchsorted(numbers)
        for key, values in got.items():
            if not np.array_equal(values, self.values[key][places]):
                raise ValueError(f"{key} of a batch is not what the rows hold")
        if not (np.diff(numbers.reshape(BATCH, width)) == 1).all():
            raise ValueError("a window has rows that do not follow each other")


@dataclass(frozen=True)
class Work:
    """What a store is for.

    Attributes:
        rows: What it holds.
        folder: Where its files lie, if it has any; not there yet.
        width: Rows of a window.
        prioritized: Whether rows are drawn by priority.
        keys: What a row holds.
    """

    rows: Rows
    folder: Path
    width: int = 1
    prioritized: bool = False
    keys: tuple[str, ...] = KEYS


class Store:
    """A full store; rows are added and batches drawn. `how` says which of several ways."""

    needs: tuple[str, ...] = ()  # modules, see `Candidate`
    lacks: tuple[str, ...] = ()  # keys that its batches do not have
    finds_ends = True  # also of trajectories that were added later

    def __init__(self, work: Work, how: str = "") -> None:
        self.work, self.how, self.capacity = work, how, work.rows.capacity
        self.starts = work.rows.starts(work.width)
        self.random = np.random.default_rng(0)
        self.build()

    def build(self) -> None:
        """Makes it and fills it."""
        raise NotImplementedError

    def fill(self) -> None:
        for values in self.work.rows.trajectories(self.work.keys):
            self.extend(self.piece(values))

    def piece(self, values: Values) -> Any:
        """Rows as the library takes them; made before the clock runs."""
        return values

    def extend(self, piece: Any) -> None:
        raise NotImplementedError

    def windows(self) -> Array:
        """The rows of a batch, drawn by hand, int64 [B, W]."""
        drawn = self.starts[self.random.integers(len(self.starts), size=BATCH)]
        found: Array = drawn[:, None] + np.arange(self.work.width)
        return found

    def draw(self) -> Any:
        raise NotImplementedError

    def read(self, batch: Any) -> dict[str, Any]:
        """The values of a batch by key."""
        found: dict[str, Any] = batch
        return found

    def index(self, batch: Any) -> Any:
        """The rows of a batch that was drawn by priority."""
        return batch["index"]

    def weight(self, batch: Any) -> Any:
        """Their importance weights."""
        return batch["weight"]

    def prioritize(self, index: Any, priority: Array) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Raises unless a batch holds what it should."""
        read = self.read(self.draw())
        drawn = {key: read[key] for key in read if key in self.work.rows.values}
        self.work.rows.check(drawn, self.work.width, set(self.work.keys) - set(self.lacks))


class Tables(Store):
    """By hand: a table for each key, and starts from an array of all that fit at first."""

    finds_ends = False

    def build(self) -> None:
        self.is_numpy, self.at = self.how.startswith("numpy"), 0
        values = self.work.rows.some(slice(0, self.capacity), self.work.keys)
        self.tables: dict[str, Any] = {key: self._own(values[key]) for key in values}
        self.torch_starts = torch.from_numpy(self.starts)
        self.torch_steps = torch.arange(self.work.width)

    def _own(self, value: Array) -> Any:
        return value.copy() if self.is_numpy else torch.from_numpy(value).clone()

    def piece(self, values: Values) -> Any:
        return {key: self._own(value) for key, value in values.items()}

    def extend(self, piece: Any) -> None:
        count = len(piece["action"])
        start = self.at if self.at + count <= self.capacity else 0
        self.at = start + count
        for key, table in self.tables.items():
            table[start : self.at] = piece[key]

    def draw(self) -> Any:
        if self.is_numpy:
            index = self.windows()
            return {key: table.take(index, axis=0) for key, table in self.tables.items()}
        drawn = self.torch_starts[torch.randint(len(self.torch_starts), (BATCH,))]
        return self.gather(drawn[:, None] + self.torch_steps)

    def gather(self, index: Any) -> Any:
        if self.how == "torch fancy index":
            return {key: table[index] for key, table in self.tables.items()}
        rows = index.view(-1)
        return {
            key: table.index_select(0, rows).view(*index.shape, *table.shape[1:])
            for key, table in self.tables.items()
        }


class Packed(Tables):
    """By hand: a row in one table of float32, flags too; its keys are views of what is drawn."""

    def build(self) -> None:
        super().build()
        columns = [table.view(self.capacity, -1).float() for table in self.tables.values()]
        self.sizes = [column.shape[1] for column in columns]
        self.record, size = torch.cat(columns, 1), sum(self.sizes)
        self.tables = {}
        # Row r of this view is the window that starts on row r.
        shape = self.capacity - self.work.width + 1, self.work.width * size
        self.whole = self.record.as_strided(shape, (size, 1))

    def gather(self, index: Any) -> Any:
        drawn: Any
        if self.how == "one copy a window":
            drawn = self.whole.index_select(0, index[:, 0].contiguous())
        else:
            drawn = self.record.index_select(0, index.view(-1))
        parts = drawn.view(*index.shape, -1).split(self.sizes, dim=-1)
        return dict(zip(self.work.keys, parts, strict=True))


class Summed(Tables):
    """By hand: all priorities are summed up for each draw."""

    def build(self) -> None:
        super().build()
        self.priority = np.ones(self.capacity)

    def draw(self) -> Any:
        sums = self.priority.cumsum()
        index = sums.searchsorted(self.random.random(BATCH) * sums[-1], side="right")
        weight = self.priority[index] ** -BETA
        batch = {key: table.take(index, axis=0) for key, table in self.tables.items()}
        return {**batch, "index": index, "weight": weight / weight.max()}

    def prioritize(self, index: Any, priority: Array) -> None:
        self.priority[index] = priority**ALPHA


class Gymtask(Store):
    """gymtask's ReplayBuffer."""

    def build(self) -> None:
        storage = self.work.folder if self.how == "on disk" else "memory"
        order = gymtask.Prioritization(ALPHA, BETA) if self.work.prioritized else None
        self.buffer = gymtask.ReplayBuffer(self.capacity, storage, order)
        self.fill()

    def piece(self, values: Values) -> Any:
        return tensordict(values)

    def extend(self, piece: Any) -> None:
        self.buffer.extend(piece)

    def draw(self) -> Any:
        batch = self.buffer.sample(BATCH, self.work.width)
        return batch.contiguous() if self.how == "made contiguous" else batch

    def read(self, batch: Any) -> dict[str, Any]:
        return by_key(batch)

    def index(self, batch: Any) -> Any:
        return batch["index"].view(-1)

    def prioritize(self, index: Any, priority: Array) -> None:
        self.buffer.update_priorities(index, priority)


def tensordict(values: Values, own_axis: bool = False) -> TensorDict:
    """Rows as a TensorDict; with an axis of their own for single numbers, as TorchRL has it."""
    content: dict[str, Any] = {"next": {}}
    for key, value in values.items():
        target = content["next"] if key.startswith("next/") else content
        tensor = torch.from_numpy(value)
        alone = own_axis and tensor.ndim == 1
        target[key.removeprefix("next/")] = tensor.unsqueeze(-1) if alone else tensor
    return TensorDict(content, [len(values["action"])])


def by_key(batch: Any) -> dict[str, Any]:
    """The tensors of a TensorDict."""
    items = batch.items(include_nested=True, leaves_only=True)
    return {key if isinstance(key, str) else "/".join(key): value for key, value in items}
