"""ReplayBuffer by hand-made examples; tests/property/test_replay_buffer.py holds it to a model."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import NonTensorStack, TensorDict

from gymtask import MultiReplaySamples, Prioritization, ReplayBuffer, ReplayDataset
from gymtask.errors import ConfigurationError, ReplayError, WindowError
from gymtask.replay import storage
from gymtask.replay.starts import Wanted
from tests.replay_model import OBSERVATIONS, piece


def zeros(length: int) -> list[float]:
    return [0.0] * length


def filled(*pieces: TensorDict, capacity: int = 100, **settings: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, seed=0, **settings)
    buffer.extend(list(pieces))
    return buffer


def first_observations(batch: TensorDict) -> set[int]:
    return {int(each) for each in batch["observation"][:, 0, 0]}


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """The system refuses to make a file longer than that, as it does where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestWhatItHolds:
    def test_a_batch_has_the_keys_dtypes_and_values_that_were_stored(self) -> None:
        given = piece(0, 0, [1.0, 2.0, 3.0], "terminated")
        given["h"] = torch.randn(3, 2, dtype=torch.bfloat16)
        given["z"] = torch.zeros(3, 0)
        buffer = filled(given)
        batch = buffer.sample(200)
        assert batch.batch_size == (200, 1)
        keys = set(given.keys(include_nested=True, leaves_only=True))
        assert set(batch.keys(include_nested=True, leaves_only=True)) == keys
        for row in batch[:, 0]:
            expected = given[int(row["step"])]
            for key in keys:
                assert row[key].dtype == expected[key].dtype
                assert torch.equal(row[key], expected[key])

    def test_the_last_rows_stay_and_each_place_is_used(self) -> None:
        buffer = filled(
            *(piece(number, 0, zeros(3), "terminated") for number in range(4)), capacity=7
        )
        assert (len(buffer), buffer.num_added) == (7, 12)
        # Of the second trajectory its last row, of the third and the fourth all.
        kept = {1002, 2000, 2001, 2002, 3000, 3001, 3002}
        assert first_observations(buffer.sample(500)) == kept

    def test_what_collect_samples_gives_can_be_added_as_it_is(self) -> None:
        samples = MultiReplaySamples(
            [piece(0, 0, zeros(3), ""), piece(1, 0, zeros(2), "truncated")]
        )
        buffer = ReplayBuffer(10, seed=0)
        buffer.extend(samples)
        assert len(buffer) == 5

    def test_nothing_at_all_can_be_added(self) -> None:
        buffer = ReplayBuffer(10)
        buffer.extend([])
        buffer.extend(MultiReplaySamples([]))
        assert len(buffer) == 0

    def test_a_batch_is_the_callers_own(self) -> None:
        buffer = filled(piece(0, 0, zeros(3), "terminated"))
        batch = buffer.sample(20, 2)
        batch["observation"].fill_(-1)
        batch["action"].zero_()
        assert batch["next", "observation"].min() < -1  # is no part of the observation
        again = buffer.sample(20, 2)
        assert (again["observation"][..., 0] >= 0).all()
        assert (again["action"] == again["observation"][..., 0] * 3).all()

    def test_what_was_added_can_be_changed_afterwards(self) -> None:
        given = piece(0, 0, zeros(3), "")
        buffer = filled(given)
        given["observation"].fill_(9)
        given["next", "observation"].fill_(9)
        batch = buffer.sample(50)
        assert first_observations(batch) == {0, 1, 2}
        assert set(batch["next", "observation"][:, 0, 0].tolist()) == {1, 2, 3}

    def test_flags_in_the_middle_end_an_episode(self) -> None:
        both = torch.cat([piece(0, 0, zeros(3), "terminated"), piece(1, 0, zeros(3), "truncated")])
        buffer = filled(both)
        windows = buffer.sample(300, 2)
        assert first_observations(windows) == {0, 1, 1000, 1001}

    @pytest.mark.parametrize("key", ["trajectory_id", "step", "is_init"])
    def test_each_key_that_says_so_breaks_a_trajectory(self, key: str) -> None:
        rows = piece(0, 0, zeros(4), "")
        rows[key][2:] = {"trajectory_id": 7, "step": 50, "is_init": True}[key]
        rows[key][3:] += key == "step"
        if key == "is_init":
            rows["is_init"][3] = False
        assert first_observations(filled(rows).sample(200, 2)) == {0, 2}

    def test_rows_without_ids_belong_to_their_piece_alone(self) -> None:
        pieces = [piece(0, 0, zeros(2), ""), piece(0, 2, zeros(2), "")]
        bare = [each.exclude("trajectory_id", "step", "is_init") for each in pieces]
        assert first_observations(filled(*bare).sample(100, 2)) == {0, 2}
        assert first_observations(filled(*pieces).sample(100, 2)) == {0, 1, 2}

    def test_rows_that_require_grad_are_stored_by_value(self) -> None:
        rows = piece(0, 0, zeros(2), "")
        rows["value"] = torch.ones(2, requires_grad=True) * 2
        batch = filled(rows).sample(4)
        assert not batch["value"].requires_grad
        assert (batch["value"] == 2).all()


