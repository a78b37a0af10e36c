"""Pieces of trajectories, and the windows of rows that training draws from them.

A *piece* is a run of consecutive rows of one trajectory: an episode, or a part of one that was
cut. A *window* is `clip_size` (W) rows of one piece, neighbours `stride` steps apart. It spans
(W - 1) * stride + 1 rows, and all of them must lie in the piece: a piece of L rows holds
L - span + 1 windows, or none. With W = 3 and stride = 2 the span is 5, and 7 rows hold 3 windows:

    row of the piece       0   1   2   3   4   5   6
    window that starts: 0  x   .   x   .   x
                        1      x   .   x   .   x
                        2          x   .   x   .   x

Pieces lie end to end in one store. Three of 4 rows, and the windows with W = 3 and stride = 1:

    row of the store       0   1   2   3 | 4   5   6   7 | 8   9  10  11
    a window starts        ^   ^         | ^   ^         | ^   ^

The starts are computed once. A batch is then a draw of them, each as likely as any other (windows
are, not pieces: a long one holds more), plain arithmetic for the rows, and one gather per key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, overload

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from gymtask.config import raise_if_any, require_bool, require_int
from gymtask.errors import ConfigurationError, WindowError
from gymtask.windows import window_rows, window_span, window_starts

__all__ = ["EpisodeRecord", "MultiReplaySamples", "ReplayDataset", "ReplaySamples"]

Key = str | tuple[str, ...]  # of a TensorDict; a tuple for a nested one
Leaves = dict[Key, Any]  # by flat key: a Tensor, or tensordict's own container of non-tensor data


@dataclass(frozen=True)
class EpisodeRecord:
    """An episode that ended, all of it; `episode_return` is the float64 sum of its rewards."""

    trajectory_id: int
    env_id: int
    episode_return: float
    length: int
    terminated: bool
    truncated: bool


def _leaves(samples: TensorDictBase) -> Leaves:
    return dict(samples.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor))


def _select(store: TensorDict, keys: Sequence[Key]) -> Leaves:
    if isinstance(keys, str) or not keys:
        raise ConfigurationError(f"`batch_keys` must be a list of keys, got {keys!r}")
    known = list(store.keys(include_nested=True))
    chosen: Leaves = {}
    for key in keys:
        if key not in known:
            raise ConfigurationError(f"`batch_keys` must be among {known}, got {key!r}")
        chosen |= _leaves(store.select(key))
    return chosen


def _gather(leaves: Leaves, rows: Tensor, device: torch.device | None) -> TensorDict:
    """Copies the given rows of every leaf; the batch shape is that of `rows`, int64."""
    gathered: Leaves = {}
    flat = rows.flatten()  # index_select takes one dimension, and is faster than leaf[rows]
    for key, leaf in leaves.items():
        if isinstance(leaf, Tensor):
            flat = flat.to(leaf.device)  # a copy only where the device changes
            gathered[key] = leaf.index_select(0, flat).view(*rows.shape, *leaf.shape[1:])
        else:
            gathered[key] = leaf[rows]
    return TensorDict(gathered, batch_size=rows.shape, device=device)


def _join(pieces: Sequence[TensorDictBase]) -> TensorDict:
    """Copies pieces of one layout end to end; values only, for no gradient flows into a store."""
    columns = [_leaves(piece) for piece in pieces]
    first = columns[0] if columns else {}
    layout = [_layout(leaf) for leaf in first.values()]
    for number, leaves in enumerate(columns):
        # Thousands of short pieces are common: the words are looked for only where they may differ.
        if leaves.keys() != first.keys() or [_layout(leaf) for leaf in leaves.values()] != layout:
            raise_if_any(list(_layout_problems(number, leaves, first)))
    with torch.no_grad():
        joined = {key: torch.cat([leaves[key] for leaves in columns]) for key in first}
    return TensorDict(joined, [sum(map(len, pieces))], device=pieces[0].device if pieces else None)


def _layout(leaf: object) -> tuple[object, ...]:
    return (leaf.dtype, leaf.shape[1:], leaf.device) if isinstance(leaf, Tensor) else ()


def _describe(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} [{', '.join(['T', *map(str, leaf.shape[1:])])}] on {leaf.device}"
    return "absent" if leaf is None else "non-tensor data"


def _layout_problems(number: int, leaves: Leaves, first: Leaves) -> Iterator[str]:
    for key in {**first, **leaves}:
        rule, got = _describe(first.get(key)), _describe(leaves.get(key))
        if got != rule:
            yield f"`samples[{number}].get({key!r})` must be {rule} as in samples[0], got {got}"


def _piece_problems(name: str, samples: object) -> Iterator[str]:
    if not isinstance(samples, TensorDictBase):
        yield f"`{name}` must be a TensorDict of batch shape [T], got {type(samples).__name__}"
    elif samples.batch_dims != 1 or len(samples) == 0:
        yield f"`{name}` must have a batch shape [T], T above 0, got {list(samples.batch_size)}"


def _window_problems(clip_size: object, stride: object) -> Iterator[str]:
    yield from require_int("clip_size", clip_size, 1)
    yield from require_int("stride", stride, 1)


def _require_window(lengths: Sequence[int], clip_size: int, stride: int) -> None:
    if not lengths:
        raise WindowError("no trajectory to take a window from: there is no piece")
    if max(lengths) < (span := window_span(clip_size, stride)):
        raise WindowError(
            f"no trajectory is long enough for a window of {span} rows (clip_size {clip_size}, "
            f"stride {stride}): the longest of {len(lengths)} has {max(lengths)}"
        )


def _stream(parent: torch.Generator | None, seed: int | None = None) -> torch.Generator:
    drawn = torch.randint(2**63 - 1, (), generator=parent) if seed is None else seed
    return torch.Generator().manual_seed(int(drawn) % 2**64)  # torch takes no more than 64 bits


class ReplaySamples:
    """One piece of a trajectory.

    Args:
        samples: The rows in order of time, TensorDict [T]; the attribute of that name is no copy.

    Raises:
        ConfigurationError: `samples` is no TensorDict, has another batch shape, or has no row.
    """

    def __init__(self, samples: TensorDictBase) -> None:
        raise_if_any(list(_piece_problems("samples", samples)))
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | slice) -> TensorDictBase:
        """Returns one row, TensorDict [], or several, TensorDict [n]; a view in both cases."""
        return self.samples[index]

    def __iter__(self) -> Iterator[TensorDictBase]:
        return iter(self.samples)

    def sample(self, clip_size: int, stride: int = 1, only_last: bool = False) -> TensorDict:
        """Copies one window [W], drawn uniformly with torch's global generator.

        Args:
            clip_size: Window length W, in rows.
            stride: Gap between the rows of the window, in steps.
            only_last: Take the window that ends on the last row, not a random one.

        Raises:
            ConfigurationError: An argument breaks its rule.
            WindowError: The piece is shorter than a window.
        """
        raise_if_any([*_window_problems(clip_size, stride), *require_bool("only_last", only_last)])
        _require_window([len(self)], clip_size, stride)
        last = len(self) - window_span(clip_size, stride)
        start = torch.tensor(last) if only_last else torch.randint(last + 1, ())
        rows = window_rows(start, clip_size, stride)
        return _gather(_leaves(self.samples), rows, self.samples.device)


class MultiReplaySamples:
    """Many pieces, end to end in one store.

    The store is a copy of what was given (of non-tensor data, a reference). Its pieces, the list
    `samples`, are views and locked: values can be changed in place, in the store too; a key cannot
    be added, for the store would not get it. `num_transitions` is the number of all rows.

    Args:
        samples: The pieces, each a TensorDict [T] or a `ReplaySamples`, all with the same keys, and
            each key with the same dtype, device and shape after T. There may be none.
        num_dropped: Rows that were collected and left out, since their piece was too short.
        episodes: The episodes that ended in the collection; the attribute is a list.

    Raises:
        ConfigurationError: An argument breaks its rule; a piece is unlike the first one.
    """

    def __init__(
        self,
        samples: Iterable[TensorDictBase | ReplaySamples],
        *,
        num_dropped: int = 0,
        episodes: Iterable[EpisodeRecord] = (),
    ) -> None:
        raise_if_any(list(require_int("num_dropped", num_dropped, 0)))
        pieces = [piece.samples if isinstance(piece, ReplaySamples) else piece for piece in samples]
        for number, piece in enumerate(pieces):
            raise_if_any(list(_piece_problems(f"samples[{number}]", piece)))
        self._set(_join(pieces), [len(piece) for piece in pieces], num_dropped, episodes)

    @classmethod
    def from_rows(
        cls,
        rows: TensorDict,
        lengths: Sequence[int],
        *,
        num_dropped: int = 0,
        episodes: Iterable[EpisodeRecord] = (),
    ) -> MultiReplaySamples:
        """The same from rows [sum T] that lie end to end: they become the store, uncopied."""
        if sum(lengths) != len(rows) or min(lengths, default=1) < 1:
            raise ConfigurationError(
                f"`lengths` must be positive and add up to the {len(rows)} rows, got {lengths}"
            )
        samples = cls.__new__(cls)
        samples._set(rows, lengths, num_dropped, episodes)
        return samples

    def _set(
        self,
        store: TensorDict,
        lengths: Sequence[int],
        num_dropped: int,
        episodes: Iterable[EpisodeRecord],
    ) -> None:
        self._store = store
        self._lengths = torch.tensor(lengths, dtype=torch.int64)
        self.num_transitions = len(store)
        self.num_dropped = num_dropped
        self.episodes = list(episodes)

    @cached_property
    def samples(self) -> list[ReplaySamples]:
        """The pieces, in the order given; made when first asked for, as few readers need them."""
        return [ReplaySamples(v.lock_()) for v in self._store.split(self._lengths.tolist())]

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, index: int) -> ReplaySamples: ...
    @overload
    def __getitem__(self, index: slice) -> MultiReplaySamples: ...
    def __getitem__(self, index: int | slice) -> ReplaySamples | MultiReplaySamples:
        """Returns a piece; or a copy of those of a slice, without `num_dropped` and `episodes`."""
        pieces = self.samples[index]
        return MultiReplaySamples(pieces) if isinstance(pieces, list) else pieces

    def __iter__(self) -> Iterator[ReplaySamples]:
        return iter(self.samples)

    def partition(self, rank: int, world_size: int) -> MultiReplaySamples:
        """Returns one process's share: a copy of pieces rank, rank + world_size, and so on.

        Raises:
            ConfigurationError: `world_size` is below 1, or `rank` outside [0, world_size).
        """
        raise_if_any([*require_int("rank", rank, 0), *require_int("world_size", world_size, 1)])
        if rank >= world_size:
            raise ConfigurationError(f"`rank` must be below world_size ({world_size}), got {rank}")
        return self[rank::world_size]

    def sample(self, clip_size: int, stride: int = 1, only_last: bool = False) -> list[TensorDict]:
        """Copies a window [W] of each piece that holds one, as `ReplaySamples.sample` does.

        Raises:
            ConfigurationError: An argument breaks its rule.
            WindowError: No piece holds a window.
        """
        raise_if_any([*_window_problems(clip_size, stride), *require_bool("only_last", only_last)])
        _require_window(self._lengths.tolist(), clip_size, stride)
        fitting = [piece for piece in self.samples if len(piece) >= window_span(clip_size, stride)]
        return [piece.sample(clip_size, stride, only_last) for piece in fitting]

    def to_tensordict(self) -> TensorDict:
        """Returns a copy of all rows [sum T], with ("next", "end"): True on each piece's last."""
        flat: TensorDict = self._store.clone()
        end = torch.zeros(len(flat), dtype=torch.bool)
        end[self._lengths.cumsum(0) - 1] = True
        tensors = (leaf for leaf in _leaves(flat).values() if isinstance(leaf, Tensor))
        flat["next", "end"] = end.to(next(tensors, end).device)
        return flat


