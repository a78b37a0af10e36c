"""The states that a policy sees: arrays that are made once, and TensorDict views of their rows.

A view of the first n rows is kept for each n, so a step builds none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from gymtask.errors import HookError
from gymtask.spaces import nest_tensors
from gymtask.tape import Key
from gymtask.trajectory import STATE_KEYS
from gymtask.workers.layout import Array, Space

COUNTERS = ("step", "run_step", "trajectory_id", "env_id")


@dataclass(frozen=True)
class Column:
    """What is kept for one key: its shape and dtype without the axis of rows."""

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def fits(table: Array, column: Column) -> bool:
    """Whether a table [capacity, N, ...] is of a column's values."""
    return table.shape[2:] == column.shape and table.dtype == column.dtype


def check_columns(before: Sequence[Column], now: Sequence[Column], *, any_open: bool) -> None:
    """Checks that what is kept of states stays the same from one collection to the next.

    Raises:
        HookError: A carry has another shape or dtype; or there are others, and rows of the earlier
            collection are open.
    """
    old = {column.key: column for column in before}
    wanted = {column.key: column for column in now}
    if wanted.keys() != old.keys() and any_open:
        raise HookError(
            "the carries must stay the same while rows of an earlier collection are open, got"
            f" {sorted(wanted)} after {sorted(old)}; call pool.reset() to give those rows up"
        )
    for key, column in wanted.items():
        kept = old.get(key, column)
        if (kept.shape, kept.dtype) != (column.shape, column.dtype):
            raise HookError(
                f"the carry {'/'.join(key)!r} must keep its shape {kept.shape} and dtype"
                f" {kept.dtype}, got {column.shape} and {column.dtype}; call pool.reset() to"
                " begin anew"
            )


def new_extras(
    extras: Mapping[Key, Array], before: Mapping[Key, Column], *, any_open: bool
) -> dict[Key, Column]:
    """Columns for what the policy returned under other keys than before.

    Raises:
        HookError: Rows are open, which hold the keys of before.
    """
    if any_open:
        raise HookError(
            "`get_actions` must return the same keys for every row of a trajectory, got"
            f" {sorted(extras)} after {sorted(before)}"
        )
    return {key: Column(key, rows.shape[1:], rows.dtype) for key, rows in extras.items()}


def check_extras(extras: Mapping[Key, Array], columns: Mapping[Key, Column]) -> None:
    """Checks that what the policy returned beside its actions is of the kinds that are kept.

    Raises:
        HookError: Something is not.
    """
    for key, rows in extras.items():
        column = columns[key]
        if column.shape != rows.shape[1:] or column.dtype != rows.dtype:
            raise HookError(
                f"`{'/'.join(key)}` from `get_actions` must keep its shape {column.shape} and"
                f" dtype {column.dtype}, got {rows.shape[1:]} and {rows.dtype}"
            )


class States:
    """What the policy sees of up to `capacity` environments.

    Args:
        space: Tells how leaves of the observation are nested.
        observation_columns: What is seen of each leaf.
        carry_columns: As the attribute.
        capacity: Likewise.

    Attributes:
        capacity: Rows of the arrays.
        carry_columns: The keys of `get_initial_carry`.
        arrays: The rows by key, [capacity, ...].
        counters: Of these step, run_step, trajectory_id and env_id, int64 [4, capacity].
        is_init: Of these is_init, bool [capacity].
    """

    def __init__(
        self,
        space: Space,
        observation_columns: Sequence[Column],
        carry_columns: Sequence[Column],
        capacity: int,
    ) -> None:
        self.capacity = capacity
        self.carry_columns = list(carry_columns)
        self._space, self._observation_columns = space, observation_columns
        self.arrays: dict[Key, Array] = {
            column.key: np.zeros((capacity, *column.shape), column.dtype)
            for column in [*observation_columns, *carry_columns]
        }
        self.counters: Array = np.zeros((len(COUNTERS), capacity), np.int64)
        self.arrays |= {(name,): row for name, row in zip(COUNTERS, self.counters, strict=True)}
        self.is_init = self.arrays["is_init",] = np.zeros(capacity, bool)
        self._views: dict[int, StatesView] = {}

    def view(self, n: int) -> StatesView:
        """The first n rows."""
        view = self._views.get(n)
        if view is None or view.is_spoilt:
            view = self._views[n] = StatesView(self._make_view(n))
        return view

    def _make_view(self, n: int) -> TensorDict:
        tensors = {key: torch.from_numpy(array[:n]) for key, array in self.arrays.items()}
        observation = [tensors[column.key] for column in self._observation_columns]
        view = TensorDict({"observation": nest_tensors(self._space, observation)}, batch_size=[n])
        for column in self.carry_columns:
            view[column.key] = tensors[column.key]
        for name in STATE_KEYS:
            view[name] = tensors[(name,)]
        return view

    def spoil(self, n: int) -> None:
        """Fills the first n rows with nonsense, so that a reference to them shows at once."""
        for array in self.arrays.values():
            kind = array.dtype.kind
            array[:n] = (
                np.nan if kind == "f" else True if kind == "b" else np.iinfo(array.dtype).max
            )


class Snapshot:
    """What a TensorDict held, nested ones included, when this was made.

    Attributes:
        tensordict: The TensorDict.
    """

    def __init__(self, tensordict: TensorDict) -> None:
        self.tensordict = tensordict
        self._whole, *self._nested = _entries(tensordict)

    def added(self) -> list[str] | None:
        """Names that were added to it since; None if anything else in it was changed."""
        entries, held = self._whole
        # By identity: comparing tensors would compute something. What is added comes last.
        same = len(entries) >= len(held) and all(map(is_, entries.values(), held))
        for nested, before in self._nested:
            same &= len(nested) == len(before) and all(map(is_, nested.values(), before))
        if not same:
            return None
        return list(entries)[len(held) :] if len(entries) > len(held) else []


class StatesView(Snapshot):
    """A TensorDict of states, which a policy is given.

    Attributes:
        is_spoilt: Whether something that it held was changed, so that a new one must be made.
    """

    is_spoilt = False

    def restore(self) -> None:
        """Lets the next call see the states as they were: removes what a policy put in."""
        names = self.added()
        self.is_spoilt = names is None
        for name in names or ():
            self.tensordict.del_(name)


def _entries(tensordict: TensorDict) -> list[tuple[dict[str, Any], list[Any]]]:
    """The dicts that a TensorDict and all nested ones keep their entries in, and their values."""
    live = entries_of(tensordict)
    found = [(live, list(live.values()))]
    for value in found[0][1]:
        if isinstance(value, TensorDict):
            found += _entries(value)
    return found


def entries_of(tensordict: TensorDictBase) -> dict[str, Any]:
    """The entries of a TensorDict by name, to be read only: its own dict where it has one.

    Its methods take several times as long, which counts where a policy is called.
    """
    if type(tensordict) is TensorDict:
        own: dict[str, Any] = tensordict._tensordict
        return own
    return dict(tensordict.items())
