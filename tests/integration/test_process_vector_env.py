"""`ProcessVectorEnv` against Gymnasium's own vector environments."""

from __future__ import annotations

import multiprocessing
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import gymtask
from gymtask.errors import ConfigurationError, MakerError
from gymtask.testing import ScriptedEnv
from gymtask.workers.waiting import num_cores
from tests.integration.pool_envs import GatedEnv, GravityEnv, NumberedEnv, PlainWrapper, is_running
from tests.integration.vector_envs import (
    AUTORESET,
    DTYPES,
    NESTED,
    RandomSpaceEnv,
    TextEnv,
    assert_same_run,
    same,
)


def make(env: Any, envs: int = 3, workers: int | None = 2, **kwargs: Any) -> Any:
    return gymtask.ProcessVectorEnv([env] * envs, num_workers=workers, **kwargs)


class TestEqualsSyncVectorEnv:
    @pytest.mark.parametrize("autoreset", AUTORESET)
    @pytest.mark.parametrize(("envs", "workers"), [(2, 2), (6, 2), (8, 1), (5, 2)])
    def test_for_nested_spaces_and_infos(self, autoreset: str, envs: int, workers: int) -> None:
        ours = make(RandomSpaceEnv, envs, workers, autoreset_mode=autoreset)
        theirs = SyncVectorEnv([RandomSpaceEnv] * envs, autoreset_mode=autoreset)
        assert ours.shared_memory
        assert_same_run(ours, theirs)

    @pytest.mark.parametrize("autoreset", AUTORESET)
    @pytest.mark.parametrize("env", [TextEnv, partial(RandomSpaceEnv, infos=False)])
    def test_without_a_fixed_shape_or_without_infos(self, env: Any, autoreset: str) -> None:
        ours = make(env, autoreset_mode=autoreset)
        assert ours.shared_memory == (env is not TextEnv)
        assert_same_run(ours, SyncVectorEnv([env] * 3, autoreset_mode=autoreset), 40)

    @pytest.mark.parametrize("autoreset", ["NextStep", "SameStep"])
    def test_without_shared_memory(self, autoreset: str) -> None:
        ours = make(RandomSpaceEnv, shared_memory=False, autoreset_mode=autoreset)
        assert not ours.shared_memory
        assert_same_run(ours, SyncVectorEnv([RandomSpaceEnv] * 3, autoreset_mode=autoreset), 30)

    def test_for_every_dtype(self) -> None:
        parts = {
            dtype: spaces.Box(0, 1, (2,), np.dtype(dtype).type)  # type: ignore[arg-type]
            for dtype in DTYPES
        }
        env = partial(RandomSpaceEnv, spaces.Dict(parts), spaces.Dict(parts), infos=False)
        ours = make(env, autoreset_mode="SameStep")
        assert_same_run(ours, SyncVectorEnv([env] * 3, autoreset_mode="SameStep"), 20)


def test_an_environment_that_reuses_its_arrays_gives_right_final_observations() -> None:
    kwargs = {"lengths": 2, "reuse_arrays": True}
    with_copies = make(partial(ScriptedEnv, **kwargs), autoreset_mode="SameStep")
    with_copies.reset(seed=0)
    kept = []
    for _ in range(4):
        kept.append(with_copies.step(np.zeros(3, int)))
    with_copies.close()
    first, ended = kept[0], kept[1]
    assert [row.tolist() for row in ended[4]["final_obs"]] == [[2, i, 0] for i in range(3)]
    assert ended[4]["final_info"]["t"].tolist() == [2, 2, 2]
    assert ended[0].tolist() == [[100, i, -1] for i in range(3)]
    # Nothing that was handed out has changed since.
    assert first[0].tolist() == [[1, i, 0] for i in range(3)]
    assert first[1].tolist() == [1.0] * 3
    assert not first[2].any()
    assert ended[2].all()


def test_without_copies_the_shared_arrays_themselves_are_given() -> None:
    envs = make(ScriptedEnv, copy=False)
    first, _ = envs.reset(seed=0)
    again = envs.step(np.zeros(3, int))[0]
    assert again is first
    assert first[:, 0].tolist() == [1, 1, 1]
    envs.close()


