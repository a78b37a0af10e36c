"""What is collected does not depend on who steps the environments, on batches or on timing."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torch import Tensor

import gymtask
from gymtask.testing import ScriptedEnv
from tests.integration import test_bit_equality as plain
from tests.integration.native_envs import MODE_IDS, MODES, vector_of
from tests.tasks import make_task

NUM_ENVS = 8
NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED

# ---- one hash ------------------------------------------------------------------------------------

LOGITS = torch.from_numpy(np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32))


def tabular(self: Any, model: Tensor, states: TensorDict, optimal: bool) -> TensorDict:
    """A stochastic policy on a table: what it gives for a row cannot depend on the batch."""
    logits = model[states["observation"]]
    action = gymtask.sampling.categorical(logits, states)
    return TensorDict({"action": action, "logits": logits}, batch_size=[len(states)])


def hash_of(env: Any, mode: str, workers: int, limits: tuple[int, int | None]) -> str:
    """Of 10,000 transitions in two collections, sorted by environment, episode and step."""
    task = make_task(NUM_ENVS, workers, mode, env=env, get_actions=tabular)
    with task.get_worker_pool() as pool:
        parts = [
            task.collect_samples(
                LOGITS,
                pool,
                total,
                min_batch_size=limits[0],
                max_batch_size=limits[1],
                use_tqdm=False,
            )
            for total in (3_333, 6_667)
        ]
    rows = torch.cat([part.to_tensordict() for part in parts]).exclude(("next", "end"))
    assert len(rows) == 10_000
    assert rows["action"].unique().tolist() == [0, 1, 2, 3]
    places = [rows[key].numpy() for key in ("step", "trajectory_id", "env_id")]
    rows = rows[torch.from_numpy(np.lexsort(places))]
    digest = hashlib.sha256()
    flat = rows.flatten_keys("/")
    for key in sorted(flat.keys()):
        digest.update(f"{key} {flat[key].dtype} {tuple(flat[key].shape)}".encode())
        digest.update(flat[key].numpy().tobytes())
    return digest.hexdigest()


make_lake = functools.partial(gym.make, "FrozenLake-v1", map_name="4x4", is_slippery=True)


@functools.cache
def reference() -> str:
    return hash_of(make_lake, "sync", 1, (1, None))


@pytest.mark.parametrize(
    ("mode", "workers", "limits"),
    [
        ("sync", 1, (1, None)),  # the very same again
        ("sync", 2, (1, 1)),
        ("sync", 1, (5, 5)),
        ("thread", 1, (1, 3)),
        ("thread", 3, (1, None)),
        ("thread", 8, (8, 8)),
        ("thread", 8, (1, 3)),
        ("process", 1, (1, None)),
        ("process", 2, (1, 3)),
        ("process", 2, (4, 4)),
        ("process", 3, (1, None)),
        ("process", 8, (1, None)),
        ("process", 8, (2, None)),
    ],
)
def test_ten_thousand_rows_have_one_hash(
    mode: str, workers: int, limits: tuple[int, int | None]
) -> None:
    assert hash_of(make_lake, mode, workers, limits) == reference()


@pytest.mark.parametrize(
    ("autoreset", "limits"),
    [(NEXT, (1, None)), (NEXT, (1, 3)), (SAME, (1, None)), (DISABLED, (2, 5))],
)
def test_it_is_that_of_native_mode_too(
    autoreset: AutoresetMode, limits: tuple[int, int | None]
) -> None:
    assert hash_of(vector_of(make_lake, autoreset), "native", 1, limits) == reference()


# ---- the rows of a plain loop --------------------------------------------------------------------


def make_limited(env_id: str) -> Any:
    """As `plain.make_gym`, without importing this module, and torch, in a worker."""
    return functools.partial(gym.make, env_id, max_episode_steps=plain.TIME_LIMITS[env_id])


IDS = ["CartPole-v1", "FrozenLake-v1", "Pendulum-v1"]
TOTALS = (333, 330)


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest) -> Any:
    """An id, actions for its environments, and the rows that a loop over each alone gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "NUM_ENVS", NUM_ENVS)
        # A policy is asked for actions of steps beyond what is collected, where all step together.
        patch.setattr(plain, "MAX_ROWS", 2 * sum(TOTALS) // NUM_ENVS)
        actions = plain.draw_actions(request.param)
        rows = [plain.plain_rows(request.param, i, actions[i]) for i in range(NUM_ENVS)]
    return request.param, torch.from_numpy(actions), rows


def check_against_plain_loop(oracle: Any, env: Any, mode: str, workers: int) -> None:
    _, actions, rows = oracle
    task = plain.fixed_actions_task(gymtask.Environment(env), actions, mode, workers)
    given = [0] * NUM_ENVS
    with task.get_worker_pool() as pool:
        for total in TOTALS:
            samples = task.collect_samples(None, pool, total, use_tqdm=False)
            counts = samples.to_tensordict()["env_id"].bincount(minlength=NUM_ENVS).tolist()
            assert sum(counts) == total
            pieces = []
            for index, count in enumerate(counts):
                pieces += plain.split_at_ends(rows[index][given[index] : given[index] + count])
                given[index] += count
            for found, expected in zip(samples, pieces, strict=True):
                plain.assert_same_bits(found.samples, expected)


@pytest.mark.parametrize("oracle", IDS, indirect=True)
@pytest.mark.parametrize("per_worker", [1, 3, 8])
def test_rows_are_those_of_a_plain_loop_for_any_number_per_worker(
    oracle: Any, mode: str, per_worker: int
) -> None:
    env = make_limited(oracle[0])
    check_against_plain_loop(oracle, env, mode, -(-NUM_ENVS // per_worker))


@pytest.mark.parametrize("oracle", IDS, indirect=True)
@pytest.mark.parametrize("autoreset", MODES, ids=MODE_IDS)
def test_rows_are_those_of_a_plain_loop_in_each_autoreset_mode(
    oracle: Any, autoreset: AutoresetMode
) -> None:
    env = make_limited(oracle[0])
    check_against_plain_loop(oracle, vector_of(env, autoreset), "native", 1)


@pytest.mark.parametrize("oracle", IDS[:1], indirect=True)
@pytest.mark.parametrize("num_workers", [8, 3, 1])
@pytest.mark.parametrize("autoreset", MODES, ids=MODE_IDS)
def test_a_process_vector_env_gives_them_too(
    oracle: Any, autoreset: AutoresetMode, num_workers: int
) -> None:
    single = make_limited(oracle[0])

    def make(num_envs: int) -> Any:
        return gymtask.ProcessVectorEnv(
            [single] * num_envs, num_workers=num_workers, autoreset_mode=autoreset
        )

    check_against_plain_loop(oracle, make, "native", 1)


# ---- replies out of order ------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "workers"), [("thread", 4), ("process", 4), ("process", 2)])
@pytest.mark.parametrize("limits", [(1, 3), (1, None)])
def test_no_reply_is_taken_for_that_of_another_environment(
    mode: str, workers: int, limits: tuple[int, int | None]
) -> None:
    """O-27: the environments tell their number and the action that they got, at any pace."""

    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        assert torch.equal(states["observation"][:, 1].long(), states["env_id"])
        return (states["run_step"] * 7 + states["env_id"] * 11) % 50

    paces = (0.0, 0.0001, 0.0003, 0.001)
    env = functools.partial(ScriptedEnv, (9, 4, 7, 30), num_actions=50, seconds=paces)
    task = make_task(4, workers, mode, env=env, get_actions=act)
    with task.get_worker_pool() as pool:
        rows = task.collect_samples(
            None,
            pool,
            10_000,
            allocation="first_come",
            min_batch_size=limits[0],
            max_batch_size=limits[1],
            use_tqdm=False,
        ).to_tensordict()
        counts = rows["env_id"].bincount(minlength=4)
        assert counts.tolist() == pool.run_step.tolist()
    assert len(rows) == 10_000
    assert counts.min() > 0
    run_step = torch.cat([torch.arange(int(count)) for count in counts])
    after = rows["next", "observation"].long()
    assert torch.equal(rows["action"], (run_step * 7 + rows["env_id"] * 11) % 50)
    assert torch.equal(after[:, 1], rows["env_id"])
    assert torch.equal(after[:, 2], rows["action"])
    length = torch.tensor([9, 4, 7, 30])[rows["env_id"]]
    assert torch.equal(after[:, 0], 100 * (run_step // length) + run_step % length + 1)
    assert torch.equal(rows["next", "terminated"], rows["step"] == length - 1)
