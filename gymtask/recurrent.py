"""Recurrent networks over windows: the state begins anew with an episode, and may be warmed up.

Rows hold the carry that the policy had when it acted on them, so a window that starts in the middle
of an episode has the state to start from (the "stored state" of Kapturowski et al., "Recurrent
experience replay in distributed reinforcement learning", ICLR 2019, section 3)::

    def run_model(self, model, batch, state):
        hidden = unroll(model.cell, batch["observation"], batch["hidden"], batch["is_init"])
        return model.head(hidden)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gymtask.config import raise_if_any, require_int
from gymtask.errors import HookError

__all__ = ["Carry", "after_burn_in", "unroll"]

Carry: TypeAlias = "Tensor | TensorDictBase | tuple[Tensor, ...]"
"""A recurrent state: (hidden, cell) for an nn.LSTMCell, one tensor for an nn.GRUCell."""


def unroll(
    cell: Callable[[Tensor, Any], Any],
    inputs: Tensor,
    carries: Carry,
    is_init: Tensor,
    *,
    burn_in: int = 0,
) -> Tensor:
    """Runs a recurrent cell along windows, from the states that were stored with their rows.

    Of `carries` it takes the first row of each window, and rows with `is_init`, where the state is
    the initial one again; everything between comes from the cell. With the parameters that the
    carries were collected with, outputs are those of a pass over the whole episode.

    With older carries the first outputs of a window are off. `burn_in` rows warm the state up:
    they are run with the present parameters, but no gradient flows into or through them, and they
    are to be left out of the loss (`after_burn_in`). Rows whose episode began within the window
    need no warm-up and are trained on; an episode's first rows would have no part in any loss
    otherwise.

    Args:
        cell: An nn.LSTMCell, nn.GRUCell or nn.RNNCell, or what maps (inputs [B, ...], carry [B,
            ...]) to (output [B, ...], next carry).
        inputs: What the cell sees, [B, W, ...].
        carries: The state before each row, as rows store it, [B, W, ...]; a tuple or TensorDict of
            such where there are several. Zeros do, where none is stored.
        is_init: Whether the row is the first of its episode, bool [B, W].
        burn_in: Number of rows that only warm the state up, fewer than W.

    Returns:
        The outputs, [B, W, ...].

    Raises:
        ConfigurationError: An argument breaks its rule.
        HookError: The cell returned something else.
    """
    _check(inputs, carries, is_init, burn_in)
    counts = after_burn_in(is_init, burn_in)
    carry, outputs = _at(carries, 0), []
    for t in range(is_init.shape[1]):
        carry = _where(is_init[:, t], _at(carries, t), carry)
        output, carry = _step(cell, inputs[:, t], carry)
        if t < burn_in:
            output = torch.where(_wide(counts[:, t], output), output, output.detach())
            carry = _where(counts[:, t], carry, _detached(carry))
        outputs.append(output)
    return torch.stack(outputs, 1)


def after_burn_in(is_init: Tensor, burn_in: int) -> Tensor:
    """Tells which rows of windows count in the loss.

    All but the first `burn_in`, and of these the ones whose episode began within the window: their
    state comes from its start, and not from a stored one.

    Args:
        is_init: Whether the row is the first of its episode, bool [B, W].
        burn_in: Number of rows that only warm the state up.

    Returns:
        bool [B, W].
    """
    late = torch.arange(is_init.shape[1], device=is_init.device) >= burn_in
    return late | (is_init.cumsum(1) > 0)


def _check(inputs: Tensor, carries: Carry, is_init: Tensor, burn_in: int) -> None:
    problems = [*require_int("burn_in", burn_in, 0)]
    if is_init.dtype != torch.bool or is_init.ndim != 2:
        rule = "must be bool [B, W]"
        problems.append(f"`is_init` {rule}, got {is_init.dtype} {list(is_init.shape)}")
    elif not is_init.shape[1]:
        problems.append(f"`is_init` must have one row a window at least, got {list(is_init.shape)}")
    elif not problems and burn_in >= is_init.shape[1]:
        problems.append(f"`burn_in` must be less than W = {is_init.shape[1]}, got {burn_in}")
    parts = carries if isinstance(carries, tuple) else (carries,)
    for name, part in [("inputs", inputs), *(("carries", part) for part in parts)]:
        if part.shape[:2] != is_init.shape:
            rule = f"must begin with the shape of `is_init`, {list(is_init.shape)}"
            problems.append(f"`{name}` {rule}, got {list(part.shape)}")
    raise_if_any(problems)


def _step(cell: Callable[[Tensor, Any], Any], inputs: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
    returned = cell(inputs, carry)
    if isinstance(returned, Tensor):  # an nn.GRUCell or nn.RNNCell: the output is the next state
        return returned, returned
    if isinstance(returned, tuple) and len(returned) == 2:
        if isinstance(carry, tuple) and isinstance(returned[1], Tensor):  # an nn.LSTMCell
            return returned[0], cast(Carry, returned)
        output, following = returned
        if isinstance(following, tuple) == isinstance(carry, tuple):
            return output, following
    raise HookError(
        "the cell must return its next carry, or (output, next carry), of the form of the carry"
        f" that it was given, {type(carry).__name__}, got {type(returned).__name__}"
    )


# ---- carries of any form -------------------------------------------------------------------------


def _at(carries: Carry, t: int) -> Carry:
    """Row t of all windows."""
    if isinstance(carries, tuple):
        return tuple(part[:, t] for part in carries)
    return carries[:, t]


def _detached(carry: Carry) -> Carry:
    if isinstance(carry, tuple):
        return tuple(part.detach() for part in carry)
    return carry.detach()


def _where(mask: Tensor, yes: Any, no: Any) -> Carry:
    """Takes `yes` in the windows of `mask`, bool [B], and `no` in the others."""
    if isinstance(no, tuple):
        return tuple(cast(Tensor, _where(mask, *pair)) for pair in zip(yes, no, strict=True))
    return cast(Carry, torch.where(_wide(mask, no), yes, no))


def _wide(mask: Tensor, value: Any) -> Tensor:
    """The mask [B] with as many dimensions as `value` [B, ...]."""
    return mask.reshape(-1, *[1] * (value.ndim - 1))