def test_replies_that_arrive_out_of_order_belong_to_their_environments(tmp_path: Path) -> None:
    envs = make(partial(GatedEnv, tmp_path), 3, 3)
    envs.reset(seed=0)
    for step in range(1, 4):
        envs.step_async(np.zeros(3, int))
        for number in (2, 0, 1):
            (tmp_path / f"{number}-{step}").touch()
        assert envs.step_wait()[0].tolist() == [[i, step] for i in range(3)]
    envs.close()


class TestActions:
    @pytest.mark.parametrize(
        ("space", "actions"),
        [
            (spaces.Box(-1, 1, (2,), np.float32), np.full((3, 2), 0.1, np.float64)),
            (spaces.Box(-1, 1, (), np.float32), np.array([0.1, 0.2, 0.3])),
            (spaces.Discrete(5, start=2), np.array([2, 3, 6], np.int32)),
            (spaces.Text(3), ("a", "b", "c")),
        ],
        ids=str,
    )
    def test_reach_the_environment_as_they_were_given(self, space: Any, actions: Any) -> None:
        envs = make(partial(RandomSpaceEnv, NESTED, space))
        envs.reset(seed=0)
        envs.step(actions)
        for (seen,), action in zip(envs.call("actions_seen"), actions, strict=True):
            assert np.array_equal(seen, action)
            assert getattr(seen, "dtype", str) == getattr(action, "dtype", str)
        envs.close()

    def test_may_be_a_list(self) -> None:
        envs = make(ScriptedEnv)
        envs.reset(seed=0)
        assert envs.step([0, 1, np.int64(1)])[0][:, 2].tolist() == [0, 1, 1]
        envs.close()

    @pytest.mark.parametrize(("actions", "error"), [([0, 1], ValueError), (0, TypeError)])
    def test_of_a_wrong_number_are_refused_and_nothing_moves(
        self, actions: Any, error: type[Exception]
    ) -> None:
        envs = make(ScriptedEnv)
        envs.reset(seed=0)
        with pytest.raises(error):
            envs.step(actions)
        assert envs.step([0, 0, 0])[0][:, 0].tolist() == [1, 1, 1]
        envs.close()


class TestReset:
    def test_takes_a_list_of_seeds_and_options(self) -> None:
        envs = make(RandomSpaceEnv)
        theirs = SyncVectorEnv([RandomSpaceEnv] * 3)
        options = {"a": 1}
        for seed in ([5, 6, 7], np.int64(4).item(), [1, None, 3]):
            got, expected = (env.reset(seed=seed, options=options) for env in (envs, theirs))
            assert same(got[1], expected[1])
        envs.close()

    def test_of_some_leaves_the_others_and_the_callers_options_alone(self) -> None:
        envs = make(partial(ScriptedEnv, lengths=[1, 5, 1]), autoreset_mode="Disabled")
        envs.reset(seed=0)
        ended = envs.step(np.zeros(3, int))[2]
        options = {"reset_mask": ended, "other": 1}
        observations, infos = envs.reset(options=options)
        assert list(options) == ["reset_mask", "other"]
        assert observations[:, 0].tolist() == [100, 1, 100]
        assert infos["_episode"].tolist() == [True, False, True]
        envs.close()

    @pytest.mark.parametrize(
        ("mask", "error"),
        [
            ([True] * 3, TypeError),
            (np.ones(3), TypeError),
            (np.ones(2, bool), ConfigurationError),
            (np.zeros(3, bool), ConfigurationError),
        ],
    )
    def test_refuses_a_bad_mask(self, mask: Any, error: type[Exception]) -> None:
        envs = make(ScriptedEnv)
        with pytest.raises(error, match="reset_mask"):
            envs.reset(options={"reset_mask": mask})
        with pytest.raises(ConfigurationError, match=r"`seed` must be .* got 2 of them"):
            envs.reset(seed=[1, 2])
        envs.reset(seed=0)
        envs.close()

    def test_between_an_end_and_its_reset_the_next_step_is_a_step(self) -> None:
        envs = make(partial(ScriptedEnv, lengths=1))
        envs.reset(seed=0)
        envs.step(np.zeros(3, int))
        envs.reset(options={"reset_mask": np.array([True, False, False])})
        assert envs.step(np.zeros(3, int))[0][:, 0].tolist() == [101, 100, 100]
        envs.close()