class TestWindows:
    def test_windows_cross_the_seam_of_the_ring(self) -> None:
        buffer = ReplayBuffer(5, seed=0)
        for step in range(8):  # rows 3 to 7 stay; 5 to 7 lie before them
            buffer.extend(piece(0, step, zeros(1), ""))
        windows = buffer.sample(200, 3)
        assert first_observations(windows) == {3, 4, 5}
        steps = windows["step"]
        assert (steps == steps[:, :1] + torch.arange(3)).all()

    def test_pieces_of_many_environments_are_one_trajectory_each(self) -> None:
        buffer = ReplayBuffer(40, seed=0)
        for step in range(10):
            buffer.extend([piece(env, step, [float(env)], "") for env in range(3)])
        windows = buffer.sample(400, 4, 2)
        assert (windows["trajectory_id"] == windows["trajectory_id"][:, :1]).all()
        assert (windows["step"] == windows["step"][:, :1] + 2 * torch.arange(4)).all()
        assert first_observations(windows) == {
            env * OBSERVATIONS + step for env in range(3) for step in range(4)
        }

    def test_pieces_that_come_together_are_one_trajectory_too(self) -> None:
        buffer = filled(
            piece(0, 0, zeros(2), ""), piece(1, 0, zeros(2), ""), piece(0, 2, zeros(2), "")
        )
        assert first_observations(buffer.sample(50, 4)) == {0}

    @pytest.mark.parametrize("ends", ["", "terminated"])
    def test_windows_that_lie_in_one_part_of_the_ring_are_right(self, ends: str) -> None:
        # 31 rows, of which the last 20 stay, the oldest of them in place 11.
        pieces = [piece(number, 0, zeros(5), ends) for number in range(6)]
        buffer = filled(*pieces, piece(6, 0, zeros(1), ""), capacity=20)
        found = set()
        for _ in range(400):  # one by one, so that none meets the end of the ring with another
            window = buffer.sample(1, 3)[0]
            step, first = window["step"], int(window["observation"][0, 0])
            assert step.tolist() == list(range(int(step[0]), int(step[0]) + 3))
            assert torch.equal(window["observation"][:, 0], first + torch.arange(3.0))
            assert torch.equal(window["next", "observation"][:, 0], first + torch.arange(1.0, 4.0))
            found.add(first)
        first_steps = [
            (2, 1),
            (2, 2),
            *((number, step) for number in (3, 4, 5) for step in range(3)),
        ]
        assert found == {OBSERVATIONS * number + step for number, step in first_steps}

    def test_all_windows_are_drawn_equally_often(self) -> None:
        buffer = filled(piece(0, 0, zeros(9), "terminated"), piece(1, 0, zeros(5), ""))
        windows = buffer.sample(20_000, 3)
        _, counts = windows["observation"][:, 0, 0].unique(return_counts=True)
        mean = 20_000 / 10  # 7 windows of the one and 3 of the other
        assert len(counts) == 10
        assert (counts - mean).abs().max() < 4 * (mean * 0.9) ** 0.5

    def test_a_rare_window_is_found(self) -> None:
        short = [piece(number, 0, zeros(2), "terminated") for number in range(400)]
        buffer = filled(*short, piece(400, 0, zeros(30), ""), capacity=1000)
        windows = buffer.sample(100, 29)
        assert first_observations(windows) == {400_000, 400_001}

    def test_windows_that_begin_with_an_episode(self) -> None:
        buffer = filled(
            piece(0, 0, zeros(5), ""), piece(1, 3, zeros(9), ""), piece(2, 0, zeros(2), "")
        )
        windows = buffer.sample(50, 3, start_at_episode_start=True)
        assert first_observations(windows) == {0}
        assert windows["is_init"][:, 0].all()
        with pytest.raises(WindowError, match="that begins with an episode"):
            buffer.sample(1, 8, start_at_episode_start=True)

    def test_padded_windows_have_zeros_where_the_mask_is_false(self) -> None:
        buffer = filled(piece(0, 0, [1.0, 2.0], "terminated"), piece(1, 0, [3.0] * 4, ""))
        windows = buffer.sample(200, 3, pad=True)
        short = windows["mask"][:, 2].logical_not()
        assert first_observations(windows) == {0, 1000, 1001}
        assert (windows["trajectory_id"][short, :2] == 0).all()
        assert windows["mask"][short].tolist() == [[True, True, False]] * int(short.sum())
        assert windows["next", "reward"][short].tolist() == [[1.0, 2.0, 0.0]] * int(short.sum())
        assert windows["next", "observation"][short, :, 0].unique(dim=0).tolist() == [[1, 2, 0]]
        assert windows["next", "terminated"][short].unique(dim=0).tolist() == [[False, True, False]]
        assert windows["mask"][~short].all()

    def test_padding_leaves_long_trajectories_whole_windows_only(self) -> None:
        buffer = filled(piece(0, 0, zeros(5), ""))
        assert first_observations(buffer.sample(100, 2, 3, pad=True)) == {0, 1}


