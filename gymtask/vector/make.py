"""`make_vec`: a vector environment from an id, as `gymnasium.make_vec` makes one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import VectorizeMode
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from gymtask.errors import ConfigurationError
from gymtask.maker import find_spec, without_main
from gymtask.vector.arguments import checked_autoreset_mode
from gymtask.vector.process import ProcessVectorEnv
from gymtask.vector.thread import ThreadVectorEnv

OURS: dict[str, Any] = {"process": ProcessVectorEnv, "thread": ThreadVectorEnv}
GYMNASIUMS: dict[str, Any] = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}
MODES = ("process", "thread", "sync", "native", "async", "vector_entry_point")


def make_vec(
    id: str | EnvSpec,
    num_envs: int = 1,
    vectorization_mode: str | VectorizeMode = "process",
    vector_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] | None = None,
    *,
    num_workers: int | None = None,
    autoreset_mode: str | AutoresetMode = "NextStep",
    **kwargs: Any,
) -> VectorEnv[Any, Any, Any]:
    """Makes a vector environment; `gymnasium.make_vec` with the faster modes of gymtask.

    Args:
        id: An id, "module:Name-v0" too, or an EnvSpec. What its kwargs say of the next four
            arguments goes before what is given here, as in Gymnasium.
        num_envs: Environments.
        vectorization_mode: "process" (`ProcessVectorEnv`), "thread" (a SyncVectorEnv stepped by
            threads), "sync" (a SyncVectorEnv), "native" or "vector_entry_point" (the id's own
            VectorEnv), "async" (Gymnasium's AsyncVectorEnv); members of VectorizeMode too.
        vector_kwargs: Further arguments of the vector environment.
        wrappers: Functions that wrap each environment, in order.
        num_workers: Processes or threads; None: one for each core that this process may use.
        autoreset_mode: When an ended episode is reset; the id's own VectorEnv has its own way,
            which `vectorization_mode="native"` leaves as it is.
        **kwargs: Arguments of the environment.

    Returns:
        The vector environment. `gymtask.make_vec(envs.spec)` makes it again; `gymnasium.make_vec`
        does not know the modes "process" and "thread".

    Raises:
        ConfigurationError: A value breaks its rule.
        gymnasium.error.Error: The id is unknown, or cannot be made in this way.
    """
    spec = copy.deepcopy(_spec_of(id))
    held = spec.kwargs  # a spec that a vector environment had says how that was made
    num_envs = held.pop("num_envs", num_envs)
    mode = _checked_mode(held.pop("vectorization_mode", vectorization_mode))
    vector = _checked_kwargs(held.pop("vector_kwargs", vector_kwargs), mode)
    listed = _checked_wrappers(held.pop("wrappers", wrappers))
    _check_num_envs(num_envs)
    held.update(kwargs)
    autoreset = checked_autoreset_mode(autoreset_mode)
    if autoreset != AutoresetMode.NEXT_STEP:
        _set(vector, "autoreset_mode", autoreset, mode, (*OURS, *GYMNASIUMS))
    if num_workers is not None:
        _set(vector, "num_workers", num_workers, mode, OURS)
    if mode not in OURS:
        return gym.make_vec(spec, num_envs, VectorizeMode(mode), vector or None, listed)
    return _make(spec, num_envs, mode, vector, listed)


def _make(
    spec: EnvSpec,
    num_envs: int,
    mode: str,
    vector_kwargs: dict[str, Any],
    wrappers: list[Callable[[Any], Any]],
) -> VectorEnv[Any, Any, Any]:
    if spec.entry_point is None:
        raise gym.error.Error(
            f"Cannot create vectorized environment for {spec.id} because it doesn't have an entry"
            " point defined."
        )
    keywords = dict(spec.kwargs)
    single = replace(without_main(spec), kwargs={})  # workers know nothing of `__main__`

    def make_single() -> Any:
        env = gym.make(single, **keywords)
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    env: VectorEnv[Any, Any, Any] = OURS[mode]([make_single] * num_envs, **vector_kwargs)
    spec.kwargs["vectorization_mode"] = mode
    if num_envs != 1:
        spec.kwargs["num_envs"] = num_envs
    if vector_kwargs:
        spec.kwargs["vector_kwargs"] = vector_kwargs
    if wrappers:
        spec.kwargs["wrappers"] = wrappers
    env.spec = spec
    return env


def _spec_of(id: Any) -> EnvSpec:
    if isinstance(id, EnvSpec):
        return id
    if not isinstance(id, str):
        raise ConfigurationError(f"`id` must be an id or an EnvSpec, got {id!r}")
    return find_spec(id)


def _checked_mode(mode: Any) -> str:
    name = mode.value if isinstance(mode, VectorizeMode) else mode
    if not isinstance(name, str) or name not in MODES:
        raise ConfigurationError(
            f"`vectorization_mode` must be one of {', '.join(map(repr, MODES))}, got {mode!r}"
        )
    return "vector_entry_point" if name == "native" else name


def _check_num_envs(num_envs: Any) -> None:
    if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
        raise ConfigurationError(f"`num_envs` must be an integer of at least 1, got {num_envs!r}")


def _checked_kwargs(vector_kwargs: Any, mode: str) -> dict[str, Any]:
    if vector_kwargs is not None and not isinstance(vector_kwargs, Mapping):
        raise ConfigurationError(f"`vector_kwargs` must be a dict or None, got {vector_kwargs!r}")
    kind = {**OURS, **GYMNASIUMS}.get(mode)
    if vector_kwargs and kind is not None:
        known = [name for name in inspect.signature(kind).parameters if name != "env_fns"]
        if not set(vector_kwargs) <= set(known):
            raise ConfigurationError(
                f"`vector_kwargs` must hold arguments of {kind.__name__}, which are"
                f" {', '.join(known)}, got {sorted(set(vector_kwargs) - set(known))}"
            )
    return dict(vector_kwargs or {})


def _checked_wrappers(wrappers: Any) -> list[Callable[[Any], Any]]:
    if wrappers is None:
        return []
    if not isinstance(wrappers, (list, tuple)) or not all(map(callable, wrappers)):
        raise ConfigurationError(f"`wrappers` must be a list of callables, got {wrappers!r}")
    return list(wrappers)


def _set(vector: dict[str, Any], name: str, value: Any, mode: str, modes: Iterable[str]) -> None:
    """Sets an argument of the vector environment, which must know it and not have another."""
    if mode not in modes:
        raise ConfigurationError(
            f"`{name}` must be left out with vectorization_mode={mode!r}, which has no use for it,"
            f" got {value!r}"
        )
    if vector.setdefault(name, value) != value:
        raise ConfigurationError(
            f"`{name}` must be what `vector_kwargs` says, {vector[name]!r}, or be left out there,"
            f" got {value!r}"
        )
