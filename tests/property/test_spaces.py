"""Random values of random spaces, through one buffer and through a whole collection.

What is refused, and why, is in tests/unit/test_spaces.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import gymtask
from gymtask.workers.layout import make_reader, make_writer, space_leaves
from tests.tasks import make_task

FLOATS = (np.float16, np.float32, np.float64)
INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32)
NUM_ENVS = 2
NUM_STEPS = 3

shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> gym.Space[Any]:
    dtype = draw(st.sampled_from([*FLOATS, *INTEGERS, np.bool_]))
    shape = draw(shapes)
    if dtype is np.bool_:
        return spaces.Box(0, 1, shape, np.bool_)
    if dtype in FLOATS:
        low, high = draw(st.sampled_from([(-2.0, 0.5), (-np.inf, np.inf), (0.0, np.inf)]))
        return spaces.Box(low, high, shape, dtype)
    low = draw(st.integers(0 if np.iinfo(dtype).min == 0 else -100, 100))
    return spaces.Box(low, draw(st.integers(low, 120)), shape, dtype)


discretes = st.builds(
    lambda n, start, dtype: spaces.Discrete(n, start=start, dtype=dtype),
    st.integers(1, 20),
    st.integers(-50, 50),
    st.sampled_from([np.int8, np.int32, np.int64]),
)
multi_discretes = st.builds(
    lambda pairs, dtype: spaces.MultiDiscrete(
        np.array([n for n, _ in pairs]), dtype, start=np.array([start for _, start in pairs])
    ),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=3),
    st.sampled_from([np.int8, np.uint8, np.int64]),
)
multi_binaries = st.one_of(st.integers(1, 4), st.just((2, 3))).map(spaces.MultiBinary)
random_spaces = st.recursive(
    st.one_of(boxes(), discretes, multi_discretes, multi_binaries),
    lambda part: st.one_of(
        st.dictionaries(st.sampled_from("cab"), part, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(part, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=5,
)


def samples(space: gym.Space[Any], seed: int, count: int) -> list[Any]:
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def assert_same(found: Any, expected: Any) -> None:
    """Equal, and of the same types and dtypes all the way down."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()


@given(space=random_spaces, seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=200)
def test_a_value_that_is_written_is_read_as_it_was(space: gym.Space[Any], seed: int) -> None:
    arrays = [np.zeros((3, *leaf.shape), leaf.dtype) for leaf in space_leaves(space, "action")]
    write, read = make_writer(space, arrays), make_reader(space, arrays)
    values = samples(space, seed, 3)
    for index, value in enumerate(values):
        write(index, value)
    for index, value in enumerate(values):
        assert_same(read(index), value)


@given(space=random_spaces, seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=50)
def test_what_was_read_is_a_copy(space: gym.Space[Any], seed: int) -> None:
    arrays = [np.zeros((1, *leaf.shape), leaf.dtype) for leaf in space_leaves(space, "action")]
    write, read = make_writer(space, arrays), make_reader(space, arrays)
    first, second = samples(space, seed, 2)
    write(0, first)
    found = read(0)
    write(0, second)
    assert_same(found, first)


# ---- a whole collection --------------------------------------------------------------------------


def stored(space: gym.Space[Any], value: Any, *, action: bool) -> Any:
    """The value as a row holds it: tensors, in dicts for Dict and Tuple (design, section 5)."""
    if isinstance(space, spaces.Dict):
        return {key: stored(part, value[key], action=action) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return {
            str(k): stored(part, value[k], action=action) for k, part in enumerate(space.spaces)
        }
    if isinstance(space, spaces.Discrete) and action:
        return torch.tensor(int(value) - int(space.start))
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float32))
    widened = {"uint16": np.int32, "uint32": np.int64}.get(array.dtype.name, array.dtype)
    return torch.from_numpy(array.astype(widened))


