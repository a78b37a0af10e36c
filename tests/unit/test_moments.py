"""Count, mean and variance of rows that come by and by."""

from __future__ import annotations

import copy
import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gymtask import RunningStatistics
from gymtask.errors import ConfigurationError
from tests.unit.trajectories import (
    INF,
    NAN,
    assert_same,
    saved,
)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_statistics_of_four_numbers_by_hand() -> None:
    statistics = RunningStatistics()
    assert [float(each) for each in statistics.buffers()] == [0, 0, 0, 1]
    statistics.update(torch.tensor([2.0, 4.0]))
    statistics.update(torch.tensor([4.0, 6.0]))
    assert [float(each) for each in statistics.buffers()] == [4, 4, 8, 2]
    assert float(statistics.std) == pytest.approx(math.sqrt(2))


def test_rows_may_have_any_leading_dimensions() -> None:
    values = torch.randn(4, 5, 2, 3, generator=torch.Generator().manual_seed(0))
    whole, one_by_one = RunningStatistics((2, 3)), RunningStatistics((2, 3))
    whole.update(values)
    for row in values.flatten(0, 1):
        one_by_one.update(row)
    assert whole.count == one_by_one.count == 20
    torch.testing.assert_close(whole.m2, one_by_one.m2, rtol=1e-13, atol=0)
    np.testing.assert_allclose(whole.variance, values.double().numpy().var((0, 1)), rtol=1e-13)


def test_a_large_mean_costs_the_variance_no_digits() -> None:
    noise = np.random.default_rng(0).normal(0, 1e-3, 10_000)
    statistics = RunningStatistics()
    for part in np.split(1e8 + noise, 100):
        statistics.update(torch.from_numpy(part))
    # What is left of the noise once it has been rounded to neighbours of 1e8.
    kept = (1e8 + noise) - 1e8
    assert statistics.mean.item() == pytest.approx(1e8 + kept.mean(), rel=1e-15)
    assert statistics.variance.item() == pytest.approx(kept.var(), rel=1e-7)
    naive = ((1e8 + noise) ** 2).mean() - (1e8 + noise).mean() ** 2
    assert abs(naive - kept.var()) > kept.var()


def test_rows_beyond_two_to_the_31_are_counted_one_by_one() -> None:
    statistics = RunningStatistics()
    count = 2**33
    state = {"count": torch.tensor(count), "mean": doubles(5.0)[0], "m2": doubles(2.0 * count)[0]}
    statistics.load_state_dict(state)
    assert statistics.variance == 2
    for _ in range(3):
        statistics.update(torch.tensor([5.0]))
    assert statistics.count == count + 3
    assert statistics.mean == 5
    assert statistics.m2 == 2.0 * count


def test_many_rows_at_once_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(101, 3, generator=torch.Generator().manual_seed(0))
    whole, parts = RunningStatistics((3,)), RunningStatistics((3,))
    whole.update(values)
    monkeypatch.setattr("gymtask.moments._CHUNK", 30)
    parts.update(values)
    torch.testing.assert_close(parts.m2, whole.m2, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float16])
def test_any_real_dtype_is_counted_in_float64(dtype: torch.dtype) -> None:
    statistics = RunningStatistics()
    statistics.update(torch.tensor([0, 1, 1, 1]).to(dtype))
    assert (statistics.mean.item(), statistics.variance.item()) == (0.75, 0.1875)


def test_no_rows_change_nothing() -> None:
    statistics = RunningStatistics((2,))
    statistics.update(torch.zeros(0, 2))
    assert_same(statistics, RunningStatistics((2,)))
    statistics.update(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    before = copy.deepcopy(statistics)
    statistics.update(torch.zeros(0, 2))
    assert_same(statistics, before)


def test_a_shape_without_elements_is_allowed() -> None:
    statistics = RunningStatistics((0,))
    statistics.update(torch.zeros(3, 0))
    assert statistics.count == 3


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_refused_and_nothing_counted(bad: float) -> None:
    statistics = RunningStatistics((2,))
    message = re.escape(f"`values` must be finite, got {bad} at [1, 0]")
    with pytest.raises(ConfigurationError, match=message):
        statistics.update(torch.tensor([[0.0, 1.0], [bad, 1.0], [bad, 1.0]]))
    assert_same(statistics, RunningStatistics((2,)))


def test_numbers_whose_squares_overflow_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="got numbers whose squares are not"):
        RunningStatistics().update(doubles(1e200, -1e200))


def test_statistics_are_in_checkpoints_and_stay_float64_when_the_task_is_cast() -> None:
    statistics = RunningStatistics((2,))
    statistics.update(torch.tensor([[1.0, 2.0], [3.0, 5.0], [1.0, 0.1]]))
    task = nn.ModuleDict({"statistics": statistics, "layer": nn.Linear(2, 2)})
    assert list(statistics.state_dict()) == ["count", "mean", "m2"]
    before = copy.deepcopy(statistics)
    task.half()
    task.to(torch.bfloat16)
    assert task["layer"].weight.dtype == torch.bfloat16
    assert_same(statistics, before)
    again = RunningStatistics((2,))
    again.load_state_dict(saved(statistics))
    assert_same(again, statistics)
