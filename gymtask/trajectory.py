"""Trajectories: their keys, how rows become TensorDicts, and what hooks may do to them.

A piece is a run of consecutive rows of one episode. Its observations are kept once, T + 1 of them:
row t acts on number t and leads to number t + 1, of which the last is the true one, also at an
episode's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from gymtask.errors import HookError
from gymtask.workers.layout import Array

Key: TypeAlias = "tuple[str, ...]"

STATE_KEYS = ("is_init", "env_id", "trajectory_id", "step", "run_step")
"""What `states` holds beside the observation and carries."""

NEXT_KEYS = frozenset({"reward", "terminated", "truncated", "done", "info", "end", "action"})
"""First keys that a carry must not have, beside the reserved ones: ("next", key) is taken."""

RESERVED_KEYS = frozenset({"observation", "next", "state_value", *STATE_KEYS})
"""First keys that `get_actions` must not return."""


@dataclass
class Piece:
    """Consecutive rows of one episode, as they were collected.

    Attributes:
        env_id: Index of the environment.
        trajectory_id: Number of the episode.
        first_step: Row number in the episode of the first row.
        first_run_step: Step of the environment in the run at the first row.
        length: T.
        states: Arrays [T + 1, ...]: observations and carries.
        rows: Arrays [T, ...]: actions, what else the policy returned, reward, flags.
        infos: For each row the values of the asked info keys; empty when none are asked for.
    """

    env_id: int
    trajectory_id: int
    first_step: int
    first_run_step: int
    length: int
    states: dict[Key, Array]
    rows: dict[Key, Array]
    infos: list[dict[str, Any]] = field(default_factory=list)

    def split(self, length: int) -> tuple[Piece, Piece]:
        """The first `length` rows and the rest; the observation between them belongs to both."""
        head = Piece(
            self.env_id,
            self.trajectory_id,
            self.first_step,
            self.first_run_step,
            length,
            {key: array[: length + 1] for key, array in self.states.items()},
            {key: array[:length] for key, array in self.rows.items()},
            self.infos[:length],
        )
        tail = Piece(
            self.env_id,
            self.trajectory_id,
            self.first_step + length,
            self.first_run_step + length,
            self.length - length,
            {key: array[length:] for key, array in self.states.items()},
            {key: array[length:] for key, array in self.rows.items()},
            self.infos[length:],
        )
        return head, tail


def assemble(pieces: Sequence[Piece], info_keys: Sequence[str]) -> TensorDict:
    """All rows of some pieces, end to end.

    Returns:
        A TensorDict [sum T] of tensors that share no memory with each other or with the pieces.
    """
    lengths = [piece.length for piece in pieces]
    content: dict[str, Any] = {}
    following: dict[str, Any] = {}
    for key in pieces[0].states:
        # Row t acts on number t and leads to number t + 1 of its piece.
        _put(content, key, _joined([piece.states[key][:-1] for piece in pieces]))
        _put(following, key, _joined([piece.states[key][1:] for piece in pieces]))
    for piece in pieces:
        if piece.rows.keys() != pieces[0].rows.keys():
            raise HookError(
                "`get_actions` must return the same keys while rows of an earlier collection are"
                f" left, got {sorted(piece.rows)} after {sorted(pieces[0].rows)}; call pool.reset()"
                " to give those rows up"
            )
    for key in pieces[0].rows:
        _put(content, key, _joined([piece.rows[key] for piece in pieces]))
    following.update(content.pop("next"))
    following["done"] = following["terminated"] | following["truncated"]
    if info_keys:
        following["info"] = _info_columns(
            [info for piece in pieces for info in piece.infos], info_keys
        )
    content.update(_counters(pieces, lengths))
    del content["run_step"]
    content["next"] = following
    return TensorDict(content, batch_size=[sum(lengths)])


def value_states(pieces: Sequence[Piece]) -> TensorDict:
    """The states of all rows, each piece with the one that it leads to, [sum (T + 1)]."""
    lengths = [piece.length + 1 for piece in pieces]
    content: dict[str, Any] = {}
    for key in pieces[0].states:
        _put(content, key, _joined([piece.states[key] for piece in pieces]))
    content.update(_counters(pieces, lengths))
    return TensorDict(content, batch_size=[sum(lengths)])


def split_values(values: Tensor, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    """Values [sum (T + 1)] of `value_states` as those of rows and of next states, [sum T]."""
    parts: tuple[Tensor, ...] = torch.split(values, [piece.length + 1 for piece in pieces])
    return torch.cat([part[:-1] for part in parts]), torch.cat([part[1:] for part in parts])


def _counters(pieces: Sequence[Piece], lengths: Sequence[int]) -> dict[str, Tensor]:
    def repeated(values: list[int]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.int64), lengths))

    def counted(firsts: list[int]) -> Tensor:
        runs = [
            np.arange(first, first + length) for first, length in zip(firsts, lengths, strict=True)
        ]
        return torch.from_numpy(np.concatenate(runs))

    step = counted([piece.first_step for piece in pieces])
    return {
        "is_init": step == 0,
        "step": step,
        "run_step": counted([piece.first_run_step for piece in pieces]),
        "trajectory_id": repeated([piece.trajectory_id for piece in pieces]),
        "env_id": repeated([piece.env_id for piece in pieces]),
    }


def _joined(arrays: list[Array]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _put(target: dict[str, Any], key: Key, value: Any) -> None:
    for part in key[:-1]:
        target = target.setdefault(part, {})
    target[key[-1]] = value


def _info_columns(infos: list[dict[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """One column for each info key, and under "_key" which rows have a value.

    Numbers and arrays of one shape become tensors (floats as float32, integers as int64), in which
    a missing value is NaN, or 0 for integers and bools; anything else is kept as it is, with None
    where it is missing.
    """
    columns: dict[str, Any] = {}
    for key in keys:
        values = [info.get(key) for info in infos]
        columns[key] = _info_column(values)
        columns[f"_{key}"] = torch.tensor([value is not None for value in values])
    return columns


def _info_column(values: list[Any]) -> Any:
    given = [_as_array(value) for value in values if value is not None]
    if not given:
        return torch.full((len(values),), float("nan"))
    # An unsigned integer of 64 bits may not fit int64.
    numeric = all(array.dtype.kind in "biuf" and array.dtype != np.uint64 for array in given)
    if not numeric or len({array.shape for array in given}) != 1:
        return NonTensorStack(*values)
    dtype = np.result_type(*{array.dtype for array in given})
    stored = np.float32 if dtype.kind == "f" else np.bool_ if dtype.kind == "b" else np.int64
    column = np.full((len(values), *given[0].shape), np.nan if dtype.kind == "f" else 0, stored)
    column[[value is not None for value in values]] = given
    return torch.from_numpy(column)


def _as_array(value: Any) -> Array:
    try:
        return np.asarray(value)
    except ValueError:  # lists of unequal lengths
        return np.empty((), object)


# ---- what hooks may do ---------------------------------------------------------------------------


def checked_trajectory(hook: str, before: TensorDictBase, after: object) -> TensorDict:
    """What a postprocess hook made of one trajectory, which must have the same length.

    Raises:
        HookError: It is no TensorDict, or of another batch size.
    """
    if not isinstance(after, TensorDictBase):
        hint = "; does it end with `return trajectory`?" if after is None else ""
        raise HookError(f"`{hook}` must return a TensorDict, got {type(after).__name__}{hint}")
    if after.batch_size != before.batch_size:
        raise HookError(
            f"`{hook}` must keep the length of a trajectory, {len(before)}, got batch size"
            f" {tuple(after.batch_size)}"
        )
    return after if isinstance(after, TensorDict) else after.to_tensordict()


def checked_trajectories(before: Sequence[TensorDictBase], after: object) -> list[TensorDict]:
    """What `postprocess_trajectories` returned: the same number, lengths and order.

    Raises:
        HookError: Number or lengths differ.
    """
    name = "postprocess_trajectories"
    if isinstance(after, TensorDictBase) or not isinstance(after, (list, tuple)):
        hint = "; does it end with `return trajectories`?" if after is None else ""
        raise HookError(
            f"`{name}` must return a list of TensorDicts, got {type(after).__name__}{hint}"
        )
    if len(after) != len(before):
        raise HookError(
            f"`{name}` must keep the number of trajectories, {len(before)}, got {len(after)}"
        )
    checked = [checked_trajectory(name, old, new) for old, new in zip(before, after, strict=True)]
    for place, (old, new) in enumerate(zip(before, checked, strict=True)):
        for key in ("trajectory_id", "step"):
            stood, stands = old.get(key, None), new.get(key, None)
            if stood is stands or stood is None or stands is None:  # a hook may take keys away
                continue
            if not torch.equal(stood[:1], stands[:1]):
                raise HookError(
                    f"`{name}` must keep the order of trajectories, got one that begins with {key}"
                    f" {stands[:1].tolist()} at place {place}, where {stood[:1].tolist()} stood"
                )
    return checked
