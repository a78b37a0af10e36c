"""One call of the policy: the states it sees, and what it returned, checked.

The states of a batch lie in arrays that are made once; a TensorDict view of the first n rows is
kept for each n, so a step builds none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from gymtask.errors import ActionError, HookError
from gymtask.sampling import NoiseStreams
from gymtask.spaces import ActionCodec, nest_tensors, stored_dtype, to_numpy
from gymtask.trajectory import NEXT_KEYS, RESERVED_KEYS, STATE_KEYS, Key
from gymtask.workers.layout import Array, Space, space_leaves

if TYPE_CHECKING:
    from gymtask.task import ReinforcementLearningTask


COUNTERS = ("step", "run_step", "trajectory_id")


@dataclass(frozen=True)
class Column:
    """What is kept for one key: its shape and dtype without the axis of rows."""

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass
class Answer:
    """What the policy chose for n environments, as arrays.

    Attributes:
        actions: For each leaf of the action space [n, *shape], as stored.
        extras: What else `get_actions` returned, by key.
        carries: What it returned under ("next", key), by the carry's key.
    """

    actions: list[Array]
    extras: dict[Key, Array]
    carries: dict[Key, Array]


class Actor:
    """Calls `get_actions` for a batch of environments.

    Attributes:
        codec: Checks and converts actions.
        observation_columns: The leaves of the observation, as stored.
        carry_columns: The keys of `get_initial_carry`.
        initial_carry: For each of them the value at an episode's start.
        arrays: What the policy sees, by key, [capacity, ...].
        counters: Of these step, run_step and trajectory_id, int64 [3, capacity].
    """

    def __init__(
        self,
        task: ReinforcementLearningTask[Any, Any],
        model: Any,
        *,
        observation_space: Space,
        action_space: Space,
        capacity: int,
        noise: NoiseStreams,
        optimal: bool,
        keep_float64: bool,
    ) -> None:
        self._task, self._model, self._optimal, self._noise = task, model, optimal, noise
        self._device = device_of(model)
        self._debug = os.environ.get("GYMTASK_DEBUG", "0") not in ("", "0")
        self.codec = ActionCodec(action_space, clip=task.config.environment.action_clip)
        self.observation_columns = [
            Column(
                ("observation", *leaf.path),
                leaf.shape,
                stored_dtype(leaf.dtype, keep_float64=keep_float64),
            )
            for leaf in space_leaves(observation_space, "observation")
        ]
        self._read_carry()
        carried = {column.key[0] for column in self.carry_columns}
        self._not_returned = (RESERVED_KEYS | carried) - {"next"}
        self._space = observation_space
        self._capacity = capacity
        self.arrays: dict[Key, Array] = {
            column.key: np.zeros((capacity, *column.shape), column.dtype)
            for column in [*self.observation_columns, *self.carry_columns]
        }
        self.counters: Array = np.zeros((len(COUNTERS), capacity), np.int64)
        self.arrays |= {(name,): row for name, row in zip(COUNTERS, self.counters, strict=True)}
        self.arrays["is_init",] = np.zeros(capacity, bool)
        self.arrays["env_id",] = np.zeros(capacity, np.int64)
        self._views: dict[int, list[tuple[TensorDictBase, dict[str, Any]]]] = {}

    def _read_carry(self) -> None:
        self.carry_columns: list[Column] = []
        self.initial_carry: dict[Key, Array] = {}
        if not overrides(self._task, "get_initial_carry"):
            return
        with eval_mode(self._model), torch.no_grad():
            carry = self._task.get_initial_carry(self._model)
        if not isinstance(carry, TensorDictBase) or carry.batch_size != ():
            raise HookError(
                f"`get_initial_carry` must return a TensorDict with batch size [], got {carry!r}"
            )
        for key, value in carry.items(include_nested=True, leaves_only=True):
            path = (key,) if isinstance(key, str) else tuple(key)
            if path[0] in RESERVED_KEYS or path[0] in NEXT_KEYS:
                raise HookError(f"`get_initial_carry` must not return the reserved key {path[0]!r}")
            assert isinstance(value, Tensor)
            array = to_numpy(value).copy()
            self.carry_columns.append(Column(path, array.shape, array.dtype))
            self.initial_carry[path] = array

    def act(self, env_ids: Array) -> Answer:
        """Calls the policy for environments whose states lie in the first n rows of `arrays`.

        The caller holds `eval_mode`.

        Raises:
            ActionError: The actions do not fit; no environment has moved.
            HookError: Something else in what it returned breaks its contract.
        """
        n = len(env_ids)
        base = self._view(n)
        states: TensorDictBase = base if self._device is None else base.to(self._device)
        self._noise.begin(states, env_ids, self.counters[1, :n])
        gradients = torch.is_grad_enabled()
        try:
            # As torch.no_grad() does, for a quarter of its time. Not around the whole loop: an
            # environment in this process may need gradients of its own.
            torch.set_grad_enabled(False)
            returned = self._task.get_actions(self._model, states, self._optimal)
        finally:
            torch.set_grad_enabled(gradients)
            self._noise.end()
            self._drop_if_changed(n)
        return self._read_answer(returned, states, n)

    def release(self, num_rows: int) -> None:
        """Called when an answer is stored.

        With GYMTASK_DEBUG=1 it fills the states with nonsense, so that a
        reference that the policy kept by mistake shows at once.
        """
        if not self._debug:
            return
        for array in self.arrays.values():
            kind = array.dtype.kind
            array[:num_rows] = (
                np.nan if kind == "f" else True if kind == "b" else np.iinfo(array.dtype).max
            )

    def _view(self, n: int) -> TensorDictBase:
        if n not in self._views:
            tensors = {key: torch.from_numpy(array[:n]) for key, array in self.arrays.items()}
            observation = [tensors[column.key] for column in self.observation_columns]
            view = TensorDict(
                {"observation": nest_tensors(self._space, observation)}, batch_size=[n]
            )
            for column in self.carry_columns:
                view[column.key] = tensors[column.key]
            for name in STATE_KEYS:
                view[name] = tensors[(name,)]
            self._views[n] = _parts_of(view)
        return self._views[n][0][0]

    def _drop_if_changed(self, n: int) -> None:
        """Lets the next call see `states` as it was, also where a policy put keys in."""
        for part, content in self._views[n]:
            # By identity: comparing tensors would compute something.
            if len(part.keys()) != len(content) or any(
                found is not content.get(name) for name, found in part.items()
            ):
                del self._views[n]
                return

    def _read_answer(self, returned: Any, states: TensorDictBase, n: int) -> Answer:
        kind = type(returned)
        if (kind is Tensor or isinstance(returned, Tensor)) and not self.carry_columns:
            return Answer(self.codec.encode(returned, n), {}, {})
        if kind is not TensorDict and not isinstance(returned, TensorDictBase):
            needed = ' with "action" and ("next", key) for each carry' if self.carry_columns else ""
            raise HookError(
                f"`get_actions` must return a Tensor or a TensorDict{needed}, got"
                f" {type(returned).__name__}"
            )
        if returned.batch_size[:1] != (n,):
            raise ActionError(
                f"`get_actions` must return a TensorDict of batch size [{n}], got"
                f" {list(returned.batch_size)}"
            )
        content = self._added(returned, states)
        if "action" not in content:
            raise ActionError(
                f'`get_actions` must return an "action", got only the keys {sorted(content)}'
            )
        actions = self.codec.encode(content.pop("action"), n)
        carries = self._read_carries(content.pop("next", None), n)
        extras: dict[Key, Array] = {}
        for name, value in content.items():
            _flatten_into(extras, (name,), value, n)
        return Answer(actions, extras, carries)

    def _added(self, returned: TensorDictBase, states: TensorDictBase) -> dict[str, Any]:
        """What `returned` holds beside the states that were handed out, by its first key."""
        content: dict[str, Any] = dict(returned.items())
        if returned is states:
            # A TensorDictModule writes into its input.
            known = {"observation", *STATE_KEYS, *(column.key[0] for column in self.carry_columns)}
            content = {name: value for name, value in content.items() if name not in known}
        elif not self._not_returned.isdisjoint(content):
            raise HookError(
                f"`get_actions` must not return the reserved keys"
                f" {sorted(self._not_returned & content.keys())}; return `states` itself with keys"
                " added, or a TensorDict with the new keys alone"
            )
        return content

    def _read_carries(self, following: Any, n: int) -> dict[Key, Array]:
        if following is None and not self.carry_columns:
            return {}
        found: dict[Key, Array] = {}
        if following is not None:
            _flatten_into(found, (), following, n)
        expected = {column.key: column for column in self.carry_columns}
        if found.keys() != expected.keys():
            raise HookError(
                f'`get_actions` must return ("next", key) for the carries {sorted(expected)} and'
                f' nothing else under "next", got {sorted(found)}'
            )
        for key, array in found.items():
            if array.shape[1:] != expected[key].shape or array.dtype != expected[key].dtype:
                raise HookError(
                    f'("next", {"/".join(key)!r}) must have shape {(n, *expected[key].shape)} and'
                    f" dtype {expected[key].dtype} as `get_initial_carry` says, got {array.shape}"
                    f" and {array.dtype}"
                )
        return found


def _parts_of(view: TensorDictBase) -> list[tuple[TensorDictBase, dict[str, Any]]]:
    """A TensorDict and all nested ones, each with what it holds."""
    parts = [(view, dict(view.items()))]
    for value in parts[0][1].values():
        if isinstance(value, TensorDictBase):
            parts += _parts_of(value)
    return parts


def _flatten_into(found: dict[Key, Array], key: Key, value: Any, n: int) -> None:
    if type(value) is Tensor and value.ndim and len(value) == n:  # nearly always
        found[key] = to_numpy(value)
        return
    if isinstance(value, TensorDictBase):
        for name, part in value.items():
            _flatten_into(found, (*key, name), part, n)
        return
    if not isinstance(value, Tensor) or value.shape[:1] != (n,):
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise HookError(
            f"`{'/'.join(key)}` from `get_actions` must be a tensor of {n} rows, got {shape}"
        )
    found[key] = to_numpy(value)


def device_of(model: Any) -> torch.device | None:
    """The device of a module's parameters, None for the CPU and for models that are no module."""
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return None if tensor.device.type == "cpu" else tensor.device
    return None


def overrides(task: object, hook: str) -> bool:
    """Whether a task defines an optional hook itself."""
    from gymtask.task import ReinforcementLearningTask

    return getattr(type(task), hook) is not getattr(ReinforcementLearningTask, hook)


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Puts a module into eval mode, and each of its parts back into the mode that it had."""
    modules: Sequence[nn.Module] = list(model.modules()) if isinstance(model, nn.Module) else ()
    training = [module for module in modules if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
