"""Returns and advantages: values worked out by hand, what is refused, and what warns.

Agreement with a plain loop over random data is in tests/property/test_returns.py.
"""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from gymtask import returns
from gymtask.errors import ConfigurationError, CutReturnWarning
from gymtask.returns import discounted_returns, generalized_advantage_estimate

FUNCTIONS = [discounted_returns, generalized_advantage_estimate]

both = pytest.mark.parametrize("function", FUNCTIONS)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def flags(*rows: int, length: int) -> Tensor:
    """True at the given rows."""
    return torch.tensor([row in rows for row in range(length)], dtype=torch.bool)


def arguments(length: int = 3, /, **changes: Any) -> dict[str, Any]:
    """Valid arguments of both functions, but for the changes."""
    valid: dict[str, Any] = {
        "reward": torch.arange(1.0, length + 1),
        "value": torch.full((length,), 2.0),
        "next_value": torch.full((length,), 3.0),
        "terminated": torch.zeros(length, dtype=torch.bool),
        "truncated": torch.zeros(length, dtype=torch.bool),
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "end": None,
    }
    return valid | changes


def call(function: Any, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    given = dict(arguments)
    if function is discounted_returns:
        del given["value"], given["gae_lambda"]
        return (discounted_returns(**given),)
    return generalized_advantage_estimate(**given)


@pytest.fixture
def not_yet_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "_cut_return_warned", False)


# Values worked out by hand.


def test_truncated_row_bootstraps_from_its_true_next_observation() -> None:
    advantage, target = generalized_advantage_estimate(
        floats(1, 1, 1, 1),
        value=floats(2, 2, 50, 2),
        next_value=floats(2, 2, 2, 2),
        terminated=flags(length=4),
        truncated=flags(1, length=4),
        gamma=0.9,
        gae_lambda=0.8,
    )
    # Row 2 begins the next episode: 1 + 0.9 * 2 - 50 + 0.72 * 0.8.
    torch.testing.assert_close(advantage, floats(1.376, 0.8, -46.624, 0.8))
    torch.testing.assert_close(target, floats(3.376, 2.8, 3.376, 2.8))


def test_terminated_row_ends_its_own_episode_and_not_its_neighbours() -> None:
    advantage, _ = generalized_advantage_estimate(
        floats(1, 1, 1),
        value=floats(2, 2, 50),
        next_value=floats(2, 50, 2),
        terminated=flags(1, length=3),
        truncated=flags(length=3),
        gamma=0.9,
        gae_lambda=0.8,
    )
    torch.testing.assert_close(advantage, floats(0.08, -1.0, -47.2))


def test_returns_do_not_leak_into_the_episode_before() -> None:
    result = discounted_returns(
        floats(1, 2, 4, 8),
        terminated=flags(1, 3, length=4),
        truncated=flags(length=4),
        gamma=0.5,
    )
    torch.testing.assert_close(result, floats(2, 2, 8, 8))


def test_cut_after_the_terminated_row_leaves_the_bare_reward() -> None:
    terminated = flags(2, length=3)
    result = discounted_returns(
        floats(1, 2, 3),
        terminated=terminated,
        truncated=flags(length=3),
        gamma=0.5,
        next_value=floats(70, 80, 90),
    )
    torch.testing.assert_close(result, floats(2.75, 3.5, 3))
    assert terminated.tolist() == [False, False, True]


def test_cut_before_the_episode_is_over_bootstraps() -> None:
    result = discounted_returns(
        floats(1, 2),
        terminated=flags(length=2),
        truncated=flags(length=2),
        gamma=0.5,
        next_value=floats(70, 10),
    )
    torch.testing.assert_close(result, floats(4.5, 7))


@both
def test_terminated_wins_over_truncated(function: Any) -> None:
    last = flags(2, length=3)
    given = arguments(terminated=last, truncated=last, next_value=floats(3, 3, 1000))
    bare = 3.0 if function is discounted_returns else 3.0 - 2.0
    assert call(function, given)[0][2].item() == bare


@both
@pytest.mark.parametrize("grad", [False, True])
def test_nan_behind_a_terminated_row_does_not_leak(function: Any, grad: bool) -> None:
    # The NaN is a row of the first episode, the terminated one; the second is cut.
    next_value = floats(3, float("nan"), 3, 3).requires_grad_(grad)
    given = arguments(4, terminated=flags(1, length=4), next_value=next_value)
    results = call(function, given)
    assert all(result.isfinite().all() for result in results)
    bare = 2.0 if function is discounted_returns else 2.0 - 2.0
    assert results[0][1].item() == bare
    if grad:
        (gradient,) = torch.autograd.grad(torch.cat(results).sum(), next_value)
        assert gradient[1].item() == 0.0
        assert gradient.isfinite().all()


