"""What a collection makes of actions: what it refuses, and what environments get."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from gymtask.errors import ActionError
from gymtask.spaces import ActionCodec
from tests.unit.space_envs import acting, collect, recorder


class TestBeforeAnythingMoves:
    @pytest.mark.parametrize(
        ("space", "good", "bad"),
        [
            (spaces.Discrete(2), 1, 2),
            (spaces.Box(-1, 1, ()), 0.5, math.nan),
            (spaces.Box(-1, 1, ()), 0.5, math.inf),
        ],
        ids=["out of range", "nan", "inf"],
    )
    def test_no_environment_of_the_batch_has_moved(
        self, space: gym.Space[Any], good: float, bad: float
    ) -> None:
        def act(states: TensorDict) -> Tensor:
            actions = torch.full((len(states),), good)
            wrong = (states["env_id"] == 2) & (states["run_step"] == 3)
            return torch.where(wrong, bad, actions)

        task = acting(recorder(action_space=space), act, num_envs=3)
        with task.get_worker_pool() as pool:
            with pytest.raises(ActionError):
                task.collect_samples(None, pool, 30, use_tqdm=False)
            assert [len(part) for part in pool.get_attr("received")] == [3, 3, 3]

    def test_a_wrong_shape_or_dtype_is_refused_at_the_first_step(self) -> None:
        for action in (torch.zeros(3), torch.zeros(2, dtype=torch.int64)):
            task = acting(recorder(), lambda states, action=action: action, num_envs=3)
            with task.get_worker_pool() as pool:
                with pytest.raises(ActionError):
                    task.collect_samples(None, pool, 30, use_tqdm=False)
                assert pool.get_attr("received") == ([], [], [])


class TestWhatEnvironmentsGet:
    def test_index_plus_start(self, mode: str) -> None:
        """O-30."""
        task = acting(
            recorder(spaces.Discrete(3, start=-1), spaces.Discrete(3, start=1), [-1, 0, 1, 0]),
            lambda states: states["run_step"] % 3,
            num_envs=2,
            mode=mode,
        )
        rows, received = collect(task, 12)
        assert received == ([1, 2, 3, 1, 2, 3],) * 2
        assert rows["action"].tolist() == [0, 1, 2, 0, 1, 2] * 2
        assert rows["observation"][:4].tolist() == [-1, 0, 1, 0]

    def test_clipped_only_on_request_and_the_row_keeps_the_policys_action(self, mode: str) -> None:
        """O-11."""
        given = torch.tensor([5.0, -0.1, -7.0], dtype=torch.float64)
        environment = recorder(action_space=spaces.Box(-2, 2, (1,)))
        for clip, expected in [(False, [5.0, -0.1, -7.0]), (True, [2.0, -0.1, -2.0])]:
            task = acting(
                environment,
                lambda states: given[states["run_step"]].unsqueeze(-1),
                mode=mode,
                action_clip=clip,
            )
            rows, (received,) = collect(task, 3)
            assert rows["action"].dtype == torch.float32
            assert rows["action"].tolist() == given.float().unsqueeze(-1).tolist()
            wanted = np.array(expected, np.float32)
            for action, value in zip(received, wanted, strict=True):
                assert action.dtype == np.float32
                assert action.tolist() == [value]

    def test_an_action_that_shares_the_storage_of_states_in_debug_mode_too(
        self, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GYMTASK_DEBUG", "1")
        space = spaces.Box(-1, 1, (1,))
        task = acting(
            recorder(space, space, [np.array([k / 8], np.float32) for k in range(8)]),
            lambda states: states["observation"],
            mode=mode,
        )
        rows, (received,) = collect(task, 3)
        assert rows["action"].tolist() == [[0.0], [0.125], [0.25]]
        assert [action.tolist() for action in received] == [[0.0], [0.125], [0.25]]

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Discrete(4),
            spaces.Discrete(4, dtype=np.int16),
            spaces.MultiDiscrete([4, 4]),
            spaces.MultiBinary(2),
            spaces.Box(-1, 1, (2,), np.float64),
            spaces.Box(-1, 1, ()),
            spaces.Box(0, 9, (2,), np.uint8),
            spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (1,))}),
            spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]),
        ],
        ids=str,
    )
    def test_the_types_of_a_sample(self, mode: str, space: gym.Space[Any]) -> None:
        """O-43: an environment that checks types sees those of `action_space.sample()`."""
        space.seed(1)
        sample = space.sample()
        row = ActionCodec(space).rows_of(sample)
        action = TensorDict(row, batch_size=[]) if isinstance(row, dict) else row
        task = acting(
            recorder(action_space=space),
            lambda states: TensorDict({"action": action.unsqueeze(0)}, batch_size=[1]),
            mode=mode,
        )
        _, (received,) = collect(task, 2)
        for found in received:
            assert kinds(found) == kinds(sample)


def kinds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: kinds(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(kinds(part) for part in value)
    return type(value), value.dtype, value.shape
