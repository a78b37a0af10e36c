"""Frame stacks against a plain loop: of windows over random pieces, and of whole collections."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

import gymtask
from gymtask import rollout
from gymtask.replay import MultiReplaySamples, ReplayDataset
from gymtask.replay.frames import FrameHistory
from gymtask.windows import window_span
from tests.integration.native_envs import MODE_IDS, vector_of
from tests.property.test_collection import (
    Boom,
    Call,
    EpisodesEnv,
    Lengths,
    Model,
    call_once,
    chosen,
    runs,
)
from tests.tasks import make_task

# ---- windows -------------------------------------------------------------------------------------

PIECES = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=7)
"""The step on which each piece begins, and its rows."""


def frame(piece: int, step: int) -> list[int]:
    return [1000 * piece + step, piece]


def plain_stack(piece: int, step: int, num_frames: int) -> list[list[int]]:
    return [frame(piece, max(0, step - back)) for back in reversed(range(num_frames))]


def make_samples(pieces: Sequence[tuple[int, int]], num_frames: int) -> MultiReplaySamples:
    """Frames lie under ("observation", "a"), and their halves under ("observation", "b")."""
    rows = []
    for piece, (first, length) in enumerate(pieces):
        frames = torch.tensor([frame(piece, first + t) for t in range(length + 1)])
        both = [TensorDict({"a": each, "b": each / 2}) for each in (frames[:-1], frames[1:])]
        steps = torch.arange(first, first + length)
        content = {"observation": both[0], "step": steps, "piece": torch.full_like(steps, piece)}
        rows.append(TensorDict({**content, "next": {"observation": both[1]}}, [length]))
    counts = [min(num_frames - 1, first) for first, _ in pieces]
    before = [
        frame(piece, first - back)
        for piece, (first, _) in enumerate(pieces)
        for back in range(counts[piece], 0, -1)
    ]
    kept = torch.tensor(before, dtype=torch.int64).reshape(-1, 2)
    history = FrameHistory(
        num_frames, counts, {("observation", "a"): kept, ("observation", "b"): kept / 2}
    )
    lengths = [length for _, length in pieces]
    return MultiReplaySamples.from_rows(torch.cat(rows), lengths, history=history)


def check_windows(batch: TensorDict, num_frames: int) -> None:
    pieces, steps = batch["piece"].tolist(), batch["step"].tolist()
    for later, stacks in enumerate((batch["observation"], batch["next", "observation"])):
        wanted = [
            [plain_stack(p, t + later, num_frames) for p, t in zip(own, times, strict=True)]
            for own, times in zip(pieces, steps, strict=True)
        ]
        assert stacks["a"].tolist() == wanted
        assert torch.equal(stacks["b"], stacks["a"] / 2)


@settings(deadline=None, max_examples=80)
@given(PIECES, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.data())
def test_every_window_shows_the_stacks_that_a_loop_makes(
    pieces: list[tuple[int, int]], num_frames: int, clip_size: int, stride: int, data: st.DataObject
) -> None:
    samples = make_samples(pieces, num_frames)
    if max(samples.lengths) < window_span(clip_size, stride):
        return
    for batch in ReplayDataset(samples, clip_size, stride, 5, replacement=False):
        check_windows(batch, num_frames)
    rank = data.draw(st.integers(0, len(samples) - 1))
    part = samples.partition(rank, len(samples))[::-1]
    if max(part.lengths) >= window_span(clip_size, stride):
        for only_last in (False, True):
            for window in part.sample(clip_size, stride, only_last):
                check_windows(window.unsqueeze(0), num_frames)


# ---- collections ---------------------------------------------------------------------------------


def seen(env_id: int, episode: int, step: int, run_step: int, num_frames: int) -> list[list[int]]:
    """What a policy must see of EpisodesEnv."""
    backs = [min(back, step) for back in reversed(range(num_frames))]
    return [
        [
            100 * episode + step - back,
            env_id,
            int(chosen(env_id, run_step - back - 1)) if step > back else -1,
        ]
        for back in backs
    ]


def check_states(states: TensorDict, num_envs: int, num_frames: int) -> None:
    names = ("env_id", "trajectory_id", "step", "run_step")
    counters = zip(*(states[name].tolist() for name in names), strict=True)
    wanted = [
        seen(env_id, trajectory_id // num_envs, step, run_step, num_frames)
        for env_id, trajectory_id, step, run_step in counters
    ]
    assert states["observation"].tolist() == wanted


def stacking_task(lengths: Lengths, mode: str, workers: int, num_frames: int) -> Any:
    """A task whose hooks check what they see, and fail where its `call` says so."""
    env: Any = functools.partial(EpisodesEnv, lengths)
    autoreset = mode
    if mode in MODE_IDS:
        env = vector_of(functools.partial(env, mode != "SAME_STEP"), AutoresetMode[mode])
        mode = "native"

    def fail(task: Any, hook: str) -> None:
        task.calls[hook] = task.calls.get(hook, 0) + 1
        if task.call.fails_in == hook and task.calls[hook] == task.call.fails_at:
            raise Boom(hook)

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        fail(self, "get_actions")
        # In NEXT_STEP mode an ended environment is shown once more, for an action that is no row.
        shown = states[~states["is_init"]] if autoreset == "NEXT_STEP" else states
        check_states(shown, len(lengths), num_frames)
        action: Tensor = chosen(states["env_id"], states["run_step"])
        return action

    def get_values(self: Any, model: Any, states: TensorDict) -> Tensor:
        fail(self, "get_values")
        check_states(states, len(lengths), num_frames)
        return torch.zeros(len(states))

    def each(self: Any, trajectory: TensorDict) -> TensorDict:
        fail(self, "postprocess_trajectory")
        return trajectory

    def together(self: Any, trajectories: list[TensorDict]) -> list[TensorDict]:
        fail(self, "postprocess_trajectories")
        return trajectories

    return make_task(
        len(lengths),
        workers,
        mode,
        get_environment=lambda self: gymtask.Environment(env, frame_stack=num_frames),
        get_actions=get_actions,
        get_values=get_values,
        postprocess_trajectory=each,
        postprocess_trajectories=together,
    )


def check_samples(samples: MultiReplaySamples, lengths: Lengths, num_frames: int) -> None:
    model, keys = Model(lengths), ("env_id", "trajectory_id", "step")
    for batch in ReplayDataset(samples, 1, 1, 64, replacement=False):
        for later, stacks in enumerate((batch["observation"], batch["next", "observation"])):
            wanted = []
            for env_id, trajectory, step in zip(
                *(batch[key][:, 0].tolist() for key in keys), strict=True
            ):
                episode = trajectory // len(lengths)
                run_step = model.number_of(env_id, episode, step + later)
                wanted.append([seen(env_id, episode, step + later, run_step, num_frames)])
            assert stacks.tolist() == wanted


def check_run(drawn: tuple[Lengths, list[Call]], mode: str, workers: int, num_frames: int) -> None:
    lengths, made = drawn
    task = stacking_task(lengths, mode, workers, num_frames)
    with task.get_worker_pool() as pool:
        for call in [*made, Call(20, {}, None)]:
            task.__dict__["call"], task.__dict__["calls"] = call, {}
            samples = call_once(task, pool, call)
            if isinstance(samples, MultiReplaySamples) and len(samples):
                check_samples(samples, lengths, num_frames)


@pytest.mark.parametrize("mode", ["sync", "thread", *MODE_IDS])
@settings(deadline=None, max_examples=40)
@given(runs(), st.integers(1, 5), st.sampled_from([None, (1, 1), (3, 1 << 28)]))
def test_policy_values_and_windows_see_the_last_frames_of_the_episode(
    mode: str,
    drawn: tuple[Lengths, list[Call]],
    num_frames: int,
    tape: tuple[int, int] | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if tape is not None:  # so small that they are renewed all the time
            patch.setattr(rollout, "FIRST_CAPACITY", tape[0])
            patch.setattr(rollout, "MAX_BYTES", tape[1])
        workers = len(drawn[0]) if mode == "thread" else 1
        check_run(drawn, mode, workers, num_frames)
