"""Which spaces are stored, in which dtypes, and which observations are refused.

Actions are in test_actions.py, values of random spaces in tests/property/test_spaces.py.
"""

from __future__ import annotations

import pickle
import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from gymtask.errors import ObservationError, SpaceError
from gymtask.spaces import stored_dtype
from gymtask.workers.layout import space_leaves
from tests.unit.space_envs import acting, collect, recorder


class TestStoredDtype:
    @pytest.mark.parametrize(
        ("given", "stored"),
        [
            *[(name, "float32") for name in ("float16", "float32", "float64", "longdouble")],
            *[(name, name) for name in ("int8", "int16", "int32", "int64", "uint8", "bool")],
            ("uint16", "int32"),
            ("uint32", "int64"),
        ],
    )
    def test_floats_become_float32_and_the_rest_stays_exact(self, given: str, stored: str) -> None:
        assert stored_dtype(np.dtype(given)) == np.dtype(stored)

    def test_float64_is_kept_on_request_and_nothing_is_widened_to_it(self) -> None:
        kept = {
            name: stored_dtype(np.dtype(name), keep_float64=True).name
            for name in ("float16", "float32", "float64", "int64")
        }
        assert kept == {
            "float16": "float32",
            "float32": "float32",
            "float64": "float64",
            "int64": "int64",
        }

    @pytest.mark.parametrize("name", ["uint64", "complex64", "U3"])
    def test_a_dtype_that_torch_cannot_hold_is_refused_by_name(self, name: str) -> None:
        with pytest.raises(SpaceError, match=re.escape(str(np.dtype(name)))):
            stored_dtype(np.dtype(name))


def test_a_space_that_was_pickled_has_numpys_own_dtype_objects() -> None:
    # The quick way of writing observations tells dtypes apart by identity.
    space = pickle.loads(pickle.dumps(spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Discrete(3))))
    leaves = space_leaves(space, "observation")
    assert [leaf.dtype is np.dtype(leaf.dtype.name) for leaf in leaves] == [True, True]


class Custom(spaces.Space[int]):
    def __init__(self) -> None:
        super().__init__((), np.int64)

    def sample(self, mask: Any = None, probability: Any = None) -> int:
        return 0

    def contains(self, x: Any) -> bool:
        return True

    def __repr__(self) -> str:
        return "Custom(7)"


UNFIXED = [
    spaces.Text(5),
    spaces.Graph(spaces.Box(-1, 1, (2,)), None),
    spaces.Sequence(spaces.Discrete(2)),
    spaces.OneOf([spaces.Discrete(2), spaces.Box(-1, 1, ())]),
    Custom(),
]


class TestRefusedSpaces:
    @pytest.mark.parametrize("role", ["observation", "action"])
    @pytest.mark.parametrize("space", UNFIXED, ids=lambda space: type(space).__name__)
    def test_a_space_without_fixed_shape_is_refused_by_name_when_the_pool_is_made(
        self, space: gym.Space[Any], role: str, mode: str
    ) -> None:
        """O-60."""
        nested = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([space])})
        for given, where in [(space, ""), (nested, f" at {role}['b']['0']")]:
            environment = recorder(**{f"{role}_space": given})
            task = acting(environment, lambda states: None, mode=mode)
            text = f"the {role} space must be built of .*, got {re.escape(repr(space) + where)}$"
            with pytest.raises(SpaceError, match=text):
                task.get_worker_pool()
            with pytest.raises(SpaceError, match=text):
                environment.reset()

    @pytest.mark.parametrize("role", ["observation", "action"])
    def test_uint64_is_refused_before_a_step(self, role: str) -> None:
        environment = recorder(
            **{f"{role}_space": spaces.Box(0, 5, (), np.uint64)}, observations=[np.uint8(0)]
        )
        with pytest.raises(SpaceError, match="got uint64"):
            environment.reset()
        task = acting(environment, lambda states: torch.zeros(1, dtype=torch.int64))
        with task.get_worker_pool() as pool:
            with pytest.raises(SpaceError, match="got uint64"):
                task.collect_samples(None, pool, 2, use_tqdm=False)
            assert pool.get_attr("received") == ([],)


PAIR = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Tuple([spaces.Discrete(3)])})
VECTOR = np.zeros(2, np.float32)

