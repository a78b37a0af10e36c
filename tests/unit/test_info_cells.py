"""Info values in cells of shared memory come out as they went in, or are refused."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtask.workers.info_cells import CELL, InfoCells

DTYPES = [np.dtype(code) for code in "?bBhHiIlLqQefdFD"]
scalars = st.sampled_from(DTYPES).flatmap(arrays.from_dtype)
small = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, max_side=2))
)
plain = st.one_of(st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats())


def cells(keys: tuple[str, ...] = ("a", "b"), num_envs: int = 3) -> InfoCells:
    memory = memoryview(bytearray(num_envs * len(keys) * CELL))
    return InfoCells(dict.fromkeys(range(num_envs), keys), len(keys), memory)


def same(found: Any, value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        alike = (found.dtype, found.shape) == (value.dtype, value.shape)
        return alike and found.tobytes() == value.tobytes()
    return repr(found) == repr(value)  # NaN and -0.0 too


@given(plain | scalars | small, plain | scalars | small)
def test_what_is_read_is_what_was_written(a: Any, b: Any) -> None:
    some = cells()
    assert some.write(1, {"b": b, "a": a})
    found = some.read(1)
    assert list(found) == ["a", "b"]
    for name, value in (("a", a), ("b", b)):
        assert type(found[name]) is type(value)
        assert same(found[name], value)
    assert some.read(0) == some.read(2) == {}


def test_a_key_that_is_not_given_is_missing_though_it_was_there_before() -> None:
    some = cells()
    assert some.write(0, {"a": 1, "b": 2.5})
    assert some.write(0, {"b": True})
    assert some.read(0) == {"b": True}


def test_what_was_read_stays_when_the_cell_is_written_again() -> None:
    some = cells()
    some.write(0, {"a": np.arange(3)})
    found = some.read(0)["a"]
    some.write(0, {"a": np.zeros(3, np.int64)})
    assert found.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "value",
    [
        "text",
        None,
        [1, 2],
        {"x": 1},
        1 << 63,
        np.zeros(CELL, np.uint8),
        np.array(["text"]),
        np.array([object()]),
        np.datetime64("2026-01-01"),
        np.zeros(2, ">f4"),
        np.ma.masked_array([1.0], [True]),
        np.zeros((1,) * 8),
    ],
    ids=repr,
)
def test_what_does_not_fit_is_refused(value: Any) -> None:
    assert not cells().write(0, {"a": value, "b": 1})


def test_a_subclass_of_a_number_is_refused() -> None:
    class Degrees(float):
        """Would come out as a float."""

    assert not cells().write(0, {"a": Degrees(1.0)})


def test_an_environment_without_keys_has_nothing_to_write() -> None:
    some = cells(())
    assert some.write(0, {})
    assert some.read(0) == {}
