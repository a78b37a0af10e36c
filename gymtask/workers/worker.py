"""A worker before it is started, and the rows that come back from started ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gymtask.config import EnvironmentConfig
from gymtask.maker import EnvironmentMaker
from gymtask.workers.layout import Array, Space
from gymtask.workers.slots import Slots


@dataclass(frozen=True)
class BaseEnvironmentWorker:
    """A worker that is not started yet: which environments it will run, and how.

    Attributes:
        maker: Makes each of its environments.
        env_ids: Their indices in the pool.
        seed: Environment i is first reset with `seed + i`. In native mode the VectorEnv is given
            `seed` alone: Sync- and AsyncVectorEnv and ALE's make the same of it, one with a single
            generator (CartPole-v1's own) gives rows that depend on the number of environments.
        mode: "sync", "thread", "process" or "native"; the same for all workers of a pool.
        cleanup_time: Seconds it gets to close its environments before it is killed.
        daemon: Whether a worker process is daemonic.
    """

    maker: EnvironmentMaker
    env_ids: tuple[int, ...]
    seed: int
    mode: str = "sync"
    cleanup_time: float = 5.0
    daemon: bool = True


@dataclass(frozen=True)
class Steps:
    """Rows that a pool gave back: n real transitions, or n first observations after a reset.

    Attributes:
        env_ids: int64 [n], increasing.
        observation: [n, *shape], or dicts and tuples of such arrays; after an episode's end, the
            first observation of the next episode.
        reward: float64 [n].
        terminated: bool [n].
        truncated: bool [n].
        final_observation: [m, *shape], the last observations of the m episodes that ended, in the
            order of the rows whose `ended` is True.
        info: One dict for each row, with those of the environment's `info_keys` that its step gave.
            At an episode's end they are the last step's; what the reset after it gave is left out.
    """

    env_ids: Array
    observation: Any
    reward: Array
    terminated: Array
    truncated: Array
    final_observation: Any
    info: list[dict[str, Any]]

    @property
    def ended(self) -> Array:
        """Whether the row is the last of its episode, bool [n]."""
        ended: Array = self.terminated | self.truncated
        return ended


def spaces_of(maker: EnvironmentMaker) -> tuple[Space, Space]:
    """The observation space and the action space of an environment, which is made to look at it.

    Raises:
        Exception: What making it, or closing it, raised.
    """
    try:
        env = maker()
        spaces = env.observation_space, env.action_space
        env.close()
    except Exception as error:
        error.add_note("raised by environment 0, which was made to learn its spaces")
        raise
    return spaces


def take_rows(slots: Slots, env_ids: Array) -> Steps:
    """The rows of these environments, copied out of the slots."""
    terminated, truncated = slots.terminated[env_ids], slots.truncated[env_ids]
    return Steps(
        env_ids=env_ids.copy(),
        observation=slots.nested_observation(env_ids),
        reward=slots.reward[env_ids],
        terminated=terminated,
        truncated=truncated,
        final_observation=slots.nested_observation(env_ids[terminated | truncated], final=True),
        info=[dict(slots.infos[index]) for index in env_ids],
    )


def make_workers(
    maker: EnvironmentMaker, config: EnvironmentConfig, *, force_sync: bool = False
) -> list[BaseEnvironmentWorker]:
    """Splits environments over workers, in sizes that differ by at most one."""
    sync = force_sync or config.num_env_workers == 0
    mode = "sync" if sync else config.env_worker_mode
    num_workers = 1 if mode == "native" else max(1, config.num_env_workers)
    groups = np.array_split(np.arange(config.total_envs), num_workers)
    return [
        BaseEnvironmentWorker(
            maker=maker,
            env_ids=tuple(group.tolist()),
            seed=config.env_seed,
            mode=mode,
            cleanup_time=config.env_cleanup_time,
            daemon=config.daemon,
        )
        for group in groups
    ]


def split_by_owner(env_ids: Array, owner: Array, num_workers: int) -> list[tuple[int, list[int]]]:
    """The workers that own some of `env_ids`, each with those that it owns."""
    owners = owner[env_ids]
    return [
        (worker, env_ids[owners == worker].tolist())
        for worker in range(num_workers)
        if (owners == worker).any()
    ]
