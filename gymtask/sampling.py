"""Random numbers: cheap, batch-invariant action sampling, and the seeds of all streams.

Inside `get_actions` the noise of a row comes from a stream of (seed, environment, run_step, number
of the draw in this call). It is the same whichever environments share the batch, so a collection
can be repeated with other batch sizes and worker counts. Two draws in one call are independent.
Outside `get_actions` torch's generator is used.

Noise is drawn ahead in blocks: block b of an environment is made by a counter-based generator
(Philox; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) whose key is the stream
and whose counter is b. So a stream can be entered at any run_step, and nothing about it needs to be
saved.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from gymtask.errors import ConfigurationError
from gymtask.masks import entropy as entropy
from gymtask.masks import masked as masked
from gymtask.workers.layout import Array

PURPOSES = {"noise": 0, "resume": 1, "eval": 2, "clip": 3, "warmup": 4, "restart": 5}
BLOCK = 256  # run steps drawn at once
_ALL = slice(None)

NoiseKey: TypeAlias = "tuple[int, str, int]"
"""(seed, purpose, count): tells the streams of training, each evaluation and each clip apart."""


def stream_seed(seed: int, purpose: str, index: int, count: int) -> int:
    """A seed of 31 bits, from `SeedSequence(seed, spawn_key=(purpose, index, count))`."""
    sequence = np.random.SeedSequence(seed, spawn_key=(PURPOSES[purpose], index, count))
    return int(sequence.generate_state(1)[0] >> 1)


# ---- what a policy calls -------------------------------------------------------------------------


def categorical(logits: Tensor, states: TensorDictBase) -> Tensor:
    """Samples from softmax(logits) by the Gumbel-max trick.

    argmax_k(logits_k + g_k) with g_k = −log(−log(u_k)) and u_k uniform in (0, 1).

    The sum is one of float32 numbers at least, whose rounding favours the first of equal actions
    by half the spacing of numbers as large as the logits: by 5e-4 of its probability at 1e4, 3e-2
    at 1e6. Where float32 logits are larger than that, pass `logits.log_softmax(-1)`.

    Args:
        logits: float [n, ..., K], not necessarily normalised; −inf, as from `masked`, excludes an
            action. float16 and bfloat16 are taken as they are to float32.
        states: The states that `get_actions` was given, or n rows of them.

    Returns:
        int64 [n, ...].
    """
    # Noise is float32 at least, and so is the sum.
    return (logits + _noise("gumbel", logits, states)).argmax(-1)


def gaussian(mean: Tensor, std: Tensor | float, states: TensorDictBase) -> Tensor:
    """Samples mean + std · ε with ε from N(0, 1).

    Args:
        mean: float [n, ...].
        std: float, broadcastable to `mean`.
        states: The states that `get_actions` was given, or n rows of them.

    Returns:
        float [n, ...]; float16 and bfloat16 are rounded from a sum in float32.
    """
    action = mean + std * _noise("normal", mean, states)
    return action if mean.itemsize > 2 else action.to(torch.result_type(mean, std))


def squashed_gaussian(
    mean: Tensor,
    std: Tensor | float,
    states: TensorDictBase,
    *,
    low: Tensor | float = -1.0,
    high: Tensor | float = 1.0,
) -> Tensor:
    """Samples tanh(mean + std · ε), spread from (−1, 1) to (low, high) (Haarnoja et al.

    2018, appendix C).

    Args:
        mean: float [n, ...].
        std: float, broadcastable to `mean`.
        states: The states that `get_actions` was given, or n rows of them.
        low: Lower bounds of the action, broadcastable to `mean`.
        high: Upper bounds, likewise.

    Returns:
        float [n, ...], from `low` to `high` as numbers of its dtype, these included where the tanh
        is rounded to −1 or 1. float16 and bfloat16 are rounded from float32, never over a bound.
    """
    noise = _noise("normal", mean, states)
    # At least `low`, as what is added to it is not negative; but low + (high − low) may be rounded
    # to more than `high`.
    action = low + ((mean + std * noise).tanh() + 1.0) * 0.5 * (high - low)
    action = action.clamp(max=high)
    return action if mean.itemsize > 2 else _rounded_within(action, mean, std, low, high)


def _rounded_within(
    action: Tensor, mean: Tensor, std: Tensor | float, low: Tensor | float, high: Tensor | float
) -> Tensor:
    """Rounds an action float32 [n, ...] to the dtype of its arguments, and not over a bound."""
    rounded = action.to((mean + std + low + high).dtype)
    # Compared in float32: a number would be rounded to the dtype of what it is compared with.
    over, under = rounded.float() > high, rounded.float() < low
    rounded = torch.where(over, rounded.nextafter(rounded.new_tensor(-math.inf)), rounded)
    return torch.where(under, rounded.nextafter(rounded.new_tensor(math.inf)), rounded)


def epsilon_greedy(
    values: Tensor,
    epsilon: float | Tensor,
    states: TensorDictBase,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Takes the best action, and with probability ε any of all K with equal chances.

    Args:
        values: float [n, K].
        epsilon: ε in [0, 1], a number or a tensor [] or [n].
        states: The states that `get_actions` was given, or n rows of them.
        mask: bool or integer [n, K], 0 where an action is forbidden, as in `masked`: the best and
            the random actions are those of the allowed ones alone. None allows all.

    Returns:
        int64 [n].

    Raises:
        ConfigurationError: `epsilon` or `mask` breaks its rule. Whether a tensor lies in [0, 1] is
            looked at on the CPU alone, since it would wait for any other device.
    """
    _check_epsilon(epsilon, len(values))
    if mask is not None:
        values = masked(values, mask)
    draws = uniform(states, 2).to(values.device)
    if mask is None:
        random = _index_below(values.shape[-1], draws[:, 1])
    else:
        # The j-th of the allowed actions, from 0, stands where their count so far becomes j + 1.
        so_far = mask.bool().cumsum(-1)
        place = _index_below(so_far[:, -1], draws[:, 1])
        random = torch.searchsorted(so_far, place.unsqueeze(-1) + 1).squeeze(-1)
    return torch.where(draws[:, 0] < epsilon, random, values.argmax(-1))


