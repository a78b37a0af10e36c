"""One call of the policy: the states it sees, and what it returned, checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from gymtask.errors import ActionError, HookError
from gymtask.maker import EnvironmentMaker
from gymtask.random_actions import MASK, RandomActions
from gymtask.sampling import NoiseStreams
from gymtask.spaces import ActionCodec, stored_dtype, to_numpy
from gymtask.states import Column, States, entries_of
from gymtask.tape import Key
from gymtask.trajectory import NEXT_KEYS, RESERVED_KEYS, STATE_KEYS
from gymtask.workers.layout import Array, Space, space_leaves
from gymtask.workers.pool import WorkerPool

if TYPE_CHECKING:
    from gymtask.task import ReinforcementLearningTask


@dataclass(slots=True)
class Answer:
    """What the policy chose for n environments, as arrays.

    Attributes:
        actions: For each leaf of the action space [n, *shape], as stored.
        decoded: The same as environments get them.
        extras: What else `get_actions` returned, by key.
        carries: What it returned under ("next", key), by the carry's key.
    """

    actions: list[Array]
    decoded: list[Array]
    extras: dict[Key, Array]
    carries: dict[Key, Array]


class Actor:
    """Calls `get_actions` for a batch of environments.

    Attributes:
        task: Whose policy it is.
        noise: The action noise.
        codec: Checks and converts actions.
        observation_columns: The leaves of the observation, as stored: single frames.
        carry_columns: The keys of `get_initial_carry`.
        initial_carry: For each of them the value at an episode's start.
        states: What the policy sees.
        debug: Whether GYMTASK_DEBUG=1 is set.
    """

    def __init__(
        self,
        task: ReinforcementLearningTask[Any, Any],
        *,
        observation_space: Space,
        action_space: Space,
        capacity: int,
        noise: NoiseStreams,
        maker: EnvironmentMaker,
    ) -> None:
        self.task, self.noise = task, noise
        self._space, self._capacity = observation_space, capacity
        self.codec = ActionCodec(action_space, clip=task.config.environment.action_clip)
        self.observation_columns = [
            Column(
                ("observation", *leaf.path),
                leaf.shape,
                stored_dtype(leaf.dtype, keep_float64=maker.keep_float64),
            )
            for leaf in space_leaves(observation_space, "observation")
        ]
        self._seen_columns = self.observation_columns
        if maker.frame_stack is not None:
            self._seen_columns = [
                Column(column.key, (maker.frame_stack, *column.shape), column.dtype)
                for column in self.observation_columns
            ]
        self.states = States(observation_space, self._seen_columns, [], capacity)

    @classmethod
    def for_pool(
        cls, task: ReinforcementLearningTask[Any, Any], pool: WorkerPool, noise: NoiseStreams
    ) -> Self:
        """One that acts in all environments of a pool."""
        return cls(
            task,
            observation_space=pool.observation_space,
            action_space=pool.action_space,
            capacity=pool.num_envs,
            noise=noise,
            maker=pool.workers[0].maker,
        )

    def begin(self, model: Any, *, optimal: bool, random_actions: bool = False) -> None:
        """Makes ready for calls with this model, whose initial carry is asked for.

        Args:
            model: What `get_actions` is given.
            optimal: Likewise.
            random_actions: Whether the actions that it returns are replaced by random ones.

        Raises:
            HookError: The carry breaks its contract.
        """
        self._model, self._optimal = model, optimal
        self._device = device_of(model)
        self._random = None
        if random_actions:
            self._random = RandomActions(self.codec, self.noise.key[0], self.noise.first_env)
        self.debug = os.environ.get("GYMTASK_DEBUG", "0") not in ("", "0")
        self._read_carry()
        if self.carry_columns != self.states.carry_columns:
            columns = self._seen_columns
            self.states = States(self._space, columns, self.carry_columns, self._capacity)
        carried = {column.key[0] for column in self.carry_columns}
        self._not_returned = (RESERVED_KEYS | carried) - {"next"}

    def _read_carry(self) -> None:
        self.carry_columns: list[Column] = []
        self.initial_carry: dict[Key, Array] = {}
        if not overrides(self.task, "get_initial_carry"):
            return
        with eval_mode(self._model, self.task), torch.no_grad():
            carry = self.task.get_initial_carry(self._model)
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

    def act(self, env_ids: Array, even_run_step: int = -1, block: slice = slice(None)) -> Answer:
        """Calls the policy for environments whose states lie in the first n rows.

        The caller holds `eval_mode`.

        Args:
            env_ids: int64 [n].
            even_run_step: Their step of the run, if they are a block of all and at the same.
            block: Which block of all they are, if `even_run_step` says so.

        Raises:
            ActionError: The actions do not fit; no environment has moved.
            HookError: Something else in what it returned breaks its contract.
        """
        n = len(env_ids)
        view = self.states.view(n)
        states: TensorDictBase = view.tensordict
        if self._device is not None:
            states = states.to(self._device)
        run_steps = self.states.counters[1, :n]
        self.noise.begin(states, env_ids, run_steps, even_run_step, block)
        gradients = torch.is_grad_enabled()
        try:
            # As torch.no_grad() does, for a tenth of its time. Not around the whole loop: an
            # environment in this process may need gradients of its own.
            torch._C._set_grad_enabled(False)
            returned = self.task.get_actions(self._model, states, self._optimal)
            answer = self._read_answer(returned, states, n)
            if self._random is not None:
                mask = self.states.arrays.get(MASK)
                mask = mask[:n] if mask is not None and self._random.takes(mask) else None
                answer = self._randomized(answer, self._random.draw(env_ids, run_steps, mask))
        finally:
            torch._C._set_grad_enabled(gradients)
            self.noise.end()
            view.restore()
        return answer

    def _randomized(self, answer: Answer, actions: list[Array]) -> Answer:
        if answer.extras:
            raise HookError(
                "`get_actions` must return actions alone where random ones are taken instead, got"
                f" {sorted(answer.extras)} too, which would not belong to the action of the row"
            )
        return Answer(actions, self.codec.decode(actions), {}, answer.carries)

    def release(self, num_rows: int) -> None:
        """Called when an answer is stored, if `debug` is set.

        It fills the states with nonsense, so that a reference that the policy kept by mistake shows
        at once.
        """
        self.states.spoil(num_rows)

    def _read_answer(self, returned: Any, states: TensorDictBase, n: int) -> Answer:
        kind = type(returned)
        if kind is not TensorDict and isinstance(returned, Tensor) and not self.carry_columns:
            actions = self.codec.encode(returned, n)
            return Answer(actions, self.codec.decode(actions), {}, {})
        if kind is not TensorDict and not isinstance(returned, TensorDictBase):
            needed = ' with "action" and ("next", key) for each carry' if self.carry_columns else ""
            raise HookError(
                f"`get_actions` must return a Tensor or a TensorDict{needed}, got"
                f" {type(returned).__name__}"
            )
        if len(returned) != n:
            raise ActionError(
                f"`get_actions` must return a TensorDict of batch size [{n}], got"
                f" {list(returned.batch_size)}"
            )
        content = self._added(returned, states)
        if "action" not in content:
            raise ActionError(
                f'`get_actions` must return an "action", got only the keys {sorted(content)}'
            )
        actions = self.codec.encode(content["action"], n)
        carries: dict[Key, Array] = {}
        if self.carry_columns or "next" in content:
            carries = self._read_carries(content.get("next"), n)
        extras: dict[Key, Array] = {}
        for name, value in content.items():
            if name not in ("action", "next"):
                _flatten_into(extras, (name,), value, n)
        return Answer(actions, self.codec.decode(actions), extras, carries)

    def _added(self, returned: TensorDictBase, states: TensorDictBase) -> dict[str, Any]:
        """What `returned` holds beside the states that were handed out, by its first key."""
        content: dict[str, Any] = entries_of(returned)
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


def _flatten_into(found: dict[Key, Array], key: Key, value: Any, n: int) -> None:
    if type(value) is Tensor:  # nearly always
        array = found[key] = to_numpy(value)
        if array.ndim and len(array) == n:
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
        for tensor in chain(model.parameters(), model.buffers()):
            return None if tensor.device.type == "cpu" else tensor.device
    return None


def overrides(task: object, hook: str) -> bool:
    """Whether a task defines an optional hook itself."""
    from gymtask.task import ReinforcementLearningTask

    return getattr(type(task), hook) is not getattr(ReinforcementLearningTask, hook)


@contextmanager
def eval_mode(*modules: Any) -> Iterator[None]:
    """Puts modules into eval mode, and each of their parts back into the mode that it had.

    Args:
        *modules: A model and its task; what is no module is left alone.
    """
    found = [module for module in modules if isinstance(module, nn.Module)]
    training = [part for module in found for part in module.modules() if part.training]
    if training:
        for module in found:
            module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