class TestWholeWindows:
    """Windows that are copied as one piece of memory are those that are read row by row."""

    @pytest.mark.parametrize("num_rows", [17, 24, 41])  # not full, full, and round the seam
    @pytest.mark.parametrize("width", [2, 3, 5])
    def test_they_hold_what_rows_read_one_by_one_hold(self, num_rows: int, width: int) -> None:
        buffer = ReplayBuffer(24, seed=0)
        ends, added, trajectory = cycle(["terminated", "cut", "truncated"]), 0, 0
        while added < num_rows:
            length = min(4 + trajectory % 3, num_rows - added)
            buffer.extend(piece(trajectory, 0, zeros(length), next(ends)))
            added, trajectory = added + length, trajectory + 1
        reader = buffer._ring.reader(buffer._reading)
        starts = buffer._starts.all(Wanted(width))
        whole = np.array([s for s in starts if reader.lie_whole(np.array([s]), width)])
        assert len(starts) - len(whole) <= width
        rows = buffer._ring.links.follow(whole, range(width))
        expected = reader.read(rows, consecutive=False)
        got = reader.read_whole(whole, width)
        assert set(got.keys(True, True)) == set(expected.keys(True, True))
        for key in got.keys(True, True):
            assert got[key].dtype == expected[key].dtype
            assert torch.equal(got[key], expected[key]), key

    def test_numbers_of_sixteen_bytes_lie_beside_smaller_ones(self) -> None:
        given = piece(0, 0, zeros(3), "terminated")
        given["z"], given["x"] = torch.randn(2, 3, dtype=torch.float64).to(torch.complex128)
        given["x"] = given["x"].real.clone()
        batch = filled(given).sample(50, 2)
        place = batch["step"]
        assert torch.equal(batch["z"], given["z"][place])
        assert torch.equal(batch["x"], given["x"][place])

    def test_an_observation_that_is_changed_leaves_the_next_one_as_it_is(self) -> None:
        batch = filled(piece(0, 0, zeros(50), "terminated")).sample(30, 4)
        before = batch["next", "observation"].clone()
        batch["observation"].zero_()
        assert torch.equal(batch["next", "observation"], before)

    def test_rows_that_lie_apart_are_not_read_as_one_piece(self) -> None:
        buffer = filled(piece(0, 0, zeros(30), "cut"), piece(1, 0, zeros(30), "cut"))
        buffer.extend([piece(0, 30, zeros(9), "terminated"), piece(1, 30, zeros(9), "terminated")])
        reader = buffer._ring.reader(buffer._reading)
        assert not reader.lie_whole(np.array([0, 5]), 4)


class TestNextValues:
    def test_a_changed_next_observation_is_kept_and_warned_of_once(self) -> None:
        rows = piece(0, 0, zeros(4), "")
        rows["next", "observation"][1] = 77.0
        buffer = filled(piece(1, 0, zeros(3), "terminated"))
        with pytest.warns(UserWarning, match="takes twice the memory"):
            buffer.extend(rows)
        buffer.extend(piece(2, 0, zeros(3), "truncated"))  # does not warn
        batch = buffer.sample(500)
        for row in batch[:, 0]:
            changed = (row["trajectory_id"], row["step"]) == (0, 1)
            expected = 77.0 if changed else row["observation"][0] + 1
            assert row["next", "observation"][0] == expected

    def test_a_continuation_that_begins_elsewhere_keeps_both(self) -> None:
        buffer = filled(piece(0, 0, zeros(2), ""))
        after = piece(0, 2, zeros(2), "")
        after["observation"][0] = 50.0  # normalised anew, say
        with pytest.warns(UserWarning, match="takes twice the memory"):
            buffer.extend(after)
        windows = buffer.sample(100, 4)
        assert windows["observation"][0, :, 0].tolist() == [0, 1, 50, 3]
        assert windows["next", "observation"][0, :, 0].tolist() == [1, 2, 3, 4]

    def test_pieces_that_come_together_and_contradict_each_other_keep_both(self) -> None:
        pieces = [piece(0, 0, zeros(2), ""), piece(0, 2, zeros(2), "")]
        pieces[1]["observation"][0] = 50.0
        buffer = filled(piece(1, 0, zeros(3), ""))
        with pytest.warns(UserWarning, match="takes twice the memory"):
            buffer.extend(pieces)
        for each in (buffer, filled(*pieces)):
            windows = each.sample(100, 4)
            assert windows["observation"][0, :, 0].tolist() == [0, 1, 50, 3]
            assert windows["next", "observation"][0, :, 0].tolist() == [1, 2, 3, 4]

    def test_a_continuation_takes_over_the_place_of_the_state_before_it(self) -> None:
        buffer = ReplayBuffer(50)
        for step in range(120):
            buffer.extend([piece(env, step, zeros(1), "") for env in range(3)])
        assert buffer._ring.links.num_chains == 3

    def test_rewards_that_are_observed_are_summed_up_as_others(self) -> None:
        rows = piece(0, 0, [1.0, 2.0, 3.0], "terminated")
        rows["reward"] = torch.tensor([0.0, 1.0, 2.0])  # that of the step before
        batch = filled(rows, n_step=2, gamma=0.5).sample(50)[:, 0]
        for row in batch:
            assert row["reward"] == row["step"]
            assert row["next", "reward"] == [2.0, 3.5, 3.0][int(row["step"])]

    def test_nan_and_negative_zero_are_values_like_others(self) -> None:
        rows = piece(0, 0, zeros(3), "")
        rows["observation"][1] = rows["next", "observation"][0] = float("nan")
        rows["observation"][2] = rows["next", "observation"][1] = -0.0
        filled(rows)  # no warning

    def test_carries_are_kept_once_and_state_values_twice(self) -> None:
        rows = piece(0, 0, zeros(3), "")
        for name in ("memory", "state_value"):
            rows[name] = torch.arange(3.0)
            rows["next", name] = torch.arange(1.0, 4.0)
        buffer = filled(rows)
        after = piece(0, 3, zeros(1), "")
        after["memory"], after["next", "memory"] = torch.tensor([3.0]), torch.tensor([4.0])
        after["state_value"], after["next", "state_value"] = torch.ones(1) * 9, torch.ones(1) * 8
        buffer.extend(after)  # no warning: another estimate of a state is no contradiction
        windows = buffer.sample(10, 4)
        assert windows["next", "memory"][0].tolist() == [1, 2, 3, 4]
        assert windows["next", "state_value"][0].tolist() == [1, 2, 3, 8]


