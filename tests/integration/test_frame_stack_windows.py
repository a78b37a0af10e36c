"""Windows of rows that hold single frames show stacks, those of Gymnasium's wrapper, bit by bit."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gymtask.errors import ConfigurationError, HookError
from gymtask.replay import MultiReplaySamples, ReplayBuffer, ReplayDataset, ReplaySamples
from tests.integration.stack_envs import (
    SPACES,
    assert_shown,
    collections,
    plain_stacks,
    stack_task,
    windows,
)
from tests.tasks import collect

# ---- windows -------------------------------------------------------------------------------------


def sampled(samples: MultiReplaySamples | ReplaySamples) -> list[TensorDict]:
    windows = samples.sample(1, only_last=True)
    return windows if isinstance(windows, list) else [windows]


def test_slices_partitions_and_pieces_keep_the_frames_before_them() -> None:
    task, _ = stack_task("sync")
    expected, space = plain_stacks(), SPACES["float32"]
    for each in collections(task):
        parts: list[Any] = [each, each[1::2], each[-2:], each.partition(1, 2), *each]
        parts += [MultiReplaySamples(reversed(list(each))), pickle.loads(pickle.dumps(each))]
        for part in parts:
            for window in sampled(part):
                assert_shown(window, space, expected)
                assert_shown(window, space, expected, ("next", "observation"), later=1)


def test_windows_of_the_task_s_dataset_hold_the_keys_asked_for_alone() -> None:
    task, _ = stack_task("sync")
    expected = plain_stacks()
    samples = collections(task)[1]
    task.batch_keys = ["step", "trajectory_id", ("next", "observation")]
    (batch,) = task.build_rl_dataset(samples)
    assert set(batch.keys()) == {"step", "trajectory_id", "next"}
    assert_shown(batch, SPACES["float32"], expected, ("next", "observation"), later=1)


def test_a_batch_shares_no_memory_with_the_store_or_with_itself() -> None:
    task, _ = stack_task("sync")
    samples = collections(task)[1]
    before = samples.rows.clone()
    batch = windows(samples, 2)[0]
    stacks, following = batch["observation"].clone(), batch["next", "observation"].clone()
    batch["observation"][:, 0].zero_()
    assert torch.equal(batch["observation"][:, 1], stacks[:, 1])
    assert torch.equal(batch["next", "observation"], following)
    batch["next", "observation"].zero_()
    assert (samples.rows == before).all()


def test_pieces_of_stacks_and_of_single_frames_do_not_mix() -> None:
    stacked, single = (collect(stack_task("sync", num_frames=k)[0], 9) for k in (3, None))
    with pytest.raises(ConfigurationError, match=r"the same number of frames .*, got \[0, 3\]"):
        MultiReplaySamples([stacked[0], single[0]])


@pytest.mark.parametrize("num_frames", [1, 4])
def test_a_replay_buffer_shows_the_same_stacks(num_frames: int) -> None:
    task, _ = stack_task("sync", num_frames=num_frames)
    expected, space = plain_stacks(num_frames=num_frames), SPACES["float32"]
    stack = task.get_environment_cached().maker.frame_stack
    buffer = ReplayBuffer(1000, frame_stack=stack)
    samples = [each for each in collections(task) if not each.num_dropped]
    for each in samples:
        buffer.extend(each)
    drawn = 0
    for batch in ReplayDataset(buffer, 2, 1, 16, replacement=False):
        drawn += len(batch)
        assert_shown(batch, space, expected)
        assert_shown(batch, space, expected, ("next", "observation"), later=1)
    assert drawn > sum(len(windows(each, 2)) for each in samples)


# ---- hooks ---------------------------------------------------------------------------------------


def negated(trajectory: TensorDict, key: Any) -> TensorDict:
    trajectory[key] = -trajectory[key]
    return trajectory


def negated_in_place(trajectory: TensorDict, key: Any) -> TensorDict:
    trajectory[key].neg_()
    return trajectory


def without(trajectory: TensorDict, *keys: Any) -> TensorDict:
    return trajectory.exclude(*keys)


REFUSED = {
    "changed": functools.partial(negated, key="observation"),
    "changed in place": functools.partial(negated_in_place, key="observation"),
    "taken away alone": lambda trajectory: without(trajectory, "observation"),
    "of another dtype": lambda trajectory: trajectory.set(
        ("next", "observation"), trajectory["next", "observation"].double()
    ),
}
ACCEPTED = {
    "added": lambda trajectory: trajectory.set("more", trajectory["step"]),
    "a copy": lambda trajectory: trajectory.clone(),
    "both taken away": lambda trajectory: without(
        trajectory, "observation", ("next", "observation")
    ),
    "next taken away": lambda trajectory: without(trajectory, ("next", "observation")),
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_hook_that_changes_frames_is_refused(change: str) -> None:
    hook = REFUSED[change]
    task, _ = stack_task("sync", postprocess_trajectory=lambda self, trajectory: hook(trajectory))
    with pytest.raises(HookError, match="must leave 'observation' as it is with frame_stack=4"):
        collect(task, 9)


@pytest.mark.parametrize("change", ACCEPTED)
def test_a_hook_gets_single_frames_and_may_add_or_take_away(change: str) -> None:
    hook, shapes = ACCEPTED[change], []

    def postprocess_trajectories(self: Any, trajectories: list[TensorDict]) -> list[TensorDict]:
        shapes.extend(trajectory["observation"].shape[1:] for trajectory in trajectories)
        return [hook(trajectory) for trajectory in trajectories]

    task, _ = stack_task("sync", postprocess_trajectories=postprocess_trajectories)
    expected, space = plain_stacks(), SPACES["float32"]
    for each in collections(task):
        for batch in windows(each):
            if "observation" in set(batch.keys()):
                assert_shown(batch, space, expected)
            if "observation" in set(batch["next"].keys()):
                assert_shown(batch, space, expected, ("next", "observation"), later=1)
    assert set(shapes) == {(3,)}
