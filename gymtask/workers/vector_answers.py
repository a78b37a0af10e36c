"""What a `VectorEnv` says of itself, and of one of its environments."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from gymtask.errors import ConfigurationError
from gymtask.workers.layout import Space, children, flatten, nest
from gymtask.workers.vector_closing import AnyVectorEnv


def autoreset_mode(env: AnyVectorEnv) -> AutoresetMode:
    """How a VectorEnv begins the next episode.

    That is what its attribute of that name says, or its metadata, as an `AutoresetMode` or the
    value of one.

    Raises:
        ConfigurationError: Neither says.
    """
    # The attribute first: metadata is often one dict for all of a class, and some write into it.
    declared = [getattr(env.unwrapped, "autoreset_mode", None)]
    if env.metadata is not VectorEnv.metadata:
        declared.append((env.metadata or {}).get("autoreset_mode"))
    for each in declared:
        for mode in AutoresetMode:
            if each in (mode, mode.value, mode.name):
                return mode
    known = [mode.value for mode in AutoresetMode]
    raise ConfigurationError(
        f"`metadata['autoreset_mode']` of {env} must be one of {known}, got {declared[-1]!r}; the"
        " rows at the ends of episodes cannot be told apart without it"
    )


def of_environment(space: Space, batch: Any, index: int) -> Any:
    """The value of one environment in a batch of them, or in an array of objects, one for each."""
    if isinstance(batch, (list, tuple)) and len(batch) > index and children(space) is None:
        return batch[index]
    if isinstance(batch, np.ndarray) and batch.dtype == object:
        return batch[index]
    if children(space) is None:
        return np.asarray(batch)[index]
    return nest(space, [np.asarray(leaf)[index] for leaf in flatten(space, batch)])


def info_of_environment(infos: dict[str, Any], key: str, index: int, num_envs: int) -> Any:
    """What `infos` say of one environment under a key, None for nothing.

    Without a mask it counts for all environments.
    """
    value = infos.get(key)
    if value is None or not _is_given(infos.get(f"_{key}"), index, num_envs):
        return None
    if isinstance(value, dict):
        parts = {name for name in value if not (name.startswith("_") and name[1:] in value)}
        return {
            name: info_of_environment(value, name, index, num_envs)
            for name in value
            if name in parts
        }
    return copy.deepcopy(value[index] if _is_one_each(value, num_envs) else value)


def _is_given(mask: Any, index: int, num_envs: int) -> bool:
    if _is_one_each(mask, num_envs):
        return bool(mask[index])
    # One for all; what is no mask is another info, whose name begins so.
    return bool(np.any(mask)) if isinstance(mask, (bool, np.bool_, np.ndarray)) else True


def _is_one_each(value: Any, num_envs: int) -> bool:
    if isinstance(value, np.ndarray):  # one without dimensions has no length
        return bool(value.shape[:1] == (num_envs,))
    return isinstance(value, (list, tuple)) and len(value) == num_envs