def test_nan_in_a_next_value_that_returns_do_not_use_is_ignored() -> None:
    given = arguments(next_value=floats(float("nan"), float("nan"), 10), gamma=0.5)
    torch.testing.assert_close(call(discounted_returns, given)[0], floats(4, 6, 8))


@both
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["terminated", "truncated", "end"])
@pytest.mark.parametrize("grad", [False, True])
def test_nan_and_infinite_rewards_stay_in_their_piece(
    function: Any, poison: float, kind: str, grad: bool
) -> None:
    reward = floats(1, 2, poison).requires_grad_(grad)
    given = arguments(reward=reward, **{kind: flags(1, length=3)})
    for result in call(function, given):
        assert result[:2].isfinite().all()
        assert not result[2].isfinite()


@both
@pytest.mark.parametrize("grad", [False, True])
def test_what_float32_cannot_hold_is_infinite_without_a_warning(function: Any, grad: bool) -> None:
    given = arguments(reward=floats(3e38, 3e38, 3e38).requires_grad_(grad), gamma=1.0)
    for result in call(function, given):
        assert result.isposinf().tolist() == [True, True, False]


def test_end_bootstraps_each_piece() -> None:
    result = discounted_returns(
        floats(1, 2, 4, 8),
        terminated=flags(length=4),
        truncated=flags(length=4),
        gamma=0.5,
        next_value=floats(100, 16, 100, 32),
        end=flags(1, length=4),
    )
    torch.testing.assert_close(result, floats(6, 10, 16, 24))


@pytest.mark.usefixtures("not_yet_warned")
def test_without_next_value_a_truncated_row_counts_as_followed_by_nothing() -> None:
    result = discounted_returns(
        floats(1, 2, 4, 8),
        terminated=flags(length=4),
        truncated=flags(1, 3, length=4),
        gamma=0.5,
    )
    torch.testing.assert_close(result, floats(2, 2, 8, 8))


@both
def test_no_rows_give_no_rows(function: Any) -> None:
    for result in call(function, arguments(0)):
        assert result.shape == (0,)
        assert result.dtype == torch.float32


# Warnings.


def cut_returns(**changes: Any) -> Tensor:
    given = arguments(next_value=None) | changes
    return call(discounted_returns, given)[0]


@pytest.mark.usefixtures("not_yet_warned")
def test_cut_return_warns_once_at_the_line_of_the_call() -> None:
    with pytest.warns(CutReturnWarning, match="give `next_value`") as caught:
        result = discounted_returns(
            floats(1, 2),
            terminated=flags(length=2),
            truncated=flags(length=2),
            gamma=0.5,
        )
    assert [warning.filename for warning in caught] == [__file__]
    torch.testing.assert_close(result, floats(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut_returns()


@pytest.mark.usefixtures("not_yet_warned")
def test_cut_piece_inside_warns() -> None:
    with pytest.warns(CutReturnWarning):
        cut_returns(end=flags(0, length=3), terminated=flags(2, length=3))


@pytest.mark.usefixtures("not_yet_warned")
@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_whole_episodes_do_not_warn(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut_returns(**{kind: flags(1, 2, length=3)}, end=flags(1, length=3))
        cut_returns(next_value=floats(1, 1, 1))
        call(discounted_returns, arguments(0, next_value=None))


# What is refused.

NAN = float("nan")
SHAPE = "have the shape (3,) of `reward`, time last, got"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"reward": [1.0, 2.0, 3.0]}, "`reward` must be a torch.Tensor, got list"),
    ({"reward": torch.arange(3)}, "`reward` must have a floating dtype, got torch.int64"),
    ({"reward": torch.tensor(1.0)}, "`reward` must have the shape [..., T], time last, got ()"),
    ({"next_value": floats(1)}, f"`next_value` must {SHAPE} (1,)"),
    (
        {"next_value": floats(1, 2, 3).double()},
        "`next_value` must have the dtype torch.float32, got torch.float64",
    ),
    ({"terminated": None}, "`terminated` must be a torch.Tensor, got NoneType"),
    ({"terminated": flags(length=3).unsqueeze(-1)}, f"`terminated` must {SHAPE} (3, 1)"),
    (
        {"terminated": floats(0, 0, 1)},
        "`terminated` must have the dtype torch.bool, got torch.float32",
    ),
    ({"truncated": torch.tensor(False)}, f"`truncated` must {SHAPE} ()"),
    (
        {"truncated": torch.zeros(3, dtype=torch.uint8)},
        "`truncated` must have the dtype torch.bool, got torch.uint8",
    ),
    ({"end": flags(length=4)}, f"`end` must {SHAPE} (4,)"),
    ({"end": floats(0, 0, 1)}, "`end` must have the dtype torch.bool, got torch.float32"),
    ({"end": flags(length=3).to("meta")}, "`end` must be on cpu, the device of `reward`, got meta"),
    ({"gamma": 1.01}, "`gamma` must be a number in [0, 1], got 1.01"),
    ({"gamma": -0.1}, "`gamma` must be a number in [0, 1], got -0.1"),
    ({"gamma": NAN}, "`gamma` must be a number in [0, 1], got nan"),
    ({"gamma": float("inf")}, "`gamma` must be a number in [0, 1], got inf"),
    ({"gamma": "0.9"}, "`gamma` must be a number in [0, 1], got '0.9'"),
    ({"gamma": True}, "`gamma` must be a number in [0, 1], got True"),
    ({"gamma": torch.tensor(0.5)}, "`gamma` must be a number in [0, 1], got tensor(0.5000)"),
    (
        {"next_value": floats(1, 1, NAN)},
        "`next_value` must not be NaN at a row that bootstraps from it, got nan at row 2",
    ),
]
REFUSED_BY_GAE: list[tuple[dict[str, Any], str]] = [
    ({"value": None}, "`value` must be a torch.Tensor, got NoneType"),
    ({"value": floats(1, 2)}, f"`value` must {SHAPE} (2,)"),
    (
        {"value": floats(1, 2, 3).half()},
        "`value` must have the dtype torch.float32, got torch.float16",
    ),
    (
        {"value": floats(1, 2, 3).to("meta")},
        "`value` must be on cpu, the device of `reward`, got meta",
    ),
    ({"next_value": None}, "`next_value` must be a torch.Tensor, got NoneType"),
    (
        {"next_value": floats(NAN, 1, 1)},
        "`next_value` must not be NaN at a row that bootstraps from it, got nan at row 0",
    ),
    ({"gae_lambda": 2}, "`gae_lambda` must be a number in [0, 1], got 2"),
]


