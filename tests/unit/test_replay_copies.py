"""Copies of replay buffers and pieces, what takes the place of what was there, n-step rewards."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gymtask import MultiReplaySamples, Prioritization, ReplayBuffer
from gymtask.errors import ReplayError, WindowError
from gymtask.replay.saving import load_into
from tests.replay_model import piece

COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
copied = pytest.mark.parametrize("how", COPIES, ids=["deepcopy", "pickle"])
RULE = Prioritization(alpha=1.0, beta=1.0)


def rows(trajectory: int, length: int, end: str = "terminated") -> TensorDict:
    return piece(trajectory, 0, [1.0] * length, end)


def filled(*pieces: TensorDict, capacity: int = 100, **settings: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, seed=0, **settings)
    buffer.extend(list(pieces))
    return buffer


def saved(folder: Path, *pieces: TensorDict, **settings: Any) -> Path:
    filled(*pieces, **settings).save(folder)
    return folder


def observations(buffer: ReplayBuffer) -> set[int]:
    return {int(each) for each in buffer.sample(500)["observation"][:, 0, 0]}


class TestCopies:
    @copied
    @pytest.mark.parametrize("first", [0, 10])
    def test_a_prioritised_one_draws_and_weighs_as_the_original_does(
        self, how: Callable[[Any], Any], first: int
    ) -> None:
        buffer = ReplayBuffer(64, prioritized=RULE, seed=0)
        if first:
            buffer.extend(rows(0, first))
        both = [buffer, how(buffer)]
        for each in both:
            each.extend(rows(1, 10))
            each.update_priorities(torch.tensor([0]), torch.tensor([50.0]))
        batches = [each.sample(1000) for each in both]
        assert (batches[0] == batches[1]).all()
        assert set(batches[1]["index"].flatten().tolist()) == set(range(first + 10))
        assert len(set(batches[1]["weight"].flatten().tolist())) == 2

    @copied
    def test_priorities_of_a_copy_are_saved(
        self, how: Callable[[Any], Any], tmp_path: Path
    ) -> None:
        buffer = how(filled(rows(0, 4), prioritized=RULE))
        buffer.update_priorities(torch.arange(4), torch.tensor([0.0, 0.0, 0.0, 1e9]))
        buffer.save(tmp_path / "saved")
        assert observations(ReplayBuffer.load(tmp_path / "saved")) == {3}

    @copied
    def test_pieces_of_a_copy_are_views_of_its_own_store(self, how: Callable[[Any], Any]) -> None:
        samples = MultiReplaySamples([rows(0, 5), rows(1, 3)])
        assert len(samples.samples) == 2
        other = how(samples)
        other.samples[1].samples["next", "reward"].fill_(7.0)
        assert other.rows["next", "reward"].tolist() == [1.0] * 5 + [7.0] * 3
        assert samples.rows["next", "reward"].tolist() == [1.0] * 8


class TestLoadInto:
    """What a buffer holds is given up for what was saved."""

    def test_priorities_of_rows_that_are_gone_are_gone(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "saved", rows(0, 5), prioritized=RULE)
        buffer = filled(rows(1, 50), prioritized=RULE)
        load_into(buffer, path)
        assert observations(buffer) == set(range(5))

    def test_windows_are_those_of_the_new_rows(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "saved", rows(0, 10), rows(1, 10))
        buffer = filled(rows(2, 5), rows(3, 15))
        assert buffer.windows(8, 1).tolist() == [*range(5, 13)]
        load_into(buffer, path)
        assert buffer.windows(8, 1).tolist() == [0, 1, 2, 10, 11, 12]

    def test_files_of_the_old_rows_are_deleted(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "saved", rows(0, 10))
        buffer = filled(rows(1, 20), storage=tmp_path / "rows")
        before = set(os.listdir(tmp_path / "rows"))
        load_into(buffer, path)
        after = set(os.listdir(tmp_path / "rows"))
        assert len(after) == len(before)
        assert not after & before
        assert observations(buffer) == set(range(10))

    def test_an_empty_one_takes_rows_of_another_kind_afterwards(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "saved")
        buffer = filled(rows(1, 20), storage=tmp_path / "rows")
        load_into(buffer, path)
        assert len(buffer) == 0
        assert os.listdir(tmp_path / "rows") == []
        buffer.extend(TensorDict({"observation": torch.arange(3)}, [3]))
        assert set(buffer.sample(50)["observation"].flatten().tolist()) == {0, 1, 2}

    @pytest.mark.parametrize("name", ["records.bin", "side.bin", "weights.npy"])
    def test_what_is_damaged_leaves_the_buffer_as_it_was(self, name: str, tmp_path: Path) -> None:
        path = saved(tmp_path / "saved", rows(0, 10), prioritized=RULE)
        (path / name).write_bytes((path / name).read_bytes()[:-1])
        buffer = filled(rows(1, 4), prioritized=RULE)
        with pytest.raises(ReplayError, match="damaged"):
            load_into(buffer, path)
        assert observations(buffer) == set(range(1000, 1004))


class TestSumsOfRewards:
    @pytest.mark.parametrize(
        ("stored", "given"),
        [
            (torch.float16, torch.float16),
            (torch.float64, torch.float64),
            (torch.bfloat16, torch.bfloat16),
            (torch.int64, torch.float32),
            (torch.uint8, torch.float32),
            (torch.bool, torch.float32),
        ],
    )
    def test_rewards_of_any_dtype_are_summed_up_as_numbers(
        self, stored: torch.dtype, given: torch.dtype
    ) -> None:
        some = rows(0, 5)
        some["next", "reward"] = torch.tensor([1, 1, 0, 1, 1]).to(stored)
        buffer = filled(some, n_step=3, gamma=0.5)
        batch = buffer.read(buffer.windows(1, 1), 1, 1)["next", "reward"]
        assert batch.dtype == given
        assert batch.flatten().tolist() == [1.5, 1.25, 0.75, 1.5, 1.0]


class TestRowsThatLieApart:
    @pytest.mark.parametrize("apart", ["observation", "next", "both", "neither"])
    @pytest.mark.parametrize("shape", [(), (3,)])
    def test_next_observations_are_known_for_the_following_rows(
        self, apart: str, shape: tuple[int, ...], recwarn: pytest.WarningsRecorder
    ) -> None:
        values = torch.randn(11, *shape, 2)
        values[4] = torch.nan
        own, following = values[:-1, ..., 0], values[1:, ..., 0]
        if apart in ("observation", "neither"):
            following = following.contiguous()
        if apart in ("next", "neither"):
            own = own.contiguous()
        for flaw in (None, 0.0):  # then the same with a row that leads elsewhere
            some = TensorDict({"observation": own, "next": {"observation": following}}, [10])
            if flaw is not None:
                some = some.clone()
                some["next", "observation"][7] = flaw
            buffer = filled(some)
            batch = buffer.read(buffer.windows(1, 1), 1, 1)["next", "observation"].squeeze(1)
            assert torch.equal(batch.nan_to_num(9.0), some["next", "observation"].nan_to_num(9.0))
            fields = buffer._ring.layout.linked  # type: ignore[union-attr]
            assert len(fields) == (flaw is None)
        assert not recwarn.list


class TestPriorityZero:
    @pytest.mark.parametrize("capacity", [64, 100])
    @pytest.mark.parametrize("clip_size", [1, 3])
    def test_windows_that_all_have_it_cannot_be_drawn(self, capacity: int, clip_size: int) -> None:
        rule = Prioritization(epsilon=0.0)
        buffer = filled(rows(0, 10), capacity=capacity, prioritized=rule)
        buffer.update_priorities(torch.arange(10), torch.zeros(10))
        with pytest.raises(WindowError, match=r"windows of . rows has the priority 0"):
            buffer.sample(6, clip_size)
        buffer.update_priorities(torch.tensor([4]), torch.tensor([1.0]))
        assert set(buffer.sample(6, clip_size)["index"][:, 0].tolist()) == {4}
