"""Environments that are stepped together by a `gymnasium.vector.VectorEnv`.

Whatever its autoreset mode, what the pool gives is the same: each row is a transition with its true
next observation, and an episode that ended is followed by the next one.

- SAME_STEP: the step that ends an episode returns the next one's first observation, and the final
  one in `infos["final_obs"]`.
- DISABLED: the pool resets those that ended, by `reset(options={"reset_mask": ...})`.
- NEXT_STEP: the step after the end resets, ignores the action and is no transition. `recv` holds an
  ended row back until that step has given the observation that follows it. The collector takes
  part in it instead (see `held` and `began`), since it can act on all others at once that way.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from typing_extensions import override

from gymtask.errors import (
    ConfigurationError,
    NothingPendingError,
    ObservationError,
    PoolStateError,
)
from gymtask.workers.arguments import check_limits
from gymtask.workers.layout import Array, castable, flatten, make_writer, nest
from gymtask.workers.pool import Failures, WorkerPool
from gymtask.workers.slots import Slots
from gymtask.workers.vector_answers import autoreset_mode, info_of_environment, of_environment
from gymtask.workers.vector_closing import AnyVectorEnv, close_vector_env
from gymtask.workers.worker import BaseEnvironmentWorker, Steps, take_rows

_NOBODY: Array = np.empty(0, np.int64)


class NativePool(WorkerPool):
    """Steps all environments at once, in a VectorEnv that the worker's maker makes.

    Counts as one worker, whose rows arrive together; a step is made when every environment has got
    an action.
    """

    steps_together = True

    def __init__(self, workers: Sequence[BaseEnvironmentWorker], env: AnyVectorEnv) -> None:
        self._env = env
        num_envs = len(workers[0].env_ids)
        slots = Slots(env.single_observation_space, env.single_action_space, num_envs)
        super().__init__(workers, slots)
        self._mode = autoreset_mode(env)
        self._write_final = make_writer(self.observation_space, slots.final_observation)
        self._info_keys = workers[0].maker.info_keys
        self._warned = False
        self._broken_off = False  # whether a call of the VectorEnv was, anywhere
        self._posted: Array = np.zeros(num_envs, bool)

    @classmethod
    @override
    def start(cls, workers: Sequence[BaseEnvironmentWorker]) -> Self:
        worker = workers[0]
        if len(workers) > 1:
            raise ConfigurationError(
                f"`workers` must be one in native mode, which holds all, got {len(workers)}"
            )
        env = worker.maker.make_vector(len(worker.env_ids), worker.seed)
        try:
            return cls(workers, env)
        except BaseException:
            close_vector_env(env, worker.cleanup_time)
            raise

    # ---- stepping --------------------------------------------------------------------------------

    @override
    def take(
        self, min_envs: int, max_envs: int, timeout: float | None = None, spare: float = 0.0
    ) -> Array:
        """Steps all environments, and gives all of them.

        Those of which `began` says so were only reset: their rows are no transitions. Where some
        have no action, as the policy failed for them, nobody is stepped or given, and the actions
        of the others are forgotten.
        """
        if self.closed:
            self._require_open()
        if not self.num_pending:
            self._raise_stuck()
        if self.num_pending < self.num_envs:
            self._posted[:] = False
            self.num_pending, self.began = 0, None
            return _NOBODY
        try:
            self.began = self.held if len(self.held) else None
            self._posted[:] = False
            self.num_pending = 0
            self._step()
        except KeyboardInterrupt as error:  # whether the step was made is not known
            self._give_up(error)
        return self.all_ids

    @override
    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None
    ) -> Steps:
        self._require_open()
        check_limits(min_envs, max_envs, timeout)
        want = min(min_envs, self.num_pending)
        while len(self._ready) < want and not len(self._missing()):
            self._step_holding()
        if not self._ready:
            self._raise_stuck()
        return take_rows(self.slots, self._pop(self.num_envs if max_envs is None else max_envs))

    def _raise_stuck(self) -> None:
        if not self.num_pending:
            raise NothingPendingError("cannot recv, as no action is pending; call send() first")
        raise PoolStateError(
            "cannot recv, as a VectorEnv steps all environments together; send actions to"
            f" environments {self._missing().tolist()} first"
        )

    def _missing(self) -> Array:
        """Who needs an action before a step can be made, in increasing order."""
        missing = ~self._posted
        missing[self.held] = False
        ids: Array = np.flatnonzero(missing)
        return ids

    @override
    def _post(self, env_ids: Array) -> None:
        self._posted[env_ids] = True

    def _step_holding(self) -> None:
        """Makes a step; the row of an episode's end is ready when what follows it is known."""
        try:
            self._step_beside_held()
        except KeyboardInterrupt as error:  # rows that are held may be gone
            self._give_up(error)

    def _step_beside_held(self) -> None:
        slots, held = self.slots, self.held
        kept = slots.reward[held], slots.flags[held], [slots.infos[index] for index in held]
        self._posted[:] = False
        self._step()
        slots.reward[held], slots.flags[held] = kept[:2]
        for index, info in zip(held.tolist(), kept[2], strict=True):
            slots.infos[index] = info
        self._ready += np.setdiff1d(self.all_ids, self.held).tolist()

    def _step(self) -> None:
        slots = self.slots
        # A copy, since a VectorEnv may keep what it gets. Who is reset gets any action: its last.
        actions = nest(self.action_space, [leaf.copy() for leaf in slots.action])
        try:
            observation, reward, terminated, truncated, infos = self._env.step(actions)
            self._write(observation)
            slots.reward[:] = self._checked("rewards", reward)
            slots.terminated[:] = self._checked("terminated", terminated)
            slots.truncated[:] = self._checked("truncated", truncated)
            if len(self.held):
                slots.reward[self.held], slots.flags[self.held] = 0.0, False
                self.held = _NOBODY
            if self._info_keys:
                self._keep_infos(infos)
            if 1 in slots.flags.tobytes():
                self._end_episodes(np.flatnonzero(slots.terminated | slots.truncated), infos)
        except BaseException as error:
            self._fail(error, -1)

    def _write(self, observation: Any) -> None:
        try:
            values = flatten(self.observation_space, observation)
        except (TypeError, LookupError) as error:
            raise ObservationError(
                f"the observations of {self._env} must be arranged as"
                f" {self.observation_space} is, got {observation!r:.200}"
            ) from error
        for leaf, value in zip(self.slots.observation, values, strict=True):
            array = np.asarray(value)
            if array.shape != leaf.shape or not castable(array.dtype, leaf.dtype):
                raise ObservationError(
                    f"the observations of {self._env} must have shape {leaf.shape} and dtype"
                    f" {leaf.dtype}, got {array.shape} and {array.dtype}"
                )
            np.copyto(leaf, array, casting="unsafe")

    def _checked(self, name: str, values: Any) -> Array:
        array = np.asarray(values)
        if array.shape != (self.num_envs,) or array.dtype.kind not in "biuf":
            raise ObservationError(
                f"the {name} of {self._env} must be one number for each of {self.num_envs}"
                f" environments, got {array.dtype} {array.shape}"
            )
        return array

    def _end_episodes(self, ended: Array, infos: dict[str, Any]) -> None:
        slots = self.slots
        if self._mode is AutoresetMode.SAME_STEP:
            self._read_finals(ended, infos)
            return
        for leaf, final in zip(slots.observation, slots.final_observation, strict=True):
            final[ended] = leaf[ended]
        if self._mode is AutoresetMode.NEXT_STEP:
            self.held = ended
        else:
            self._reset_some(ended)

    def _reset_some(self, ended: Array) -> None:
        """Begins the next episodes in DISABLED mode."""
        mask = np.zeros(self.num_envs, bool)
        mask[ended] = True
        before = [leaf[~mask] for leaf in self.slots.observation]
        self._write(self._env.reset(options={"reset_mask": mask.copy()})[0])
        for leaf, old in zip(self.slots.observation, before, strict=True):
            if leaf[~mask].tobytes() != old.tobytes():
                raise ObservationError(
                    f"reset(options={{'reset_mask': ...}}) of {self._env} must leave environments"
                    f" {np.flatnonzero(~mask).tolist()} as they are, as its autoreset mode is"
                    " DISABLED, got other observations of them; use another autoreset mode"
                )

    def _read_finals(self, ended: Array, infos: dict[str, Any]) -> None:
        finals = infos.get("final_obs", infos.get("final_observation"))
        given = infos.get("_final_obs", infos.get("_final_observation"))
        mask = np.asarray(True if given is None else given)
        if finals is None or not (mask[ended] if mask.ndim else mask).all():
            raise ObservationError(
                f"{self._env} must give the final observation of each episode in"
                " infos['final_obs'], as its autoreset mode is SAME_STEP, got"
                f" {'only the keys ' + str(sorted(infos)) if finals is None else 'some only'};"
                " use another autoreset mode"
            )
        for index in ended.tolist():
            try:
                final = of_environment(self.observation_space, finals, index)
            except (LookupError, TypeError) as error:
                raise ObservationError(
                    f"infos['final_obs'] of {self._env} must hold one observation for each of"
                    f" {self.num_envs} environments, got {finals!r:.200}"
                ) from error
            self._write_final(index, final)
        if not self._warned and self._look_overwritten(ended):
            self._warned = True
            warnings.warn(
                f"final observations of {self._env} are the first ones of the next episodes: with"
                " SAME_STEP, an environment that reuses its arrays has overwritten them when it"
                " was reset; use another autoreset mode, or let it return copies",
                stacklevel=2,
            )

    def _look_overwritten(self, ended: Array) -> bool:
        """Whether all arrays in the final observations are those of the next episodes."""
        pairs = list(zip(self.slots.observation, self.slots.final_observation, strict=True))
        # Numbers are no arrays, so nothing can have written into them.
        arrays = [(first, final) for first, final in pairs if first.ndim > 1]
        return bool(arrays) and all(
            first[ended].tobytes() == final[ended].tobytes() for first, final in arrays
        )

    def _keep_infos(self, infos: dict[str, Any]) -> None:
        ended: list[bool] = self.slots.flags.any(axis=1).tolist()  # type: ignore[assignment]
        for index in range(self.num_envs):
            source = infos
            if ended[index] and self._mode is AutoresetMode.SAME_STEP:
                source = infos.get("final_info", {})  # the rest is of the next episode's reset
            found = {
                key: info_of_environment(source, key, index, self.num_envs)
                for key in self._info_keys
            }
            self.slots.infos[index] = {
                key: value for key, value in found.items() if value is not None
            }

    # ---- everything else -------------------------------------------------------------------------

    @override
    def _wait(self, timeout: float, for_all: bool = False) -> None:
        """Nothing finishes by itself here."""

    @override
    def _run(
        self, method: str, args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        if not hasattr(self._env, method) and not hasattr(self._env.unwrapped, method):
            raise ConfigurationError(
                f"{method}() must be a method of the VectorEnv to be used in native mode, got"
                f" {self._env}, which has none"
            )
        try:
            if method == "reset":
                self._reset([seed for (seed,) in args])
                return []
            # A wrapper has only the methods that every VectorEnv has.
            target: Any = self._env if hasattr(self._env, method) else self._env.unwrapped
            if method == "set_attr":
                target.set_attr(args[0][0], [value for _, value in args])
                return []
            found: Any = getattr(target, method)(*args[0], **(kwargs or {}))
        except BaseException as error:
            self._fail(error, -1)
        return self._one_each(method, found)

    def _one_each(self, method: str, found: Any) -> list[Any]:
        results = [None] * self.num_envs if found is None else list(found)
        if len(results) != self.num_envs:
            raise ConfigurationError(
                f"{method}() of {self._env} must give one result for each of {self.num_envs}"
                f" environments, got {len(results)}"
            )
        return results

    def _reset(self, seeds: list[Any]) -> None:
        first = seeds[0]
        seed: Any = first  # a VectorEnv with one generator for all takes one number only
        if first is not None and seeds != list(range(first, first + self.num_envs)):
            env = self._env.unwrapped
            if isinstance(env, (SyncVectorEnv, AsyncVectorEnv)):
                seed = seeds
            elif type(env).__module__.startswith("ale_py"):
                seed = np.array(seeds)
        with warnings.catch_warnings():
            if not self.was_reset and first == self.seed:  # it was made with this seed, if it could
                warnings.filterwarnings("ignore", "EnvPool seeds are fixed")
            observation, infos = self._env.reset(seed=seed)
        self._check_reset_infos(infos)
        self._write(observation)
        self.slots.reward[:], self.slots.flags[:] = 0.0, False
        self.held, self.began = _NOBODY, None

    def _check_reset_infos(self, infos: dict[str, Any]) -> None:
        """Refuses an environment whose reset gives what SAME_STEP gives at an episode's end.

        Of the two, an AsyncVectorEnv or a SyncVectorEnv keeps that of the reset.
        """
        merged = isinstance(self._env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        if not merged or self._mode is not AutoresetMode.SAME_STEP:
            return
        for key in ("final_obs", "final_info")[: 2 if self._info_keys else 1]:
            if key in infos:
                raise ObservationError(
                    f"the info of reset() in {self._env} must not hold {key!r}, which would take"
                    " the place of what an episode ended with, as its autoreset mode is SAME_STEP,"
                    f" got {infos[key]!r:.80}; use another autoreset mode"
                )

    @override
    def _fail(
        self, error: BaseException, env_id: int, cause: BaseException | None = None
    ) -> NoReturn:
        self._broken_off = not isinstance(error, Exception)  # Ctrl-C strikes anywhere
        try:
            super()._fail(error, env_id, cause)
        finally:
            del error, cause  # see there

    @override
    def _close(self, timeout: float) -> Failures:
        close_vector_env(self._env, timeout, broken_off=self._broken_off)
        return []