WRONG = [
    (spaces.Box(-1, 1, (3,)), np.zeros(2), "must have shape (3,), got shape (2,)"),
    (spaces.Box(-1, 1, (3,)), np.zeros(1), "must have shape (3,), got shape (1,)"),
    (spaces.Box(-1, 1, (3,)), np.zeros((1, 3)), "must have shape (3,), got shape (1, 3)"),
    (spaces.Box(-1, 1, (3,)), 0.5, "must have shape (3,), got shape ()"),
    (spaces.Box(-1, 1, ()), np.zeros(1), "must have shape (), got shape (1,)"),
    (spaces.Box(-1, 1, (2,)), [[0.5], [0.5, 1.0]], "must have shape (2,), got"),
    (spaces.Box(-1, 1, (1,)), None, "must have shape (1,), got shape ()"),
    (spaces.Box(-1, 1, ()), None, "must be of dtype float32, got object"),
    (spaces.Box(-1, 1, ()), 1j, "must be of dtype float32, got complex128"),
    (spaces.Box(0, 255, (2,), np.uint8), [0.5, 1.0], "must be of dtype uint8, got float64"),
    (spaces.Box(-9, 9, (2,), np.int8), np.array([1, 200]), "must fit dtype int8, got"),
    (spaces.Box(0, 1, (2,), np.bool_), np.array([0, 1]), "must be of dtype bool, got int64"),
    (spaces.Discrete(3), 1.0, "must be of dtype int64, got float64"),
    (spaces.Discrete(3), np.array([1]), "must have shape (), got shape (1,)"),
    (spaces.Discrete(3), "1", "must be of dtype int64, got <U1"),
    (spaces.MultiBinary(2), np.zeros(2), "must be of dtype int8, got float64"),
    (spaces.MultiDiscrete([2, 2]), (1,), "must have shape (2,), got shape (1,)"),
    (PAIR, {"a": VECTOR}, "must have the keys ['a', 'b'], got ['a']"),
    (PAIR, {"a": VECTOR, "b": (1,), "c": 0}, "['a', 'b'], got ['a', 'b', 'c']"),
    (PAIR, {"a": VECTOR, "c": (1,)}, "['a', 'b'], got ['a', 'c']"),
    (PAIR, VECTOR, "must have the keys ['a', 'b'], got ndarray"),
    (PAIR, {"a": VECTOR, "b": ()}, "the observation['b'] must be a tuple of length 1, got ()"),
    (PAIR, {"a": VECTOR, "b": 1}, "the observation['b'] must be a tuple of length 1, got 1"),
    (PAIR, {"a": VECTOR[:1], "b": (1,)}, "the observation['a'] must have shape (2,), got"),
    (PAIR, {"a": VECTOR, "b": (1.5,)}, "the observation['b']['0'] must be of dtype int64"),
]


class TestWrongObservations:
    @pytest.mark.parametrize(("space", "wrong", "text"), WRONG)
    @pytest.mark.parametrize("when", ["at reset", "at a step", "at the end"])
    def test_a_wrong_observation_raises_and_names_what_is_wrong(
        self, space: gym.Space[Any], wrong: Any, text: str, when: str
    ) -> None:
        space.seed(0)
        place = {"at reset": 0, "at a step": 2, "at the end": 4}[when]
        shown = [space.sample() for _ in range(place)] + [wrong, space.sample()]
        task = acting(
            recorder(space, observations=shown),
        )
        with (
            task.get_worker_pool() as pool,
            pytest.raises(ObservationError, match=re.escape(text)) as caught,
        ):
            task.collect_samples(None, pool, 8, use_tqdm=False)
        assert str(caught.value).startswith("the observation")

    @pytest.mark.parametrize("mode", ["thread", "process"])
    def test_it_reaches_the_caller_from_a_worker_with_its_environment(self, mode: str) -> None:
        space = spaces.Box(-1, 1, (3,))
        shown = [np.zeros(3, np.float32), np.zeros(2, np.float32)]
        task = acting(
            recorder(space, observations=shown),
            mode=mode,
        )
        with (
            task.get_worker_pool() as pool,
            pytest.raises(ObservationError, match="got shape") as caught,
        ):
            task.collect_samples(None, pool, 8, use_tqdm=False)
        assert any("environment 0" in note for note in caught.value.__notes__)

    def test_values_that_fit_are_cast(self) -> None:
        shown = [[1, 2, 3], np.array([0.5, 1, 2]), (4.0, 5.0, 6.0), np.ones(3, np.float16)]
        space = spaces.Box(-np.inf, np.inf, (3,))
        task = acting(
            recorder(space, observations=shown),
        )
        rows, _ = collect(task, 3)
        assert rows["observation"].tolist() == [[1, 2, 3], [0.5, 1, 2], [4, 5, 6]]
        assert rows["next", "observation"][-1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize(
    ("space", "shown", "dtype"),
    [
        (spaces.Discrete(500), 499, torch.int64),
        (spaces.Box(-1, 1, ()), np.float32(0.5), torch.float32),
        (spaces.Box(-1, 1, (), np.float64), 0.5, torch.float32),
    ],
    ids=["Discrete", "Box float32", "Box float64"],
)
def test_scalar_observations_have_the_batch_shape_alone(
    space: gym.Space[Any], shown: Any, dtype: torch.dtype, num_envs: int
) -> None:
    """O-68."""
    seen: list[tuple[torch.Size, torch.dtype]] = []

    def act(states: TensorDict) -> Tensor:
        seen.append((states["observation"].shape, states["observation"].dtype))
        return torch.zeros(len(states), dtype=torch.int64)

    task = acting(recorder(space, observations=[shown]), act, num_envs=num_envs)
    rows, _ = collect(task, 3 * num_envs)
    assert set(seen) == {(torch.Size([num_envs]), dtype)}
    assert rows["observation"].shape == (3 * num_envs,)
    assert rows["observation"].tolist() == [shown] * (3 * num_envs)
