"""Frame stacks are those of Gymnasium's FrameStackObservation, bit by bit, and stored nowhere."""

from __future__ import annotations

import functools
import pickle
import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import FrameStackObservation
from tensordict import TensorDict
from torch import Tensor

import gymtask
from gymtask.errors import MakerError, SpaceError
from tests.integration.stack_envs import (
    NUM_ENVS,
    SEED,
    SPACES,
    RandomFrames,
    assert_shown,
    collections,
    gymnasium_stacks,
    leaves_at,
    plain_stacks,
    stack_task,
    stored,
    windows,
)
from tests.tasks import collect, make_task

MODES = ["sync", "thread", "process", "NEXT_STEP", "SAME_STEP", "DISABLED"]

# ---- what policies see ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_policy_values_and_windows_see_the_stacks_of_gymnasium(mode: str) -> None:
    estimated: list[TensorDict] = []

    def get_values(self: Any, model: Any, states: TensorDict) -> Tensor:
        estimated.append(states.clone())
        return torch.zeros(len(states))

    task, seen = stack_task(mode, get_values=get_values)
    expected, space = plain_stacks(), SPACES["float32"]
    samples = collections(task)
    # In NEXT_STEP mode an ended environment is shown once more, for an action that is no row.
    acted = {(int(s["env_id"]), int(s["run_step"])): s for states in seen for s in states.unbind(0)}
    for states in [*acted.values(), *estimated]:
        assert_shown(states, space, expected)
    assert len(acted) >= sum(each.num_transitions + each.num_dropped for each in samples)
    rows = [len(states) for states in estimated]
    assert rows == [len(each.rows) + len(each) for each in samples]
    for each in samples:
        assert each.rows["observation"].shape == (len(each.rows), 3)
        for clip_size, stride in ((1, 1), (2, 1), (2, 2)):
            for batch in windows(each, clip_size, stride):
                assert batch["observation"].shape[2:] == (4, 3)
                assert_shown(batch, space, expected)
                assert_shown(batch, space, expected, ("next", "observation"), later=1)
    ends = torch.cat([each.rows["next", "terminated"] for each in samples])
    assert 0 < int(ends.sum()) < len(ends)
    assert sum(bool(each.rows["next", "truncated"].any()) for each in samples) > 1
    cut = [piece for each in samples for piece in each if not piece.samples["next", "done"][-1]]
    assert any(piece.samples["step"][0] > 0 for piece in cut)


@pytest.mark.parametrize("num_frames", [1, 2, 5])
@pytest.mark.parametrize("kind", SPACES)
def test_every_kind_of_space_is_stacked_leaf_by_leaf(kind: str, num_frames: int) -> None:
    task, seen = stack_task("sync", kind, num_frames)
    expected, space = plain_stacks(kind, num_frames), SPACES[kind]
    for each in collections(task):
        for batch in windows(each, 2):
            assert_shown(batch, space, expected)
            assert_shown(batch, space, expected, ("next", "observation"), later=1)
    for states in seen:
        assert_shown(states, space, expected)


def test_float64_is_kept_on_request() -> None:
    task, seen = stack_task("sync", "float64", keep_float64=True)
    expected = plain_stacks("float64", keep_float64=True)
    (batch, *_) = windows(collect(task, 30))
    assert batch["observation"].dtype == seen[0]["observation"].dtype == torch.float64
    assert_shown(batch, SPACES["float64"], expected)


def test_a_carry_is_not_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMTASK_DEBUG", "1")  # states are filled with nonsense after each call

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
        newest = states["observation"][:, -1].sum(-1)
        content = {"action": torch.zeros(len(states), dtype=torch.int64), "sum": newest}
        content["next"] = {"memory": states["memory"] + newest}
        return TensorDict(content, batch_size=[len(states)])

    task, _ = stack_task(
        "sync",
        get_actions=get_actions,
        get_initial_carry=lambda self, model: TensorDict({"memory": torch.zeros(())}),
    )
    for each in collections(task):
        rows = each.rows
        assert torch.equal(rows["next", "memory"], rows["memory"] + rows["sum"])
        assert torch.equal(rows["sum"], rows["observation"].sum(-1))
        assert not rows["memory"][rows["is_init"]].any()


def test_the_first_stack_after_a_reset_by_hand_holds_no_older_frame() -> None:
    task, seen = stack_task("sync", num_frames=3)
    with task.get_worker_pool() as pool:
        task.collect_samples(None, pool, 10, use_tqdm=False)
        pool.reset()
        seen.clear()
        task.collect_samples(None, pool, 3, use_tqdm=False)
    first = seen[0]["observation"]
    assert torch.equal(first, first[:, :1].expand_as(first))


def test_evaluation_shows_stacks() -> None:
    task, seen = stack_task("sync")
    gymtask.evaluate(task, None, num_episodes=9)
    assert_consistent(seen)


def assert_consistent(seen: list[TensorDict], num_frames: int = 4) -> None:
    """Checks each stack against the newest frames of the stacks before it."""
    frames: dict[tuple[int, int], Tensor] = {}
    for states in seen:
        for state in states.unbind(0):
            trajectory, step = int(state["trajectory_id"]), int(state["step"])
            frames[trajectory, step] = state["observation"][-1]
            steps = [max(0, step - back) for back in range(num_frames - 1, -1, -1)]
            wanted = torch.stack([frames[trajectory, each] for each in steps])
            assert torch.equal(state["observation"], wanted)
    assert max(step for _, step in frames) > num_frames