def _check_epsilon(epsilon: float | Tensor, num_rows: int) -> None:
    if isinstance(epsilon, Tensor):
        # A comparison with [n, 1] would be broadcast to [n, n].
        if epsilon.ndim and epsilon.shape != (num_rows,):
            raise ConfigurationError(
                f"`epsilon` must be a number or a tensor of shape () or ({num_rows},), got shape"
                f" {tuple(epsilon.shape)}"
            )
        if epsilon.is_cpu and not ((epsilon >= 0) & (epsilon <= 1)).all():
            raise ConfigurationError(f"`epsilon` must lie in 0 to 1, got {epsilon.tolist()!s:.80}")
    elif not isinstance(epsilon, Real):
        raise ConfigurationError(
            f"`epsilon` must be a number or a tensor, got {type(epsilon).__name__}"
        )
    elif not 0 <= epsilon <= 1:
        raise ConfigurationError(f"`epsilon` must lie in 0 to 1, got {epsilon}")


def _index_below(count: int | Tensor, draws: Tensor) -> Tensor:
    """Turns draws [n] from [0, 1) into indices from 0 to count − 1, int64 [n]."""
    # float32 draws lie below 1, but the product may round up to the count.
    return (draws * count).long().clamp_(max=count - 1)


def uniform(states: TensorDictBase, k: int) -> Tensor:
    """Draws k numbers from [0, 1) for each row, float32 [n, k].

    Args:
        states: The states that `get_actions` was given, or n rows of them.
        k: Numbers a row.
    """
    # A copy, since the noise itself is handed out.
    return _noise("uniform", torch.empty(states.batch_size[0], k), states).clone()


# ---- the streams behind it -----------------------------------------------------------------------


@dataclass
class _Block:
    """Noise drawn ahead for one draw of the policy.

    Attributes:
        data: float32 [BLOCK, N, *size].
        number: int64 [N], which block of its stream each environment has in `data`; -1 for none.
        common_number: The number of all environments, -1 where they differ.
        rows: float32 [N, *size], BLOCK views of `data`.
        flat: float32 [BLOCK * N, *size], a view of `data`.
        sure_of: Indices of environments whose blocks were looked at.
        sure_until: The last call of the policy for which these hold what they need for sure.
        keys: uint64 [N, 2], Philox keys.
    """

    data: Array
    number: Array
    keys: Array
    common_number: int = -1

    def __post_init__(self) -> None:
        self.rows = torch.from_numpy(self.data).unbind()
        # Not -1, as an action may be an array of no numbers.
        count = self.data.shape[0] * self.data.shape[1]
        self.flat = self.data.reshape(count, *self.data.shape[2:])
        self.sure_of: Array | None = None
        self.sure_until = 0


