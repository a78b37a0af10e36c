"""Action masks on their way from the environment to the policy, the rows and a replay buffer."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

import gymtask
from gymtask import sampling
from gymtask.errors import ConfigurationError, ObservationError
from tests.integration.mask_envs import MaskedEnv, mask_of, masked_environment
from tests.tasks import TAXI, collect, make_task

ROOT = Path(__file__).parents[2]
TAXI_MASK = partial(gymtask.InfoToObservation, spaces={"action_mask": spaces.MultiBinary(6)})


def act_by_mask(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
    """An allowed action by chance; the row keeps what the policy saw."""
    mask = states["observation", "action_mask"]
    logits = sampling.masked(torch.zeros(mask.shape), mask)
    content = {"action": sampling.categorical(logits, states), "seen": mask.clone()}
    return TensorDict(content, batch_size=[len(states)])


def masked_task(
    environment: gymtask.Environment, mode: str = "sync", **hooks: Any
) -> gymtask.ReinforcementLearningTask:
    methods = {"get_actions": act_by_mask, **hooks}
    return make_task(3, 2, mode, get_environment=lambda self: environment, **methods)


def true_masks(observation: TensorDict) -> Tensor:
    """The masks of the states that observations [M] of `MaskedEnv` tell of, int8 [M, 5]."""
    count, number, _ = observation["observation"].reshape(-1, 3).long().unbind(-1)
    each = zip(number.tolist(), (count // 100).tolist(), (count % 100).tolist(), strict=True)
    return torch.from_numpy(np.stack([mask_of(*place) for place in each]))


def masks(observation: TensorDict) -> Tensor:
    return observation["action_mask"].reshape(-1, 5)


# ---- to the policy and the rows ------------------------------------------------------------------


@pytest.mark.parametrize("way", ["info", "method", "observation"])
def test_each_mask_is_that_of_its_own_state_in_policy_rows_and_replay(mode: str, way: str) -> None:
    task = masked_task(masked_environment(way), mode)
    buffer = gymtask.ReplayBuffer(1000, seed=0)
    with task.get_worker_pool() as pool:
        collections = [task.collect_samples(None, pool, n, use_tqdm=False) for n in (50, 31)]
    for samples in collections:
        buffer.extend(samples)
    flat = torch.cat([samples.to_tensordict() for samples in collections])
    assert flat["observation", "action_mask"].dtype == torch.int8
    assert torch.equal(flat["seen"], true_masks(flat["observation"]))
    assert flat["seen"].gather(-1, flat["action"].unsqueeze(-1)).all()
    for rows in (flat, buffer.sample(400)):
        for part in (rows, rows["next"]):
            assert torch.equal(masks(part["observation"]), true_masks(part["observation"]))
        # The states in which it could be wrong are there: final ones, and those after a reset.
        terminated, truncated = rows["next", "terminated"], rows["next", "truncated"]
        assert terminated.any()
        assert truncated.any()
        assert (rows["is_init"] & (rows["trajectory_id"] >= 3)).any()
        assert not rows["next", "observation", "action_mask"][terminated].any()
        assert rows["next", "observation", "action_mask"][truncated].any(-1).all()


def test_values_of_next_states_leave_out_what_those_forbid() -> None:
    samples = collect(masked_task(masked_environment("info")), 60)
    buffer = gymtask.ReplayBuffer(100, seed=0)
    buffer.extend(samples)
    following = buffer.sample(200)["next"]
    values = torch.arange(5.0).expand(200, 1, 5)
    mask, terminated = following["observation", "action_mask"], following["terminated"]
    with pytest.raises(ConfigurationError, match=r"allow all: mask.bool\(\) \| terminated.unsq"):
        sampling.masked(values, mask)  # no action follows where an episode has terminated
    best = sampling.masked(values, mask.bool() | terminated.unsqueeze(-1)).amax(-1)
    expected = torch.where(terminated, 4.0, (values * mask).amax(-1))
    assert torch.equal(best, expected)


@pytest.mark.parametrize("lacks", [0, 1, 3])
def test_a_mask_that_is_missing_is_told_with_the_environment(mode: str, lacks: int) -> None:
    mask = {"action_mask": spaces.MultiBinary(5)}
    wrapper = partial(gymtask.InfoToObservation, spaces=mask)
    environment = gymtask.Environment(MaskedEnv, wrappers=(wrapper,), lacks=lacks)
    call = "step" if lacks else "reset"
    message = rf"every {call} of .*MaskedEnv.* must hold 'action_mask'.*only the keys \["
    with pytest.raises(ObservationError, match=message) as raised:
        collect(masked_task(environment, mode), 30)
    assert any("environment" in note for note in raised.value.__notes__)


def test_stacked_frames_stack_the_masks_and_the_newest_is_that_of_the_state() -> None:
    stacks: list[TensorDict] = []

    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        stacks.append(states["observation"].clone())
        mask = states["observation", "action_mask"][:, -1]
        return sampling.categorical(sampling.masked(torch.zeros(mask.shape), mask), states)

    collect(masked_task(masked_environment("info", frame_stack=4), get_actions=act), 60)
    for observation in stacks:
        assert observation["action_mask"].shape[1:] == (4, 5)
        assert torch.equal(masks(observation), true_masks(observation))


# ---- Taxi ----------------------------------------------------------------------------------------


def test_rows_of_taxi_are_those_of_a_plain_loop_over_gymnasium(mode: str) -> None:
    environment = gymtask.Environment(TAXI, wrappers=(TAXI_MASK,), max_episode_steps=24)
    flat = collect(masked_task(environment, mode), 300).to_tensordict()
    assert flat["next", "truncated"].sum() >= 9
    for env_id in range(3):
        plain = gym.make(TAXI, max_episode_steps=24)
        observation, info = plain.reset(seed=env_id)
        for row in flat[flat["env_id"] == env_id]:
            assert row["observation", "observation"] == observation
            assert row["observation", "action_mask"].tolist() == info["action_mask"].tolist()
            assert row["seen"].tolist() == info["action_mask"].tolist()
            observation, reward, terminated, truncated, info = plain.step(int(row["action"]))
            following = row["next"]
            assert following["observation", "observation"] == observation
            assert following["observation", "action_mask"].tolist() == info["action_mask"].tolist()
            assert following["reward"] == reward
            assert bool(following["done"]) == (terminated or truncated)
            if terminated or truncated:
                observation, info = plain.reset()


@pytest.mark.parametrize("autoreset_mode", ["NextStep", "SameStep"])
def test_vector_environments_wrapped_so_agree_with_those_of_gymnasium(autoreset_mode: str) -> None:
    keywords: dict[str, Any] = {"max_episode_steps": 7}
    envs = gymtask.make_vec(
        TAXI, 4, num_workers=2, wrappers=[TAXI_MASK], autoreset_mode=autoreset_mode, **keywords
    )
    plain = gym.vector.SyncVectorEnv(
        [lambda: TAXI_MASK(gym.make(TAXI, **keywords))] * 4, autoreset_mode=autoreset_mode
    )
    try:
        found, expected = envs.reset(seed=3)[0], plain.reset(seed=3)[0]
        for step in range(30):
            for key in ("observation", "action_mask"):
                assert np.array_equal(found[key], expected[key])
            actions = np.full(4, step % 6)
            found, expected = envs.step(actions)[0], plain.step(actions)[0]
    finally:
        envs.close()
        plain.close()


def test_the_example_runs_on_a_tiny_budget(tmp_path: Path) -> None:
    script = ROOT / "examples" / "masked_q_learning.py"
    command = [sys.executable, "-W", "error", str(script), "--max-samples", "512"]
    command += ["--no-clip", "--trainer.run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "mean return over 100 episodes, greedy: -" in done.stdout


@pytest.mark.slow
def test_the_example_learns_with_the_mask_what_it_does_not_without_it(tmp_path: Path) -> None:
    script = ROOT / "examples" / "masked_q_learning.py"
    found = []
    for flag in ("--mask", "--no-mask"):
        command = [sys.executable, str(script), flag, "--no-clip"]
        command += ["--trainer.run-dir", str(tmp_path / flag)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
        found.append(float(done.stdout.partition("greedy: ")[2].split()[0]))
    assert found[0] > 7
    assert found[1] < -100
