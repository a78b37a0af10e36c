"""Native mode by hand: who must be sent actions, what is held back, access, seeds and refusals."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from gymtask.config import EnvironmentConfig
from gymtask.errors import (
    ConfigurationError,
    MakerError,
    NothingPendingError,
    ObservationError,
    PoolClosedError,
    PoolStateError,
)
from gymtask.maker import EnvironmentMaker
from gymtask.testing import ScriptedEnv
from gymtask.trainer import evaluate
from gymtask.workers.pool import WorkerPool
from gymtask.workers.worker import make_workers
from tests.integration.native_envs import MODE_IDS, MODES, DriftVectorEnv, Scripts, vector_of
from tests.integration.pool_envs import GravityEnv, RandomEnv, open_pool, step_all
from tests.tasks import make_task

NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


@pytest.fixture(params=MODES, ids=MODE_IDS)
def autoreset(request: pytest.FixtureRequest) -> AutoresetMode:
    mode: AutoresetMode = request.param
    return mode


def opened(env: Any, num_envs: int = 2, **keywords: Any) -> WorkerPool:
    return open_pool(env, "native", envs=num_envs, workers=1, **keywords)


def scripted(mode: AutoresetMode, **kwargs: Any) -> Callable[..., Any]:
    return vector_of(ScriptedEnv, mode, num_actions=9, **kwargs)


# ---- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [SAME, DISABLED], ids=["SAME_STEP", "DISABLED"])
def test_each_step_gives_a_row_of_everyone(mode: AutoresetMode) -> None:
    with opened(scripted(mode, lengths=(2, 3))) as pool:
        steps = pool.reset()
        assert steps.observation[:, 0].tolist() == [0, 0]
        shown = [step_all(pool, [1, 1]) for _ in range(6)]
    assert [step.observation[:, 0].tolist() for step in shown] == [
        [1, 1],
        [100, 2],
        [101, 100],
        [200, 101],
        [201, 102],
        [300, 200],
    ]
    finals = [step.final_observation[:, 0].tolist() for step in shown]
    assert finals == [[], [2], [3], [102], [], [202, 103]]
    assert [step.ended.tolist() for step in shown][1:3] == [[True, False], [False, True]]


def test_an_ended_row_is_held_back_until_what_follows_it_is_known() -> None:
    """NEXT_STEP: the reset is a step of its own, which needs actions of the others only."""
    with opened(scripted(NEXT, lengths=(2, 3)), info_keys=("t",)) as pool:
        pool.reset()
        assert step_all(pool, [1, 1]).env_ids.tolist() == [0, 1]
        pool.send([5, 6])
        steps = pool.recv(2)  # environment 0 has ended
        assert steps.env_ids.tolist() == [1]
        assert (pool.num_pending, steps.reward.tolist()) == (1, [2.0])
        with pytest.raises(PoolStateError, match=r"send actions to environments \[1\] first"):
            pool.recv()
        with pytest.raises(PoolStateError, match=r"cannot reset while actions of .* \[0\]"):
            pool.reset()
        pool.send([7], [1])
        steps = pool.recv(2)  # now environment 1 has ended, and 0 has begun
        assert steps.env_ids.tolist() == [0]
        assert steps.observation.tolist() == [[100, 0, -1]]
        assert steps.final_observation.tolist() == [[2, 0, 5]]
        assert (steps.reward.tolist(), steps.terminated.tolist()) == ([2.0], [True])
        assert steps.info == [{"t": 2}]
        pool.send([8], [0])
        steps = pool.recv(2)
        assert steps.env_ids.tolist() == [0, 1]
        assert steps.observation.tolist() == [[101, 0, 8], [100, 1, -1]]
        assert steps.final_observation.tolist() == [[3, 1, 7]]
        assert steps.reward.tolist() == [1.0, 3.0]
        assert steps.info == [{"t": 1}, {"t": 3}]
        assert pool.num_pending == 0


@pytest.mark.parametrize("num_envs", [1, 3])
def test_when_all_have_ended_at_once_recv_needs_nobody(num_envs: int) -> None:
    with opened(scripted(NEXT, lengths=1), num_envs) as pool:
        pool.reset()
        for episode in range(1, 4):
            steps = step_all(pool, [2] * num_envs)
            assert steps.env_ids.tolist() == list(range(num_envs))
            assert steps.observation[:, 0].tolist() == [100 * episode] * num_envs
            assert steps.final_observation[:, 0].tolist() == [100 * episode - 99] * num_envs
            assert steps.ended.all()


def test_a_step_needs_actions_of_everyone(autoreset: AutoresetMode) -> None:
    """O-66."""
    with opened(scripted(autoreset), 3) as pool:
        pool.reset()
        with pytest.raises(NothingPendingError, match="no action is pending"):
            pool.recv()
        pool.send([1], [1])
        with pytest.raises(PoolStateError, match=r"steps all .* send actions to .* \[0, 2\] first"):
            pool.recv()
        with pytest.raises(PoolStateError, match=r"cannot send to environments \[1\]"):
            pool.send([1], [1])
        pool.send([3, 2], [2, 0])
        assert pool.recv(3).observation[:, 2].tolist() == [2, 1, 3]


def test_limits_and_leftover_rows_are_those_of_every_pool(autoreset: AutoresetMode) -> None:
    """O-62."""
    with opened(scripted(autoreset, lengths=50), 4) as pool:
        pool.reset()
        pool.send([0, 1, 2, 3])
        assert pool.recv(1, 3).env_ids.tolist() == [0, 1, 2]
        assert pool.num_pending == 1
        pool.send([4, 4, 4], [0, 1, 2])
        assert pool.recv(1).observation[:, 2].tolist() == [3]
        pool.send([4], [3])
        assert pool.recv(4, timeout=0.0).observation[:, 2].tolist() == [4, 4, 4, 4]
        with pytest.raises(ConfigurationError, match="`min_envs` must be at least 1"):
            pool.recv(0)


def test_steps_belong_to_the_caller(autoreset: AutoresetMode) -> None:
    with opened(scripted(autoreset, lengths=9)) as pool:
        kept = [pool.reset(), step_all(pool, [1, 1])]
        step_all(pool, [2, 2])
        kept[1].env_ids[:] = 7
        assert [steps.observation[0, 0] for steps in kept] == [0, 1]
        assert step_all(pool, [1, 1]).env_ids.tolist() == [0, 1]


# ---- seeds, access, close ------------------------------------------------------------------------


def test_environments_are_seeded_apart_and_only_once(autoreset: AutoresetMode) -> None:
    """O-07, O-16: the same numbers as in sync mode, and no seed a second time."""

    def shown(pool: WorkerPool) -> list[Any]:
        found = [pool.reset().observation]
        found += [step_all(pool).observation for _ in range(3)]
        found.append(pool.reset().observation)
        return [*found, pool.reset(seed=11).observation, pool.reset().observation]

    # Odd numbers of steps: the resets do not fall together with an episode's end.
    with open_pool(RandomEnv, "sync", envs=3, workers=1, seed=5) as pool:
        expected = [np.random.default_rng(5 + index).random() for index in range(3)]
        reference = shown(pool)
        assert reference[0].tolist() == expected
    if autoreset is NEXT:
        return  # rows at an episode's end come later; collections show the same
    with opened(vector_of(RandomEnv, autoreset), 3, seed=5) as pool:
        for ours, theirs in zip(shown(pool), reference, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_evaluation_has_its_shares_and_its_seeds(autoreset: AutoresetMode) -> None:
    """O-06: five episodes of each, though one has finished ten long before."""
    records = []
    for mode, env in (
        ("native", vector_of(ScriptedEnv, autoreset, lengths=(1, 10))),
        ("sync", lambda: ScriptedEnv((1, 10))),
    ):
        task = make_task(2, 1, mode, env=env)
        records.append(evaluate(task, None, num_episodes=10))
    assert records[0] == records[1]
    lengths = [record.length for record in records[0]]
    assert sorted(lengths) in ([1] * 5 + [10] * 5, [1] * 10, [10] * 10)


def test_call_attributes_render_and_close(autoreset: AutoresetMode) -> None:
    make = vector_of(GravityEnv, autoreset, render_mode="rgb_array")
    pool = opened(make, 3)
    pool.reset()
    assert pool.get_attr("g") == (0.5, 0.5, 0.5)
    pool.set_attr("g", [1.0, 2.0, 3.0])
    assert pool.call("add", 1.0, second=2.0) == (3.0, 4.0, 5.0)
    assert step_all(pool).reward.tolist() == [1.0, 2.0, 3.0]
    pool.set_attr("g", 7)
    assert pool.get_attr("g") == (7, 7, 7)
    assert [picture.max() for picture in pool.render()] == [0, 1, 2]
    pool.close()
    pool.close()
    with pytest.raises(PoolClosedError):
        pool.recv()


def test_what_a_vector_env_has_not_is_refused_and_the_pool_goes_on() -> None:
    with opened(DriftVectorEnv) as pool:
        pool.reset()
        with pytest.raises(ConfigurationError, match=r"call\(\) must be a method of the VectorEnv"):
            pool.call("anything")
        with pytest.raises(ConfigurationError, match=r"get_attr\(\) must be a method"):
            pool.get_attr("anything")
        step_all(pool, np.zeros((2, 1)))


def test_a_vector_wrapper_stands_between(autoreset: AutoresetMode) -> None:
    def make(num_envs: int) -> Any:
        return RecordEpisodeStatistics(scripted(autoreset, lengths=3)(num_envs))

    with opened(make) as pool:
        pool.reset()
        step_all(pool)
        assert pool.get_attr("num_steps") == (1, 1)
        assert pool.call("render")[0].shape == (16, 16, 3)


# ---- refusals ------------------------------------------------------------------------------------


def refused(match: str, env: Any, error: type[Exception] = MakerError, **keywords: Any) -> None:
    with pytest.raises(error, match=match):
        opened(env, **keywords)


def test_a_vector_env_must_say_how_it_resets() -> None:
    def undeclared(num_envs: int) -> Any:
        return Scripts(num_envs, metadata={})

    def wrong(num_envs: int) -> Any:
        return Scripts(num_envs, metadata={"autoreset_mode": "Sometimes"})

    rule = r"`metadata\['autoreset_mode'\]` of .* must be one of \['NextStep', 'SameStep', 'Disab"
    refused(rule + r".*got None", undeclared, ConfigurationError)
    refused(rule + r".*got 'Sometimes'", wrong, ConfigurationError)


def test_the_mode_that_another_vector_env_wrote_into_shared_metadata_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ale_py writes it into the dict that all VectorEnvs without one of their own have."""

    class Plain(DriftVectorEnv):
        metadata = VectorEnv.metadata

    monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", SAME)
    refused("must be one of", Plain, ConfigurationError)


