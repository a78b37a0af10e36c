"""Running statistics and returns: however rows are divided, they are those of all rows."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gymtask import RewardNormalizer, RunningStatistics
from tests.property.rollouts import thorough
from tests.unit.trajectories import assert_counted, piece, running_returns

numbers = st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda x: x if abs(x) > 1e-6 else 0.0)


def exact(values: list[float]) -> tuple[float, float]:
    """Mean and m2 without any rounding but the last."""
    given = [Fraction(value) for value in values]
    mean = sum(given) / len(given)
    return float(mean), float(sum((value - mean) ** 2 for value in given))


@thorough
@given(st.lists(numbers, min_size=1, max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_any_split_gives_the_statistics_of_all_rows(values: list[float], cuts: list[int]) -> None:
    statistics = RunningStatistics()
    for part in np.split(np.array(values), sorted(cuts)):
        statistics.update(torch.from_numpy(part))
    mean, m2 = exact(values)
    size = max(map(abs, values))
    assert statistics.count == len(values)
    assert abs(float(statistics.mean) - mean) <= 1e-12 * size
    # Relative to m2 itself, but for what the rounding of the rows' mean alone may do.
    assert abs(float(statistics.m2) - m2) <= 1e-12 * m2 + 1e-28 * len(values) * size**2
    np.testing.assert_allclose(
        statistics.variance, np.var(values), rtol=1e-12, atol=1e-28 * size**2
    )


@thorough
@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=30),
    st.integers(1, 29),
    st.sampled_from([1e3, 1e6, 1e8]),
)
def test_an_offset_costs_no_more_digits_than_its_mean_loses(
    noise: list[float], cut: int, offset: float
) -> None:
    values = [offset + value for value in noise]
    statistics = RunningStatistics()
    for part in (values[:cut], values[cut:]):
        statistics.update(torch.tensor(part, dtype=torch.float64))
    _, m2 = exact(values)
    # Means are rounded to eps * offset. A sum of squares would be to eps * offset**2.
    eps = torch.finfo(torch.float64).eps
    assert abs(float(statistics.m2) - m2) <= 1e-12 * m2 + 8 * eps * offset * len(values)


ends = st.sampled_from(["", "terminated", "truncated"])


@thorough
@given(st.data(), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_any_split_gives_the_running_returns_of_whole_streams(
    data: st.DataObject, gamma: float
) -> None:
    streams = []
    for env_id in range(2):
        episodes = data.draw(st.lists(st.tuples(st.integers(1, 8), ends), min_size=1, max_size=5))
        pieces = []
        for number, (length, end) in enumerate(episodes):
            rewards = [float(1 + env_id + number + row % 3) for row in range(length)]
            pieces.append(piece(*rewards, env_id=env_id, trajectory_id=number, end=end))
        streams.append(torch.cat(pieces))
    normalize = RewardNormalizer(2, gamma=gamma)
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=5).map(sorted))
    for start, stop in zip([0, *cuts], [*cuts, 40], strict=True):
        parts = [stream[start:stop] for stream in streams]
        normalize.update([part for part in parts if len(part)])
    assert_counted(normalize, running_returns(*streams, gamma=gamma))
