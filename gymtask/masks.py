"""Actions that a state forbids: what is left of a policy's logits, and their entropy."""

from __future__ import annotations

import math

from torch import Tensor

from gymtask.errors import ConfigurationError


def masked(logits: Tensor, mask: Tensor) -> Tensor:
    """Forbids actions: their logits, or their values, become −inf.

    Softmax, log_softmax, argmax, `categorical` and torch's Categorical are then those of the
    allowed actions alone; forbidden ones have probability 0, log-probability −inf and no gradient.
    For the entropy see `entropy`.

    The final observation of an episode may allow nothing, as no action follows it. Where such rows
    are looked at, as next observations are, allow all there: `mask.bool() |
    terminated.unsqueeze(-1)`.

    Args:
        logits: float [n, ..., K].
        mask: bool or integer, of the same shape; 0 where an action is forbidden.

    Returns:
        float [n, ..., K].

    Raises:
        ConfigurationError: The shapes or dtypes break their rules, or a row allows no action. That
            is looked at on the CPU alone, since it would wait for any other device; there such a
            row gives NaN probabilities.
    """
    if not logits.is_floating_point():
        raise ConfigurationError(f"logits and values must be floats, got {logits.dtype}")
    if mask.shape != logits.shape:
        raise ConfigurationError(
            f"`mask` must have the shape {tuple(logits.shape)} of the logits, got"
            f" {tuple(mask.shape)}"
        )
    if mask.is_floating_point() or mask.is_complex():
        raise ConfigurationError(
            f"`mask` must be bool or integer, got {mask.dtype}; pass mask > 0.5 if it holds 0 and 1"
        )
    forbidden = mask == 0
    if forbidden.is_cpu:
        empty = forbidden.all(-1)
        if empty.any():
            rows = [tuple(row) if len(row) > 1 else row[0] for row in empty.nonzero().tolist()]
            raise ConfigurationError(
                f"`mask` must allow an action in each row, got none in {len(rows)} of"
                f" {empty.numel()} rows: {rows[:5]}; where an episode has ended and no action"
                " follows, allow all: mask.bool() | terminated.unsqueeze(-1)"
            )
    return logits.masked_fill(forbidden, -math.inf)


def entropy(logits: Tensor) -> Tensor:
    """The entropy −Σ p · log p of softmax(logits), with 0 · log 0 = 0.

    So −inf excludes an action from it and from its gradient, where p · log p would be 0 · −inf,
    which is NaN.

    Args:
        logits: float [n, ..., K], such as `masked` gives.

    Returns:
        float [n, ...], in nats.
    """
    log_prob = logits.log_softmax(-1)
    return -(log_prob.exp() * log_prob.masked_fill(log_prob == -math.inf, 0.0)).sum(-1)
