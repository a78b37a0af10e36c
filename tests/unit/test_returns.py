"""Returns and advantages: what flags and NaN do, what is refused, and what warns.

Values worked out by hand are in test_returns_by_hand.py, agreement with a plain loop over random
data in tests/property/test_returns.py.
"""

import inspect
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gymtask import returns
from gymtask.errors import ConfigurationError, CutReturnWarning
from gymtask.returns import (
    discounted_returns,
    generalized_advantage_estimate,
    lambda_returns,
    n_step_returns,
    vtrace,
)

FUNCTIONS = [getattr(returns, name) for name in returns.__all__]
ADVANTAGES = [generalized_advantage_estimate, vtrace]
FLOATS = ["reward", "value", "next_value", "log_prob", "behaviour_log_prob"]
NAN = float("nan")

every = pytest.mark.parametrize("function", FUNCTIONS)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def flags(*rows: int, length: int) -> Tensor:
    """True at the given rows."""
    return torch.tensor([row in rows for row in range(length)], dtype=torch.bool)


def arguments(length: int = 3, /, **changes: Any) -> dict[str, Any]:
    """Valid arguments of all functions, but for the changes; ratios of probabilities are 1."""
    valid: dict[str, Any] = {
        "reward": torch.arange(1.0, length + 1),
        "value": torch.full((length,), 2.0),
        "next_value": torch.full((length,), 3.0),
        "terminated": torch.zeros(length, dtype=torch.bool),
        "truncated": torch.zeros(length, dtype=torch.bool),
        "log_prob": torch.full((length,), -1.0),
        "behaviour_log_prob": torch.full((length,), -1.0),
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "lambda_": 0.8,
        "n": 2,
        "rho_clip": 1.0,
        "c_clip": 1.0,
        "end": None,
    }
    return valid | changes


def call(function: Any, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """Calls it with those of the arguments that it takes."""
    taken = inspect.signature(function).parameters
    results = function(**{name: value for name, value in arguments.items() if name in taken})
    return results if isinstance(results, tuple) else (results,)


def takers(name: str) -> list[Any]:
    """The functions that take this argument."""
    return [function for function in FUNCTIONS if name in inspect.signature(function).parameters]


@pytest.fixture
def not_yet_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "_cut_return_warned", False)


# What all of them do.


@every
def test_terminated_wins_over_truncated(function: Any) -> None:
    last = flags(2, length=3)
    given = arguments(terminated=last, truncated=last, next_value=floats(3, 3, 1000))
    bare = 3.0 - 2.0 if function in ADVANTAGES else 3.0
    assert call(function, given)[0][2].item() == bare


@every
@pytest.mark.parametrize("grad", [False, True])
def test_nan_behind_a_terminated_row_does_not_leak(function: Any, grad: bool) -> None:
    # The NaN is a row of the first episode, the terminated one; the second is cut.
    next_value = floats(3, NAN, 3, 3).requires_grad_(grad)
    given = arguments(4, terminated=flags(1, length=4), next_value=next_value)
    results = call(function, given)
    assert all(result.isfinite().all() for result in results)
    bare = 2.0 - 2.0 if function in ADVANTAGES else 2.0
    assert results[0][1].item() == bare
    if grad:
        (gradient,) = torch.autograd.grad(torch.cat(results).sum(), next_value)
        assert gradient[1].item() == 0.0
        assert gradient.isfinite().all()


@pytest.mark.parametrize("function", [discounted_returns, lambda_returns, n_step_returns])
@pytest.mark.parametrize("grad", [False, True])
def test_nan_in_a_next_value_that_is_not_used_is_ignored(function: Any, grad: bool) -> None:
    next_value = floats(NAN, NAN, 10).requires_grad_(grad)
    given = arguments(next_value=next_value, gamma=0.5, lambda_=1.0, n=3)
    (result,) = call(function, given)
    torch.testing.assert_close(result, floats(4, 6, 8))
    if grad:
        (gradient,) = torch.autograd.grad(result.sum(), next_value)
        # Each row counts the last next value, discounted once for each step up to it.
        torch.testing.assert_close(gradient, floats(0, 0, 0.875))


@pytest.mark.parametrize("grad", [False, True])
def test_n_step_returns_use_next_values_of_stops_and_of_full_sums_only(grad: bool) -> None:
    end = flags(1, length=6)
    used = flags(1, 4, 5, length=6)  # rows 2 to 4 are the only three before which none stops
    for row in range(6):
        next_value = torch.ones(6)
        next_value[row] = NAN
        given = arguments(6, next_value=next_value.requires_grad_(grad), end=end, n=3)
        if used[row]:
            with pytest.raises(ConfigurationError, match=f"got nan at row {row}$"):
                call(n_step_returns, given)
        else:
            assert call(n_step_returns, given)[0].isfinite().all()


@pytest.mark.parametrize("name", ["reward", "log_prob", "behaviour_log_prob"])
@pytest.mark.parametrize("grad", [False, True])
def test_nan_stays_in_its_row_and_those_before_it_in_the_piece(name: str, grad: bool) -> None:
    given = arguments(6, end=flags(1, length=6))
    given[name] = torch.where(flags(4, length=6), NAN, given[name]).requires_grad_(grad)
    for result in (result for function in takers(name) for result in call(function, given)):
        assert result[[0, 1, 5]].isfinite().all()
        assert not result[4].isfinite()


@every
@pytest.mark.parametrize("poison", [NAN, float("inf")])
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


@every
@pytest.mark.parametrize("grad", [False, True])
def test_what_float32_cannot_hold_is_infinite_without_a_warning(function: Any, grad: bool) -> None:
    reward = floats(3e38, 3e38, 3e38).requires_grad_(grad)
    given = arguments(reward=reward, gamma=1.0)
    for result in call(function, given):
        assert result.isposinf().tolist() == [True, True, False]