@pytest.mark.parametrize("name", ["NextStep", "NEXT_STEP"])
def test_the_mode_may_be_a_string(name: str) -> None:
    with opened(lambda num_envs: Scripts(num_envs, metadata={"autoreset_mode": name})) as pool:
        pool.reset()
        assert step_all(pool).env_ids.tolist() == [0, 1]


def test_what_is_no_batch_of_all_environments_is_refused() -> None:
    class Part(DriftVectorEnv):
        """What ale_py makes with a batch_size."""

        def __init__(self, num_envs: int) -> None:
            super().__init__(num_envs)
            self.observation_space = gym.spaces.Box(-99, 99, (num_envs - 1, 2), np.float32)

    refused("must return a gymnasium.vector.VectorEnv in native mode, got", ScriptedEnv)
    refused("must return a gymnasium.vector.VectorEnv", lambda: gym.make("CartPole-v1"))
    refused(r"of 2 environments \(num_envs\).*got one of 3", lambda: DriftVectorEnv(3))
    refused(r"in one batch \(batch_size\), got .* \(1, 2\)", Part)


def test_wrappers_and_ids_without_an_entry_point_are_refused() -> None:
    refused(
        "`wrappers` must be empty in native mode.*pass a callable", DriftVectorEnv, wrappers=[len]
    )
    refused("vector_entry_point", "FrozenLake-v1", gym.error.Error)


