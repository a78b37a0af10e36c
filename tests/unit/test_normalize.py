"""Normalised observations, what is saved of both normalisers, and bad arguments."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from gymtask import ObservationNormalizer, RewardNormalizer, RunningStatistics
from gymtask.errors import ConfigurationError, SpaceError
from tests.unit.trajectories import (
    NAN,
    SPACE,
    assert_same,
    nested,
    observed,
    piece,
    saved,
)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_observations_by_hand() -> None:
    normalize = ObservationNormalizer((2,), epsilon=1e-8)
    normalize.update(observed(torch.tensor([[0.0, 10.0], [2.0, 10.0], [4.0, 40.0]])))
    mean, std = doubles(2, 20), doubles(8 / 3, 200).sqrt()
    values = torch.tensor([[[4.0, 20.0], [2.0, -8.0]]])
    result = normalize(values)
    assert (result.dtype, result.shape) == (torch.float32, values.shape)
    torch.testing.assert_close(result, ((values - mean) / std).float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(normalize.denormalize(result), values, rtol=1e-6, atol=1e-5)


def test_before_any_update_observations_are_only_clipped() -> None:
    normalize = ObservationNormalizer((3,), clip=2.0)
    values = torch.tensor([-3.0, 0.5, 2.5])
    torch.testing.assert_close(normalize(values), torch.tensor([-2.0, 0.5, 2.0]))
    unlimited = ObservationNormalizer((3,), clip=math.inf)
    torch.testing.assert_close(unlimited(values), values)


def test_a_constant_observation_becomes_0_and_another_one_is_clipped() -> None:
    normalize = ObservationNormalizer((2,))
    normalize.update(observed(torch.full((1000, 2), 0.1)))
    assert torch.equal(normalize(torch.full((2,), 0.1)), torch.zeros(2))
    assert torch.equal(normalize(torch.tensor([0.2, -0.2])), torch.tensor([10.0, -10.0]))


@pytest.mark.parametrize("training", [True, False])
def test_forward_updates_nothing_in_either_mode(training: bool) -> None:
    normalize, reward = ObservationNormalizer((2,)).train(training), RewardNormalizer(1)
    normalize.update(observed(torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    before = copy.deepcopy(normalize), copy.deepcopy(reward)
    normalize(torch.randn(5, 2))
    reward.train(training)(torch.randn(5))
    assert_same(normalize, before[0])
    assert_same(reward, before[1])


def test_large_float32_observations_keep_their_digits() -> None:
    normalize = ObservationNormalizer(())
    values = torch.tensor([16_000_001.0, 16_000_003.0])
    normalize.update(observed(values))
    torch.testing.assert_close(normalize(values), torch.tensor([-1.0, 1.0]))


def test_forward_is_differentiable() -> None:
    normalize = ObservationNormalizer(())
    normalize.update(observed(torch.tensor([0.0, 4.0])))
    value = torch.tensor(3.0, requires_grad=True)
    normalize(value).backward()
    assert value.grad is not None
    assert value.grad.item() == pytest.approx(0.5)


def test_parts_of_a_nested_observation_are_normalised_where_they_are_named() -> None:
    normalize = ObservationNormalizer(SPACE, keys=["keys", ("room", "1")])
    assert normalize.paths == [("keys",), ("room", "1")]
    values, kept = nested(50), nested(50)
    normalize.update(observed(values))
    result = normalize(values)
    for path in normalize.paths:
        exact = values[path].double()
        exact = (exact - exact.mean(0)) / (exact.var(0, correction=0) + 1e-8).sqrt()
        torch.testing.assert_close(result[path], exact.float())
    for path in ("image", ("room", "0")):
        assert result[path] is values[path]
    assert (values == kept).all()  # the argument is as it was
    back = normalize.denormalize(result)
    torch.testing.assert_close(back["keys"], values["keys"])


def test_a_key_takes_what_is_below_it_and_integers_that_it_names() -> None:
    normalize = ObservationNormalizer(SPACE, keys=["room", "image"])
    assert normalize.paths == [("room", "0"), ("room", "1"), ("image",)]
    normalize.update([observed(nested(20)), observed(nested(30))])
    result = normalize(nested(20))
    assert result["image"].dtype == result["room", "0"].dtype == torch.float32


def test_a_space_of_floats_alone_needs_no_keys_and_a_shape_declares_any_dtype() -> None:
    space = gym.spaces.Tuple((gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-1, 1, ())))
    assert ObservationNormalizer(space).paths == [("0",), ("1",)]
    normalize = ObservationNormalizer((2, 2, 1))
    normalize.update(observed(nested(9)["image"]))
    assert normalize(nested(9)["image"]).abs().mean() < 1.1


def test_the_space_is_left_as_it_is() -> None:
    """O-42."""
    before = copy.deepcopy(SPACE)
    normalize = ObservationNormalizer(SPACE, keys=["image"])
    normalize.update(observed(nested(9)))
    normalize(nested(9))
    assert before == SPACE
    assert SPACE["image"] == gym.spaces.Box(0, 255, (2, 2, 1), np.uint8)
    assert ObservationNormalizer(SPACE, keys=["image"]).statistics[0].count == 0


def test_stacks_of_frames_are_normalised_by_statistics_of_single_ones() -> None:
    normalize = ObservationNormalizer((2,))
    normalize.update(observed(torch.tensor([[0.0, 1.0], [2.0, 3.0]])))
    stacks = torch.randn(5, 4, 2)
    assert torch.equal(normalize(stacks)[:, 3], normalize(stacks[:, 3]))


def test_a_resumed_run_counts_as_an_unbroken_one_to_the_last_bit() -> None:
    def collections() -> list[list[TensorDict]]:
        random = np.random.default_rng(1)
        observations = [
            torch.randn(3, 2, generator=torch.Generator().manual_seed(i)) for i in range(6)
        ]
        return [
            [
                piece(*random.normal(size=3), env_id=env_id, trajectory_id=env_id, step=3 * number,
                      observation=100 + observations[number])
                for env_id in range(2)
            ]
            for number in range(6)
        ]  # fmt: skip

    def modules() -> nn.ModuleList:
        return nn.ModuleList([RewardNormalizer(2, gamma=0.97), ObservationNormalizer((2,))])

    whole, first, second = modules(), modules(), modules()
    for number, collection in enumerate(collections()):
        if number == 3:
            second.load_state_dict(saved(first))
        for module in [*whole, *(first if number < 3 else second)]:
            module.update(collection)  # type: ignore[operator]
    assert_same(second, whole)
    assert second[0].running_returns.value.abs().min() > 0  # type: ignore[union-attr, operator]
    values = torch.randn(5, 2)
    assert torch.equal(second[1](values), whole[1](values))


def test_state_dicts_hold_tensors_alone_and_name_what_they_are() -> None:
    assert list(saved(RewardNormalizer(2))) == [
        "statistics.count", "statistics.mean", "statistics.m2",
        "running_returns.value", "running_returns.trajectory_id", "running_returns.step",
    ]  # fmt: skip
    assert list(saved(ObservationNormalizer(SPACE, keys=["keys"]))) == [
        "statistics.0.count", "statistics.0.mean", "statistics.0.m2",
    ]  # fmt: skip


def test_a_copy_counts_apart() -> None:
    first = ObservationNormalizer((2,))
    first.update(observed(torch.randn(4, 2)))
    second, before = copy.deepcopy(first), copy.deepcopy(first)
    second.update(observed(torch.randn(4, 2)))
    assert_same(first, before)
    assert second.statistics[0].count == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RunningStatistics("ab"), "`shape` must be a tuple of whole numbers, got 'ab'"),
        (lambda: RunningStatistics((-1,)), "`shape` must be"),
        (lambda: RewardNormalizer(0), "`num_envs` must be"),
        (lambda: RewardNormalizer(1, gamma=1.5), "`gamma` must be a number in [0, 1], got 1.5"),
        (lambda: RewardNormalizer(1, gamma=True), "`gamma` must be a number in [0, 1], got True"),
        (lambda: RewardNormalizer(1, epsilon=0.0), "`epsilon` must be a number above 0, got 0.0"),
        (lambda: ObservationNormalizer((2,), clip=-1), "`clip` must be a number above 0, got -1"),
        (lambda: ObservationNormalizer((2,), clip=NAN), "`clip` must be a number above 0, got nan"),
        (lambda: ObservationNormalizer((2,), keys=["a"]), "`keys` must be None beside a shape"),
        (
            lambda: ObservationNormalizer(SPACE),
            "`observation['image']` must be a Box of floats to be normalised unasked, got Box(0,"
            " 255, (2, 2, 1), uint8); name what is to be normalised in `keys`",
        ),
        (
            lambda: ObservationNormalizer(gym.spaces.Discrete(3)),
            "`observation` must be a Box of floats to be normalised unasked, got Discrete(3); give",
        ),
        (lambda: ObservationNormalizer(gym.spaces.MultiBinary(3)), "got MultiBinary(3)"),
        (
            lambda: ObservationNormalizer(SPACE, keys=["key"]),
            "`keys` must be among ['image', 'keys', ('room', '0'), ('room', '1')], got 'key'",
        ),
        (lambda: ObservationNormalizer(SPACE, keys="keys"), "`keys` must be a list of keys, got"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make()


def test_a_space_without_a_fixed_shape_is_refused() -> None:
    with pytest.raises(SpaceError, match="the observation space must be built of"):
        ObservationNormalizer(gym.spaces.Text(5))


def test_a_bad_observation_is_named_and_nothing_counted() -> None:
    normalize = ObservationNormalizer(SPACE, keys=["image", "keys"])
    fresh = copy.deepcopy(normalize)
    broken = nested(3)
    broken["keys"][2, 1] = NAN
    for given, message in (
        (observed(broken), "`observation['keys']` must be finite, got nan at [2, 1]"),
        (
            observed(nested(3).exclude("keys")),
            "`trajectories[0].get(('observation', 'keys'))` must be a tensor, got the keys",
        ),
        (
            observed(nested(3).set("keys", torch.ones(3, 3))),
            "`trajectories[0].get(('observation', 'keys'))` must have the shape [T, 2], got [3, 3]",
        ),
        (observed(torch.ones(3, 2)), "must be a tensor, got the keys ['observation']"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            normalize.update(given)
        assert_same(normalize, fresh)
    for value, message in (
        (nested(3).set("keys", torch.ones(3, 3)), "`observation['keys']` must have the shape"),
        (torch.ones(3, 2), "`observation['image']` must be a torch.Tensor, got NoneType"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            normalize(value)
    with pytest.raises(
        ConfigurationError, match=re.escape("must have the shape [..., 2], got [2, 3]")
    ):
        ObservationNormalizer((2,))(torch.ones(2, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_on_the_cpu_meet_statistics_on_a_gpu() -> None:
    rows = [piece(1, 2, 4, observation=torch.randn(3, 2))]
    modules = [nn.ModuleList([ObservationNormalizer((2,)), RewardNormalizer(1)]) for _ in range(2)]
    modules[1].cuda()
    for observation, reward in modules:
        observation.update(rows)  # type: ignore[operator]
        reward.update(rows)  # type: ignore[operator]
    values = torch.randn(5, 2)
    for here, there in zip(*modules, strict=True):
        assert there(values).device == values.device
        assert there(values.cuda()).is_cuda
        torch.testing.assert_close(there(values.cuda()).cpu(), here(values))
