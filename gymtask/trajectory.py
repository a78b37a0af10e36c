"""Trajectories: their keys, how rows become TensorDicts, and what hooks may do to them.

A trajectory holds every observation twice: as what a row acts on, and as what the row before leads
to; at an episode's end the latter is the true final one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from gymtask.errors import HookError
from gymtask.tape import FLAGS, REWARD, Key, Piece, Selection
from gymtask.workers.layout import Array

STATE_KEYS = ("is_init", "env_id", "trajectory_id", "step", "run_step")
"""What `states` holds beside the observation and carries."""

NEXT_KEYS = frozenset({"reward", "terminated", "truncated", "done", "info", "end", "action"})
"""First keys that a carry must not have, beside the reserved ones: ("next", key) is taken."""

RESERVED_KEYS = frozenset({"observation", "next", "state_value", *STATE_KEYS})
"""First keys that `get_actions` must not return."""


def assemble(pieces: Sequence[Piece], info_keys: Sequence[str]) -> TensorDict:
    """All rows of some pieces, end to end.

    Returns:
        A TensorDict [sum T] of tensors that share no memory with each other or with the pieces.
    """
    lengths = [piece.length for piece in pieces]
    selection = Selection(pieces)
    _check_keys(selection.row_keys)
    content: dict[str, Any] = {}
    following: dict[str, Any] = {}
    for key in pieces[0].tape.states:
        put(content, key, torch.from_numpy(selection.states(key)))
        put(following, key, torch.from_numpy(selection.next_states(key)))
    for key in pieces[0].tape.rows:
        if key not in (REWARD, FLAGS):
            put(content, key, torch.from_numpy(selection.rows(key)))
    following |= _outcome(selection)
    if info_keys:
        following["info"] = _info_columns(
            [info for piece in pieces for info in piece.infos], info_keys
        )
    content.update(_counters(pieces, lengths))
    del content["run_step"]
    content["next"] = following
    return TensorDict(content, batch_size=[sum(lengths)])


def _check_keys(row_keys: Sequence[set[Key]]) -> None:
    for keys in row_keys:
        if keys != row_keys[0]:
            raise HookError(
                "`get_actions` must return the same keys while rows of an earlier collection are"
                f" left, got {sorted(keys)} after {sorted(row_keys[0])}; call pool.reset() to give"
                " those rows up"
            )


def _outcome(selection: Selection) -> dict[str, Tensor]:
    flags = torch.from_numpy(selection.rows(FLAGS))
    terminated, truncated = flags[:, 0].clone(), flags[:, 1].clone()
    return {
        "reward": torch.from_numpy(selection.rows(REWARD).astype(np.float32)),
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated | truncated,
    }


def value_states(pieces: Sequence[Piece], frame_stack: int | None = None) -> TensorDict:
    """The states of all rows, each piece with the one that it leads to, [sum (T + 1)].

    Observations are shown as stacks of `frame_stack` frames, None shows single ones.
    """
    lengths = [piece.length + 1 for piece in pieces]
    selection = Selection(pieces)
    content: dict[str, Any] = {}
    for key in pieces[0].tape.states:
        if frame_stack is not None and key[0] == "observation":
            put(content, key, torch.from_numpy(selection.all_stacks(key, frame_stack)))
        else:
            put(content, key, torch.from_numpy(selection.all_states(key)))
    content.update(_counters(pieces, lengths))
    return TensorDict(content, batch_size=[sum(lengths)])


def frames_before(pieces: Sequence[Piece], most: int) -> tuple[list[int], dict[str | Key, Tensor]]:
    """The observations that came before each piece in its episode, `most` or fewer.

    Returns:
        How many of each piece; and by the flat key of each leaf all of them end to end.
    """
    selection = Selection(pieces)
    frames = {
        key if len(key) > 1 else key[0]: torch.from_numpy(selection.states_before(key, most))
        for key in pieces[0].tape.states
        if key[0] == "observation"
    }
    return selection.num_before(most).tolist(), frames


def split_values(values: Tensor, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    """Values [sum (T + 1)] of `value_states` as those of rows and of next states, [sum T]."""
    parts: tuple[Tensor, ...] = torch.split(values, [piece.length + 1 for piece in pieces])
    return torch.cat([part[:-1] for part in parts]), torch.cat([part[1:] for part in parts])


def _counters(pieces: Sequence[Piece], lengths: Sequence[int]) -> dict[str, Tensor]:
    def repeated(values: list[int]) -> Array:
        return np.repeat(np.array(values, np.int64), lengths)

    # Number r of all rows is number r - before of its piece, if `before` rows lie before that one.
    before = list(accumulate(lengths, initial=0))
    number = np.arange(before[-1]) - repeated(before[:-1])
    step = number + repeated([piece.first_step for piece in pieces])
    counters = {
        "is_init": step == 0,
        "step": step,
        "run_step": number + repeated([piece.first_run_step for piece in pieces]),
        "trajectory_id": repeated([piece.trajectory_id for piece in pieces]),
        "env_id": repeated([piece.env_id for piece in pieces]),
    }
    return {key: torch.from_numpy(column) for key, column in counters.items()}


def put(target: dict[str, Any], key: Key, value: Any) -> None:
    """Puts a value into nested dicts, which are made where they are not there."""
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


def checked_trajectory(hook: str, length: int, after: object) -> TensorDict:
    """What a postprocess hook made of one trajectory, which must still have its length.

    Raises:
        HookError: It is no TensorDict, or of another batch size.
    """
    if not isinstance(after, TensorDictBase):
        hint = "; does it end with `return trajectory`?" if after is None else ""
        raise HookError(f"`{hook}` must return a TensorDict, got {type(after).__name__}{hint}")
    if after.batch_size != (length,):
        raise HookError(
            f"`{hook}` must keep the length of a trajectory, {length}, got batch size"
            f" {tuple(after.batch_size)}"
        )
    return after if isinstance(after, TensorDict) else after.to_tensordict()


def checked_trajectories(
    lengths: Sequence[int], places: Sequence[tuple[Tensor | None, Tensor | None]], after: object
) -> list[TensorDict]:
    """What `postprocess_trajectories` returned: the same number, lengths and order.

    Args:
        lengths: Of the trajectories that it was given.
        places: The trajectory_id and step [T] of each, which tell where it belongs.
        after: What it returned.

    Raises:
        HookError: Number, lengths or order differ.
    """
    name = "postprocess_trajectories"
    if isinstance(after, TensorDictBase) or not isinstance(after, (list, tuple)):
        hint = "; does it end with `return trajectories`?" if after is None else ""
        raise HookError(
            f"`{name}` must return a list of TensorDicts, got {type(after).__name__}{hint}"
        )
    if len(after) != len(lengths):
        raise HookError(
            f"`{name}` must keep the number of trajectories, {len(lengths)}, got {len(after)}"
        )
    checked = [
        checked_trajectory(name, length, one) for length, one in zip(lengths, after, strict=True)
    ]
    for place, (stood, trajectory) in enumerate(zip(places, checked, strict=True)):
        for key, before in zip(("trajectory_id", "step"), stood, strict=True):
            now = trajectory.get(key, None)
            if before is now or before is None or now is None:  # a hook may take keys away
                continue
            if not torch.equal(before[:1], now[:1]):
                raise HookError(
                    f"`{name}` must keep the order of trajectories, got one that begins with {key}"
                    f" {now[:1].tolist()} at place {place}, where {before[:1].tolist()} stood"
                )
    return checked