def test_a_time_limit_that_nobody_would_keep_is_refused() -> None:
    refused(
        "`max_episode_steps` must be None in native mode, as .* takes no such keyword, got 4",
        lambda num_envs: DriftVectorEnv(num_envs),
        max_episode_steps=4,
    )


def test_more_than_one_worker_is_refused() -> None:
    maker = EnvironmentMaker.create(DriftVectorEnv)
    workers = make_workers(maker, EnvironmentConfig(num_envs=2, env_worker_mode="native"))
    halves = [type(workers[0])(maker, (index,), 0, "native") for index in workers[0].env_ids]
    with pytest.raises(ConfigurationError, match=r"`workers` must be one in native mode.*got 2"):
        WorkerPool.from_workers(halves)


def test_a_vector_env_is_refused_where_one_environment_is_needed() -> None:
    message = "a VectorEnv can only be collected from, with env_worker_mode='native'"
    task = make_task(2, 1, "native", env=DriftVectorEnv)
    with pytest.raises(MakerError, match=message):
        task.sample_clip(return_images=False, return_states=True)
    with pytest.raises(MakerError, match=message):
        open_pool(DriftVectorEnv, "sync", num_envs=2)


def broken(index: int, change: Callable[[Any], Any], mode: AutoresetMode = NEXT) -> Any:
    """A VectorEnv whose step returns one thing changed."""

    def change_one(answer: list[Any]) -> list[Any]:
        answer[index] = change(answer[index])
        return answer

    return lambda num_envs: Scripts(num_envs, change_one, mode=mode)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (broken(0, lambda x: x[:, :2]), r"must have shape (2, 3) and dtype float32, got (2, 2) an"),
        (broken(0, lambda x: x[:1]), r"must have shape (2, 3) and dtype float32, got (1, 3) and f"),
        (broken(0, lambda x: x + 1j), r"and dtype float32, got (2, 3) and complex"),
        (
            broken(1, lambda x: x[:, None]),
            r"the rewards of .* must be one number for each of 2 env",
        ),
        (broken(2, lambda x: x[0]), r"the terminated of .* must be one number for each"),
        (broken(3, lambda x: [None] * 2), r"the truncated of .* got object (2,)"),
        (
            broken(4, lambda x: {}, SAME),
            r"must give the final observation of each episode in infos",
        ),
        (
            broken(
                4, lambda x: {"final_obs": x.get("final_obs"), "_final_obs": [True, False]}, SAME
            ),
            r"SAME_STEP, got some only",
        ),
    ],
)
def test_what_a_vector_env_returns_must_fit_its_spaces(env: Any, message: str) -> None:
    pool = opened(env)
    pool.reset()
    steps = iter(lambda: step_all(pool), None)
    with pytest.raises(ObservationError, match=message.replace("(", r"\(").replace(")", r"\)")):
        list(itertools.islice(steps, 2))
    assert pool.closed


