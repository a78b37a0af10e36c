"""What a pool promises about rows, batches, seeds and access: one body for all modes."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from gymtask.errors import (
    CollectionInterrupted,
    ConfigurationError,
    NothingPendingError,
    PoolClosedError,
    PoolStateError,
)
from gymtask.testing import ScriptedEnv
from gymtask.workers.pool import WorkerPool
from gymtask.workers.waiting import num_cores
from tests.integration.pool_envs import (
    ASYNC_MODES,
    WORKERS,
    GatedEnv,
    NumberedEnv,
    open_pool,
    step_all,
    wait_for,
)

LENGTHS = (3, 5, 1, 2, 4)


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

    def test_a_timeout_is_kept_where_all_are_asked_for(self, gated: Any) -> None:
        pool, let = gated
        let(4)  # nobody waits for the first one alone
        start = time.monotonic()
        assert pool.recv(5, timeout=0.1).env_ids.tolist() == [4]
        assert time.monotonic() - start < 0.19

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

    def test_with_time_to_spare_those_who_finish_together_are_taken_together(self) -> None:
        workers = max(2, num_cores())
        with open_pool(ScriptedEnv, "process", envs=2 * workers, workers=workers) as pool:
            pool.reset()
            together = 0
            for _ in range(100):
                pool.post(pool.all_ids)
                while pool.num_pending:
                    together += len(pool.take(1, pool.num_envs, None, spare=1.0)) == pool.num_envs
        assert together >= 90

    def test_with_little_time_to_spare_nobody_waits_for_a_straggler(self, tmp_path: Path) -> None:
        with open_pool(GatedEnv, "process", folder=tmp_path) as pool:
            pool.reset()
            pool.post(pool.all_ids)
            for step in range(1, 50):
                (tmp_path / f"0-{step}").touch()
                assert pool.take(1, 2, None, spare=0.001).tolist() == [0]
                pool.post(np.array([0]))
            (tmp_path / "1-1").touch()
            assert 1 in pool.take(1, 2, None, spare=0.001)

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
