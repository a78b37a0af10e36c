"""What is collected is what a plain loop over the environments sees, bit by bit.

The loop is `plain_rows`: `gymnasium.make`, one reset with a seed, and nothing of gymtask. Actions
are drawn beforehand, one for each environment and each of its steps.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import gymtask
from tests.tasks import TAXI, make_task

NUM_ENVS = 5
TOTALS = (200, 203, 204)  # rows of three collections, one after another
MAX_ROWS = sum(TOTALS) // NUM_ENVS + 2  # an environment gives at most so many of them
SEED = 7

TIME_LIMITS = {
    "CartPole-v1": 18,  # some episodes fall before it, some last as long
    "Acrobot-v1": 23,
    "Pendulum-v1": 17,
    TAXI: 24,
    "FrozenLake-v1": 6,
    "Blackjack-v1": None,  # an episode has a few steps
    "HalfCheetah-v5": 19,
    "LunarLander-v3": 80,  # random flight crashes, mostly in time
}

Rows = dict[str, Any]


def fixed_actions_task(
    environment: gymtask.Environment, table: Tensor, mode: str, num_workers: int
) -> gymtask.ReinforcementLearningTask:
    """Takes action number `run_step` of environment `env_id` from a table [N, ..., *shape]."""

    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        return table[states["env_id"], states["run_step"]]

    return make_task(
        num_envs=len(table),
        workers=num_workers,
        mode=mode,
        config={"env_seed": SEED},
        get_environment=lambda self: environment,
        get_actions=act,
    )


def make_gym(env_id: str) -> gym.Env[Any, Any]:
    return gym.make(env_id, max_episode_steps=TIME_LIMITS[env_id])


def import_box2d() -> None:
    """Where the DeprecationWarning of its import is an error, Box2D crashes the interpreter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("Box2D")


def draw_actions(env_id: str) -> np.ndarray[Any, Any]:
    """As rows hold them: indices from 0, or float32 within the bounds."""
    env = make_gym(env_id)
    space, random = env.action_space, np.random.default_rng(1)
    env.close()
    if isinstance(space, gym.spaces.Discrete):
        return random.integers(space.n, size=(NUM_ENVS, MAX_ROWS))
    assert isinstance(space, gym.spaces.Box)
    size = (NUM_ENVS, MAX_ROWS, *space.shape)
    return random.uniform(space.low, space.high, size).astype(np.float32)


def stored(observation: Any) -> dict[str, Any]:
    """The leaves of an observation in the dtypes of design section 5, by key."""
    if isinstance(observation, tuple):
        return {f"observation/{k}": np.int64(part) for k, part in enumerate(observation)}
    if isinstance(observation, np.ndarray):
        return {"observation": observation.astype(np.float32)}
    return {"observation": np.int64(observation)}


