"""Whole episodes after any collections: nothing is cut, whatever tapes their rows lie on."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import gymtask
from gymtask import rollout
from tests.integration.native_envs import table_of
from tests.tasks import make_task

LENGTHS = (1, 3, 7)


class Count(gym.Env[Any, Any]):
    """Counts 100 · episode + step, up to `length` steps; its info is the step."""

    def __init__(self, length: int) -> None:
        self.observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(5)
        self.length, self.episode = length, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.episode = 0, self.episode + 1
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        reward = self.count + int(action) / 8
        return self._observe(), reward, self.count == self.length, False, {"t": self.count}

    def _observe(self) -> Any:
        return np.array([100 * self.episode + self.count], np.float32)


def remember(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
    newest = states["observation"].reshape(len(states), -1)[:, -1]
    action = (states["run_step"] + states["env_id"]) % 5
    memory = states["memory"] * 0.5 + newest
    extra = {"note": newest * 2, "stack": states["observation"].clone()}
    return TensorDict({"action": action, "next": {"memory": memory}, **extra}, [len(states)])


def task_of(stack: int | None = None) -> gymtask.ReinforcementLearningTask:
    def make() -> Any:
        return SyncVectorEnv(
            [lambda length=length: Count(length) for length in LENGTHS],  # type: ignore[misc]
            autoreset_mode=AutoresetMode.NEXT_STEP,
        )

    return make_task(
        len(LENGTHS),
        1,
        "native",
        get_environment=lambda self: gymtask.Environment(make, info_keys=("t",), frame_stack=stack),
        get_initial_carry=lambda self, model: TensorDict({"memory": torch.ones(())}),
        get_actions=remember,
        get_values=lambda self, model, states: (
            states["memory"] + states["observation"].reshape(len(states), -1).sum(-1)
        ),
    )


def reference(stack: int | None = None) -> dict[int, TensorDict]:
    """All rows of each environment."""
    task = task_of(stack)
    with task.get_worker_pool() as pool:
        # Environments give the more rows the longer their episodes are.
        rows = task.collect_samples(None, pool, 3000, use_tqdm=False).to_tensordict()
    return {index: rows[rows["env_id"] == index] for index in range(len(LENGTHS))}


@pytest.fixture(scope="module")
def all_rows() -> dict[int | None, dict[int, TensorDict]]:
    return {stack: reference(stack) for stack in (None, 3)}


CALLS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"total_samples": st.integers(1, 60)},
            optional={
                "max_trajectory_length": st.integers(1, 4),
                "allocation": st.sampled_from(["equal", "first_come"]),
            },
        ),
        st.fixed_dictionaries(
            {"takes": st.integers(0, 12)}, optional={"max_trajectory_length": st.integers(1, 3)}
        ),
        st.fixed_dictionaries(
            {"total_samples": st.integers(1, 60), "whole_episodes": st.just(True)},
            optional={"allocation": st.sampled_from(["equal", "first_come"])},
        ),
    ),
    min_size=1,
    max_size=6,
)
WHOLE: dict[str, Any] = {"total_samples": 30, "whole_episodes": True}


def pieces_of(task: Any, pool: Any, call: dict[str, Any]) -> list[TensorDict]:
    if "takes" not in call:
        samples = task.collect_samples(None, pool, use_tqdm=False, **call)
        return [piece.samples for piece in samples]
    keywords = {key: value for key, value in call.items() if key != "takes"}
    generator = task.iter_samples(None, pool, use_tqdm=False, **keywords)
    pieces = [next(generator) for _ in range(call["takes"])]
    generator.close()
    return pieces


@settings(max_examples=150)
@given(calls=CALLS, stack=st.sampled_from([None, 3]), capacity=st.sampled_from([4, 64]))
def test_whole_episodes_are_whole_whatever_was_collected_before(
    all_rows: dict[int | None, dict[int, TensorDict]],
    calls: list[dict[str, Any]],
    stack: int | None,
    capacity: int,
) -> None:
    place = [0] * len(LENGTHS)
    task = task_of(stack)
    with pytest.MonkeyPatch.context() as patch, task.get_worker_pool() as pool:
        patch.setattr(rollout, "FIRST_CAPACITY", capacity)
        for call in [*calls, WHOLE, WHOLE]:
            for piece in pieces_of(task, pool, call):
                index = int(piece["env_id"][0])
                first, place[index] = place[index], place[index] + len(piece)
                if call.get("whole_episodes"):
                    assert piece["next", "done"][-1]
                    assert piece["next", "done"].sum() == 1
                # It goes on where the last one ended, with all that belongs to its rows.
                wanted = all_rows[stack][index][first : place[index]]
                assert table_of(piece) == table_of(wanted.exclude(("next", "end")))


@pytest.mark.parametrize("total", range(30, 60))
def test_an_episode_that_lies_on_two_tapes_is_not_cut(total: int) -> None:
    """More resets than a tape has room for: it is changed in the middle of a call."""
    task = task_of()
    with task.get_worker_pool() as pool:
        task.collect_samples(None, pool, total, max_trajectory_length=1, use_tqdm=False)
        whole = task.collect_samples(None, pool, 30, whole_episodes=True, use_tqdm=False)
    assert all(piece.samples["next", "done"][-1] for piece in whole)