class TestFrameStacks:
    def test_stacks_equal_those_of_gymnasiums_wrapper_bit_for_bit(self) -> None:
        single = gym.make("CartPole-v1")
        stacked = gym.wrappers.FrameStackObservation(gym.make("CartPole-v1"), 3)
        buffer = ReplayBuffer(1000, frame_stack=3, seed=0)
        expected: dict[tuple[int, int], tuple[Any, Any]] = {}
        for episode in range(3):
            (observation, _), (seen, _) = single.reset(seed=episode), stacked.reset(seed=episode)
            done, step = False, 0
            while not done:
                action = (step // 2) % 2
                following, reward, terminated, truncated, _ = single.step(action)
                next_seen = stacked.step(action)[0]
                done = terminated or truncated
                expected[episode, step] = seen, next_seen
                rows = piece(episode, step, [float(reward)], "terminated" if done else "")
                rows["observation"] = torch.tensor(observation)[None]
                rows["next", "observation"] = torch.tensor(following)[None]
                buffer.extend(rows)
                observation, seen, step = following, next_seen, step + 1
        batch = buffer.sample(2000)[:, 0]
        assert {(int(r["trajectory_id"]), int(r["step"])) for r in batch} == set(expected)
        for row in batch:
            seen, next_seen = expected[int(row["trajectory_id"]), int(row["step"])]
            assert row["observation"].numpy().tobytes() == seen.tobytes()
            assert row["next", "observation"].numpy().tobytes() == next_seen.tobytes()

    def test_a_next_observation_that_is_stored_twice_is_stacked_too(self) -> None:
        rows = piece(0, 0, zeros(3), "")
        rows["next", "observation"][1] = 77.0
        buffer = filled(piece(1, 0, zeros(2), ""), frame_stack=2)
        with pytest.warns(UserWarning, match="takes twice the memory"):
            buffer.extend(rows)
        for row in buffer.sample(100)[:, 0]:
            if (row["trajectory_id"], row["step"]) == (0, 1):
                assert row["observation"].tolist() == [[0, 0], [1, -1]]
                assert row["next", "observation"].tolist() == [[1, -1], [77, 77]]

    def test_only_the_observation_is_stacked(self) -> None:
        rows = piece(0, 0, zeros(3), "")
        rows["memory"], rows["next", "memory"] = torch.zeros(3, 2), torch.zeros(3, 2)
        batch = filled(rows, frame_stack=2).sample(5)
        assert batch["observation"].shape == (5, 1, 2, 2)
        assert batch["memory"].shape == batch["next", "memory"].shape == (5, 1, 2)

    def test_memory_is_that_of_single_frames(self) -> None:
        frames, length = 1000, 200
        buffer = ReplayBuffer(frames, frame_stack=4, seed=0)
        for episode in range(frames // length):
            pixels = torch.zeros(length + 1, 84, 84, dtype=torch.uint8)
            rows = piece(episode, 0, zeros(length), "terminated")
            rows["observation"], rows["next", "observation"] = pixels[:-1], pixels[1:]
            buffer.extend(rows)
        ring = buffer._ring
        size = ring.records.array.nbytes + ring.side.array[: ring.links.num_chains].nbytes
        size += sum(value.nbytes for value in vars(ring.links).values() if hasattr(value, "nbytes"))
        assert size <= 1.05 * 84 * 84 * frames
        assert buffer.sample(2)["observation"].shape == (2, 1, 4, 84, 84)


class TestPriorities:
    def test_frequencies_and_weights_are_those_of_the_paper(self) -> None:
        rule = Prioritization(alpha=0.5, beta=0.4, epsilon=0.0)
        buffer = filled(piece(0, 0, zeros(4), "terminated"), prioritized=rule)
        priorities = torch.tensor([1.0, 4.0, 9.0, 0.0])
        buffer.update_priorities(torch.arange(4), priorities)
        batch = buffer.sample(20_000)[:, 0]
        # p ** alpha is 1, 2, 3 and 0, so the probabilities are 1/6, 2/6, 3/6 and 0.
        counts = batch["index"].bincount(minlength=4) / 20_000
        assert counts.tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6, 0.0], abs=0.015)
        # (n p) ** -beta over the largest, which the rarest row has.
        expected = torch.tensor([1.0, 2.0, 3.0]) ** -0.4
        assert torch.allclose(batch["weight"], expected[batch["index"]])

    def test_beta_can_be_raised(self) -> None:
        buffer = filled(
            piece(0, 0, zeros(2), ""), prioritized=Prioritization(alpha=1.0, epsilon=0.0)
        )
        buffer.update_priorities(torch.arange(2), torch.tensor([1.0, 4.0]))
        buffer.beta = 1.0
        batch = buffer.sample(100)[:, 0]
        assert set(batch["weight"].tolist()) == {1.0, 0.25}

    def test_new_rows_have_the_largest_priority_so_far(self) -> None:
        rule = Prioritization(alpha=1.0, epsilon=0.0)
        buffer = filled(piece(0, 0, zeros(2), ""), prioritized=rule)
        buffer.update_priorities(torch.tensor([0, 1]), torch.tensor([8.0, 0.5]))
        buffer.extend(piece(1, 0, zeros(1), ""))
        batch = buffer.sample(20_000)[:, 0]
        counts = batch["index"].bincount(minlength=3) / 20_000
        assert counts.tolist() == pytest.approx([8 / 16.5, 0.5 / 16.5, 8 / 16.5], abs=0.015)

    def test_priorities_of_overwritten_rows_are_gone(self) -> None:
        rule = Prioritization(alpha=1.0, epsilon=0.0)
        buffer = filled(piece(0, 0, zeros(3), ""), capacity=3, prioritized=rule)
        batch = buffer.sample(10)
        buffer.extend(piece(1, 0, zeros(3), ""))
        buffer.update_priorities(batch["index"], torch.full((10, 1), 1e9))  # of rows that are gone
        counts = (buffer.sample(6000)[:, 0]["index"] - 3).bincount(minlength=3)
        assert counts.tolist() == pytest.approx([2000] * 3, abs=200)

    def test_windows_are_drawn_by_the_priority_of_their_first_row(self) -> None:
        rule = Prioritization(alpha=1.0, epsilon=0.0)
        buffer = filled(piece(0, 0, zeros(4), ""), prioritized=rule)
        buffer.update_priorities(torch.arange(4), torch.tensor([1.0, 0.0, 3.0, 1e6]))
        windows = buffer.sample(8000, 2)  # none begins on the last row
        assert windows["index"].shape == windows["weight"].shape == (8000, 2)
        counts = windows["index"][:, 0].bincount(minlength=4) / 8000
        assert counts.tolist() == pytest.approx([0.25, 0.0, 0.75, 0.0], abs=0.03)

    @pytest.mark.parametrize(
        ("index", "priority", "message"),
        [
            ([0], [1.0, 2.0], "must have one shape"),
            ([0.0], [1.0], "`index` integers"),
            ([0], [float("nan")], "`priority` must be finite"),
            ([0], [-1.0], "`priority` must be finite and at least 0"),
            ([3], [1.0], "`index` must lie in 0 to 2, got 3"),
            ([-1], [1.0], "`index` must lie in 0 to 2, got -1"),
        ],
    )
    def test_bad_priorities_are_refused(self, index: Any, priority: Any, message: str) -> None:
        buffer = filled(piece(0, 0, zeros(3), ""), prioritized=Prioritization())
        with pytest.raises(ConfigurationError, match=message):
            buffer.update_priorities(torch.tensor(index), torch.tensor(priority))

    def test_priorities_of_a_plain_buffer_are_refused(self) -> None:
        buffer = filled(piece(0, 0, zeros(3), ""))
        with pytest.raises(ConfigurationError, match="`prioritized` must be set"):
            buffer.update_priorities(torch.tensor([0]), torch.tensor([1.0]))


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"capacity": 0}, "`capacity` must be an integer of at least 1, got 0"),
            ({"n_step": 0}, "`n_step` must be an integer of at least 1, got 0"),
            ({"gamma": -1}, "`gamma` must be a number of at least 0, got -1"),
            ({"frame_stack": 0}, "`frame_stack` must be an integer of at least 1"),
            ({"seed": -1}, "`seed` must be an integer of at least 0"),
            ({"prioritized": True}, "`prioritized` must be a Prioritization or None, got True"),
            ({"storage": 3}, '`storage` must be "memory" or a directory, got 3'),
        ],
    )
    def test_bad_settings_are_named(self, settings: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            ReplayBuffer(**{"capacity": 5, **settings})

    def test_a_bad_prioritization_is_named(self) -> None:
        with pytest.raises(ConfigurationError, match="`alpha` must be a number of at least 0"):
            Prioritization(alpha=-1)

    def test_an_empty_buffer_gives_nothing(self) -> None:
        with pytest.raises(WindowError, match="is empty; call extend"):
            ReplayBuffer(5).sample(1)

    def test_windows_longer_than_every_trajectory_are_refused_with_both_lengths(self) -> None:
        buffer = filled(piece(0, 0, zeros(3), "terminated"), piece(1, 0, zeros(2), ""))
        with pytest.raises(WindowError, match=r"no window of 4 rows is stored.*longest.* has 3"):
            buffer.sample(1, 4)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((0,), "`batch_size` must be an integer of at least 1, got 0"),
            ((1, 0), "`clip_size` must be an integer of at least 1, got 0"),
            ((1, 1, 0), "`stride` must be an integer of at least 1, got 0"),
        ],
    )
    def test_bad_arguments_of_sample_are_named(self, arguments: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            filled(piece(0, 0, zeros(3), "")).sample(*arguments)

    def test_a_trajectory_longer_than_capacity_is_refused_and_nothing_added(self) -> None:
        buffer = filled(piece(0, 0, zeros(3), ""), capacity=5)
        with pytest.raises(ConfigurationError, match=r"`capacity` must be at least .* 6, got 5"):
            buffer.extend([piece(1, 0, zeros(2), ""), piece(2, 0, zeros(6), "")])
        assert buffer.num_added == 3

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda rows: rows.set("more", torch.zeros(2)), "`more` .* must be absent"),
            (lambda rows: rows.del_("action"), "`action` .*int64 \\[T\\].*, got absent"),
            (
                lambda rows: rows.set("action", torch.zeros(2)),
                "`action` .*int64 \\[T\\].*, got torch.float32 \\[T\\]",
            ),
            (
                lambda rows: rows.set("action", torch.zeros(2, 3, dtype=torch.int64)),
                "`action` .*int64 \\[T\\].*, got torch.int64 \\[T, 3\\]",
            ),
        ],
    )
    def test_other_keys_shapes_or_dtypes_are_refused_and_nothing_added(
        self, change: Any, message: str
    ) -> None:
        buffer = filled(piece(0, 0, zeros(3), ""))
        rows = piece(1, 0, zeros(2), "")
        change(rows)
        with pytest.raises(ConfigurationError, match=message):
            buffer.extend([rows])
        assert buffer.num_added == 3

    @pytest.mark.parametrize(
        ("reward", "message"),
        [
            (None, "got absent; store rows with it, or make the buffer with n_step=1"),
            (
                torch.zeros(2, 1),
                "must be a real number for each row.* got torch.float32 \\[T, 1\\]",
            ),
            (torch.zeros(2, dtype=torch.complex64), "got torch.complex64 \\[T\\]"),
        ],
    )
    def test_rows_without_rewards_cannot_be_summed_up(
        self, reward: torch.Tensor | None, message: str
    ) -> None:
        rows = piece(0, 0, zeros(2), "")
        if reward is None:
            del rows["next", "reward"]
        else:
            rows["next", "reward"] = reward
        buffer = ReplayBuffer(5, n_step=2)
        with pytest.raises(ConfigurationError, match=f"`next/reward` of trajectories .*{message}"):
            buffer.extend(rows)
        assert buffer.num_added == 0
        assert set(filled(rows).sample(2)["next"].keys()) >= {"observation"}

    @pytest.mark.parametrize("name", ["trajectory_id", "step", "is_init"])
    def test_what_tells_where_a_row_is_must_be_one_number(self, name: str) -> None:
        rows = piece(0, 0, zeros(4), "terminated")
        alone = rows.clone()
        alone[name] = alone[name].unsqueeze(-1)  # as TorchRL has them
        assert first_observations(filled(alone).sample(50, 3)) == {0, 1}
        rows[name] = torch.zeros(4, 2, dtype=rows[name].dtype)
        with pytest.raises(ConfigurationError, match=f"`{name}` of .* one number for each row"):
            filled(rows)

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            (["no"], r"`batch_keys` must be among \[.*'action'.*\], got 'no'"),
            ([("next", "no")], r"`batch_keys` must be among .*, got \('next', 'no'\)"),
            ([], r"`batch_keys` must be a list of keys, got \[\]"),
            ("action", "`batch_keys` must be a list of keys, got 'action'"),
        ],
    )
    def test_keys_that_are_not_stored_are_refused_as_for_pieces(
        self, keys: Any, message: str
    ) -> None:
        rows = piece(0, 0, zeros(2), "")
        for samples in (filled(rows), MultiReplaySamples([rows])):
            with pytest.raises(ConfigurationError, match=message):
                ReplayDataset(samples, 1, 1, 1, batch_keys=keys)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (3, "`trajectories` must be MultiReplaySamples, a TensorDict"),
            ([3], r"`trajectories\[0\]` must be a TensorDict of batch shape \[T\].*got int"),
            ([TensorDict({}, [2, 3])], r"got batch shape \[2, 3\]"),
            ([TensorDict({}, [0])], r"got batch shape \[0\]"),
        ],
    )
    def test_what_is_no_trajectory_is_refused(self, given: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            ReplayBuffer(5).extend(given)

    def test_data_that_is_no_tensor_is_refused_by_name(self) -> None:
        rows = piece(0, 0, zeros(2), "")
        rows["text"] = NonTensorStack("a", "b")
        with pytest.raises(ConfigurationError, match="`text` must be a tensor to be stored"):
            ReplayBuffer(5).extend(rows)


class TestOnDisk:
    def test_rows_lie_in_files_of_their_directory(self, tmp_path: Path) -> None:
        buffer = filled(piece(0, 0, zeros(3), ""), storage=tmp_path / "rows")
        assert sum(file.stat().st_size for file in (tmp_path / "rows").iterdir()) > 1000
        assert first_observations(buffer.sample(50)) == {0, 1, 2}

    def test_files_larger_than_memory_hold_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(storage, "MEMORY", 0)
        buffer = ReplayBuffer(1000, tmp_path, seed=0)
        for number in range(6):  # the fourth crosses the end of the ring
            buffer.extend(piece(number, 0, zeros(300), "terminated"))
        for each in (buffer, pickle.loads(pickle.dumps(buffer))):
            windows = each.sample(200, 5)
            first = windows["observation"][:, :1, 0]
            assert torch.equal(windows["observation"][..., 0], first + torch.arange(5.0))
            assert torch.equal(windows["next", "observation"][..., 0], first + torch.arange(1.0, 6))
            assert first.min() >= 2 * OBSERVATIONS + 200

    def test_the_states_behind_last_rows_grow_with_their_number(self, tmp_path: Path) -> None:
        buffer = ReplayBuffer(300, tmp_path / "rows", seed=0)
        for number in range(300):
            buffer.extend(piece(number, 0, zeros(1), "terminated"))
        batch = buffer.sample(3000)
        assert len(first_observations(batch)) == 300
        assert torch.equal(batch["next", "observation"][..., 0], batch["observation"][..., 0] + 1)

    def test_a_directory_that_holds_something_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match="a directory that is new or empty"):
            ReplayBuffer(5, tmp_path)

    def test_a_full_disk_is_a_clear_error_and_nothing_is_added(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        buffer = filled(piece(0, 0, zeros(3), ""), storage=tmp_path / "rows")
        many = [piece(number, 0, zeros(1), "") for number in range(1, 90)]
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(ReplayError, match=r"No space left on device.*free some space"):
                buffer.extend(many)
            assert buffer.num_added == 3
            with pytest.raises(ReplayError, match="No space left on device"):
                ReplayBuffer(5, tmp_path / "others").extend(many[:2])
        buffer.extend(many)
        assert len(first_observations(buffer.sample(5000))) == 92

    def test_a_buffer_that_does_not_fit_leaves_no_file_and_can_be_filled_later(
        self, tmp_path: Path
    ) -> None:
        buffer = ReplayBuffer(10_000, tmp_path, seed=0)
        rows = piece(0, 0, zeros(3), "")
        with (
            files_of_at_most(100_000),
            pytest.raises(ReplayError, match=r"cannot reserve 0\.\d+ MB"),
        ):
            buffer.extend(rows)
        assert not list(tmp_path.iterdir())
        buffer.extend(rows)
        assert first_observations(buffer.sample(50)) == {0, 1, 2}

    def test_a_buffer_whose_second_file_does_not_fit_leaves_none_either(
        self, tmp_path: Path
    ) -> None:
        buffer = ReplayBuffer(
            2, tmp_path, seed=0
        )  # two rows are smaller than 64 states behind some
        with files_of_at_most(300), pytest.raises(ReplayError, match="cannot reserve"):
            buffer.extend(piece(0, 0, zeros(2), ""))
        assert not list(tmp_path.iterdir())
        buffer.extend(piece(0, 0, zeros(2), ""))
        assert len(list(tmp_path.iterdir())) == 2

    def test_a_full_disk_leaves_files_as_long_as_they_were(self, tmp_path: Path) -> None:
        buffer = filled(piece(0, 0, zeros(3), ""), storage=tmp_path / "rows", capacity=500)
        lengths = {path: path.stat().st_size for path in (tmp_path / "rows").iterdir()}
        many = [piece(number, 0, zeros(1), "") for number in range(1, 400)]
        with files_of_at_most(min(lengths.values()) + 100), pytest.raises(ReplayError):
            buffer.extend(many)
        assert {path: path.stat().st_size for path in (tmp_path / "rows").iterdir()} == lengths
        buffer.extend(many)
        assert len(buffer) == 402


class TestSaving:
    @pytest.fixture
    def buffer(self) -> ReplayBuffer:
        pieces = [piece(number, 0, [float(number)] * 3, "") for number in range(4)]
        return filled(*pieces, capacity=8, prioritized=Prioritization(), n_step=2)

    def test_a_loaded_buffer_goes_on_bit_for_bit(
        self, buffer: ReplayBuffer, tmp_path: Path
    ) -> None:
        buffer.update_priorities(torch.tensor([7, 8]), torch.tensor([5.0, 0.1]))
        buffer.beta = 0.7
        buffer.sample(5)
        buffer.save(tmp_path / "saved")
        loaded = ReplayBuffer.load(tmp_path / "saved")
        for _ in range(3):
            for clip_size in (1, 2):
                first, second = (each.sample(20, clip_size) for each in (buffer, loaded))
                assert (first == second).all()
            for each in (buffer, loaded):
                each.extend([piece(3, 3 + each.num_added, zeros(2), ""), piece(9, 0, zeros(1), "")])

    def test_an_empty_buffer_is_saved_too(self, tmp_path: Path) -> None:
        ReplayBuffer(5).save(tmp_path / "saved")
        loaded = ReplayBuffer.load(tmp_path / "saved", tmp_path / "rows")
        loaded.extend(piece(0, 0, zeros(3), ""))
        assert len(loaded) == 3

    def test_a_saved_buffer_is_replaced_by_the_next(
        self, buffer: ReplayBuffer, tmp_path: Path
    ) -> None:
        buffer.save(tmp_path / "saved")
        buffer.extend(piece(20, 0, zeros(2), ""))
        buffer.save(tmp_path / "saved")
        assert ReplayBuffer.load(tmp_path / "saved").num_added == buffer.num_added
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]

    def test_a_save_that_fails_leaves_what_was_saved_before(
        self, buffer: ReplayBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        buffer.save(tmp_path / "saved")
        buffer.extend(piece(20, 0, zeros(2), ""))
        with monkeypatch.context() as patched:
            patched.setattr(np, "savez", full)
            with pytest.raises(ReplayError, match="No space left on device"):
                buffer.save(tmp_path / "saved")
        assert ReplayBuffer.load(tmp_path / "saved").num_added == buffer.num_added - 2
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]

    # NumPy 2.1 leaves its file to be closed later, which fails for want of room, too.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("nbytes", [100, 2000, 9000])
    def test_a_disk_that_is_full_while_saving_leaves_what_was_saved_before(
        self, tmp_path: Path, nbytes: int
    ) -> None:
        buffer = filled(piece(0, 0, zeros(200), ""), capacity=300)
        buffer.save(tmp_path / "saved")
        buffer.extend(piece(20, 0, zeros(2), ""))
        with (
            files_of_at_most(nbytes),
            pytest.raises(ReplayError, match="cannot save the ReplayBuffer at"),
        ):
            buffer.save(tmp_path / "saved")
        assert ReplayBuffer.load(tmp_path / "saved").num_added == buffer.num_added - 2
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]
        buffer.save(tmp_path / "saved")
        assert ReplayBuffer.load(tmp_path / "saved").num_added == buffer.num_added

    def test_nothing_else_is_replaced(self, buffer: ReplayBuffer, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ReplayError, match="must be new, or hold a saved ReplayBuffer"):
            buffer.save(tmp_path)

    @pytest.mark.parametrize(
        "name", ["buffer.json", "records.bin", "side.bin", "links.npz", "weights.npy"]
    )
    @pytest.mark.parametrize("how", ["gone", "truncated"])
    def test_a_damaged_save_is_a_clear_error(
        self, buffer: ReplayBuffer, tmp_path: Path, name: str, how: str
    ) -> None:
        buffer.save(tmp_path / "saved")
        file = tmp_path / "saved" / name
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(ReplayError, match=r"is damaged|is not there"):
            ReplayBuffer.load(tmp_path / "saved")
        with pytest.raises(ReplayError, match=r"is damaged|is not there"):
            ReplayBuffer.load(tmp_path / "saved", tmp_path / "rows")
        assert not list((tmp_path / "rows").glob("*"))  # it can be tried again there

    def test_nothing_saved_is_a_clear_error(self, tmp_path: Path) -> None:
        with pytest.raises(ReplayError, match="no whole ReplayBuffer is saved at"):
            ReplayBuffer.load(tmp_path)

    def test_a_pickled_buffer_gives_the_same(self, buffer: ReplayBuffer) -> None:
        again = pickle.loads(pickle.dumps(buffer))
        assert (again.sample(9) == buffer.sample(9)).all()


def test_a_buffer_says_what_it_holds() -> None:
    buffer = filled(piece(0, 0, zeros(3), ""), capacity=5)
    assert repr(buffer) == "ReplayBuffer(3 of 5 transitions, in memory)"


def test_observations_of_a_dict_space_are_linked_leaf_by_leaf() -> None:
    space = spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Discrete(3))
    assert set(space) == {"a", "b"}
    rows = piece(0, 0, zeros(3), "")
    for place, owner in enumerate((rows, rows["next"])):
        step = torch.arange(3) + place
        owner["observation"] = TensorDict({"a": step[:, None] * 1.0, "b": step}, batch_size=[3])
    buffer = filled(rows)
    batch = buffer.sample(20)
    assert len(buffer._ring.side.array.dtype.names or ()) == 2
    assert torch.equal(batch["next", "observation", "b"], batch["observation", "b"] + 1)
