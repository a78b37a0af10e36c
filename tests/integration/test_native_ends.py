"""Native mode in NEXT_STEP: nobody is asked what to do in a state that only ends an episode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torch import Tensor

import gymtask
from gymtask.testing import ScriptedEnv
from tests.integration.native_envs import MODE_IDS, MODES, assert_same, rows_of, vector_of
from tests.tasks import make_task

NEXT = AutoresetMode.NEXT_STEP
LENGTHS = (3, 5, 1, 2, 7)
Make = Callable[..., Any]


def scripted(mode: AutoresetMode | None, lengths: Any = LENGTHS) -> Make:
    options = {"lengths": lengths, "num_actions": 5}
    if mode is None:
        return functools.partial(ScriptedEnv, **options)
    return vector_of(ScriptedEnv, mode, **options)


Seen = list[tuple[int, int, int, bool, bytes, bytes]]


def recording(seen: Seen) -> dict[str, Any]:
    """A policy with a carry that notes all it is asked, and draws from the noise."""

    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
        assert len(states)
        names = ("env_id", "trajectory_id", "step", "is_init")
        rows = zip(*(states[name].tolist() for name in names), strict=True)
        observations = states["observation"].numpy()
        carries = states["memory"].numpy()
        for row, observation, carry in zip(rows, observations, carries, strict=True):
            seen.append((*row, observation.tobytes(), carry.tobytes()))
        newest = states["observation"].reshape(len(states), -1, 3)[:, -1, 0]
        logits = torch.zeros(len(states), 5)
        logits[:, 0] = newest % 3
        action = gymtask.sampling.categorical(logits, states)
        memory = states["memory"] * 1.5 + action
        return TensorDict({"action": action, "next": {"memory": memory}}, [len(states)])

    return {
        "get_actions": act,
        "get_initial_carry": lambda self, model: TensorDict({"memory": torch.ones(())}),
    }


def played(
    make: Make,
    mode: str,
    totals: tuple[int, ...] = (40, 33, 61),
    *,
    stack: int | None,
    **keywords: Any,
) -> tuple[list[dict[str, bytes]], Seen]:
    seen: Seen = []
    task = make_task(
        5,
        1,
        mode,
        get_environment=lambda self: gymtask.Environment(make, info_keys=("t",), frame_stack=stack),
        **recording(seen),
    )
    with task.get_worker_pool() as pool:
        samples = [
            task.collect_samples(None, pool, total, use_tqdm=False, **keywords) for total in totals
        ]
    return rows_of(samples), seen


@pytest.mark.parametrize("stack", [None, 3])
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"max_trajectory_length": 2},
        {"min_batch_size": 1, "max_batch_size": 2},
        {"whole_episodes": True},
        {"random_actions": True},
        {"allocation": "first_come"},
    ],
    ids=str,
)
def test_the_policy_sees_the_states_that_it_sees_in_sync_mode(
    keywords: dict[str, Any], stack: int | None
) -> None:
    rows, wanted = played(scripted(None), "sync", stack=stack, **keywords)
    found_rows, found = played(scripted(NEXT), "native", stack=stack, **keywords)
    assert len(set(found)) == len(found)
    # All step on until everybody has given its share; so native mode has come further.
    further = played(
        scripted(None), "sync", (600,), stack=stack, **{**keywords, "allocation": "equal"}
    )
    assert set(found) <= set(further[1])
    if "allocation" not in keywords:  # there, whoever is first gives more
        assert set(wanted) <= set(found)
        assert_same(found_rows, rows)


def test_nobody_is_asked_where_all_are_reset() -> None:
    rows, wanted = played(scripted(None, 2), "sync", (40, 200), stack=None)
    found_rows, found = played(scripted(NEXT, 2), "native", (40, 200), stack=None)
    assert_same(found_rows, rows)
    assert sorted(found) == sorted(wanted)  # the same states, each once


@pytest.mark.parametrize("total", [None, 500])
def test_a_step_that_resets_all_finds_room_on_the_tape(total: int | None) -> None:
    """Episodes of one step: every second row of the tape is a reset."""
    task = make_task(5, 1, "native", env=scripted(NEXT, 1))
    with task.get_worker_pool() as pool:
        generator = task.iter_samples(None, pool, total_samples=total, use_tqdm=False)
        pieces = [next(generator) for _ in range(500)]
        generator.close()
    rows = torch.cat(pieces)
    assert rows["next", "done"].all()
    assert rows["is_init"].all()
    for index in range(5):
        own = rows[rows["env_id"] == index]
        assert own["observation"][:, 0].tolist() == [100 * e for e in range(len(own))]
        assert own["next", "observation"][:, 0].tolist() == [100 * e + 1 for e in range(len(own))]


def test_an_episode_that_is_reset_by_the_next_call_is_not_asked_for_either() -> None:
    seen: Seen = []
    task = make_task(2, 1, "native", env=scripted(NEXT, (3, 5)), **recording(seen))
    with task.get_worker_pool() as pool:
        for total in (6, 2, 2, 6):
            task.collect_samples(None, pool, total, use_tqdm=False)
    assert len(set(seen)) == len(seen)
    observations = [np.frombuffer(each[4], np.float32)[0] for each in seen]
    assert all(place % 100 == row[2] for place, row in zip(observations, seen, strict=True))


# ---- games that end in states in which nothing can be done ---------------------------------------


class Game(gym.Env[Any, Any]):
    """Ends after 2 to 4 moves; nothing is allowed then, and its place is NaN."""

    def __init__(self) -> None:
        place = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = spaces.Dict(place=place, action_mask=spaces.MultiBinary(3))
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.length = 0, int(self.np_random.integers(2, 5))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._observe(), 1.0 + int(action), self.count == self.length, False, {}

    def _observe(self) -> Any:
        over = self.count == self.length
        mask = np.array([True, self.count % 2, True], np.int8) * (not over)
        return {
            "place": np.array([np.nan if over else self.count], np.float32),
            "action_mask": mask,
        }


def play_masked(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
    mask = states["observation", "action_mask"]
    logits = gymtask.sampling.masked(torch.zeros(len(states), 3), mask)
    return logits.argmax(-1) if optimal else gymtask.sampling.categorical(logits, states)


class Push(Game):
    """The same, but its actions are numbers and its place is all that it shows."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._observe(), float(action[0]), self.count == self.length, False, {}

    def _observe(self) -> Any:
        return super()._observe()["place"]


