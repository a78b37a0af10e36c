"""`InfoToObservation` around single environments, and what it refuses."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeAwareObservation, TimeLimit

import gymtask
from gymtask.errors import MakerError, ObservationError
from gymtask.testing import ScriptedEnv
from gymtask.wrappers import InfoToObservation
from tests.tasks import TAXI

MASK = {"action_mask": spaces.MultiBinary(6)}


class Telling(ScriptedEnv):
    """Has its number of steps in the info dict, a method that tells it, and one that does not."""

    def reset(self, **keywords: Any) -> Any:
        observation, info = super().reset(**keywords)
        return observation, {**info, "t": 0}

    def count(self) -> int:
        return self.num_steps


def test_the_observation_becomes_a_dict_and_the_info_stays() -> None:
    env = InfoToObservation(gym.make(TAXI), MASK)
    plain = gym.make(TAXI)
    keys = ["observation", "action_mask"]
    assert list(env.observation_space.spaces) == keys
    results = [(env.reset(seed=5), plain.reset(seed=5))]
    results += [(env.step(action), plain.step(action)) for action in range(6)]
    for found, expected in results:
        assert list(found[0]) == keys
        assert env.observation_space.contains(found[0])
        assert found[0]["observation"] == expected[0]
        assert np.array_equal(found[0]["action_mask"], expected[-1]["action_mask"])
        assert found[-1].keys() == expected[-1].keys()
        assert found[1:-1] == expected[1:-1]


def test_a_dict_observation_keeps_its_keys_and_their_order() -> None:
    inner = TimeAwareObservation(TimeLimit(Telling(9), 50), flatten=False)
    env = InfoToObservation(inner, {"t": spaces.Discrete(100)})
    names = list(inner.observation_space.spaces)
    assert list(env.observation_space.spaces) == [*names, "t"]
    observation, _ = env.reset(seed=0)
    assert observation["t"] == 0
    observation, *_ = env.step(0)
    assert observation["t"] == 1
    assert observation.keys() == {*names, "t"}


def test_wrapped_twice_it_adds_what_a_method_tells_as_well() -> None:
    env = InfoToObservation(Telling(9), {"t": spaces.Discrete(100)})
    env = InfoToObservation(env, {"counted": spaces.Discrete(100)}, method="count")
    assert list(env.observation_space.spaces) == ["observation", "t", "counted"]
    assert env.reset(seed=0)[0]["counted"] == 0
    assert [env.step(0)[0]["counted"] for _ in range(3)] == [1, 2, 3]


def test_a_spec_with_the_wrapper_makes_it_again_and_it_can_be_pickled() -> None:
    wrapper = partial(InfoToObservation, spaces=MASK)
    env = pickle.loads(pickle.dumps(wrapper))(gym.make(TAXI))
    again = gym.make(env.spec)
    assert isinstance(again, InfoToObservation)
    assert again.observation_space == env.observation_space
    environment = gymtask.Environment(TAXI, wrappers=(wrapper,))
    with pickle.loads(pickle.dumps(environment)) as copy:
        state = copy.reset(seed=3)
        assert copy.info["action_mask"].tolist() == state["observation", "action_mask"].tolist()
        assert copy.observation_space == env.observation_space


@pytest.mark.parametrize(
    ("given", "method", "message"),
    [
        ({}, None, r"`spaces` must be a dict of a Gymnasium space for each new key.*got \{\}"),
        ({"t": int}, None, r"`spaces` must be a dict of .*got \{'t': <class 'int'>\}"),
        ({3: spaces.Discrete(2)}, None, "`spaces` must be a dict of"),
        (None, None, "`spaces` must be a dict of .*got None"),
        ({"observation": spaces.Discrete(2)}, None, r"`spaces` must not name keys that the "
         r"observation of .*Telling.* has already, got \['observation'\] beside \['observation'\]"),
        ({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}, "count",
         r"`spaces` must have one key where `method` is given, got \['a', 'b'\]; wrap"),
        ({"t": spaces.Discrete(2)}, "counts", "`method` must be the name of a method of .*Telling.*"
         " got 'counts'; None looks into the info dict"),
        ({"t": spaces.Discrete(2)}, "num_steps", "`method` must be the name of a method"),
    ],
)  # fmt: skip
def test_what_does_not_suit_the_environment_is_refused(
    given: Any, method: str | None, message: str
) -> None:
    with pytest.raises(MakerError, match=message):
        InfoToObservation(Telling(), given, method=method)


def test_a_key_that_a_dict_observation_has_is_refused_by_name() -> None:
    inner = TimeAwareObservation(TimeLimit(Telling(9), 50), flatten=False)
    with pytest.raises(MakerError, match=r"got \['time'\] beside \['obs', 'time'\]; rename"):
        InfoToObservation(inner, {"t": spaces.Discrete(9), "time": spaces.Discrete(9)})


def test_a_key_that_a_reset_or_a_step_lacks_is_named_with_those_that_there_are() -> None:
    env = InfoToObservation(gym.make(TAXI), {"mask": spaces.MultiBinary(6)})
    message = rf"every reset of {TAXI} must hold 'mask'.*only the keys \['prob', 'action_mask'\]"
    with pytest.raises(ObservationError, match=message):
        env.reset(seed=0)
    env = InfoToObservation(ScriptedEnv(9), {"episode": spaces.Discrete(9)})
    env.reset(seed=0)  # its steps say something else
    message = r"every step of .*ScriptedEnv.* must hold 'episode'.*only the keys \['t'\]"
    with pytest.raises(ObservationError, match=message):
        env.step(0)


def test_a_mask_of_another_length_than_its_space_is_refused_by_its_name() -> None:
    wrapper = partial(InfoToObservation, spaces={"action_mask": spaces.MultiBinary(5)})
    with (
        gymtask.Environment(TAXI, wrappers=(wrapper,)) as environment,
        pytest.raises(ObservationError, match=r"action_mask.* must have shape \(5,\), got.*\(6,\)"),
    ):
        environment.reset(seed=0)
