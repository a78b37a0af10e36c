"""A ReplayBuffer holds and gives what a model in plain Python does, whatever is done with it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tensordict import TensorDict

from gymtask import Prioritization, ReplayBuffer
from gymtask.errors import WindowError
from gymtask.replay.priorities import PriorityTree
from tests.replay_model import Model, Row, piece

ENDS = st.sampled_from(["", "", "terminated", "truncated"])


class Machine(RuleBasedStateMachine):
    """Environments give pieces in any order; windows of all kinds are drawn in between."""

    @initialize(
        capacity=st.integers(1, 24),
        on_disk=st.booleans(),
        prioritized=st.booleans(),
        n_step=st.sampled_from([1, 1, 2, 3]),
        frame_stack=st.sampled_from([None, None, 1, 3]),
        num_envs=st.sampled_from([1, 3]),
    )
    def begin(
        self, capacity: int, on_disk: bool, prioritized: bool, num_envs: int, **reading: Any
    ) -> None:
        self.num_envs = num_envs
        self.folder = tempfile.TemporaryDirectory()
        storage = Path(self.folder.name) / "0" if on_disk else "memory"
        self.buffer = ReplayBuffer(
            capacity,
            storage,
            Prioritization() if prioritized else None,
            gamma=0.5,
            seed=0,
            **reading,
        )
        self.reading: dict[str, Any] = reading
        self.model = Model(capacity)
        self.open: dict[int, tuple[int, int]] = {}  # by environment its trajectory and next step
        self.num_trajectories = self.num_saved = 0

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(data=st.data(), together=st.booleans())
    def extend(self, data: st.DataObject, together: bool) -> None:
        pieces = []
        for _ in range(data.draw(st.integers(1, 4))):
            env = data.draw(st.integers(0, self.num_envs - 1))
            trajectory, first = self.open.get(env, (self.num_trajectories, 0))
            if first == 0:
                self.num_trajectories += 1
            length = data.draw(st.integers(1, min(self.model.capacity, 7)))
            rewards = data.draw(st.lists(st.integers(-9, 9), min_size=length, max_size=length))
            end = data.draw(ENDS)
            self.model.add(trajectory, first, rewards, end)
            pieces.append(piece(trajectory, first, rewards, end))
            # Now and then the rest of an episode is never seen.
            goes_on = not end and data.draw(st.integers(0, 9)) > 0
            self.open.pop(env, None)
            if goes_on:
                self.open[env] = trajectory, first + length
        if together:
            self.buffer.extend(pieces)
        else:
            for each in pieces:
                self.buffer.extend(each)
        assert len(self.buffer) == len(self.model.rows)
        assert self.buffer.num_added == self.model.num_added

    @precondition(lambda self: hasattr(self, "model") and self.model.rows)
    @rule(clip_size=st.integers(1, 4), stride=st.integers(1, 3))
    def sample(self, clip_size: int, stride: int) -> None:
        expected = self.model.windows(clip_size, stride)
        if k := self.reading["frame_stack"]:
            expected = {n: rows for n, rows in expected.items() if self.model.frames(rows[0], k)}
        if not expected:
            with pytest.raises(WindowError):
                self.buffer.sample(1, clip_size, stride)
            return
        # So many that with near certainty each is among them.
        batch = self.buffer.sample(40 * len(expected), clip_size, stride)
        found = self.numbers(batch)
        assert {row[0] for row in found} == set(expected)
        seen = set()
        for place, numbers in enumerate(found):
            assert numbers == [row.number for row in expected[numbers[0]]]
            if numbers[0] not in seen:
                seen.add(numbers[0])
                for column, row in enumerate(expected[numbers[0]]):
                    self.check_row(batch[place, column], row)

    def numbers(self, batch: TensorDict) -> list[list[int]]:
        """The numbers of the rows, which their steps and trajectories tell."""
        known = {(row.trajectory, row.step): row.number for row in self.model.rows}
        ids, steps = batch["trajectory_id"].tolist(), batch["step"].tolist()
        found = [
            [known[key] for key in zip(*each, strict=True)] for each in zip(ids, steps, strict=True)
        ]
        if "index" in batch:
            assert batch["index"].tolist() == found
        return found

    def check_row(self, found: TensorDict, row: Row) -> None:
        total, last, discount = self.model.n_step(row, self.reading["n_step"], 0.5)
        assert found["action"] == row.observation * 3
        assert found["is_init"] == (row.step == 0)
        assert found["next", "reward"] == total
        assert found["next", "terminated"] == last.terminated
        assert found["next", "truncated"] == last.truncated
        if self.reading["n_step"] > 1:
            assert found["next", "discount"] == discount
        k = self.reading["frame_stack"]
        frames = [row.observation] if k is None else self.model.frames(row, k)
        after = self.model.frames(last, k or 1)
        assert frames is not None and after is not None  # noqa: PT018
        following = [*after[1:], last.next_observation]
        shown, next_shown = found["observation"], found["next", "observation"]
        if k is None:
            shown, next_shown = shown[None], next_shown[None]
        assert shown.tolist() == [[each, -each] for each in frames]
        assert next_shown.tolist() == [[each, -each] for each in following]

    @precondition(lambda self: hasattr(self, "model") and self.model.rows)
    @rule(data=st.data(), on_disk=st.booleans())
    def save_and_load(self, data: st.DataObject, on_disk: bool) -> None:
        self.num_saved += 1
        folder = Path(self.folder.name)
        self.buffer.save(folder / "saved")
        storage = folder / f"{self.num_saved}" if on_disk else "memory"
        loaded = ReplayBuffer.load(folder / "saved", storage)
        assert len(loaded) == len(self.buffer)
        if not self.reading["frame_stack"]:
            first, second = self.buffer.sample(9), loaded.sample(9)
            assert (first == second).all()
        self.buffer = loaded

    @precondition(lambda self: hasattr(self, "buffer") and self.buffer.prioritized is not None)
    @rule(data=st.data())
    def update_priorities(self, data: st.DataObject) -> None:
        """Any priorities leave all rows in the draw; see `test_rows_are_drawn_by_priority`."""
        count = self.buffer.num_added
        if count:
            index = data.draw(st.lists(st.integers(0, count - 1), max_size=5))
            priority = [1.0 + 0.1 * (number % 3) for number in index]
            self.buffer.update_priorities(
                torch.tensor(index, dtype=torch.int64), np.array(priority)
            )


Machine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAgainstModel = Machine.TestCase


@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_rows_are_drawn_by_priority(size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    weights = random.random(size) * (random.random(size) < 0.7)
    weights[random.integers(size)] = 1.0
    tree = PriorityTree(size)
    for rows in np.array_split(random.permutation(size), 3):
        tree.set(rows, weights[rows])
    sums = weights.cumsum()
    numbers = random.random(200)
    expected = np.searchsorted(sums, numbers * sums[-1], side="right")
    found = tree.draw(numbers)
    # Another order of summing may move a place that is all but on a border.
    border = np.abs(numbers * sums[-1] - sums[np.minimum(expected, size - 1)]) < 1e-9
    border |= np.abs(numbers * sums[-1] - (sums - weights)[np.minimum(expected, size - 1)]) < 1e-9
    assert (found == expected)[~border].all()
