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
from typing import Any, overload

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from gymtask.config import raise_if_any, require_bool, require_int
from gymtask.errors import ConfigurationError, WindowError
from gymtask.replay.frames import FrameHistory, FrameStacks
from gymtask.replay.frames import Key as Key
from gymtask.windows import window_rows, window_span

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


def leaves_of(samples: TensorDictBase) -> Leaves:
    """The leaves by flat key."""
    leaves: Leaves = {}
    for key, value in samples.items():
        if isinstance(value, Tensor):
            leaves[key] = value
        elif type(value) is TensorDict:
            for inner, leaf in leaves_of(value).items():
                leaves[(key, inner) if isinstance(inner, str) else (key, *inner)] = leaf
        else:  # tensordict's own iterator knows them all, and takes three times as long
            every = samples.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
            return dict(every)
    return leaves


def select(store: TensorDict, keys: Sequence[Key]) -> Leaves:
    """The leaves at or below some keys.

    Raises:
        ConfigurationError: There is no such key.
    """
    if isinstance(keys, str) or not keys:
        raise ConfigurationError(f"`batch_keys` must be a list of keys, got {keys!r}")
    known = list(store.keys(include_nested=True))
    chosen: Leaves = {}
    for key in keys:
        if key not in known:
            raise ConfigurationError(f"`batch_keys` must be among {known}, got {key!r}")
        chosen |= leaves_of(store.select(key))
    return chosen


def gather(
    leaves: Leaves, rows: Tensor, device: torch.device | None, stacks: FrameStacks | None = None
) -> TensorDict:
    """Copies the given rows of every leaf; the batch shape is that of `rows`, int64."""
    gathered: Leaves = {}
    flat = rows.flatten()  # index_select takes one dimension, and is faster than leaf[rows]
    for key, leaf in leaves.items():
        if stacks is not None and key in stacks.keys:
            continue
        if isinstance(leaf, Tensor):
            flat = flat.to(leaf.device)  # a copy only where the device changes
            gathered[key] = leaf.index_select(0, flat).view(*rows.shape, *leaf.shape[1:])
        else:
            gathered[key] = leaf[rows]
    if stacks is not None:
        stacks.show(rows, leaves, gathered)
    return TensorDict(gathered, batch_size=rows.shape, device=device)


def join(pieces: Sequence[TensorDictBase]) -> TensorDict:
    """Copies pieces of one layout end to end; values only, for no gradient flows into a store."""
    columns = [leaves_of(piece) for piece in pieces]
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


def window_problems(clip_size: object, stride: object) -> Iterator[str]:
    """Which rules the length and the stride of a window break."""
    yield from require_int("clip_size", clip_size, 1)
    yield from require_int("stride", stride, 1)


def require_window(lengths: Sequence[int], clip_size: int, stride: int) -> None:
    """Checks that a piece is long enough for a window.

    Raises:
        WindowError: None is.
    """
    if not lengths:
        raise WindowError("no trajectory to take a window from: there is no piece")
    if max(lengths) < (span := window_span(clip_size, stride)):
        raise WindowError(
            f"no trajectory is long enough for a window of {span} rows (clip_size {clip_size}, "
            f"stride {stride}): the longest of {len(lengths)} has {max(lengths)}"
        )


def new_stream(parent: torch.Generator | None, seed: int | None = None) -> torch.Generator:
    """A generator with this seed, or one that `parent` (None: torch's global one) draws."""
    drawn = torch.randint(2**63 - 1, (), generator=parent) if seed is None else seed
    return torch.Generator().manual_seed(int(drawn) % 2**64)  # torch takes no more than 64 bits


def _keys(samples: TensorDictBase) -> str:
    return ", ".join("/".join([key] if isinstance(key, str) else key) for key in leaves_of(samples))


def stacks_of(
    history: FrameHistory | None, lengths: Sequence[int], leaves: Leaves
) -> FrameStacks | None:
    """What shows rows as stacks, where they are shown so."""
    return None if history is None else FrameStacks(history, lengths, leaves)


class ReplaySamples:
    """One piece of a trajectory.

    Args:
        samples: The rows in order of time, TensorDict [T]; the attribute of that name is no copy.

    Attributes:
        history: Of a piece that was collected with `frame_stack`, the frames before it: `sample`
            then shows stacks, and rows hold single frames. None for others.

    Raises:
        ConfigurationError: `samples` is no TensorDict, has another batch shape, or has no row.
    """

    def __init__(self, samples: TensorDictBase) -> None:
        raise_if_any(list(_piece_problems("samples", samples)))
        self.samples = samples
        self.history: FrameHistory | None = None

    def __repr__(self) -> str:
        return f"ReplaySamples({len(self)} rows of {_keys(self.samples)})"

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
        raise_if_any([*window_problems(clip_size, stride), *require_bool("only_last", only_last)])
        require_window([len(self)], clip_size, stride)
        last = len(self) - window_span(clip_size, stride)
        start = torch.tensor(last) if only_last else torch.randint(last + 1, ())
        rows, leaves = window_rows(start, clip_size, stride), leaves_of(self.samples)
        stacks = stacks_of(self.history, [len(self)], leaves)
        return gather(leaves, rows, self.samples.device, stacks)


