"""How an `Environment` is made, closed and pickled."""

from __future__ import annotations

import pickle
import re
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

import gymtask
from gymtask.errors import (
    MakerError,
    PoolStateError,
    SpaceError,
)
from gymtask.testing import ScriptedEnv
from tests.unit.spy_env import Spy


class Flat(gym.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-1, 1, (1,))

    def observation(self, observation: Any) -> Any:
        return np.array([len(observation)], np.float32)


class TestLife:
    def test_nothing_is_made_before_it_is_needed(self) -> None:
        made = Spy.num_made
        environment = gymtask.Environment(Spy)
        repr(environment), pickle.dumps(environment)
        environment.close()
        assert Spy.num_made == made
        for use in ("observation_space", "action_space", "fps"):
            getattr(environment, use)
        environment.reset()
        environment.sample_action()
        assert Spy.num_made == made + 1
        environment.close()

    def test_close_closes_once_and_the_next_use_makes_a_new_one(self) -> None:
        environment = gymtask.Environment(Spy)
        environment.close()
        first = environment.env
        environment.close()
        environment.close()
        assert first.unwrapped.num_closed == 1
        assert environment.env is not first
        assert environment.reset()["step"].item() == 0
        environment.close()

    def test_the_context_manager_closes_after_an_exception(self) -> None:
        environment = gymtask.Environment(Spy)
        env = environment.env.unwrapped
        with pytest.raises(RuntimeError, match="stop"), environment:
            raise RuntimeError("stop")
        assert env.num_closed == 1

    @pytest.mark.parametrize("role", ["observation_space", "action_space"])
    def test_one_whose_space_cannot_be_stored_is_refused_again_and_again(self, role: str) -> None:
        made = []

        def make() -> Spy:
            made.append(Spy(**{role: spaces.Text(5)}))
            return made[-1]

        environment = gymtask.Environment(make)
        for _ in range(2):
            with pytest.raises(SpaceError, match="got Text"):
                environment.reset()
            with pytest.raises(SpaceError, match="got Text"):
                _ = environment.observation_space
        assert [env.num_closed for env in made] == [1, 1, 1, 1]

    def test_the_recipe_alone_is_pickled(self) -> None:
        with gymtask.Environment(ScriptedEnv, lengths=[2], info_keys=("t",)) as environment:
            environment.reset()
            environment.step(0)
            copy = pickle.loads(pickle.dumps(environment))
        assert copy.maker == environment.maker
        with pytest.raises(PoolStateError, match="no episode was begun"):
            copy.step(0)
        with copy:
            assert copy.reset()["observation"].tolist() == [0, 0, -1]

    def test_lambdas_and_local_classes_are_pickled(self) -> None:
        length = 2

        class Local(ScriptedEnv):
            pass

        environment = gymtask.Environment(
            lambda: Local(lengths=length), wrappers=[lambda env: TimeLimit(env, 1)]
        )
        for copy in (
            pickle.loads(pickle.dumps(environment)),
            cloudpickle.loads(cloudpickle.dumps(environment)),
        ):
            with copy:
                copy.reset()
                assert copy.step(0)["truncated"].item() is True

    def test_a_recipe_that_reaches_a_module_or_a_tensor_is_refused_by_name(self) -> None:
        network, tensor = torch.nn.Linear(1, 1), torch.zeros(1)
        with pytest.raises(MakerError, match=r"must not reach a torch Module.*Linear"):
            pickle.dumps(gymtask.Environment(lambda: ScriptedEnv(lengths=network.in_features)))
        with pytest.raises(MakerError, match="must not reach a torch Tensor"):
            pickle.dumps(gymtask.Environment(lambda: ScriptedEnv(lengths=len(tensor))))

    def test_it_changes_nothing_about_the_environments_of_others(self) -> None:
        """O-38, O-42."""
        plain = gym.make("CartPole-v1")
        cls, kind = type(plain.unwrapped), type(plain)
        before = (dict(cls.metadata), plain.observation_space, plain.action_space, plain.spec)
        with gymtask.Environment(
            "CartPole-v1", wrappers=[Flat], render_mode="rgb_array", max_episode_steps=3
        ) as environment:
            environment.reset(seed=1)
            environment.step(0)
            assert environment.observation_space == spaces.Box(-1, 1, (1,))
            assert environment.env.unwrapped.observation_space == plain.observation_space
            assert type(environment.env.unwrapped) is cls
        again = gym.make("CartPole-v1")
        assert type(again) is kind
        assert again.spec == plain.spec
        assert before == (
            dict(cls.metadata),
            again.observation_space,
            again.action_space,
            again.spec,
        )