# ---- one environment, and clips ------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPACES)
def test_the_single_environment_shows_stacks(kind: str) -> None:
    reference = FrameStackObservation(RandomFrames(kind), 4)
    with gymtask.Environment(functools.partial(RandomFrames, kind), frame_stack=4) as env:
        assert env.observation_space == reference.observation_space
        assert env.observation_space is env.observation_space
        for seed in (SEED, SEED + 1):
            states = [env.reset(seed=seed)]
            wanted = [reference.reset(seed=seed)[0]]
            while not env.terminated(states[-1]):
                states.append(env.step(0))
                wanted.append(reference.step(0)[0])
            for state, value in zip(states, wanted, strict=True):
                got = leaves_at(state["observation"], SPACES[kind], ...)
                for one, other in zip(got, stored(SPACES[kind], value), strict=True):
                    assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    again = pickle.loads(pickle.dumps(env))
    assert (env.maker.frame_stack, again.maker.frame_stack) == (4, 4)


def test_a_clip_shows_stacks_and_returns_single_frames() -> None:
    task, seen = stack_task("sync")
    for _ in range(6):
        seen.clear()
        rows = task.sample_clip(return_images=False, return_states=True, model=torch.nn.Identity())
        assert rows["observation"].shape == (len(rows), 3)
        for step, states in enumerate(seen):
            places = [max(0, step - back) for back in (3, 2, 1, 0)]
            assert torch.equal(states["observation"][0], rows["observation"][places])
    assert len(task.sample_clip(return_images=False, return_states=True)) > 0


# ---- memory, bad arguments, Atari ----------------------------------------------------------------


def test_workers_and_rows_hold_single_frames(mode: str) -> None:
    task, _ = stack_task(mode, "image")
    with task.get_worker_pool() as pool:
        assert pool.observation_space == SPACES["image"]
        samples = task.collect_samples(None, pool, 30, use_tqdm=False)
        for arrays in (pool.slots.observation, pool.slots.final_observation):
            assert [array.shape for array in arrays] == [(NUM_ENVS, 4, 5, 1)]
        assert pool.reset().observation.shape == (NUM_ENVS, 4, 5, 1)
    assert samples.rows["observation"].shape == (30, 4, 5, 1)
    assert samples[0].samples["observation"].shape[1:] == (4, 5, 1)
    assert samples.to_tensordict()["observation"].shape == (30, 4, 5, 1)
    history = samples.history
    assert history is not None
    assert not any(history.counts)  # all of these pieces begin with an episode


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
def test_a_bad_frame_stack_is_refused(value: Any) -> None:
    text = f"`frame_stack` must be an integer of at least 1, got {value!r}; None shows single"
    with pytest.raises(MakerError, match=re.escape(text)):
        gymtask.Environment("CartPole-v1", frame_stack=value)


def test_a_numpy_integer_is_a_frame_stack() -> None:
    env = gymtask.Environment("CartPole-v1", frame_stack=np.int64(3))  # type: ignore[arg-type]
    assert env.maker.frame_stack == 3
    assert env.observation_space.shape == (3, 4)


def test_a_space_without_fixed_shape_is_refused_by_name() -> None:
    class Texts(RandomFrames):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Text(5)

    with pytest.raises(SpaceError, match=r"have a fixed shape, got Text\(1, 5"):
        gymtask.Environment(Texts, frame_stack=2).observation_space  # noqa: B018


def smaller(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Every second row and column; Gymnasium's own preprocessing needs OpenCV."""
    space = spaces.Box(0, 255, (105, 80), np.uint8)
    return gym.wrappers.TransformObservation(env, lambda frame: frame[::2, ::2], space)


def test_pong_is_seen_as_gymnasium_stacks_it() -> None:
    gym.register_envs(pytest.importorskip("ale_py"))
    seen: list[TensorDict] = []
    pong = gymtask.Environment(
        "ALE/Pong-v5", wrappers=[smaller], obs_type="grayscale", max_episode_steps=11, frame_stack=4
    )

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        seen.append(states.clone())
        return (states["env_id"] + states["run_step"]) % 6

    task = make_task(
        2, 2, "process", config={"env_seed": SEED},
        get_environment=lambda self: pong, get_actions=get_actions,
    )  # fmt: skip
    expected = gymnasium_stacks(
        pong.maker, 4, 30, action=lambda env_id, run_step: (env_id + run_step) % 6, num_envs=2
    )
    with task.get_worker_pool() as pool:
        parts = [task.collect_samples(None, pool, n, use_tqdm=False) for n in (24, 30)]
    space = pong.env.observation_space
    assert pong.observation_space == batch_space(space, 4)
    for states in seen:
        assert_shown(states, space, expected)
    for part in parts:
        for batch in windows(part, 2):
            assert batch["observation"].shape[2:] == (4, 105, 80)
            assert_shown(batch, space, expected)
            assert_shown(batch, space, expected, ("next", "observation"), later=1)
    pong.close()
