"""Checks of what a pool is given: workers, indices, actions, limits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gymtask.errors import ConfigurationError
from gymtask.workers.layout import Array, Space, castable, children, flatten, space_leaves

if TYPE_CHECKING:
    from gymtask.workers.worker import BaseEnvironmentWorker


def check_workers(workers: Sequence[BaseEnvironmentWorker], modes: Sequence[str]) -> None:
    """Checks that workers make a pool.

    Raises:
        ConfigurationError: They do not fit together, or there are none.
    """
    if not workers:
        raise ConfigurationError("`workers` must hold at least one worker, got none")
    groups = [list(worker.env_ids) for worker in workers]
    found = [index for group in groups for index in group]
    if found != list(range(len(found))) or not all(groups):
        raise ConfigurationError(
            "`env_ids` of the workers must be 0 to N-1 in order, and at least one for each, got"
            f" {groups}"
        )
    kinds = [worker.mode for worker in workers]
    if len(set(kinds)) != 1 or kinds[0] not in modes:
        raise ConfigurationError(
            f"`mode` must be one of {', '.join(map(repr, modes))} and the same for all workers,"
            f" got {kinds}"
        )


def checked_ids(env_ids: Any, num_envs: int) -> Array:
    """Indices of environments as int64 [n].

    Raises:
        ConfigurationError: They are none, not different, no integers, or out of range.
    """
    ids = np.array(env_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(set(ids.tolist())) != len(ids):
        raise ConfigurationError(
            f"`env_ids` must be one or more different indices, got {env_ids!r}"
        )
    if ids.min() < 0 or ids.max() >= num_envs:
        raise ConfigurationError(f"`env_ids` must lie in 0 to {num_envs - 1}, got {ids.tolist()}")
    return ids.astype(np.int64)


def checked_seed(seed: Any) -> int:
    """A seed as a plain int, which is all that Gymnasium takes.

    Raises:
        ConfigurationError: It is no integer, or negative.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigurationError(f"`seed` must be an integer of at least 0, got {seed!r}")
    return number


def check_limits(min_envs: int, max_envs: int | None, timeout: float | None) -> None:
    """Checks how many rows are asked for.

    Raises:
        ConfigurationError: A limit breaks its rule.
    """
    if max_envs is not None and max_envs < 1:
        raise ConfigurationError(f"`max_envs` must be at least 1 or None, got {max_envs}")
    if min_envs < 1 or (max_envs is not None and min_envs > max_envs):
        raise ConfigurationError(
            f"`min_envs` must be at least 1 and at most max_envs ({max_envs}), got {min_envs}"
        )
    if timeout is not None and not timeout >= 0:
        raise ConfigurationError(f"`timeout` must be at least 0 or None, got {timeout}")


def action_arrays(space: Space, actions: Any, count: int) -> list[Array]:
    """The actions of `count` environments, one array [count, *shape] for each leaf of the space.

    Raises:
        ConfigurationError: Structure, shape or kind is another one than the space's, or an integer
            does not fit its dtype.
    """
    try:
        _check_structure(space, actions)
        arrays = [np.asarray(value) for value in flatten(space, actions)]
    except (TypeError, ValueError, LookupError) as error:
        raise ConfigurationError(
            f"`actions` must be arranged as the action space {space}, got {actions!r:.200}"
        ) from error
    checked = []
    for leaf, array in zip(space_leaves(space, "action"), arrays, strict=True):
        where = "`actions`" + "".join(f"[{key!r}]" for key in leaf.path)
        if array.shape != (count, *leaf.shape):
            raise ConfigurationError(
                f"{where} must have shape {(count, *leaf.shape)}, got {array.shape}"
            )
        if not castable(array.dtype, leaf.dtype):
            raise ConfigurationError(f"{where} must be of dtype {leaf.dtype}, got {array.dtype}")
        cast = array.astype(leaf.dtype)
        if leaf.dtype.kind in "iu" and not np.array_equal(cast, array):
            raise ConfigurationError(f"{where} must fit dtype {leaf.dtype}, got {array.tolist()}")
        checked.append(cast)
    return checked


def _check_structure(space: Space, value: Any) -> None:
    parts = children(space)
    if parts is None:
        return
    if len(value) != len(parts):
        raise ValueError(f"expected {len(parts)} parts, got {len(value)}")
    for (key, part), position in zip(parts, range(len(parts)), strict=True):
        _check_structure(part, value[key] if hasattr(value, "keys") else value[position])
