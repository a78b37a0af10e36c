"""Checks of what vector environments are given."""

from __future__ import annotations

import multiprocessing
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from gymtask.errors import ConfigurationError
from gymtask.maker import EnvironmentMaker
from gymtask.workers.waiting import num_cores


def checked_makers(env_fns: Any) -> list[EnvironmentMaker]:
    """The recipe of each environment; functions that are the same one share it.

    Raises:
        ConfigurationError: They are not one or more callables.
    """
    if isinstance(env_fns, (str, bytes, Mapping)) or not isinstance(env_fns, Sequence):
        raise ConfigurationError(
            f"`env_fns` must be a sequence of functions that make environments, got {env_fns!r:.80}"
        )
    if not env_fns:
        raise ConfigurationError("`env_fns` must hold at least one function, got none")
    for env_fn in env_fns:
        if not callable(env_fn):
            raise ConfigurationError(
                f"`env_fns` must be functions that make environments, got {env_fn!r:.80}"
            )
    made: dict[int, EnvironmentMaker] = {}
    for env_fn in env_fns:
        if id(env_fn) not in made:
            made[id(env_fn)] = EnvironmentMaker.create(env_fn)
    return [made[id(env_fn)] for env_fn in env_fns]


def checked_num_workers(num_workers: Any, num_envs: int) -> int:
    """How many workers to start; None: one for each core, at most one for each environment.

    Raises:
        ConfigurationError: It is no integer from 1 to the number of environments.
    """
    if num_workers is None:
        return min(num_cores(), num_envs)
    number = _integer(num_workers)
    if number is None or not 1 <= number <= num_envs:
        raise ConfigurationError(
            f"`num_workers` must be an integer from 1 to the number of environments ({num_envs}),"
            f" or None, got {num_workers!r}"
        )
    return number


def checked_max_concurrency(limit: Any) -> int | None:
    """How many environments may run at once.

    Raises:
        ConfigurationError: It is neither None nor a positive integer.
    """
    if limit is not None and not isinstance(limit, (int, np.integer)):
        raise ConfigurationError(
            f"`max_concurrency` must be an integer or None, got {limit!r} of {type(limit)}"
        )
    if limit is not None and limit < 1:
        raise ConfigurationError(f"`max_concurrency` must be a positive or None, got {limit!r}")
    return None if limit is None else int(limit)


def check_context(context: Any) -> None:
    """Checks the name of a start method.

    Raises:
        ConfigurationError: This system has no such one.
    """
    known = multiprocessing.get_all_start_methods()
    if context is not None and context not in known:
        raise ConfigurationError(f"`context` must be one of {known} or None, got {context!r}")


def checked_autoreset_mode(mode: Any) -> AutoresetMode:
    """The mode as a member of the enumeration.

    Raises:
        ConfigurationError: There is no such mode.
    """
    try:
        return AutoresetMode(mode)
    except ValueError as error:
        values = [member.value for member in AutoresetMode]
        raise ConfigurationError(
            f"`autoreset_mode` must be one of {values}, got {mode!r}"
        ) from error


def checked_seeds(seed: Any, num_envs: int) -> list[int | None]:
    """A seed for each environment: s + i for environment i, where s is one number.

    Raises:
        ConfigurationError: A list has another length than there are environments.
    """
    if seed is None:
        return [None] * num_envs
    first = _integer(seed)
    if first is not None:
        return [first + index for index in range(num_envs)]
    seeds = list(seed)
    if len(seeds) != num_envs:
        raise ConfigurationError(
            f"`seed` must be an integer, None, or a list of one for each of {num_envs}"
            f" environments, got {len(seeds)} of them"
        )
    return seeds


def split_options(options: Any, num_envs: int) -> tuple[Any, list[int]]:
    """The options of a reset without its mask, and the environments that are to be reset.

    The caller's dict is left as it is.

    Raises:
        TypeError: The mask is no array of bool.
        ConfigurationError: It has another shape than [num_envs], or holds no True.
    """
    if options is None or "reset_mask" not in options:
        return options, list(range(num_envs))
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ConfigurationError(
            f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}"
        )
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ConfigurationError(
            "`options['reset_mask']` must contain a boolean array with at least one True value, got"
            f" reset_mask={mask}"
        )
    rest = {key: value for key, value in options.items() if key != "reset_mask"}
    return rest, np.flatnonzero(mask).tolist()


def listed_values(values: Any, num_envs: int) -> list[Any]:
    """One value of an attribute for each environment.

    Raises:
        ConfigurationError: A list or tuple has another length.
    """
    listed = list(values) if isinstance(values, (list, tuple)) else [values] * num_envs
    if len(listed) != num_envs:
        raise ConfigurationError(
            "Values must be a list or tuple with length equal to the number of environments. "
            f"Got `{len(listed)}` values for {num_envs} environments."
        )
    return listed


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


EnvFns = Sequence[Callable[[], Any]]