def sent(space: gym.Space[Any], value: Any) -> Any:
    """What the environment gets for that row: the value, but for the digits that float32 lacks."""
    if isinstance(space, spaces.Dict):
        return {key: sent(part, value[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(sent(part, value[k]) for k, part in enumerate(space.spaces))
    if value.dtype == np.float64:
        return value.astype(np.float32).astype(np.float64)
    return value


def stack(rows: Sequence[Any]) -> Any:
    if isinstance(rows[0], dict):
        content = {key: stack([row[key] for row in rows]) for key in rows[0]}
        return TensorDict(content, batch_size=[len(rows)])
    return torch.stack(list(rows))


def echo(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], shown: Sequence[Any]
) -> gymtask.Environment:
    """Shows the observations one after another, and keeps the actions it gets in `received`."""

    # Defined in here it travels to a worker by value, which then need not import this module.
    class Echo(gym.Env[Any, Any]):
        def __init__(self) -> None:
            self.observation_space, self.action_space = observation_space, action_space
            self.received: list[Any] = []

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            return shown[0], {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.received.append(action)
            return shown[len(self.received)], 0.0, False, False, {}

    return gymtask.Environment(Echo)


def replaying(
    environment: gymtask.Environment, rows: Sequence[Any], mode: str
) -> gymtask.ReinforcementLearningTask:
    """Takes row `run_step` of a list of stored actions."""

    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
        action = stack([rows[step] for step in states["run_step"].tolist()])
        return TensorDict({"action": action}, batch_size=states.batch_size)

    return make_task(
        NUM_ENVS, NUM_ENVS, mode, get_environment=lambda self: environment, get_actions=act
    )


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, TensorDict):
        assert set(found.keys()) == set(expected.keys())
        for key in expected.keys():  # noqa: SIM118
            assert_equal(found[key], expected[key])
    else:
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def check_collection(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], seed: int, mode: str
) -> None:
    shown = samples(observation_space, seed, NUM_STEPS + 1)
    actions = samples(action_space, seed, NUM_STEPS)
    rows = [stored(action_space, action, action=True) for action in actions]
    task = replaying(echo(observation_space, action_space, shown), rows, mode)
    with task.get_worker_pool() as pool:
        pieces = task.collect_samples(None, pool, NUM_ENVS * NUM_STEPS, use_tqdm=False)
        received = pool.get_attr("received")
    observations = stack([stored(observation_space, value, action=False) for value in shown])
    for piece in pieces:
        assert_equal(piece.samples["observation"], observations[:-1])
        assert_equal(piece.samples["next", "observation"], observations[1:])
        assert_equal(piece.samples["action"], stack(rows))
    for part in received:
        for found, action in zip(part, actions, strict=True):
            assert_same(found, sent(action_space, action))


@given(observation=random_spaces, action=random_spaces, seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_rows_hold_what_was_shown_and_environments_get_what_rows_hold(
    observation: gym.Space[Any], action: gym.Space[Any], seed: int
) -> None:
    check_collection(observation, action, seed, "sync")


@given(observation=random_spaces, action=random_spaces, seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
def test_threads_and_processes_hold_and_get_the_same(
    observation: gym.Space[Any], action: gym.Space[Any], seed: int
) -> None:
    check_collection(observation, action, seed, "thread")
    check_collection(observation, action, seed, "process")


@given(space=random_spaces, seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_one_environment_alone_shows_and_gets_the_same(space: gym.Space[Any], seed: int) -> None:
    shown, actions = samples(space, seed, NUM_STEPS + 1), samples(space, seed + 1, NUM_STEPS)
    with echo(space, space, shown) as environment:
        states = [environment.reset()]
        for action in actions:
            row = stored(space, action, action=True)
            states.append(
                environment.step(TensorDict(row, batch_size=[]) if isinstance(row, dict) else row)
            )
        received = environment.env.unwrapped.received
    for state, value in zip(states, shown, strict=True):
        assert_equal(stack([state["observation"]]), stack([stored(space, value, action=False)]))
    for found, action in zip(received, actions, strict=True):
        assert_same(found, sent(space, action))