def push(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
    return gymtask.sampling.gaussian(states["observation"], 0.1, states).clamp(-1, 1)


@pytest.mark.parametrize("autoreset", MODES, ids=MODE_IDS)
@pytest.mark.parametrize(("game", "act"), [(Game, play_masked), (Push, push)], ids=["mask", "NaN"])
@pytest.mark.parametrize("keywords", [{}, {"random_actions": True}], ids=str)
def test_a_final_state_in_which_nothing_can_be_done_is_never_acted_on(
    autoreset: AutoresetMode, game: Make, act: Any, keywords: dict[str, Any]
) -> None:
    found = []
    for mode, make in (("sync", game), ("native", vector_of(game, autoreset))):
        task = make_task(3, 1, mode, env=make, get_actions=act)
        with task.get_worker_pool() as pool:
            samples = [
                task.collect_samples(None, pool, total, use_tqdm=False, **keywords)
                for total in (40, 60)
            ]
        found.append(rows_of(samples))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("autoreset", MODES, ids=MODE_IDS)
def test_games_with_a_mask_are_evaluated(autoreset: AutoresetMode) -> None:
    records = []
    for mode, make in (("sync", Game), ("native", vector_of(Game, autoreset))):
        task = make_task(3, 1, mode, env=make, get_actions=play_masked)
        records.append(gymtask.evaluate(task, None, num_episodes=9))
    assert records[0] == records[1]


def test_first_observations_are_those_of_new_episodes_in_a_vector_env_of_its_own() -> None:
    """CartPole's own: it begins within 0.05 of upright, and ends far from there."""
    first: list[Tensor] = []

    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        first.append(states["observation"][states["is_init"]].clone())
        return torch.zeros(len(states), dtype=torch.int64)

    task = make_task(4, 1, "native", env="CartPole-v1", get_actions=act)
    with task.get_worker_pool() as pool:
        task.collect_samples(None, pool, 400, use_tqdm=False)
    assert sum(map(len, first)) > 20
    assert all((observation.abs() <= 0.05).all() for observation in first)


def test_who_is_reset_gets_the_action_of_its_last_step() -> None:
    """A VectorEnv may check all that it is sent."""
    sent: list[Any] = []

    def make(num_envs: int) -> Any:
        env = scripted(NEXT, (1, 2))(num_envs)
        step = env.step
        env.step = lambda actions: (sent.append(np.array(actions)), step(actions))[1]
        return env

    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        return 1 + states["run_step"] % 4

    task = make_task(2, 1, "native", env=make, get_actions=act)
    with task.get_worker_pool() as pool:
        task.collect_samples(None, pool, 20, use_tqdm=False)
    # The run's steps do not count resets: the last action stays over one.
    assert [row[0] for row in sent[:6]] == [1, 1, 2, 2, 3, 3]
    assert [row[1] for row in sent[:6]] == [1, 2, 2, 3, 4, 4]


def test_a_policy_that_fails_beside_a_reset_loses_and_repeats_nothing() -> None:
    calls = 0

    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        nonlocal calls
        calls += 1
        if calls % 7 == 0:
            raise RuntimeError("the policy failed")
        return states["run_step"] % 5

    def run(mode: str, make: Make) -> TensorDict:
        task = make_task(3, 1, mode, env=make, get_actions=act)
        parts = []
        with task.get_worker_pool() as pool:
            while sum(map(len, parts)) < 150:
                try:
                    samples = task.collect_samples(None, pool, 9, use_tqdm=False, max_batch_size=2)
                except RuntimeError:
                    continue
                parts.append(samples.to_tensordict().exclude(("next", "end")))
        return torch.cat(parts)

    ours, theirs = run("native", scripted(NEXT)), run("sync", scripted(None))
    for index in range(3):
        mine, other = (rows[rows["env_id"] == index] for rows in (ours, theirs))
        length = min(len(mine), len(other))
        assert length > 30
        assert (mine[:length] == other[:length]).all()