class MultiReplaySamples:
    """Many pieces, end to end in one store.

    The store is a copy of what was given (of non-tensor data, a reference). Its pieces, the list
    `samples`, are views and locked: values can be changed in place, in the store too; a key cannot
    be added, for the store would not get it.

    Attributes:
        rows: The store, a TensorDict [sum T].
        lengths: Rows of each piece.
        num_transitions: Number of all rows.
        num_dropped: As the argument.
        episodes: As the argument, a list.
        history: With `frame_stack`, the frames before each piece, of which windows show stacks;
            else None. It goes with slices and partitions.

    Args:
        samples: The pieces, each a TensorDict [T] or a `ReplaySamples`, all with the same keys, and
            each key with the same dtype, device and shape after T. There may be none.
        num_dropped: Rows that were collected and left out, since their piece was too short.
        episodes: The episodes that ended in the collection.

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
        given = list(samples)
        pieces = [piece.samples if isinstance(piece, ReplaySamples) else piece for piece in given]
        for number, piece in enumerate(pieces):
            raise_if_any(list(_piece_problems(f"samples[{number}]", piece)))
        histories = [each.history if isinstance(each, ReplaySamples) else None for each in given]
        lengths, history = [len(piece) for piece in pieces], FrameHistory.joined(histories)
        self._set(join(pieces), lengths, num_dropped, episodes, history)

    @classmethod
    def from_rows(
        cls,
        rows: TensorDict,
        lengths: Sequence[int],
        *,
        num_dropped: int = 0,
        episodes: Iterable[EpisodeRecord] = (),
        history: FrameHistory | None = None,
    ) -> MultiReplaySamples:
        """The same from rows [sum T] that lie end to end: they become the store, uncopied."""
        if sum(lengths) != len(rows) or min(lengths, default=1) < 1:
            raise ConfigurationError(
                f"`lengths` must be positive and add up to the {len(rows)} rows, got {lengths}"
            )
        samples = cls.__new__(cls)
        samples._set(rows, lengths, num_dropped, episodes, history)
        return samples

    def _set(
        self,
        store: TensorDict,
        lengths: Sequence[int],
        num_dropped: int,
        episodes: Iterable[EpisodeRecord],
        history: FrameHistory | None,
    ) -> None:
        self.rows, self.history = store, history
        self.lengths = list(lengths)
        self.num_transitions = len(store)
        self.num_dropped = num_dropped
        self.episodes = list(episodes)

    @cached_property
    def samples(self) -> list[ReplaySamples]:
        """The pieces, in the order given; made when first asked for, as few readers need them."""
        pieces = [ReplaySamples(v.lock_()) for v in self.rows.split(self.lengths)]
        if self.history is not None:
            for piece, history in zip(pieces, self.history.split(), strict=True):
                piece.history = history
        return pieces

    def __getstate__(self) -> dict[str, Any]:
        # Without the pieces: those of a copy are to be views of its own store.
        return {name: value for name, value in vars(self).items() if name != "samples"}

    def __repr__(self) -> str:
        rows = f"{self.num_transitions} rows of {_keys(self.rows)}"
        return f"MultiReplaySamples({len(self)} pieces, {rows})"

    def __len__(self) -> int:
        return len(self.lengths)

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
        raise_if_any([*window_problems(clip_size, stride), *require_bool("only_last", only_last)])
        require_window(self.lengths, clip_size, stride)
        fitting = [piece for piece in self.samples if len(piece) >= window_span(clip_size, stride)]
        return [piece.sample(clip_size, stride, only_last) for piece in fitting]

    def to_tensordict(self) -> TensorDict:
        """Returns a copy of all rows [sum T], with ("next", "end"): True on each piece's last."""
        flat: TensorDict = self.rows.clone()
        end = torch.zeros(len(flat), dtype=torch.bool)
        end[torch.tensor(self.lengths, dtype=torch.int64).cumsum(0) - 1] = True
        tensors = (leaf for leaf in leaves_of(flat).values() if isinstance(leaf, Tensor))
        flat["next", "end"] = end.to(next(tensors, end).device)
        return flat