class NoiseStreams:
    """The noise of N environments.

    Between `begin` and `end` it is the source of the functions above.

    Attributes:
        key: As the argument.
        first_env: The global index of environment 0.
    """

    def __init__(self, key: NoiseKey, num_envs: int, first_env: int = 0) -> None:
        self.key = key
        self._num_envs = num_envs
        self.first_env = first_env
        self._blocks: dict[tuple[Any, ...], _Block] = {}
        self._states: TensorDictBase | None = None
        self._env_ids: Array = np.empty(0, np.int64)
        self._run_steps: Array = np.empty(0, np.int64)
        self._even_run_step, self._even_block = -1, _ALL
        self._num_calls = 0
        self._num_draws = 0

    def begin(
        self,
        states: TensorDictBase,
        env_ids: Array,
        run_steps: Array,
        even_run_step: int = -1,
        block: slice = _ALL,
    ) -> None:
        """Opens a call of `get_actions` for environments at steps of the run.

        Args:
            states: What it is given.
            env_ids: int64 [n].
            run_steps: int64 [n].
            even_run_step: The step, if they are a block of all and at the same; else -1.
            block: Which block of all they are, if `even_run_step` says so.
        """
        self._states, self._env_ids, self._run_steps = states, env_ids, run_steps
        self._even_run_step, self._even_block = even_run_step, block
        self._num_calls += 1
        self._num_draws = 0
        _local.streams = self

    def end(self) -> None:
        """Closes the call."""
        _local.streams = None

    def draw(self, kind: str, size: tuple[int, ...], states: TensorDictBase) -> Tensor:
        """Noise float32 [n, *size] for the rows of `states`, to be read only."""
        env_ids, run_steps, even = self._env_ids, self._run_steps, self._even_run_step
        if states is not self._states:  # some of the rows, or a copy of them
            env_ids, run_steps = states["env_id"].cpu().numpy(), states["run_step"].cpu().numpy()
            even = -1
        block = self._block((self._num_draws, kind, *size))
        self._num_draws += 1
        # Step r of the run lies in block r // BLOCK of the environment's stream, at place r %
        # BLOCK.
        if even >= 0 and even // BLOCK == block.common_number:
            row = block.rows[even % BLOCK]
            return row if self._even_block.stop is None else row[self._even_block]
        place = run_steps % BLOCK
        if env_ids is not block.sure_of or self._num_calls > block.sure_until:
            self._fill_stale(block, kind, size, env_ids, run_steps)
            # Nobody goes further than one step a call, so as many calls find their blocks filled.
            block.sure_of = env_ids
            block.sure_until = self._num_calls + BLOCK - 1 - int(place.max())
        return torch.from_numpy(block.flat.take(place * self._num_envs + env_ids, axis=0))

    def _fill_stale(
        self, block: _Block, kind: str, size: tuple[int, ...], env_ids: Array, run_steps: Array
    ) -> None:
        numbers = run_steps // BLOCK
        stale = block.number[env_ids] != numbers
        if stale.any():
            for index, number in zip(env_ids[stale].tolist(), numbers[stale].tolist(), strict=True):
                block.data[:, index] = _fill(kind, block.keys[index], number, (BLOCK, *size))
                block.number[index] = number
            first = int(block.number[0])
            block.common_number = first if (block.number == first).all() else -1

    def _block(self, name: tuple[Any, ...]) -> _Block:
        block = self._blocks.get(name)
        if block is None:
            draw, kind, *size = name
            seed, purpose, count = self.key
            keys = [
                np.random.SeedSequence(
                    seed,
                    spawn_key=(
                        PURPOSES[purpose],
                        self.first_env + index,
                        count,
                        draw,
                        _KINDS[kind][0],
                        *size,
                    ),
                ).generate_state(2, np.uint64)
                for index in range(self._num_envs)
            ]
            data = np.empty((BLOCK, self._num_envs, *size), np.float32)
            block = _Block(data, np.full(self._num_envs, -1, np.int64), np.array(keys))
            self._blocks[name] = block
        return block


class _Local(threading.local):
    streams: NoiseStreams | None = None


_local = _Local()


def _noise(kind: str, like: Tensor, states: TensorDictBase) -> Tensor:
    """Noise of the shape and device of `like` [n, ...], and of its dtype, but float32 for half.

    float16 and bfloat16 hold too few numbers: draws would be equal, and a Gumbel one infinite.
    """
    if not like.is_floating_point():
        raise ConfigurationError(f"logits and means must be floats, got {like.dtype}")
    num_rows, *size = like.shape
    if num_rows != states.batch_size[0]:
        raise ConfigurationError(
            f"`states` must have one row for each of the {num_rows} rows to draw, got batch size"
            f" {tuple(states.batch_size)}"
        )
    streams = _local.streams
    if streams is not None:
        noise = streams.draw(kind, tuple(size), states)
        if like.is_cpu and like.dtype is torch.float32:
            return noise
        return noise.to(like.device, torch.promote_types(like.dtype, torch.float32))
    empty = torch.empty_like(like if like.itemsize > 2 else like.float())
    if kind == "gumbel":
        return -empty.exponential_().clamp_(min=_TINY).log_()
    return empty.normal_() if kind == "normal" else torch.rand_like(empty)


def _fill(kind: str, key: Array, number: int, shape: tuple[int, ...]) -> Array:
    # The block's number is the third word of the counter, so that 2^128 numbers lie between two
    # blocks.
    generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, number, 0]))
    return _KINDS[kind][1](generator, shape)


_TINY = float(np.finfo(np.float32).tiny)


def _gumbel(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    # −log of an exponential variable is a Gumbel variable. 0 would give infinity, and NaN beside a
    # logit of −inf.
    exponential = generator.standard_exponential(shape, np.float32)
    return -np.log(np.maximum(exponential, _TINY))


def _normal(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return generator.standard_normal(shape, np.float32)


def _uniform(generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return generator.random(shape, np.float32)


_KINDS: dict[str, tuple[int, Callable[[np.random.Generator, tuple[int, ...]], Array]]] = {
    "gumbel": (0, _gumbel),
    "normal": (1, _normal),
    "uniform": (2, _uniform),
}