def plain_rows(env_id: str, index: int, actions: np.ndarray[Any, Any]) -> list[Rows]:
    """The rows of environment `index`, from a loop over it alone."""
    env = make_gym(env_id)
    rows: list[Rows] = []
    observation, _ = env.reset(seed=SEED + index)
    num_episodes, step = 0, 0
    for action in actions:
        before = stored(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        after = {f"next/{key}": value for key, value in stored(observation).items()}
        rows.append(
            {
                **before,
                **after,
                "action": action,
                "next/reward": np.float32(reward),
                "next/terminated": np.bool_(terminated),
                "next/truncated": np.bool_(truncated),
                "next/done": np.bool_(terminated or truncated),
                "is_init": np.bool_(step == 0),
                "step": np.int64(step),
                "trajectory_id": np.int64(index + NUM_ENVS * num_episodes),
                "env_id": np.int64(index),
            }
        )
        step += 1
        if terminated or truncated:
            observation, _ = env.reset()
            num_episodes, step = num_episodes + 1, 0
    env.close()
    return rows


@pytest.fixture(scope="module", params=list(TIME_LIMITS))
def env_id(request: pytest.FixtureRequest) -> str:
    if request.param == "LunarLander-v3":
        import_box2d()
    return str(request.param)


@pytest.fixture(scope="module")
def actions(env_id: str) -> np.ndarray[Any, Any]:
    return draw_actions(env_id)


@pytest.fixture(scope="module")
def oracle(env_id: str, actions: np.ndarray[Any, Any]) -> list[list[Rows]]:
    return [plain_rows(env_id, index, actions[index]) for index in range(NUM_ENVS)]


@pytest.fixture(autouse=True, scope="module")
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """MuJoCo leaves a log file in the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cwd"))
        yield


def assert_same_bits(samples: TensorDict, expected: list[Rows]) -> None:
    flat = samples.flatten_keys("/")
    assert set(flat.keys()) == set(expected[0])
    for key in expected[0]:
        found, wanted = flat[key].numpy(), np.stack([row[key] for row in expected])
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), key
        assert found.tobytes() == wanted.tobytes(), key


def split_at_ends(rows: list[Rows]) -> list[list[Rows]]:
    """Consecutive rows of the same episode."""
    pieces: list[list[Rows]] = []
    for row in rows:
        if not pieces or pieces[-1][-1]["trajectory_id"] != row["trajectory_id"]:
            pieces.append([])
        pieces[-1].append(row)
    return pieces


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_collections_one_after_another_are_the_rows_of_a_plain_loop(
    env_id: str,
    mode: str,
    num_workers: int,
    actions: np.ndarray[Any, Any],
    oracle: list[list[Rows]],
) -> None:
    environment = gymtask.Environment(env_id, max_episode_steps=TIME_LIMITS[env_id])
    task = fixed_actions_task(environment, torch.from_numpy(actions), mode, num_workers)
    given = [0] * NUM_ENVS
    # Each batch limit comes first once: which one a collection has must not matter.
    limits = {1: (1, 2, None), 2: (2, None, 1), 5: (None, 1, 2)}[num_workers]
    with task.get_worker_pool() as pool:
        for total, limit in zip(TOTALS, limits, strict=True):
            samples = task.collect_samples(None, pool, total, max_batch_size=limit, use_tqdm=False)
            counts = samples.to_tensordict()["env_id"].bincount(minlength=NUM_ENVS).tolist()
            assert sum(counts) == total
            assert max(counts) - min(counts) <= 1
            pieces = []
            for index, count in enumerate(counts):
                pieces += split_at_ends(oracle[index][given[index] : given[index] + count])
                given[index] += count
            assert len(samples) == len(pieces)
            for found, expected in zip(samples, pieces, strict=True):
                assert_same_bits(found.samples, expected)


def test_the_plain_loop_saw_episodes_end(env_id: str, oracle: list[list[Rows]]) -> None:
    rows = [row for part in oracle for row in part]
    terminated = sum(bool(row["next/terminated"]) for row in rows)
    truncated = sum(bool(row["next/truncated"]) for row in rows)
    assert terminated + truncated >= NUM_ENVS
    if env_id in ("CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "LunarLander-v3"):
        assert terminated > 0
    if TIME_LIMITS[env_id] is not None:
        assert truncated > 0


def rand_environment() -> gymtask.Environment:
    """Shows the next number of its own random stream; an episode has 2 steps."""

    # Defined in here it travels to a worker by value, which then need not import this module.
    class Rand(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(0, 1, (), np.float64)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            super().reset(seed=seed)
            self.steps = 0
            return self.np_random.random(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.steps += 1
            return self.np_random.random(), 0.0, False, self.steps == 2, {}

    return gymtask.Environment(Rand, keep_float64=True)


def test_environments_are_seeded_apart_and_only_once(mode: str) -> None:
    """O-07, O-16."""
    table = torch.zeros(3, 8, dtype=torch.int64)
    task = fixed_actions_task(rand_environment(), table, mode, 3)
    with task.get_worker_pool() as pool:
        samples = [task.collect_samples(None, pool, 9, use_tqdm=False) for _ in range(2)]
    flat = torch.cat([part.to_tensordict() for part in samples])
    for index in range(3):
        random = np.random.default_rng(SEED + index)
        # Each episode shows three numbers: its first, and one for each of its two steps.
        episodes = [random.random(3).tolist() for _ in range(3)]
        rows = flat[flat["env_id"] == index]
        assert rows["observation"].tolist() == [x for shown in episodes for x in shown[:2]]
        assert rows["next", "observation"].tolist() == [x for shown in episodes for x in shown[1:]]
