"""What a trajectory holds.

The observation of `ScriptedEnv` is (100 · episode + step, number, last action), and its reward at
step t is t.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

import gymtask
from gymtask.tape import Piece
from gymtask.trajectory import assemble, split_values, value_states
from tests.tasks import collect
from tests.unit.scripted_tasks import scripted, scripted_task

TABLE = {
    "observation": (torch.float32, (3,)),
    "action": (torch.int64, ()),
    "is_init": (torch.bool, ()),
    "step": (torch.int64, ()),
    "trajectory_id": (torch.int64, ()),
    "env_id": (torch.int64, ()),
    "next/observation": (torch.float32, (3,)),
    "next/reward": (torch.float32, ()),
    "next/terminated": (torch.bool, ()),
    "next/truncated": (torch.bool, ()),
    "next/done": (torch.bool, ()),
}


def described(samples: TensorDict) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    flat = samples.flatten_keys("/")
    return {key: (value.dtype, tuple(value.shape[1:])) for key, value in flat.items()}


class TestKeys:
    def test_are_exactly_those_of_the_table(self) -> None:
        for piece in collect(scripted_task(), 20):
            assert described(piece.samples) == TABLE
            assert piece.samples.batch_size == torch.Size([len(piece)])

    def test_iter_samples_yields_the_same_keys(self) -> None:
        task = scripted_task()
        with task.get_worker_pool() as pool:
            for samples in task.iter_samples(None, pool, total_samples=20, use_tqdm=False):
                assert described(samples) == TABLE

    def test_what_a_task_adds_is_kept_as_returned(self) -> None:
        def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
            n = len(states)
            return TensorDict(
                {
                    "action": torch.ones(n, 1, dtype=torch.int32),
                    "log_prob": torch.full((n, 1), -0.5, dtype=torch.float64),
                    "logits": {"left": torch.zeros(n, 2, dtype=torch.float16)},
                    "greedy": torch.ones(n, dtype=torch.bool),
                    "next": {"memory": states["memory"] + 1},
                },
                batch_size=[n],
            )

        memory = TensorDict({"memory": torch.zeros(2, dtype=torch.int16)}, batch_size=[])
        task = scripted_task(
            scripted(info_keys=("t", "none")),
            get_actions=act,
            get_initial_carry=lambda self, model: memory,
            get_values=lambda self, model, states: states["observation"][:, 0].double(),
        )
        with pytest.warns(UserWarning, match="no step has given"):
            samples = collect(task, 20)
        for piece in samples:
            assert described(piece.samples) == {
                **TABLE,
                "log_prob": (torch.float64, (1,)),
                "logits/left": (torch.float16, (2,)),
                "greedy": (torch.bool, ()),
                "memory": (torch.int16, (2,)),
                "next/memory": (torch.int16, (2,)),
                "state_value": (torch.float32, ()),
                "next/state_value": (torch.float32, ()),
                "next/info/t": (torch.int64, ()),
                "next/info/_t": (torch.bool, ()),
                "next/info/none": (torch.float32, ()),
                "next/info/_none": (torch.bool, ()),
            }
            rows = piece.samples
            assert torch.equal(rows["memory"][:, 0].long(), rows["step"])
            assert torch.equal(rows["next", "memory"][:, 0].long(), rows["step"] + 1)
            assert torch.equal(rows["state_value"], rows["observation"][:, 0])
            assert torch.equal(rows["next", "state_value"], rows["next", "observation"][:, 0])

    def test_dict_and_tuple_spaces_are_nested(self) -> None:
        space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (2, 1), np.uint8),
                "both": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (), np.float64)]),
            }
        )

        class Nested(gym.Env[Any, Any]):
            observation_space = action_space = space

            def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
                return space.sample(), {}

            def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
                return space.sample(), 0.0, False, False, {}

        def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
            return TensorDict({"action": states["observation"]}, batch_size=[len(states)])

        task = scripted_task(gymtask.Environment(Nested), num_envs=1, get_actions=act)
        (piece,) = collect(task, 3)
        found = described(piece.samples)
        for key in ("observation", "action", "next/observation"):
            assert found[f"{key}/image"] == (torch.uint8, (2, 1))
            assert found[f"{key}/both/0"] == (torch.int64, ())
            assert found[f"{key}/both/1"] == (torch.float32, ())
        assert len(found) == len(TABLE) + 6
        assert torch.equal(
            piece.samples["action"].flatten_keys("/")["both/1"],
            piece.samples["observation", "both", "1"],
        )


class TestBoundaries:
    def test_no_row_leads_from_an_end_to_a_beginning(self, mode: str) -> None:
        """O-01, O-02: 8 steps of episodes of 3 and of 5."""
        rows = collect(scripted_task(scripted(reuse_arrays=True), mode), 16).to_tensordict()
        before, after = rows["observation"][:, 0].tolist(), rows["next", "observation"][:, 0]
        assert list(zip(before, after.tolist(), strict=True)) == [
            *[(0, 1), (1, 2), (2, 3), (100, 101), (101, 102), (102, 103), (200, 201), (201, 202)],
            *[(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (100, 101), (101, 102), (102, 103)],
        ]
        assert (rows["next", "reward"] > 0).all()
        ends = rows["next", "done"].nonzero().squeeze(-1).tolist()
        assert ends == [2, 5, 12]
        assert after[ends].tolist() == [3, 103, 5]
        assert rows["is_init"].nonzero().squeeze(-1).tolist() == [0, 3, 6, 8, 13]
        assert rows["step"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
        assert rows["trajectory_id"].tolist() == [0] * 3 + [2] * 3 + [4] * 2 + [1] * 5 + [3] * 3

    @pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
    def test_both_flags_are_kept_as_they_came(self, mode: str, end: str) -> None:
        """O-23."""
        samples = collect(scripted_task(scripted(3, end=end), mode), 6)
        rows = samples.to_tensordict()
        flags = {name: rows["next", name].tolist() for name in ("terminated", "truncated", "done")}
        last = [False, False, True] * 2
        assert flags == {
            "terminated": [flag and end != "truncated" for flag in last],
            "truncated": [flag and end != "terminated" for flag in last],
            "done": last,
        }
        assert len(samples.episodes) == 2

    def test_a_cut_changes_no_flag(self, mode: str) -> None:
        samples = collect(scripted_task(scripted(3), mode), 16, max_trajectory_length=2)
        assert [len(piece) for piece in samples] == [2, 1, 2, 1, 2] * 2
        for piece in samples:
            assert not piece.samples["next", "done"][:-1].any()
            assert (
                piece.samples["next", "done"][-1].item() is (piece.samples["step"][-1] == 2).item()
            )


class TestMemory:
    def test_observation_and_next_observation_share_none(self) -> None:
        for piece in collect(scripted_task(), 16):
            rows = piece.samples
            before = rows["next", "observation"].clone()
            rows["observation"].sub_(1000)
            assert torch.equal(rows["next", "observation"], before)

    @pytest.mark.parametrize("source", ["collect_samples", "iter_samples"])
    def test_no_two_leaves_share_any_in_the_hooks(self, source: str) -> None:
        def look(self: Any, trajectory: TensorDict) -> TensorDict:
            leaves = list(trajectory.values(include_nested=True, leaves_only=True))
            spans = sorted(
                (leaf.data_ptr(), leaf.data_ptr() + leaf.numel() * leaf.element_size())
                for leaf in leaves
            )
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
            trajectory["observation"].sub_(1)
            seen.append(len(leaves))
            return trajectory

        seen: list[int] = []
        task = scripted_task(postprocess_trajectory=look)
        with task.get_worker_pool() as pool:
            if source == "collect_samples":
                pieces = [piece.samples for piece in task.collect_samples(None, pool, 16)]
            else:
                pieces = list(task.iter_samples(None, pool, total_samples=16))
        assert set(seen) == {len(TABLE)}
        for rows in pieces:
            gap = rows["next", "observation"][:, 0] - rows["observation"][:, 0]
            assert gap.tolist() == [2] * len(rows)

    def test_what_collect_samples_gave_does_not_change_later(self, mode: str) -> None:
        """O-18."""
        task = scripted_task(scripted(reuse_arrays=True, info_keys=("t",)), mode)
        with task.get_worker_pool() as pool:
            given = [task.collect_samples(None, pool, 7, use_tqdm=False) for _ in range(3)]
            copies = [samples.to_tensordict() for samples in given]
            for _ in range(5):
                task.collect_samples(None, pool, 50, use_tqdm=False)
            pool.reset()
        for samples, copy in zip(given, copies, strict=True):
            assert (samples.to_tensordict() == copy).all()

    def test_what_iter_samples_yielded_does_not_change_later(self, mode: str) -> None:
        """O-18."""
        task = scripted_task(scripted(reuse_arrays=True, info_keys=("t",)), mode)
        with task.get_worker_pool() as pool:
            yielded, copies = [], []
            for samples in task.iter_samples(None, pool, total_samples=60, use_tqdm=False):
                yielded.append(samples)
                copies.append(samples.clone())
        assert len(yielded) > 10
        for samples, copy in zip(yielded, copies, strict=True):
            assert (samples == copy).all()

    def test_changing_what_was_yielded_changes_nothing_that_follows(self, mode: str) -> None:
        task = scripted_task(scripted(4), mode)
        with task.get_worker_pool() as pool:
            pieces = task.iter_samples(
                None, pool, total_samples=16, max_trajectory_length=2, use_tqdm=False
            )
            for samples in pieces:
                steps = samples["observation"][:, 0] % 100
                assert torch.equal(steps.long(), samples["step"])
                samples.apply_(lambda leaf: leaf.zero_())


# ---- pieces --------------------------------------------------------------------------------------


def counted_piece(env_id: int, first_step: int, length: int) -> Piece:
    """Observation k is 100 · env_id + first_step + k, and the action of a row its observation."""
    steps = 100 * env_id + first_step + np.arange(length + 1)
    flags = {("next", name): np.zeros(length, bool) for name in ("terminated", "truncated")}
    return Piece.from_arrays(
        env_id=env_id,
        trajectory_id=env_id + 10,
        first_step=first_step,
        first_run_step=first_step + 50,
        states={("observation",): steps.astype(np.float32)},
        rows={("action",): steps[:-1], ("next", "reward"): steps[1:].astype(np.float32), **flags},
        infos=[{"k": int(step)} for step in steps[:-1]],
    )


class TestPieces:
    def test_lie_end_to_end(self) -> None:
        rows = assemble([counted_piece(0, 3, 2), counted_piece(1, 0, 3)], ["k"])
        assert rows["observation"].tolist() == [3, 4, 100, 101, 102]
        assert rows["next", "observation"].tolist() == [4, 5, 101, 102, 103]
        assert rows["next", "reward"].tolist() == [4, 5, 101, 102, 103]
        assert (
            rows["action"].tolist() == rows["next", "info", "k"].tolist() == [3, 4, 100, 101, 102]
        )
        assert rows["step"].tolist() == [3, 4, 0, 1, 2]
        assert rows["is_init"].tolist() == [False, False, True, False, False]
        assert rows["trajectory_id"].tolist() == [10, 10, 11, 11, 11]
        assert rows["env_id"].tolist() == [0, 0, 1, 1, 1]

    @pytest.mark.parametrize("length", [1, 2, 4])
    def test_the_parts_of_a_split_piece_make_up_the_whole(self, length: int) -> None:
        whole = counted_piece(1, 2, 5)
        parts = whole.split(length)
        assert [part.length for part in parts] == [length, 5 - length]
        assert (assemble(parts, ["k"]) == assemble([whole], ["k"])).all()
        assert (
            value_states(parts)["run_step"]
            == torch.tensor([*range(52, 53 + length), *range(52 + length, 58)])
        ).all()

    def test_value_states_hold_every_row_and_the_one_it_leads_to(self) -> None:
        pieces = [counted_piece(0, 3, 2), counted_piece(1, 0, 3)]
        states = value_states(pieces)
        assert states.batch_size == torch.Size([7])
        assert states["observation"].tolist() == [3, 4, 5, 100, 101, 102, 103]
        assert states["step"].tolist() == [3, 4, 5, 0, 1, 2, 3]
        assert states["run_step"].tolist() == [53, 54, 55, 50, 51, 52, 53]
        assert states["is_init"].tolist() == [False, False, False, True, False, False, False]
        values, next_values = split_values(states["observation"], pieces)
        rows = assemble(pieces, [])
        assert torch.equal(values, rows["observation"])
        assert torch.equal(next_values, rows["next", "observation"])