class TestRecipes:
    def test_an_id_a_spec_and_a_callable_make_the_same(self) -> None:
        observations = []
        for source in (
            "CartPole-v1",
            gym.spec("CartPole-v1"),
            lambda: gym.make("CartPole-v1"),
        ):
            with gymtask.Environment(source) as environment:
                observations.append(environment.reset(seed=7)["observation"])
        env = gym.make("CartPole-v1")
        expected = torch.from_numpy(env.reset(seed=7)[0])
        assert all(torch.equal(found, expected) for found in observations)

    def test_keywords_reach_what_makes_it(self) -> None:
        with gymtask.Environment("FrozenLake-v1", map_name="8x8") as environment:
            assert environment.observation_space == spaces.Discrete(64)
        with gymtask.Environment(ScriptedEnv, num_actions=5) as environment:
            assert environment.action_space == spaces.Discrete(5)

    def test_wrappers_are_applied_in_order(self) -> None:
        with gymtask.Environment(
            "CartPole-v1", wrappers=[Flat, lambda env: TimeLimit(env, 2)]
        ) as environment:
            assert isinstance(environment.env, TimeLimit)
            assert environment.reset()["observation"].tolist() == [4]
            assert environment.step(0)["truncated"].item() is False
            assert environment.step(0)["truncated"].item() is True

    @pytest.mark.parametrize("limit", [5, 700])
    def test_the_time_limit_may_be_shorter_or_longer_than_the_registered_one(
        self, limit: int
    ) -> None:
        """O-40: Pendulum is registered with 200."""
        with gymtask.Environment("Pendulum-v1", max_episode_steps=limit) as environment:
            state = environment.reset()
            while not environment.terminated(state):
                state = environment.step([0.0])
        assert state["step"].item() == limit
        assert state["truncated"].item() is True
        assert state["terminated"].item() is False

    def test_a_callable_gets_the_time_limit_around_it(self) -> None:
        with gymtask.Environment(ScriptedEnv, lengths=9, max_episode_steps=2) as environment:
            environment.reset()
            environment.step(0)
            assert environment.step(0)["truncated"].item() is True

    @pytest.mark.parametrize("length", [3, 4])
    def test_an_end_at_the_time_limit_keeps_both_flags(self, length: int) -> None:
        """O-23."""
        with gymtask.Environment(ScriptedEnv, lengths=length, max_episode_steps=3) as environment:
            environment.reset()
            for _ in range(3):
                state = environment.step(0)
        assert state["truncated"].item() is True
        assert state["terminated"].item() is (length == 3)

    def test_an_unknown_id_is_gymnasiums_own_error_at_once(self) -> None:
        with pytest.raises(gym.error.Error, match="NoSuchThing"):
            gymtask.Environment("NoSuchThing-v0")

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"env": 3}, "`env` must be an id, an EnvSpec or a callable"),
            ({"wrappers": [3]}, "`wrappers` must be callables that take an environment, got 3"),
            ({"info_keys": "t"}, "`info_keys` must be a sequence of strings, got 't'"),
            ({"max_episode_steps": 0}, "`max_episode_steps` must be at least 1, got 0"),
        ],
    )
    def test_a_bad_argument_is_refused_at_once(self, arguments: dict[str, Any], text: str) -> None:
        with pytest.raises(MakerError, match=re.escape(text)):
            gymtask.Environment(**{"env": "CartPole-v1", **arguments})