def test_a_masked_reset_that_resets_the_others_is_refused() -> None:
    """O-59."""

    class Wiping(Scripts):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.inner.reset(seed=seed, options=options)
            return self.inner.reset()

    make = vector_of(ScriptedEnv, DISABLED, lengths=(2, 9))

    def wiping(num_envs: int) -> Any:
        env = Wiping(num_envs, mode=DISABLED)
        env.inner = make(num_envs)
        return env

    with opened(wiping) as pool:
        pool.reset()
        step_all(pool)
        message = r"must leave environments [1] as they are, as its autoreset mode is DISABLED"
        with pytest.raises(ObservationError, match=re.escape(message)):
            step_all(pool)


def test_an_exception_in_a_step_keeps_its_type_and_closes_the_pool(
    autoreset: AutoresetMode,
) -> None:
    make = scripted(autoreset, lengths=9, faults={1: (3, "raise")})
    task = make_task(2, 1, "native", env=make)
    with task.get_worker_pool() as pool:
        with pytest.raises(ValueError, match="boom 1"):
            task.collect_samples(None, pool, 40, use_tqdm=False)
        assert pool.closed
        with pytest.raises(PoolClosedError):
            task.collect_samples(None, pool, 40, use_tqdm=False)


def test_an_exception_while_it_is_made_reaches_the_caller() -> None:
    def make(num_envs: int, seed: int) -> Any:
        raise RuntimeError(f"no {num_envs} environments with seed {seed}")

    refused("no 2 environments with seed 3", make, RuntimeError, seed=3)
