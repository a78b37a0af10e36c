"""What goes into a pool besides steps, and what comes out: actions, seeds, attributes, infos."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from gymtask.errors import (
    ConfigurationError,
    ObservationError,
)
from tests.integration.pool_envs import (
    ActionEnv,
    GravityEnv,
    InfoEnv,
    NumberedEnv,
    PlainWrapper,
    RandomEnv,
    kind_of,
    open_pool,
    step_all,
)

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

    def test_values_keep_their_types(self, mode: str) -> None:
        keys = ("float", "int", "bool", "scalar", "vector", "empty", "late", "text")
        with open_pool(TypedEnv, mode, info_keys=keys) as pool:
            pool.reset()
            for t in (1, 2, 3):
                for info in step_all(pool, [0, 0]).info:
                    expected = typed_info(t)
                    assert info.keys() == expected.keys()
                    for key, value in expected.items():
                        assert type(info[key]) is type(value)
                        assert getattr(info[key], "dtype", None) == getattr(value, "dtype", None)
                        assert np.array_equal(info[key], value)

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


def typed_info(t: int) -> dict[str, Any]:
    """What is given at step t: text at every third, which travels otherwise than numbers."""
    info = {
        "float": t / 3,
        "int": t,
        "bool": t == 2,
        "scalar": np.float32(t),
        "vector": np.full((2, 3), t, np.int16),
        "empty": np.zeros((0, 2)),
    }
    return info | ({"late": t} if t > 1 else {}) | ({"text": "third"} if t == 3 else {})


class TypedEnv(NumberedEnv):
    def __init__(self) -> None:
        super().__init__()
        self._num_steps = 0

    def step(self, action: Any) -> Any:
        self._num_steps += 1
        return (*super().step(action)[:4], typed_info(self._num_steps))


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