class ReplayDataset(IterableDataset[TensorDict]):
    """Batches of windows, TensorDict [B, W], uniform over all `num_windows` windows of all pieces.

    With replacement each window is drawn anew: a batch may hold one twice, and more than there
    are. Without, each pass visits every window once, its last batch may be short, and `num_batches`
    takes as many passes as it needs. Every `iter` goes on with new random numbers. A batch is a
    copy that belongs to whoever takes it. A torch DataLoader must leave it alone (its default takes
    it apart): `DataLoader(dataset, batch_size=None, collate_fn=lambda batch: batch)`.

    Args:
        buffer: The pieces.
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
        buffer: MultiReplaySamples,
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
            *_window_problems(clip_size, stride),
            *require_int("batch_size", batch_size, 1),
            *(() if num_batches is None else require_int("num_batches", num_batches, 1)),
            *(() if seed is None else require_int("seed", seed, 0)),
            *require_bool("replacement", replacement),
            *require_bool("shuffle", shuffle),
            *require_bool("drop_last", drop_last),
            *require_bool("pin_memory", pin_memory),
        ]
        if not isinstance(buffer, MultiReplaySamples):
            problems.append(f"`buffer` must be MultiReplaySamples, got {type(buffer).__name__}")
        if pin_memory is True and not torch.accelerator.is_available():
            problems.append("`pin_memory` must be False without an accelerator, got True")
        raise_if_any(problems)
        _require_window(buffer._lengths.tolist(), clip_size, stride)
        self._starts = window_starts(buffer._lengths, clip_size, stride)
        self.num_windows = len(self._starts)
        if drop_last and not replacement and batch_size > self.num_windows:
            rule = f"at most the number of windows ({self.num_windows}) with drop_last"
            raise ConfigurationError(f"`batch_size` must be {rule}, got {batch_size}")
        store = buffer._store
        self._leaves = _leaves(store) if batch_keys is None else _select(store, batch_keys)
        self._device = store.device
        self._clip_size, self._stride, self._batch_size = clip_size, stride, batch_size
        self._replacement, self._shuffle, self._pin_memory = replacement, shuffle, pin_memory
        self._pass_batches = (self.num_windows + (0 if drop_last else batch_size - 1)) // batch_size
        self._num_batches = num_batches if replacement or num_batches else self._pass_batches
        self._generator = _stream(None, seed)

    def __len__(self) -> int:
        """Returns the number of batches of one iteration; without an end there is none."""
        if self._num_batches is None:
            raise TypeError("an endless ReplayDataset has no length (num_batches is None)")
        return self._num_batches

    def __iter__(self) -> Iterator[TensorDict]:
        worker = get_worker_info()
        if worker is not None:  # every worker would draw the same windows
            raise ConfigurationError(f"`num_workers` must be 0, got {worker.num_workers}")
        # A stream of its own, which does not depend on how far other iterators have been read.
        return map(self._batch, islice(self._choices(_stream(self._generator)), self._num_batches))

    def _choices(self, stream: torch.Generator) -> Iterator[Tensor]:
        """Yields the numbers of the windows of one batch after the other, int64 [B], endlessly."""
        while self._replacement:
            yield torch.randint(self.num_windows, (self._batch_size,), generator=stream)
        while True:
            n = self.num_windows
            order = torch.randperm(n, generator=stream) if self._shuffle else torch.arange(n)
            yield from torch.split(order, self._batch_size)[: self._pass_batches]

    def _batch(self, windows: Tensor) -> TensorDict:
        rows = window_rows(self._starts[windows], self._clip_size, self._stride)
        batch = _gather(self._leaves, rows, self._device)
        return batch.pin_memory() if self._pin_memory else batch
