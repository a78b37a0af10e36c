"""Which workers make a pool, and what making one leaves as it was."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from gymtask.config import EnvironmentConfig
from gymtask.errors import (
    ConfigurationError,
)
from gymtask.maker import EnvironmentMaker
from gymtask.testing import ScriptedEnv
from gymtask.workers.pool import WorkerPool
from gymtask.workers.worker import BaseEnvironmentWorker, make_workers
from tests.integration.pool_envs import (
    MODES,
    GravityEnv,
    NumberedEnv,
    PlainWrapper,
    RandomEnv,
    open_pool,
    step_all,
)

# The first three and the fourth to sixth numbers that generators seeded 7, 8 and 9 draw.
FIRST = [0.6250955, 0.3269723, 0.8702492]
SECOND = [0.8972138, 0.9872769, 0.2868172]


class OtherSpaceEnv(NumberedEnv):
    def __init__(self, actions: int, size: int) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(actions)
        self.observation_space = spaces.Box(-1, 1, (size,))


def worker_of(env: Any, env_ids: tuple[int, ...], mode: str, **kwargs: Any) -> Any:
    maker = EnvironmentMaker.create(env, kwargs=kwargs)
    return BaseEnvironmentWorker(maker, env_ids, seed=0, mode=mode, cleanup_time=1.0)


class TestWorkers:
    def test_different_makers_with_the_same_spaces_make_one_pool(self, mode: str) -> None:
        workers = [
            worker_of(ScriptedEnv, (0, 1), mode, lengths=2),
            worker_of(ScriptedEnv, (2,), mode, lengths=3),
        ]
        with WorkerPool.from_workers(workers) as pool:
            steps = pool.reset()
            assert steps.observation[:, 1].tolist() == [0, 1, 2]
            ends = [step_all(pool, [0] * 3).ended.tolist() for _ in range(3)]
        assert ends == [[False, False, False], [True, True, False], [False, False, True]]

    @pytest.mark.parametrize(
        ("kwargs", "role"),
        [
            ({"actions": 3, "size": 2}, "action_space"),
            ({"actions": 2, "size": 3}, "observation_space"),
        ],
    )
    def test_spaces_that_differ_are_refused_naming_both(
        self, mode: str, kwargs: Any, role: str
    ) -> None:
        workers = [
            worker_of(OtherSpaceEnv, (0,), mode, actions=2, size=2),
            worker_of(OtherSpaceEnv, (1,), mode, **kwargs),
        ]
        expected = getattr(OtherSpaceEnv(2, 2), role)
        found = getattr(OtherSpaceEnv(**kwargs), role)
        message = f"`{role}` of every environment must be that of environment 0, {expected}, got"
        with pytest.raises(
            ConfigurationError, match=re.escape(f"{message} {found} from environment 1")
        ):
            WorkerPool.from_workers(workers)

    def test_each_worker_has_its_own_seed(self, mode: str) -> None:
        maker = EnvironmentMaker.create(RandomEnv)
        workers = [BaseEnvironmentWorker(maker, (i,), seed=9 - 2 * i, mode=mode) for i in range(3)]
        with WorkerPool.from_workers(workers) as pool:
            found = pool.reset().observation
        np.testing.assert_allclose(found, [FIRST[2], FIRST[1], FIRST[0]], atol=1e-7)

    @pytest.mark.parametrize(
        ("groups", "modes", "message"),
        [
            ([], [], "`workers` must hold at least one worker, got none"),
            ([(0,), (2,)], ["sync"] * 2, "`env_ids` of the workers must be 0 to N-1 in order"),
            ([(0,), (0,)], ["sync"] * 2, "`env_ids` of the workers must be 0 to N-1 in order"),
            ([(0,), ()], ["sync"] * 2, "at least one for each, got [[0], []]"),
            ([(0,), (1,)], ["sync", "thread"], "`mode` must be one of 'sync', 'thread', 'process'"),
            ([(0,)], ["cluster"], "and the same for all workers, got ['cluster']"),
        ],
    )
    def test_workers_that_make_no_pool_are_refused(
        self, groups: Any, modes: Any, message: str
    ) -> None:
        workers = [worker_of(ScriptedEnv, ids, m) for ids, m in zip(groups, modes, strict=True)]
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            WorkerPool.from_workers(workers)

    def test_environments_are_split_evenly_over_workers(self) -> None:
        maker = EnvironmentMaker.create(ScriptedEnv)
        config = EnvironmentConfig(num_env_workers=3, num_envs=8, env_worker_mode="thread")
        workers = make_workers(maker, config)
        assert [worker.env_ids for worker in workers] == [(0, 1, 2), (3, 4, 5), (6, 7)]
        assert {worker.mode for worker in workers} == {"thread"}
        assert {worker.mode for worker in make_workers(maker, config, force_sync=True)} == {"sync"}


class TestSideEffects:
    def test_building_a_pool_changes_neither_class_nor_spec_nor_spaces(
        self, mode: str, gravity_id: str
    ) -> None:
        env = gym.make(gravity_id)
        before = repr((GravityEnv.metadata, env.spec, gym.spec(gravity_id), env.action_space))
        with open_pool(gravity_id, mode, g=2.0, max_episode_steps=3, wrappers=(PlainWrapper,)) as p:
            p.reset()
            step_all(p, [0, 0])
        after = repr((GravityEnv.metadata, env.spec, gym.spec(gravity_id), env.action_space))
        assert after == before

    def test_two_modes_side_by_side_do_not_affect_each_other(self) -> None:
        pools = [open_pool(ScriptedEnv, mode, lengths=(2, 3)) for mode in MODES]
        for pool in pools:
            pool.reset()
        for t in range(6):
            found = []
            for pool in pools:
                pool.send([t % 2, 1])
            for pool in reversed(pools):
                found.append(pool.recv(2))
                if t == 3:
                    pool.close()
            assert len({steps.observation.tobytes() for steps in found}) == 1
            assert len({steps.final_observation.tobytes() for steps in found}) == 1
            if t == 3:
                break

    @pytest.mark.parametrize("length", [5, 700])
    def test_a_time_limit_may_be_shorter_or_longer_than_the_registered_one(
        self, mode: str, length: int
    ) -> None:
        gym.register("PoolCounter-v0", ScriptedEnv, max_episode_steps=500)
        try:
            with open_pool(
                "PoolCounter-v0", mode, envs=1, max_episode_steps=length, lengths=10**6
            ) as pool:
                pool.reset()
                for t in range(1, length + 1):
                    steps = step_all(pool, [0])
                    assert steps.truncated.tolist() == [t == length]
                    assert not steps.terminated[0]
                assert steps.final_observation[0, 0] == length
        finally:
            del gym.registry["PoolCounter-v0"]