@every
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
REFUSED_BY_TAKERS: list[tuple[dict[str, Any], str]] = [
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
    ({"log_prob": None}, "`log_prob` must be a torch.Tensor, got NoneType"),
    ({"log_prob": torch.zeros(3, 2)}, f"`log_prob` must {SHAPE} (3, 2)"),
    (
        {"log_prob": flags(length=3)},
        "`log_prob` must have the dtype torch.float32, got torch.bool",
    ),
    ({"behaviour_log_prob": torch.zeros(1)}, f"`behaviour_log_prob` must {SHAPE} (1,)"),
    ({"gae_lambda": 2}, "`gae_lambda` must be a number in [0, 1], got 2"),
    ({"lambda_": -0.5}, "`lambda_` must be a number in [0, 1], got -0.5"),
    ({"n": 0}, "`n` must be a whole number of at least 1, got 0"),
    ({"n": 2.0}, "`n` must be a whole number of at least 1, got 2.0"),
    ({"n": True}, "`n` must be a whole number of at least 1, got True"),
    ({"n": None}, "`n` must be a whole number of at least 1, got None"),
    ({"rho_clip": 0}, "`rho_clip` must be a number above 0, got 0"),
    ({"rho_clip": NAN}, "`rho_clip` must be a number above 0, got nan"),
    ({"rho_clip": torch.tensor(1)}, "`rho_clip` must be a number above 0, got tensor(1)"),
    ({"c_clip": -1.0}, "`c_clip` must be a number above 0, got -1.0"),
    ({"c_clip": True}, "`c_clip` must be a number above 0, got True"),
]


@every
@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_all_refuse(function: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        call(function, arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED_BY_TAKERS, ids=[text for _, text in REFUSED_BY_TAKERS]
)
def test_all_that_take_it_refuse(changes: dict[str, Any], message: str) -> None:
    (name,) = changes
    assert takers(name)
    for function in takers(name):
        with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
            call(function, arguments(**changes))


@pytest.mark.parametrize("function", [*ADVANTAGES, lambda_returns, n_step_returns])
def test_all_but_discounted_returns_need_next_values(function: Any) -> None:
    message = "`next_value` must be a torch.Tensor, got NoneType"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        call(function, arguments(next_value=None))


@pytest.mark.parametrize("function", [*ADVANTAGES, lambda_returns])
def test_nan_at_a_row_that_does_not_stop_is_refused(function: Any) -> None:
    message = "`next_value` must not be NaN at a row that bootstraps from it, got nan at row 0"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        call(function, arguments(next_value=floats(NAN, 1, 1)))


@every
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


@every
@pytest.mark.parametrize("one", [1, 1.0, np.float32(1.0)])
def test_any_kind_of_number_is_taken(function: Any, one: Any) -> None:
    names = ("gamma", "gae_lambda", "lambda_", "rho_clip", "c_clip")
    given = arguments(n=np.int64(3), **dict.fromkeys(names, one))
    expected = call(function, arguments(n=3, **dict.fromkeys(names, 1.0)))
    torch.testing.assert_close(call(function, given), expected, rtol=0, atol=0)


# What callers may rely on.


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [False, True])
def test_arguments_are_neither_changed_nor_shared(
    function: Any, dtype: torch.dtype, grad: bool
) -> None:
    given = arguments(terminated=flags(0, length=3), end=flags(length=3))
    for name in FLOATS:
        given[name] = given[name].to(dtype).requires_grad_(grad)
    before = {k: v.detach().clone() for k, v in given.items() if isinstance(v, Tensor)}
    results = call(function, given)
    for result in results:
        result.detach().fill_(-1)
    for name, tensor in before.items():
        assert torch.equal(given[name], tensor), name


@pytest.mark.parametrize("function", ADVANTAGES)
def test_advantage_and_target_do_not_share_memory(function: Any) -> None:
    advantage, target = call(function, arguments())
    kept = target.clone()
    advantage.zero_()
    assert torch.equal(target, kept)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtype_of_reward_is_kept(function: Any, dtype: torch.dtype) -> None:
    given = arguments()
    exact = call(function, given)
    for name in FLOATS:
        given[name] = given[name].to(dtype)
    for result, other in zip(call(function, given), exact, strict=True):
        assert result.dtype == dtype
        # Three rows: one rounding of the result and no other.
        torch.testing.assert_close(
            result.double(), other.double(), rtol=torch.finfo(dtype).eps + 1e-6, atol=0
        )


@every
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_gives_what_the_cpu_gives(function: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    given = arguments() | {name: torch.randn(4, 999, generator=generator) for name in FLOATS}
    for name in ("terminated", "truncated", "end"):
        given[name] = torch.rand(4, 999, generator=generator) < 0.02
    moved = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in given.items()}
    for there, here in zip(call(function, moved), call(function, given), strict=True):
        assert there.device.type == "cuda"
        torch.testing.assert_close(there.cpu(), here)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_function_may_call_them() -> None:
    def advantage(reward: Tensor) -> Tensor:
        flag = torch.tensor([False, False, True, False])
        return generalized_advantage_estimate(
            reward,
            value=reward,
            next_value=reward,
            terminated=flag,
            truncated=flag,
            gamma=0.5,
            gae_lambda=0.5,
        )[0]

    reward = torch.tensor([1.0, 2.0, 3.0, 4.0])
    compiled: Any = torch.compile(advantage, backend="eager")
    assert torch.equal(compiled(reward), advantage(reward))