class TestAccess:
    def test_to_attributes_methods_and_pictures(self) -> None:
        before = dict(GravityEnv.metadata)
        envs = make(partial(GravityEnv, render_mode="rgb_array"))
        envs.reset(seed=0)
        assert envs.render_mode == "rgb_array"
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        assert GravityEnv.metadata == before
        assert envs.get_attr("g") == (0.5, 0.5, 0.5)
        envs.set_attr("g", [1.0, 2.0, 3.0])
        assert envs.step(np.zeros(3, int))[1].tolist() == [1.0, 2.0, 3.0]
        envs.set_attr("extra", 1.0)
        assert envs.call("add", 10.0, second=0.5) == (10.5, 11.5, 12.5)
        assert [int(frame.max()) for frame in envs.render()] == [0, 1, 2]
        assert envs.np_random_seed == (0, 1, 2)
        with pytest.raises(ConfigurationError, match="length equal to the number"):
            envs.set_attr("g", [1.0])
        with pytest.raises(ConfigurationError, match="call it directly"):
            envs.call("reset")
        envs.close()

    def test_a_new_attribute_reaches_the_environment_within_its_wrappers(self) -> None:
        envs = make(lambda: PlainWrapper(GravityEnv()))
        envs.reset(seed=0)
        envs.set_attr("extra", 1.0)
        envs.set_attr("scale", 2.0)
        assert envs.step(np.zeros(3, int))[1].tolist() == [3.0] * 3
        envs.close()


class TestCallsOutOfTurn:
    def test_are_refused_with_gymnasiums_errors(self) -> None:
        envs = make(ScriptedEnv)
        for wait in (envs.step_wait, envs.reset_wait, envs.call_wait):
            with pytest.raises(NoAsyncCallError):
                wait()
        envs.reset_async(seed=0)
        for call in (envs.reset_async, partial(envs.step_async, [0] * 3)):
            with pytest.raises(AlreadyPendingCallError, match="pending call to `reset`"):
                call()
        envs.reset_wait()
        envs.call_async("spec")
        with pytest.raises(AlreadyPendingCallError):
            envs.set_attr("a", 1)
        assert envs.call_wait() == (None,) * 3
        envs.close()

    def test_after_close_are_refused_and_close_may_come_twice(self) -> None:
        envs = make(ScriptedEnv)
        envs.close()
        envs.close()
        for call in (envs.reset, envs.step_wait, partial(envs.step, [0] * 3), envs.render):
            with pytest.raises(ClosedEnvironmentError):
                call()

    def test_close_while_a_step_is_pending_warns_and_closes(self) -> None:
        envs = make(ScriptedEnv)
        pids = [process.pid for process in envs.processes]
        envs.reset(seed=0)
        envs.step_async([0] * 3)
        with pytest.warns(UserWarning, match="pending call to `step`"):
            envs.close()
        assert not any(map(is_running, pids))

    def test_a_step_that_takes_too_long_is_never_taken_for_a_later_one(
        self, tmp_path: Path
    ) -> None:
        envs = make(partial(GatedEnv, tmp_path))
        envs.reset(seed=0)
        envs.step_async([0] * 3)
        (tmp_path / "0-1").touch()
        started = time.monotonic()
        with pytest.raises(multiprocessing.TimeoutError, match="step_wait"):
            envs.step_wait(timeout=0.1)
        assert time.monotonic() - started < 2
        for number in range(3):
            (tmp_path / f"{number}-1").touch()
            (tmp_path / f"{number}-2").touch()
        assert envs.get_attr("life") == (1, 1, 1)
        assert envs.step([0] * 3)[0][:, 1].tolist() == [2, 2, 2]
        envs.close()

    def test_nor_is_a_call_or_a_reset_that_takes_too_long(self) -> None:
        for space in (NESTED, spaces.Text(5)):
            envs = make(partial(SlowEnv, space))
            first, _ = envs.reset(seed=0)
            envs.call_async("doze")
            with pytest.raises(multiprocessing.TimeoutError, match="call_wait"):
                envs.call_wait(timeout=0.01)
            envs.reset_async(seed=0, options={"doze": 0.2})
            with pytest.raises(multiprocessing.TimeoutError, match="reset_wait"):
                envs.reset_wait(timeout=0.01)
            mask = np.array([True, False, False])
            again, infos = envs.reset(seed=0, options={"reset_mask": mask})
            assert same(first, again)
            assert infos["_fresh"].tolist() == [True, False, False]
            envs.close()


