"""What a pool promises about rows, batches, seeds and access: one body for all modes."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from gymtask.config import EnvironmentConfig
from gymtask.errors import (
    CollectionInterrupted,
    ConfigurationError,
    NothingPendingError,
    ObservationError,
    PoolClosedError,
    PoolStateError,
)
from gymtask.maker import EnvironmentMaker
from gymtask.testing import ScriptedEnv
from gymtask.workers.pool import WorkerPool
from gymtask.workers.worker import BaseEnvironmentWorker, Steps, make_workers
from tests.integration.pool_envs import (
    ASYNC_MODES,
    MODES,
    WORKERS,
    ActionEnv,
    GatedEnv,
    GravityEnv,
    InfoEnv,
    NumberedEnv,
    PlainWrapper,
    RandomEnv,
    kind_of,
    open_pool,
    wait_for,
)

LENGTHS = (3, 5, 1, 2, 4)


def step_all(pool: WorkerPool, actions: Any) -> Steps:
    pool.send(actions)
    return pool.recv(pool.num_envs)


class TestRows:
    @pytest.mark.parametrize("workers", WORKERS)
    @pytest.mark.parametrize("reuse", [False, True], ids=["fresh arrays", "reused arrays"])
    @pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
    def test_each_row_is_one_step_of_the_environment_alone(
        self, mode: str, workers: int, end: str, reuse: bool
    ) -> None:
        options: dict[str, Any] = {"lengths": LENGTHS, "end": end, "num_actions": 7}
        alone = [ScriptedEnv(**options) for _ in LENGTHS]
        with open_pool(
            ScriptedEnv, mode, envs=5, workers=workers, reuse_arrays=reuse, **options
        ) as pool:
            steps = pool.reset()
            np.testing.assert_array_equal(
                steps.observation, [env.reset(seed=i)[0] for i, env in enumerate(alone)]
            )
            for t in range(31):
                actions = (np.arange(5) + t) % 7
                steps = step_all(pool, actions)
                assert steps.env_ids.tolist() == [0, 1, 2, 3, 4]
                finals = []
                for i, env in enumerate(alone):
                    observation, reward, terminated, truncated, _ = env.step(actions[i])
                    assert steps.reward[i] == reward
                    assert steps.terminated[i] == terminated
                    assert steps.truncated[i] == truncated
                    assert steps.ended[i] == (terminated or truncated)
                    if terminated or truncated:
                        finals.append(observation)
                        observation, _ = env.reset()
                    np.testing.assert_array_equal(steps.observation[i], observation)
                assert steps.final_observation.shape == (len(finals), 3)
                for found, final in zip(steps.final_observation, finals, strict=True):
                    np.testing.assert_array_equal(found, final)

    def test_one_ended_episode_resets_no_other_environment(self, mode: str) -> None:
        with open_pool(ScriptedEnv, mode, envs=2, lengths=(3, 5)) as pool:
            pool.reset()
            totals, lengths = np.zeros(2), np.zeros(2)
            episodes: list[tuple[int, float, float]] = []
            for _ in range(30):
                steps = step_all(pool, [0, 0])
                totals += steps.reward
                lengths += 1
                for i in np.flatnonzero(steps.ended):
                    episodes.append((int(i), totals[i], lengths[i]))
                    totals[i] = lengths[i] = 0
        assert Counter(episodes) == {(0, 6.0, 3.0): 10, (1, 15.0, 5.0): 6}

    def test_a_reset_gives_no_reward_no_flags_no_finals_and_no_infos(self, mode: str) -> None:
        with open_pool(ScriptedEnv, mode, envs=3, lengths=1, info_keys=("t",)) as pool:
            pool.reset()
            assert step_all(pool, [1, 1, 1]).info == [{"t": 1}] * 3
            steps = pool.reset()
        assert steps.reward.tolist() == [0.0, 0.0, 0.0]
        assert not steps.ended.any()
        assert steps.final_observation.shape == (0, 3)
        assert steps.info == [{}, {}, {}]
        assert steps.observation[:, 0].tolist() == [200, 200, 200]

    def test_steps_belong_to_the_caller_and_never_change(self, mode: str) -> None:
        with open_pool(ScriptedEnv, mode, envs=2, lengths=2, reuse_arrays=True) as pool:
            kept = [pool.reset()] + [step_all(pool, [1, 1]) for _ in range(4)]
            assert [steps.observation[0, 0] for steps in kept] == [0, 1, 100, 101, 200]
            assert [steps.reward[0] for steps in kept] == [0, 1, 2, 1, 2]
            assert kept[2].final_observation[:, 0].tolist() == [2, 2]
            kept[-1].observation[:] = np.nan
            kept[-1].env_ids[:] = 7
            steps = step_all(pool, [1, 1])
        assert steps.observation[:, 0].tolist() == [201, 201]
        assert steps.env_ids.tolist() == [0, 1]

    def test_nested_observations_keep_the_arrangement_of_their_space(self, mode: str) -> None:
        with open_pool(NestedEnv, mode, envs=2) as pool:
            pool.reset()
            steps = step_all(pool, [4, 5])
        assert list(steps.observation) == ["count", "pair"]
        assert steps.observation["count"].tolist() == [1, 1]
        assert steps.observation["count"].dtype == np.int64
        assert isinstance(steps.observation["pair"], tuple)
        assert steps.observation["pair"][0].tolist() == [[0, 4], [1, 5]]
        assert steps.observation["pair"][1].dtype == np.int8

    @pytest.mark.parametrize("workers", [2, 4])
    def test_replies_are_never_matched_to_another_environment(
        self, mode: str, workers: int
    ) -> None:
        seconds = (0.0, 0.0002, 0.0007, 0.002)
        with open_pool(
            ScriptedEnv, mode, envs=4, workers=workers, lengths=9, seconds=seconds, num_actions=50
        ) as pool:
            steps = pool.reset()
            num_sent, num_rows = np.zeros(4, int), 0
            while num_rows < 2000:
                ids = steps.env_ids
                pool.send((num_sent[ids] * 7 + ids) % 50, ids)
                steps = pool.recv(1, 3)
                sent = (num_sent[steps.env_ids] * 7 + steps.env_ids) % 50
                seen = steps.observation.copy()
                seen[steps.ended] = steps.final_observation
                np.testing.assert_array_equal(seen[:, 1], steps.env_ids)
                np.testing.assert_array_equal(seen[:, 2], sent)
                num_sent[steps.env_ids] += 1
                np.testing.assert_array_equal(
                    seen[:, 0] % 100, (num_sent[steps.env_ids] - 1) % 9 + 1
                )
                num_rows += len(ids)


class NestedEnv(NumberedEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(
            {
                "pair": spaces.Tuple([spaces.MultiDiscrete([9, 9]), spaces.MultiBinary(3)]),
                "count": spaces.Discrete(99),
            }
        )
        self.action = 0

    def step(self, action: Any) -> Any:
        self.action = action
        return super().step(action)

    def observe(self) -> Any:
        pair = (np.array([self.number, self.action]), np.array([0, 1, 1], np.int8))
        return {"count": self.life, "pair": pair}


class TestReceiving:
    @pytest.fixture(params=ASYNC_MODES)
    def gated(self, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
        """A pool of five, all of them pending, and what lets one finish."""
        with open_pool(GatedEnv, request.param, envs=5, folder=tmp_path, cleanup=1.0) as pool:
            pool.reset()
            pool.send([0] * 5)

            def let(*numbers: int) -> None:
                for number in numbers:
                    (tmp_path / f"{number}-1").touch()

            yield pool, let
            let(0, 1, 2, 3, 4)

    def test_returns_as_soon_as_enough_are_ready(self, gated: Any) -> None:
        pool, let = gated
        let(3, 1)
        start = time.monotonic()
        steps = pool.recv(2)
        assert time.monotonic() - start < 5
        assert steps.env_ids.tolist() == [1, 3]
        assert pool.num_pending == 3

    def test_gives_all_that_are_ready_then(self, gated: Any) -> None:
        pool, let = gated
        let(0, 2, 4)
        assert wait_for(lambda: _peek(pool) == 3)
        assert pool.recv(1).env_ids.tolist() == [0, 2, 4]
        assert pool.num_pending == 2

    def test_gives_at_most_max_envs_and_keeps_the_rest_for_the_next_call(self, gated: Any) -> None:
        pool, let = gated
        let(0, 1, 2, 3, 4)
        found = [pool.recv(2, 3).env_ids.tolist(), pool.recv(2, 3).env_ids.tolist()]
        assert all(len(ids) in (2, 3) and ids == sorted(ids) for ids in found)
        found.append(pool.recv(2, 3).env_ids.tolist() if pool.num_pending else [])
        assert sorted(number for ids in found for number in ids) == [0, 1, 2, 3, 4]

    def test_first_come_first_served(self, gated: Any) -> None:
        pool, let = gated
        order = []
        for number in (3, 0, 4):
            let(number)
            assert wait_for(lambda: _peek(pool) == len(order) + 1)
            order.append(number)
        assert [pool.recv(1, 1).env_ids.tolist() for _ in order] == [[3], [0], [4]]
        let(1, 2)
        assert pool.recv(2).env_ids.tolist() == [1, 2]

    def test_after_the_timeout_gives_fewer(self, gated: Any) -> None:
        pool, let = gated
        let(2)
        start = time.monotonic()
        steps = pool.recv(3, timeout=0.4)
        assert steps.env_ids.tolist() == [2]
        assert 0.4 <= time.monotonic() - start < 0.8

    def test_a_timeout_never_gives_none(self, gated: Any) -> None:
        pool, let = gated
        timer = threading.Timer(0.5, let, [4])
        start = time.monotonic()
        timer.start()
        steps = pool.recv(3, timeout=0.05)
        assert steps.env_ids.tolist() == [4]
        assert time.monotonic() - start >= 0.5
        timer.join()

    def test_a_timeout_of_zero_gives_who_is_ready_first(self, gated: Any) -> None:
        pool, let = gated
        let(1)
        assert pool.recv(5, timeout=0).env_ids.tolist() == [1]

    @pytest.mark.parametrize("min_envs", [3, 5, 50])
    def test_more_than_are_pending_counts_as_all_that_are(self, mode: str, min_envs: int) -> None:
        with open_pool(ScriptedEnv, mode, envs=5) as pool:
            pool.reset()
            pool.send([0, 0], [3, 1])
            assert pool.recv(min_envs).env_ids.tolist() == [1, 3]

    def test_without_limits_one_is_enough(self, gated: Any) -> None:
        pool, let = gated
        let(2)
        assert pool.recv().env_ids.tolist() == [2]

    def test_sync_counts_as_one_worker_whose_rows_stay_in_order(self) -> None:
        with open_pool(ScriptedEnv, "sync", envs=5) as pool:
            pool.reset()
            pool.send([0] * 5, [4, 3, 2, 1, 0])
            found = [pool.recv(1, 2).env_ids.tolist() for _ in range(3)]
        assert found == [[3, 4], [1, 2], [0]]

    def test_rows_of_a_worker_arrive_together(self, tmp_path: Path) -> None:
        for mode in ASYNC_MODES:
            folder = tmp_path / mode
            folder.mkdir()
            with open_pool(GatedEnv, mode, envs=4, workers=2, folder=folder) as pool:
                pool.reset()
                pool.send([0] * 4)
                (folder / "0-1").touch()
                for number in (2, 3):
                    (folder / f"{number}-1").touch()
                assert pool.recv(1).env_ids.tolist() == [2, 3]
                (folder / "1-1").touch()
                assert pool.recv(1).env_ids.tolist() == [0, 1]

    @pytest.mark.parametrize("workers", WORKERS)
    def test_no_environment_starves(self, mode: str, workers: int) -> None:
        with open_pool(ScriptedEnv, mode, envs=5, workers=workers) as pool:
            pool.reset()
            pool.send([0] * 5)
            counts = np.zeros(5, int)
            deadline = time.monotonic() + 30
            while counts.min() < 5:
                steps = pool.recv(1, 1)
                counts[steps.env_ids] += 1
                pool.send([0], steps.env_ids)
                assert time.monotonic() < deadline, counts

    def test_a_straggler_holds_up_nobody(self, tmp_path: Path) -> None:
        for mode in ASYNC_MODES:
            folder = tmp_path / mode
            folder.mkdir()
            for number in (0, 1):
                for step in range(1, 100):
                    (folder / f"{number}-{step}").touch()
            with open_pool(GatedEnv, mode, envs=3, folder=folder) as pool:
                steps = pool.reset()
                for _ in range(40):
                    pool.send([0] * len(steps.env_ids), steps.env_ids)
                    steps = pool.recv(1)
                    assert 2 not in steps.env_ids
                (folder / "2-1").touch()
                ids = [number for _ in range(pool.num_pending) for number in pool.take(1, 1)]
                assert 2 in ids

    def test_interrupt_ends_a_wait_and_loses_no_row(self, gated: Any) -> None:
        pool, let = gated
        pool.interrupt = lambda: True
        let(1, 3)
        start = time.monotonic()
        with pytest.raises(CollectionInterrupted):
            pool.take(5, 5)
        assert time.monotonic() - start < 10
        pool.interrupt = None
        let(0, 2, 4)
        assert pool.recv(5).env_ids.tolist() == [0, 1, 2, 3, 4]

    def test_interrupt_does_not_stop_those_who_finish(self, mode: str) -> None:
        with open_pool(ScriptedEnv, mode, envs=3) as pool:
            pool.interrupt = lambda: True
            pool.reset()
            assert step_all(pool, [0] * 3).env_ids.tolist() == [0, 1, 2]


def _peek(pool: WorkerPool) -> int:
    pool._wait(0.0)
    return len(pool._ready)


class TestStates:
    """Calls that the state of the pool does not allow raise, and change nothing."""

    def test_recv_before_anything(self, mode: str) -> None:
        with open_pool(ScriptedEnv, mode) as pool:
            with pytest.raises(NothingPendingError, match="no action is pending"):
                pool.recv()
            pool.reset()
            with pytest.raises(NothingPendingError, match="no action is pending"):
                pool.recv(timeout=0.1)
            pool.send([0], [1])
            pool.recv()
            with pytest.raises(NothingPendingError):
                pool.recv()

    def test_send_before_reset(self, mode: str) -> None:
        with (
            open_pool(ScriptedEnv, mode) as pool,
            pytest.raises(PoolStateError, match="before the first reset"),
        ):
            pool.send([0, 0])

    def test_send_twice(self, mode: str) -> None:
        with open_pool(ScriptedEnv, mode, envs=3) as pool:
            pool.reset()
            pool.send([1, 1], [0, 2])
            with pytest.raises(PoolStateError, match=re.escape("[2], as their last action")):
                pool.send([0, 0], [1, 2])
            pool.send([1], [1])
            steps = pool.recv(3)
            assert steps.observation.tolist() == [[1, 0, 1], [1, 1, 1], [1, 2, 1]]

    @pytest.mark.parametrize("call", ["reset", "call", "get_attr", "set_attr", "render"])
    def test_nothing_else_while_actions_are_pending(self, mode: str, call: str) -> None:
        arguments: dict[str, tuple[Any, ...]] = {
            "call": ("render",),
            "get_attr": ("number",),
            "set_attr": ("number", 9),
        }
        with open_pool(ScriptedEnv, mode, envs=3) as pool:
            pool.reset()
            pool.send([1, 1], [0, 2])
            with pytest.raises(PoolStateError, match=re.escape("environments [0, 2] are pending")):
                getattr(pool, call)(*arguments.get(call, ()))
            assert pool.recv(2).observation.tolist() == [[1, 0, 1], [1, 2, 1]]
            pool.reset()
            assert pool.get_attr("number") == (0, 1, 2)

    def test_everything_after_close(self, mode: str) -> None:
        pool = open_pool(ScriptedEnv, mode)
        pool.reset()
        pool.send([0, 0])
        pool.close()
        for call in (
            pool.reset,
            pool.recv,
            pool.render,
            lambda: pool.send([0, 0]),
            lambda: pool.get_attr("number"),
            lambda: pool.take(1, 1),
            lambda: pool.post(pool.all_ids),
        ):
            with pytest.raises(PoolClosedError, match="closed"):
                call()

    @pytest.mark.parametrize(
        ("env_ids", "rule"),
        [
            ([], "one or more different indices"),
            ([0, 0], "one or more different indices"),
            ([[0, 1]], "one or more different indices"),
            ([0.5, 1.0], "one or more different indices"),
            ([True, False], "one or more different indices"),
            (0, "one or more different indices"),
            ([0, 2], "0 to 1"),
            ([-1, 0], "0 to 1"),
        ],
    )
    def test_bad_indices_are_refused(self, mode: str, env_ids: Any, rule: str) -> None:
        with open_pool(ScriptedEnv, mode) as pool:
            pool.reset()
            with pytest.raises(ConfigurationError, match=f"`env_ids` must .*{rule}"):
                pool.send([0, 0], env_ids)
            assert step_all(pool, [0, 0]).reward.tolist() == [1, 1]

    @pytest.mark.parametrize(
        "limits",
        [
            {"min_envs": 0},
            {"min_envs": 2, "max_envs": 1},
            {"max_envs": 0},
            {"timeout": -1.0},
            {"timeout": float("nan")},
        ],
    )
    def test_bad_limits_are_refused(self, limits: Any) -> None:
        with open_pool(ScriptedEnv) as pool:
            pool.reset()
            pool.send([0, 0])
            with pytest.raises(ConfigurationError, match=f"`{next(iter(limits))}` must be"):
                pool.recv(**limits)
            assert pool.recv(2).reward.tolist() == [1, 1]

    def test_counters_go_on_in_another_pool(self) -> None:
        with open_pool(ScriptedEnv, envs=3) as pool:
            pool.reset()
            pool.run_step += 4
            pool.cursor = 2
            state = pool.state_dict()
            with pytest.raises(PoolStateError, match="after a reset"):
                pool.load_state_dict(state)
        assert state == {"run_step": [4, 4, 4], "episode": [0, 0, 0], "cursor": 2}
        with open_pool(ScriptedEnv, envs=3) as other:
            other.load_state_dict(state)
            assert other.state_dict() == state
            other.reset()
            assert other.episode.tolist() == [1, 1, 1]
        with (
            open_pool(ScriptedEnv, envs=2) as small,
            pytest.raises(ConfigurationError, match="2 environments, got one with 3"),
        ):
            small.load_state_dict(state)


SPACES = {
    "Discrete": spaces.Discrete(5),
    "Discrete from 3": spaces.Discrete(5, start=3),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiDiscrete grid": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "MultiBinary": spaces.MultiBinary(4),
    "Box ()": spaces.Box(-1, 1, (), np.float32),
    "Box (3,)": spaces.Box(-1, 1, (3,), np.float32),
    "Box (3,) float64": spaces.Box(-1, 1, (3,), np.float64),
    "Box uint8": spaces.Box(0, 255, (2, 2), np.uint8),
    "Dict": spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Box(-1, 1, (2,), np.float32)}),
    "Tuple": spaces.Tuple([spaces.Discrete(3), spaces.Dict({"x": spaces.MultiBinary(2)})]),
}


def stack(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: stack([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], tuple):
        return tuple(stack(list(part)) for part in zip(*values, strict=True))
    return np.stack(values)


class TestActions:
    @pytest.mark.parametrize("name", SPACES)
    def test_an_environment_gets_what_its_space_samples(self, mode: str, name: str) -> None:
        space = SPACES[name]
        samples = [space.sample() for _ in range(2)]
        with open_pool(ActionEnv, mode, space=space, info_keys=("kind",)) as pool:
            pool.reset()
            steps = step_all(pool, stack(samples))
            (got,), (other,) = pool.get_attr("actions")
        assert steps.info == [{"kind": kind_of(sample)} for sample in samples]
        assert str(got) == str(samples[0])
        assert str(other) == str(samples[1])

    @pytest.mark.parametrize("given", [[1, 2], np.array([1, 2], np.int32), (1, 2)])
    def test_the_type_does_not_depend_on_what_was_sent(self, mode: str, given: Any) -> None:
        with open_pool(ActionEnv, mode, space=SPACES["Discrete"], info_keys=("kind",)) as pool:
            pool.reset()
            assert step_all(pool, given).info == [{"kind": ("int64", "int64", ())}] * 2

    def test_an_environment_may_keep_its_action(self, mode: str) -> None:
        with open_pool(ActionEnv, mode, space=SPACES["Box (3,)"]) as pool:
            pool.reset()
            sent = np.zeros((2, 3), np.float32)
            for t in range(3):
                sent[:] = t / 10
                step_all(pool, sent)
            kept = pool.get_attr("actions")[1]
        np.testing.assert_allclose([action[0] for action in kept], [0.0, 0.1, 0.2], rtol=1e-6)

    @pytest.mark.parametrize(
        ("name", "actions", "message"),
        [
            ("Discrete", [1], "`actions` must have shape (2,), got (1,)"),
            ("Discrete", [[1], [2]], "`actions` must have shape (2,), got (2, 1)"),
            ("Discrete", [1.0, 2.0], "`actions` must be of dtype int64, got float64"),
            ("Box (3,)", np.zeros((2, 2)), "`actions` must have shape (2, 3), got (2, 2)"),
            ("Box (3,)", np.zeros(3), "`actions` must have shape (2, 3), got (3,)"),
            ("Box (3,)", [[0, 0, 0], [0, 0]], "`actions` must be arranged as the action space"),
            ("Box uint8", np.full((2, 2, 2), 256), "`actions` must fit dtype uint8, got"),
            ("Dict", {"a": np.zeros((2, 2))}, "`actions` must be arranged as"),
            ("Dict", np.zeros((2, 2)), "`actions` must be arranged as"),
            (
                "Dict",
                {"a": np.zeros((2, 2)), "b": [0.5, 1]},
                "`actions`['b'] must be of dtype int64, got float64",
            ),
            (
                "Dict",
                {"a": np.zeros((2, 2)), "b": [0, 1], "c": [0, 1]},
                "`actions` must be arranged as",
            ),
            (
                "Tuple",
                ([0, 1], {"x": np.zeros((2, 3), int)}),
                "`actions`['1']['x'] must have shape (2, 2), got (2, 3)",
            ),
            ("Tuple", ([0, 1],), "`actions` must be arranged as"),
        ],
    )
    def test_what_does_not_fit_is_refused_and_nobody_moves(
        self, name: str, actions: Any, message: str
    ) -> None:
        space = SPACES[name]
        with open_pool(ActionEnv, space=space) as pool:
            pool.reset()
            with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}"):
                pool.send(actions)
            assert pool.num_pending == 0
            steps = step_all(pool, stack([space.sample(), space.sample()]))
        assert steps.observation[:, 1].tolist() == [1, 1]


# The first three and the fourth to sixth numbers that generators seeded 7, 8 and 9 draw.
FIRST = [0.6250955, 0.3269723, 0.8702492]
SECOND = [0.8972138, 0.9872769, 0.2868172]


class TestSeeds:
    @pytest.mark.parametrize("workers", [1, 3])
    def test_each_environment_has_a_stream_that_goes_on(self, mode: str, workers: int) -> None:
        with open_pool(RandomEnv, mode, envs=3, workers=workers, seed=7) as pool:
            np.testing.assert_allclose(pool.reset().observation, FIRST, atol=1e-7)
            np.testing.assert_allclose(pool.reset().observation, SECOND, atol=1e-7)
            seen = [step_all(pool, [0] * 3).observation for _ in range(6)]  # with three autoresets
            again = pool.reset(seed=7).observation
            other = pool.reset(seed=8).observation
        np.testing.assert_allclose(again, FIRST, atol=1e-7)
        np.testing.assert_allclose(other[:2], FIRST[1:], atol=1e-7)
        for i in range(3):
            drawn = np.random.default_rng(7 + i).random(11)
            stream = [drawn[2], drawn[4], drawn[5], drawn[7], drawn[8], drawn[10]]
            np.testing.assert_array_equal([row[i] for row in seen], stream)

    def test_two_pools_with_one_seed_are_equal(self, mode: str) -> None:
        runs = []
        for _ in range(2):
            with open_pool(RandomEnv, mode, envs=3, seed=7) as pool:
                runs.append([pool.reset().observation])
                runs[-1] += [step_all(pool, [0] * 3).observation for _ in range(5)]
        np.testing.assert_array_equal(runs[0], runs[1])

    def test_a_seed_also_seeds_the_action_space(self, mode: str) -> None:
        with open_pool(RandomEnv, mode, envs=3, seed=7) as pool:
            pool.reset()
            first = [pool.call("draw_action") for _ in range(8)]
            pool.reset()
            second = [pool.call("draw_action") for _ in range(8)]
            pool.reset(seed=7)
            third = [pool.call("draw_action") for _ in range(8)]
        assert first == third != second
        assert len({tuple(row[i] for row in first) for i in range(3)}) == 3

    def test_seeds_of_the_first_reset_can_be_given(self, mode: str) -> None:
        with open_pool(RandomEnv, mode, envs=3, seed=1) as pool:
            pool.reset_seeds = [9, 7, 8]
            np.testing.assert_allclose(pool.reset().observation, np.roll(FIRST, 1), atol=1e-7)
            assert not np.allclose(pool.reset().observation, np.roll(FIRST, 1))

    @pytest.mark.parametrize("seed", [-1, 1.5, "7"])
    def test_a_bad_seed_is_refused_and_the_pool_goes_on(self, mode: str, seed: Any) -> None:
        with open_pool(RandomEnv, mode, envs=3, seed=7) as pool:
            with pytest.raises(ConfigurationError, match="`seed` must be an integer of at least 0"):
                pool.reset(seed)
            np.testing.assert_allclose(pool.reset(np.int64(7)).observation, FIRST, atol=1e-7)


@pytest.fixture
def gravity_id() -> Any:
    gym.register("PoolGravity-v0", GravityEnv, max_episode_steps=50)
    yield "PoolGravity-v0"
    del gym.registry["PoolGravity-v0"]


class TestAccess:
    @pytest.mark.parametrize("wrappers", [(), (PlainWrapper,)], ids=["made", "wrapped"])
    def test_set_attr_reaches_the_dynamics(self, mode: str, gravity_id: str, wrappers: Any) -> None:
        with open_pool(gravity_id, mode, wrappers=wrappers) as pool:
            pool.reset()
            assert step_all(pool, [0, 0]).reward.tolist() == [0.5, 0.5]
            pool.set_attr("g", [1.0, 2.0])
            assert pool.get_attr("g") == (1.0, 2.0)
            assert step_all(pool, [0, 0]).reward.tolist() == [1.0, 2.0]
            pool.set_attr("g", 4.0)
            assert step_all(pool, [0, 0]).reward.tolist() == [4.0, 4.0]

    def test_an_attribute_that_nobody_has_is_set_where_the_dynamics_see_it(
        self, mode: str, gravity_id: str
    ) -> None:
        with open_pool(gravity_id, mode, wrappers=(PlainWrapper,)) as pool:
            pool.reset()
            pool.set_attr("extra", (10.0, 20.0))
            assert step_all(pool, [0, 0]).reward.tolist() == [10.5, 20.5]

    def test_a_wrapper_keeps_its_own_attributes(self, mode: str, gravity_id: str) -> None:
        with open_pool(gravity_id, mode, wrappers=(PlainWrapper,)) as pool:
            pool.reset()
            pool.set_attr("scale", [2.0, 4.0])
            assert step_all(pool, [0, 0]).reward.tolist() == [1.0, 2.0]

    def test_set_attr_wants_one_value_or_one_for_each(self, mode: str) -> None:
        with open_pool(GravityEnv, mode, envs=3) as pool:
            with pytest.raises(ConfigurationError, match="`values` must hold 3 values, got 2"):
                pool.set_attr("g", [1.0, 2.0])
            pool.set_attr("g", 2.0)
            assert pool.get_attr("g") == (2.0, 2.0, 2.0)

    @pytest.mark.parametrize("workers", [1, 3])
    def test_call_passes_arguments_on_and_gives_results_in_order(
        self, mode: str, workers: int, gravity_id: str
    ) -> None:
        with open_pool(gravity_id, mode, envs=3, workers=workers) as pool:
            pool.reset()
            assert pool.call("add", 10, second=0.5) == (10.5, 11.5, 12.5)
            assert pool.call("num_sums") == (1, 1, 1)

    def test_render_gives_a_picture_of_each(self, mode: str) -> None:
        with open_pool(GravityEnv, mode, envs=3, render_mode="rgb_array") as pool:
            pool.reset()
            pictures = pool.render()
        assert [int(picture[0, 0, 0]) for picture in pictures] == [0, 1, 2]
        assert pictures[0].shape == (2, 2, 3)

    def test_big_values_travel_both_ways(self, mode: str) -> None:
        values = [np.full(300_000, i, np.float64) for i in range(2)]
        with open_pool(GravityEnv, mode) as pool:
            pool.set_attr("weights", values)
            found = pool.get_attr("weights")
            (same, _) = pool.call("give_back", values[1])
        np.testing.assert_array_equal(found, values)
        np.testing.assert_array_equal(same, values[1])

    def test_what_cannot_be_sent_is_refused_and_the_pool_goes_on(self) -> None:
        with open_pool(GravityEnv, "process") as pool:
            with pytest.raises(TypeError, match="cannot pickle"):
                pool.set_attr("g", [1.0, threading.Lock()])
            assert pool.get_attr("g") == (0.5, 0.5)

    def test_a_missing_attribute_raises_and_closes_the_pool(self, mode: str) -> None:
        with open_pool(GravityEnv, mode) as pool:
            with pytest.raises(AttributeError, match="nonsense"):
                pool.get_attr("nonsense")
            assert pool.closed


class TestInfos:
    def test_asked_keys_arrive_where_they_were_given(self, mode: str) -> None:
        with open_pool(InfoEnv, mode, info_keys=("even", "history", "missing")) as pool:
            pool.reset()
            found = [step_all(pool, [0, 0]).info[1] for _ in range(3)]
        assert found == [
            {"history": [1]},
            {"even": 2, "history": [1, 2]},
            {"history": [1, 2, 3]},  # of the last step, not of the reset that followed
        ]

    def test_values_do_not_change_after_they_were_given(self, mode: str) -> None:
        with open_pool(InfoEnv, mode, info_keys=("array", "history")) as pool:
            pool.reset()
            kept = [step_all(pool, [0, 0]).info for _ in range(4)]
        assert [infos[1]["array"].tolist() for infos in kept] == [[1, t] for t in (1, 2, 3, 4)]
        assert [len(infos[0]["history"]) for infos in kept] == [1, 2, 3, 4]

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_megabyte_a_step_arrives(self, mode: str, workers: int) -> None:
        size = 1 << 20
        with open_pool(
            InfoEnv, mode, workers=workers, info_keys=("bytes",), num_bytes=size
        ) as pool:
            pool.reset()
            for t in (1, 2, 3):
                pool.send([0, 0])
                ids = []
                while pool.num_pending:
                    steps = pool.recv(1, 1)
                    assert steps.info == [{"bytes": bytes([t]) * size}]
                    ids += steps.env_ids.tolist()
                assert sorted(ids) == [0, 1]

    def test_only_those_that_were_stepped_give_new_ones(self, mode: str) -> None:
        with open_pool(InfoEnv, mode, envs=2, workers=1, info_keys=("history",)) as pool:
            pool.reset()
            step_all(pool, [0, 0])
            pool.send([0], [1])
            assert pool.recv().info == [{"history": [1, 2]}]
            pool.send([0], [0])
            assert pool.recv().info == [{"history": [1, 2]}]

    def test_a_value_that_cannot_be_copied_is_an_error_in_every_mode(self, mode: str) -> None:
        with open_pool(LockedEnv, mode, info_keys=("lock",)) as pool:
            pool.reset()
            with pytest.raises(TypeError, match="cannot pickle"):
                step_all(pool, [0, 0])


class LockedEnv(NumberedEnv):
    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], {"lock": threading.Lock()})


class BadEnv(NumberedEnv):
    """Returns something that does not fit: `what` names it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self._what == "shape":
            observation = observation[:1]
        if self._what == "dtype":
            observation = np.array(["a", "b"])
        return observation, None if self._what == "reward" else reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", "the observation must have shape (2,), got shape (1,)"),
        ("dtype", "the observation must be of dtype float32, got <U1"),
        ("reward", "the reward must be a number, got None"),
    ],
)
def test_what_an_environment_returns_is_checked(mode: str, what: str, message: str) -> None:
    with open_pool(BadEnv, mode, what=what) as pool:
        pool.reset()
        with pytest.raises(ObservationError, match=re.escape(message)) as caught:
            step_all(pool, [0, 0])
    assert re.search(r"raised by environment [01] of 2", caught.value.__notes__[0])


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
            ([(0,)], ["native"], "and the same for all workers, got ['native']"),
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
