"""One environment by hand: `Environment` as the seed's single-environment API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import gymtask
from gymtask.errors import (
    ActionError,
    ObservationError,
    PoolStateError,
)
from gymtask.testing import ScriptedEnv
from tests.unit.spy_env import Spy

STATE = {
    "observation": torch.float32,
    "reward": torch.float32,
    "terminated": torch.bool,
    "truncated": torch.bool,
    "done": torch.bool,
    "step": torch.int64,
}


@pytest.fixture
def scripted() -> Iterator[gymtask.Environment]:
    with gymtask.Environment(ScriptedEnv, lengths=3) as environment:
        yield environment


def kinds(state: TensorDict) -> dict[str, torch.dtype]:
    return {str(key): value.dtype for key, value in state.items()}


class TestStates:
    def test_a_state_is_a_tensordict_without_batch_shape(
        self, scripted: gymtask.Environment
    ) -> None:
        for state in (scripted.reset(seed=4), scripted.step(1)):
            assert isinstance(state, TensorDict)
            assert state.batch_size == torch.Size([])
            assert kinds(state) == STATE
            assert all(state[key].shape == () for key in STATE if key != "observation")
            assert state["observation"].shape == (3,)

    def test_an_episode_by_hand(self, scripted: gymtask.Environment) -> None:
        state = scripted.reset(seed=4)
        assert state["observation"].tolist() == [0, 4, -1]
        assert (state["reward"].item(), state["step"].item()) == (0, 0)
        seen = []
        while not scripted.terminated(state):
            state = scripted.step(1)
            seen.append(
                (state["observation"].tolist(), state["reward"].item(), state["step"].item())
            )
        assert seen == [([1, 4, 1], 1, 1), ([2, 4, 1], 2, 2), ([3, 4, 1], 3, 3)]
        assert scripted.reset()["observation"].tolist() == [100, 4, -1]

    @pytest.mark.parametrize(
        ("end", "flags"),
        [
            ("terminated", (True, False, True)),
            ("truncated", (False, True, True)),
            ("both", (True, True, True)),
        ],
    )
    def test_terminated_is_true_for_either_reason_and_both_flags_are_kept(
        self, end: str, flags: tuple[bool, bool, bool]
    ) -> None:
        with gymtask.Environment(ScriptedEnv, lengths=1, end=end) as environment:
            assert environment.terminated(environment.reset()) is False
            state = environment.step(0)
            assert environment.terminated(state) is True
            found = tuple(state[key].item() for key in ("terminated", "truncated", "done"))
            assert found == flags

    def test_the_reward_is_float32_whatever_the_environment_gives(self) -> None:
        with gymtask.Environment(Spy) as environment:
            environment.reset()
            state = environment.step(0)
        assert state["reward"].item() == np.float32(0.1)
        assert kinds(state) == STATE

    def test_float64_is_kept_on_request_alone(self) -> None:
        for keep, kind in [(False, torch.float32), (True, torch.float64)]:
            with gymtask.Environment(Spy, keep_float64=keep) as environment:
                observation = environment.reset()["observation"]
            assert observation.dtype == kind
            assert observation.tolist() == [torch.tensor(0.1, dtype=kind).item()] * 2

    def test_a_state_does_not_change_when_the_environment_goes_on(self) -> None:
        """O-09: the environment returns one array again and again."""
        with gymtask.Environment(Spy) as environment:
            states = [environment.reset(), environment.step(0), environment.step(0)]
        assert [state["observation"][0].item() for state in states] == [np.float32(0.1), 1, 2]

    def test_nested_spaces_become_nested_tensordicts(self) -> None:
        space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (2, 2), np.uint8),
                "pair": spaces.Tuple([spaces.Discrete(3, start=-1), spaces.Box(-1, 1, ())]),
            }
        )
        with gymtask.Environment(Spy, observation_space=space, action_space=space) as environment:
            state = environment.reset(seed=3)
            assert kinds(state["observation"].flatten_keys("/")) == {
                "image": torch.uint8,
                "pair/0": torch.int64,
                "pair/1": torch.float32,
            }
            action = environment.sample_action()
            state = environment.step(action)
            (received,) = environment.env.unwrapped.received
        assert state["observation", "pair", "0"].shape == ()
        assert action["pair", "0"].item() == received["pair"][0] + 1
        assert torch.equal(action["image"], torch.from_numpy(received["image"]))
        assert action["pair", "1"].item() == received["pair"][1]

    def test_a_wrong_observation_is_refused(self) -> None:
        space = spaces.Box(-1, 1, (3,))
        with (
            gymtask.Environment(Spy, observation_space=space) as environment,
            pytest.raises(
                ObservationError, match=re.escape("must have shape (3,), got shape (2,)")
            ),
        ):
            environment.reset()


class TestActions:
    @pytest.mark.parametrize(
        "action", [2, np.int64(2), np.array(2), np.array([2]), torch.tensor(2), torch.tensor([2])]
    )
    def test_numbers_arrays_and_tensors_are_taken(self, action: Any) -> None:
        with gymtask.Environment(Spy) as environment:
            environment.reset()
            environment.step(action)
            (received,) = environment.env.unwrapped.received
        assert type(received) is np.int64
        assert received == 2

    def test_a_discrete_action_counts_from_0(self) -> None:
        """O-30."""
        space = spaces.Discrete(3, start=5)
        with gymtask.Environment(Spy, action_space=space) as environment:
            environment.reset()
            environment.step(2)
            with pytest.raises(ActionError, match="0 to 2, counted from 0"):
                environment.step(5)
            assert environment.env.unwrapped.received == [7]

    def test_a_dict_is_taken_for_a_tensordict(self) -> None:
        space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1, 1, (2,))})
        with gymtask.Environment(Spy, action_space=space) as environment:
            environment.reset()
            environment.step({"a": 1, "b": [0.5, 0.25]})
            (received,) = environment.env.unwrapped.received
        assert received["a"] == 1
        assert received["b"].tolist() == [0.5, 0.25]

    def test_floats_are_cast_to_the_dtype_of_the_space_and_never_clipped(self) -> None:
        """O-11, O-12."""
        space = spaces.Box(-2, 2, (1,), np.float64)
        with gymtask.Environment(Spy, action_space=space) as environment:
            environment.reset()
            environment.step([5.0])
            (received,) = environment.env.unwrapped.received
        assert received.dtype == np.float64
        assert received.tolist() == [5.0]

    @pytest.mark.parametrize("action", [3, -1, 0.5, [0, 1], "left", None, (0, [1])])
    def test_a_wrong_action_is_refused_before_the_environment_moves(self, action: Any) -> None:
        with gymtask.Environment(Spy) as environment:
            environment.reset()
            with pytest.raises(ActionError, match="`action` must"):
                environment.step(action)
            assert environment.env.unwrapped.received == []
            assert environment.step(0)["step"].item() == 1

    def test_a_seed_seeds_sample_action_too(self) -> None:
        """O-08."""
        runs = []
        for seed in (7, 7, 8):
            with gymtask.Environment("CartPole-v1") as environment:
                environment.reset(seed=seed)
                runs.append([environment.sample_action().item() for _ in range(20)])
        assert runs[0] == runs[1] != runs[2]
        with gymtask.Environment("CartPole-v1") as environment:
            environment.reset(seed=7)
            first = environment.sample_action().item()
            environment.reset()  # goes on
            rest = [environment.sample_action().item() for _ in range(19)]
        assert [first, *rest] == runs[0]

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Discrete(3, start=-1),
            spaces.Box(-1, 1, (2,), np.float64),
            spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3], start=[1, 0])]),
        ],
        ids=str,
    )
    def test_every_sampled_action_can_be_taken(self, space: gym.Space[Any]) -> None:
        with gymtask.Environment(Spy, action_space=space) as environment:
            environment.reset(seed=1)
            for _ in range(20):
                environment.step(environment.sample_action())
            assert all(space.contains(action) for action in environment.env.unwrapped.received)

    def test_the_action_is_what_env_step_gets_from_a_sample(self) -> None:
        """O-43."""
        plain = Spy()
        plain.action_space.seed(5)
        plain.step(plain.action_space.sample())
        with gymtask.Environment(Spy) as environment:
            environment.reset(seed=5)
            environment.step(environment.sample_action())
            (received,) = environment.env.unwrapped.received
        assert (type(received), received) == (type(plain.received[0]), plain.received[0])


class TestOrderOfCalls:
    def test_a_step_before_the_first_reset_is_refused(self, scripted: gymtask.Environment) -> None:
        with pytest.raises(PoolStateError, match=r"no episode was begun; call reset\(\) first"):
            scripted.step(0)

    @pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
    def test_a_step_after_the_end_is_refused_until_the_next_reset(self, end: str) -> None:
        with gymtask.Environment(ScriptedEnv, lengths=3, end=end) as environment:
            environment.reset()
            for _ in range(3):
                environment.step(0)
            with pytest.raises(PoolStateError, match=r"has ended; call reset\(\) first"):
                environment.step(0)
            environment.reset()
            assert environment.step(0)["step"].item() == 1

    def test_a_step_after_close_is_refused_and_makes_nothing(self) -> None:
        environment = gymtask.Environment(Spy)
        environment.reset()
        environment.close()
        made = Spy.num_made
        with pytest.raises(PoolStateError, match="no episode was begun"):
            environment.step(0)
        assert Spy.num_made == made

    def test_a_step_after_a_reset_that_failed_is_refused(self) -> None:
        class Failing(Spy):
            def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
                if seed == 13:
                    raise ValueError("bad luck")
                return super().reset(seed=seed)

        with gymtask.Environment(Failing) as environment:
            environment.reset()
            environment.step(0)
            with pytest.raises(ValueError, match="bad luck"):
                environment.reset(seed=13)
            with pytest.raises(PoolStateError, match="no episode was begun"):
                environment.step(0)

    def test_info_is_that_of_the_last_call(self) -> None:
        with gymtask.Environment(Spy, info_keys=("at",)) as environment:
            assert environment.info == {}
            environment.reset()
            assert environment.info == {"at": "reset"}
            state = environment.step(0)
            assert environment.info == {"at": 1}
            assert "info" not in state.keys()  # noqa: SIM118
        assert environment.info == {}