@both
@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_both_refuse(function: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        call(function, arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED_BY_GAE, ids=[text for _, text in REFUSED_BY_GAE]
)
def test_gae_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        call(generalized_advantage_estimate, arguments(**changes))


@both
@pytest.mark.parametrize("grad", [False, True])
def test_nan_at_a_truncated_row_is_refused_by_its_row_in_the_batch(
    function: Any, grad: bool
) -> None:
    given = {
        name: torch.stack([argument, argument]) if isinstance(argument, Tensor) else argument
        for name, argument in arguments().items()
    }
    given["truncated"][1, 0] = True
    given["next_value"][1, 0] = NAN
    given["next_value"].requires_grad_(grad)
    with pytest.raises(ConfigurationError, match=re.escape("got nan at row (1, 0)")):
        call(function, given)


@both
@pytest.mark.parametrize("one", [1, 1.0, torch.tensor([1.0]).numpy()[0]])
def test_any_kind_of_number_is_taken(function: Any, one: Any) -> None:
    given = arguments(gamma=one, gae_lambda=one)
    expected = call(function, arguments(gamma=1.0, gae_lambda=1.0))
    torch.testing.assert_close(call(function, given), expected, rtol=0, atol=0)


# What callers may rely on.


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [False, True])
def test_arguments_are_neither_changed_nor_shared(
    function: Any, dtype: torch.dtype, grad: bool
) -> None:
    given = arguments(terminated=flags(0, length=3), end=flags(length=3))
    for name in ("reward", "value", "next_value"):
        given[name] = given[name].to(dtype).requires_grad_(grad)
    before = {k: v.detach().clone() for k, v in given.items() if isinstance(v, Tensor)}
    results = call(function, given)
    for result in results:
        result.detach().fill_(-1)
    for name, tensor in before.items():
        assert torch.equal(given[name], tensor), name


def test_advantage_and_target_do_not_share_memory() -> None:
    advantage, target = call(generalized_advantage_estimate, arguments())
    kept = target.clone()
    advantage.zero_()
    assert torch.equal(target, kept)


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtype_of_reward_is_kept(function: Any, dtype: torch.dtype) -> None:
    given = arguments()
    exact = call(function, given)
    for name in ("reward", "value", "next_value"):
        given[name] = given[name].to(dtype)
    for result, other in zip(call(function, given), exact, strict=True):
        assert result.dtype == dtype
        # Three rows: one rounding of the result and no other.
        torch.testing.assert_close(
            result.double(), other.double(), rtol=torch.finfo(dtype).eps + 1e-6, atol=0
        )


@both
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_gives_what_the_cpu_gives(function: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    names = ("reward", "value", "next_value")
    given = arguments() | {name: torch.randn(4, 999, generator=generator) for name in names}
    for name in ("terminated", "truncated", "end"):
        given[name] = torch.rand(4, 999, generator=generator) < 0.02
    moved = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in given.items()}
    for there, here in zip(call(function, moved), call(function, given), strict=True):
        assert there.device.type == "cuda"
        torch.testing.assert_close(there.cpu(), here)