class SlowEnv(RandomSpaceEnv):
    """Dozes when it is asked to."""

    def doze(self, seconds: float = 0.2) -> str:
        time.sleep(seconds)
        return "well rested"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.doze((options or {}).get("doze", 0.0))
        return super().reset(seed=seed, options=options)


class TestArguments:
    def test_default_is_one_worker_a_core(self) -> None:
        envs = make(ScriptedEnv, 5, None)
        assert len(envs.processes) == min(5, num_cores())
        assert isinstance(envs, AsyncVectorEnv)
        envs.close()
        limited = make(ScriptedEnv, 5, 5, max_concurrency=2)
        assert len(limited.processes) == 2
        limited.close()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"env_fns": []}, "`env_fns` must hold at least one function, got none"),
            ({"env_fns": ["CartPole-v1"]}, "`env_fns` must be functions"),
            ({"num_workers": 0}, "`num_workers` must be an integer from 1 to the number of"),
            ({"num_workers": 3}, "(2), or None, got 3"),
            ({"num_workers": 1.5}, "got 1.5"),
            ({"autoreset_mode": "Never"}, "`autoreset_mode` must be one of"),
            ({"max_concurrency": 0}, "`max_concurrency` must be a positive"),
            ({"max_concurrency": "1"}, "`max_concurrency` must be an integer"),
            ({"observation_mode": "other"}, "actual got other"),
            ({"context": "other"}, "`context` must be one of ['fork', 'spawn', 'forkserver'] or"),
        ],
    )
    def test_that_break_a_rule_are_refused(self, arguments: dict[str, Any], message: str) -> None:
        # A value of `observation_mode` is checked by Gymnasium.
        kind = ValueError if "observation_mode" in arguments else ConfigurationError
        with pytest.raises(kind, match=re.escape(message)):
            gymtask.ProcessVectorEnv(**{"env_fns": [ScriptedEnv] * 2, **arguments})

    def test_a_function_that_makes_no_environment_is_refused(self) -> None:
        with pytest.raises(MakerError, match=r"must return a gymnasium\.Env"):
            make(lambda: 3)

    def test_other_bounds_need_another_observation_mode(self) -> None:
        def env(high: float) -> Any:
            return lambda: RandomSpaceEnv(spaces.Box(0, high, (2,)), infos=False)

        env_fns = [env(1.0), env(2.0)]
        with pytest.raises(RuntimeError, match="not equivalent"):
            gymtask.ProcessVectorEnv(env_fns)
        envs = gymtask.ProcessVectorEnv(env_fns, observation_mode="different")
        theirs = SyncVectorEnv(env_fns, observation_mode="different")
        assert envs.observation_space == theirs.observation_space
        assert_same_run(envs, theirs, 10)

    def test_a_custom_space_goes_over_the_pipe_unless_shared_memory_is_insisted_on(self) -> None:
        envs = make(OddEnv)
        assert envs.reset()[0] == ("reset",) * 3
        assert envs.step(("a", "b", "c"))[0] == ("a!", "b!", "c!")
        envs.close()
        with pytest.raises(ConfigurationError, match="`shared_memory` must be False or None"):
            make(OddEnv, shared_memory=True)


class OddSpace(spaces.Space[Any]):
    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return "odd"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OddSpace)


class OddEnv(NumberedEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = self.action_space = OddSpace()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return "reset", {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return f"{action}!", 0.0, False, False, {}
