"""How a clip is acted out, and its random streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

import gymtask
from gymtask.errors import HookError
from gymtask.testing import ScriptedEnv
from tests.integration.film_tasks import MODEL, film_task
from tests.tasks import collect, make_task


class TestPolicies:
    def test_without_a_model_actions_are_random_and_no_hook_is_called(self) -> None:
        def fail(*arguments: Any) -> Any:
            raise AssertionError("called")

        task = film_task(act=fail, lengths=40, num_actions=5, hooks={"get_initial_carry": fail})
        states = task.sample_clip(return_images=False, return_states=True)
        assert states["action"].dtype == torch.int64
        assert set(states["action"].tolist()) == set(range(5))
        assert states["action"].tolist() == states["next", "observation"][:, 2].tolist()

    def test_random_actions_of_nested_spaces_are_stored_as_trajectories_store_them(self) -> None:
        space = spaces.Dict({"a": spaces.Discrete(3, start=5), "b": spaces.Box(-1, 1, (2,))})
        received = []

        class Nested(ScriptedEnv):
            def __init__(self, **keywords: Any) -> None:
                super().__init__(**keywords)
                self.action_space = space

            def step(self, action: Any) -> Any:
                received.append(action)
                return super().step(0)

        states = film_task(Nested).sample_clip(return_images=False, return_states=True)
        assert states["action", "a"].tolist() == [action["a"] - 5 for action in received]
        assert states["action", "b"].tolist() == [action["b"].tolist() for action in received]

    def test_the_policy_sees_what_it_sees_in_training(self) -> None:
        seen: list[TensorDict] = []

        def act(states: TensorDict) -> Tensor:
            seen.append(states.clone())
            return torch.ones(len(states), dtype=torch.int64)

        film_task(act=act).sample_clip(model=MODEL)
        states = torch.cat(seen)
        assert states["observation"][:, 0].tolist() == [0, 1, 2]
        assert states["step"].tolist() == states["run_step"].tolist() == [0, 1, 2]
        assert states["is_init"].tolist() == [True, False, False]
        assert set(states.keys()) == {
            "observation", "step", "run_step", "is_init", "env_id", "trajectory_id"
        }  # fmt: skip

    @pytest.mark.parametrize("optimal", [None, True, False])
    def test_optimal_is_handed_on_and_true_by_default(self, optimal: bool | None) -> None:
        seen = []

        def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
            seen.append((model, optimal, torch.is_grad_enabled(), model.training))
            return torch.ones(len(states), dtype=torch.int64)

        model = nn.Dropout()
        task = make_task(
            get_environment=lambda self: gymtask.Environment(ScriptedEnv), get_actions=act
        )
        keywords = {} if optimal is None else {"optimal": optimal}
        task.sample_clip(model=model, **keywords)
        assert seen == [(model, optimal is not False, False, False)] * 3
        assert model.training

    @pytest.mark.parametrize("clip", [False, True])
    def test_continuous_actions_are_clipped_as_in_training(self, clip: bool) -> None:
        """O-11."""
        received = []

        class Continuous(ScriptedEnv):
            def __init__(self, **keywords: Any) -> None:
                super().__init__(**keywords)
                self.action_space = spaces.Box(-2, 2, (1,), np.float64)

            def step(self, action: Any) -> Any:
                received.append(action)
                return super().step(0)

        task = film_task(
            Continuous,
            lambda states: torch.full((1, 1), 5.0, dtype=torch.float64),
            config={"action_clip": clip},
        )
        states = task.sample_clip(model=MODEL, return_images=False, return_states=True)
        assert states["action"].dtype == torch.float32
        assert states["action"].tolist() == [[5.0]] * 3
        assert [action.tolist() for action in received] == [[2.0 if clip else 5.0]] * 3
        assert {action.dtype for action in received} == {np.dtype(np.float64)}

    def test_dict_actions_reach_the_environment(self) -> None:
        received = []

        class Nested(ScriptedEnv):
            def __init__(self, **keywords: Any) -> None:
                super().__init__(**keywords)
                parts = [spaces.Discrete(4, start=-2), spaces.MultiBinary(2)]
                self.action_space = spaces.Dict({"t": spaces.Tuple(parts)})

            def step(self, action: Any) -> Any:
                received.append(action)
                return super().step(0)

        def act(states: TensorDict) -> TensorDict:
            parts = {"0": states["step"], "1": torch.ones(1, 2, dtype=torch.int8)}
            return TensorDict({"action": {"t": parts}}, batch_size=[1])

        states = film_task(Nested, act).sample_clip(
            model=MODEL, return_images=False, return_states=True
        )
        assert states["action", "t", "0"].tolist() == [0, 1, 2]
        assert [action["t"][0] for action in received] == [-2, -1, 0]
        assert [action["t"][1].tolist() for action in received] == [[1, 1]] * 3

    @pytest.mark.parametrize(
        "second",
        [{}, {"x": torch.zeros(1, 2)}, {"x": torch.zeros(1, dtype=torch.int64)}, {"y": MODEL}],
        ids=["missing", "shape", "dtype", "key"],
    )
    def test_what_it_returns_must_be_of_one_kind(self, second: dict[str, Any]) -> None:
        second = {key: torch.zeros(1) if key == "y" else value for key, value in second.items()}

        def act(states: TensorDict) -> TensorDict:
            extra = {"x": torch.zeros(1)} if states["step"].item() == 0 else second
            return TensorDict({"action": states["step"], **extra}, batch_size=[1])

        with pytest.raises(HookError, match="must return the same keys, shapes and dtypes"):
            film_task(act=act).sample_clip(model=MODEL)


def random_policy(states: TensorDict) -> Tensor:
    return (gymtask.sampling.uniform(states, 1)[:, 0] < 0.5).long()


class TestStreams:
    @pytest.mark.parametrize("model", [MODEL, None])
    def test_two_clips_of_a_run_differ_and_the_same_count_repeats(
        self, model: nn.Module | None
    ) -> None:
        task = film_task("CartPole-v1", random_policy)
        clips = [
            task.sample_clip(model=model, return_images=False, return_states=True) for _ in range(2)
        ]
        assert not torch.equal(clips[0]["observation"][0], clips[1]["observation"][0])
        assert clips[0]["action"].tolist()[:9] != clips[1]["action"].tolist()[:9]
        assert task.num_clips == 2
        for count in (1, 0):
            task.num_clips = count
            again = task.sample_clip(model=model, return_images=False, return_states=True)
            assert (again == clips[count]).all()

    def test_another_seed_gives_another_clip(self) -> None:
        firsts = [
            film_task("CartPole-v1", config={"env_seed": seed}).sample_clip(
                return_images=False, return_states=True
            )["observation"][0]
            for seed in (1, 2)
        ]
        assert not torch.equal(*firsts)

    def test_a_clip_is_not_an_episode_of_training(self) -> None:
        task = film_task("CartPole-v1", random_policy)
        states = task.sample_clip(model=MODEL, return_images=False, return_states=True)
        rows = collect(task, 50, MODEL).to_tensordict()
        assert not torch.isin(states["observation"][:, 0], rows["observation"][:, 0]).any()

    def test_a_clip_between_two_collections_changes_nothing(self) -> None:
        def rows(film: bool) -> TensorDict:
            task = film_task("CartPole-v1", random_policy)
            with task.get_worker_pool() as pool:
                parts = []
                for _ in range(2):
                    samples = task.collect_samples(MODEL, pool, 20, use_tqdm=False)
                    parts.append(samples.to_tensordict())
                    if film:
                        task.sample_clip(model=MODEL)
            return torch.cat(parts)

        assert (rows(True) == rows(False)).all()
