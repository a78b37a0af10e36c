"""A ReplayDataset over a ReplayBuffer, in the processes of a DataLoader, and saved half-way."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from gymtask import MultiReplaySamples, Prioritization, ReplayBuffer, ReplayDataset
from gymtask.errors import ConfigurationError, ReplayError, WindowError
from tests.replay_model import piece

Owner = MultiReplaySamples | ReplayBuffer

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def pieces() -> list[TensorDict]:
    return [piece(number, 0, [0.0] * (5 + number), "terminated") for number in range(4)]


def in_buffer(**settings: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(100, seed=0, **settings)
    buffer.extend(pieces())
    return buffer


OWNERS: list[Callable[[], Owner]] = [lambda: MultiReplaySamples(pieces()), in_buffer]
WINDOWS = 3 + 4 + 5 + 6  # of 3 rows


@pytest.fixture(params=OWNERS, ids=["samples", "buffer"])
def owner(request: pytest.FixtureRequest) -> Owner:
    made: Owner = request.param()
    return made


def firsts(batches: Any) -> list[int]:
    """The first observations of all windows, which no two have in common."""
    return [int(each) for batch in batches for each in batch["observation"][:, 0, 0]]


def loader(dataset: ReplayDataset, **settings: Any) -> Any:
    return DataLoader(dataset, batch_size=None, collate_fn=ReplayDataset.collate, **settings)


class TestAnyOwner:
    def test_a_pass_visits_every_window_once_in_another_order_each_time(self, owner: Owner) -> None:
        dataset = ReplayDataset(owner, 3, 1, 4, replacement=False, seed=0)
        assert dataset.num_windows == WINDOWS
        passes = [firsts(dataset) for _ in range(3)]
        assert all(len(set(each)) == len(each) == WINDOWS for each in passes)
        assert passes[0] != passes[1] != passes[2]

    def test_without_shuffling_windows_come_in_the_order_of_the_store(self, owner: Owner) -> None:
        dataset = ReplayDataset(owner, 3, 1, 4, replacement=False, shuffle=False)
        assert firsts(dataset) == sorted(firsts(dataset))

    def test_with_replacement_all_windows_are_drawn(self, owner: Owner) -> None:
        dataset = ReplayDataset(owner, 3, 1, 50, num_batches=10, seed=0)
        drawn = firsts(dataset)
        assert len(drawn) == 500
        assert len(set(drawn)) == WINDOWS

    @pytest.mark.parametrize("workers", [1, 2])
    def test_workers_share_a_pass(self, owner: Owner, workers: int) -> None:
        dataset = ReplayDataset(owner, 3, 1, 4, replacement=False, seed=0)
        many = loader(dataset, num_workers=workers)
        passes = [firsts(many) for _ in range(2)]
        assert all(len(set(each)) == len(each) == WINDOWS for each in passes)
        assert passes[0] != passes[1]

    def test_workers_draw_different_windows(self, owner: Owner) -> None:
        dataset = ReplayDataset(owner, 3, 1, 8, num_batches=6, seed=0)
        batches = [firsts([batch]) for batch in loader(dataset, num_workers=2)]
        assert len(batches) == 6
        assert len({tuple(each) for each in batches}) == 6

    @pytest.mark.parametrize("replacement", [True, False])
    def test_a_saved_iteration_goes_on_where_it_was(self, owner: Owner, replacement: bool) -> None:
        def make() -> ReplayDataset:
            return ReplayDataset(owner, 3, 1, 4, replacement, num_batches=8, seed=5)

        dataset = make()
        list(dataset)
        iterator = iter(dataset)
        for _ in range(3):
            next(iterator)
        state = dataset.state_dict()
        expected = firsts(iterator), firsts(dataset)
        again = make()
        again.load_state_dict(state)
        assert (firsts(again), firsts(again)) == expected

    def test_batch_keys_choose_what_a_batch_holds(self, owner: Owner) -> None:
        keys: Any = ["action", ("next", "observation"), ("next", "reward")]
        (batch,) = ReplayDataset(owner, 3, 1, 4, num_batches=1, batch_keys=keys, seed=0)
        found = set(batch.keys(include_nested=True, leaves_only=True))
        assert found == {"action", ("next", "observation"), ("next", "reward")}
        assert torch.equal(batch["next", "observation"][..., 0].long() * 3, batch["action"] + 3)

    @pytest.mark.parametrize("keys", [["nonsense"], [], "action", [("next", "nonsense")]])
    def test_unknown_batch_keys_are_refused(self, owner: Owner, keys: Any) -> None:
        with pytest.raises(ConfigurationError, match="`batch_keys` must be"):
            ReplayDataset(owner, 3, 1, 4, batch_keys=keys)

    def test_too_long_windows_are_refused(self, owner: Owner) -> None:
        with pytest.raises(WindowError, match="9 rows"):
            ReplayDataset(owner, 9, 1, 4)


class TestBuffer:
    def test_what_is_added_is_drawn_from_then_on(self) -> None:
        buffer = in_buffer()
        dataset = ReplayDataset(buffer, 3, 1, 100, num_batches=1, seed=0)
        buffer.extend(piece(9, 0, [0.0] * 5, ""))
        assert set(firsts(dataset)) >= {9000, 9001, 9002}
        assert dataset.num_windows == WINDOWS + 3

    def test_a_pass_over_rows_that_were_overwritten_is_refused(self) -> None:
        buffer = ReplayBuffer(10, seed=0)
        buffer.extend(piece(0, 0, [0.0] * 10, ""))
        iterator = iter(ReplayDataset(buffer, 1, 1, 5, replacement=False, shuffle=False))
        next(iterator)
        buffer.extend(piece(1, 0, [0.0] * 8, ""))
        with pytest.raises(ReplayError, match="rows of it were overwritten meanwhile"):
            next(iterator)

    def test_priorities_decide(self) -> None:
        rule = Prioritization(alpha=1.0, epsilon=0.0)
        buffer = in_buffer(prioritized=rule)
        buffer.update_priorities(torch.arange(26), torch.zeros(26))
        buffer.update_priorities(torch.tensor([1]), torch.tensor([1.0]))
        (batch,) = ReplayDataset(buffer, 3, 1, 50, num_batches=1)
        assert set(firsts([batch])) == {1}
        assert batch["index"][0].tolist() == [1, 2, 3]

    def test_processes_that_are_not_forked_get_the_same_rows(self) -> None:
        dataset = ReplayDataset(in_buffer(), 3, 1, 4, replacement=False, shuffle=False)
        spawned = loader(dataset, num_workers=1, multiprocessing_context="spawn")
        assert firsts(spawned) == firsts(dataset)

    def test_what_is_sent_shares_its_rows_though_batches_were_read_before(self) -> None:
        buffer = ReplayBuffer(1000, seed=0)
        rows = TensorDict({"observation": torch.rand(900, 1000)}, [900])
        buffer.extend(rows)
        buffer.sample(4)
        sent = ForkingPickler.dumps(buffer)
        assert len(sent) < 100_000 < rows["observation"].nbytes
        buffer.extend(rows[:10] * 0.0 - 1.0)
        received = pickle.loads(sent)
        assert received.sample(900)["observation"].min() >= 0.0
        assert torch.equal(
            received.read(np.arange(900), 1, 1)["observation"].squeeze(1), rows["observation"]
        )
        assert buffer.sample(900)["observation"].min() == -1.0
