"""Normalisation of observations and rewards by running statistics, as parts of a task.

They are modules, and their statistics are buffers: put on a task they move with it, and checkpoints
hold them. `forward` only reads, in train mode as in eval mode; `update` alone counts, and is called
once for each collection. So the statistics stand still while a collection, an evaluation or an
epoch's updates go on, and every transition counts once, whoever looks at it how often::

    def __init__(self, config):
        super().__init__(config)
        space = self.get_environment_cached().observation_space
        self.normalize_observation = gymtask.ObservationNormalizer(space)
        self.normalize_reward = gymtask.RewardNormalizer(config.environment.total_envs, gamma=0.99)

    def get_actions(self, model, states, optimal):
        output = model(self.normalize_observation(states["observation"]))
        ...

    def postprocess_trajectories(self, trajectories):  # once a collection
        self.normalize_observation.update(trajectories)
        self.normalize_reward.update(trajectories)
        return trajectories

    def run_model(self, model, batch, state):
        return model(self.normalize_observation(batch["observation"]))

    def compute_loss(self, model, batch, state, output):
        reward = self.normalize_reward(batch["next", "reward"])
        ...

Rows stay as they came, also in a `ReplayBuffer`: each is normalised when it is read, by what is
known then. PPO and others that compare the policy with the one that acted are to show it what that
one saw, though: with other statistics it is another policy before its first update. They put what
was seen into the rows, from which `run_model` then takes it as it is; `get_values`, which comes
before the update, normalises as `get_actions` does::

    def postprocess_trajectories(self, trajectories):
        seen = [self.normalize_observation(each["observation"]) for each in trajectories]
        self.normalize_observation.update(trajectories)  # by what is not normalised yet
        for trajectory, observation in zip(trajectories, seen):
            trajectory["observation"] = observation
        ...

With torch.distributed initialised, statistics are those of the rows of all processes, equal bit for
bit in each; `update` then waits for the others, so every process calls it equally often, be it with
an empty list. Statistics stay in float64 whatever a module is cast to, and devices without float64
cannot hold them. What is counted must be finite: one NaN would be in all that comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from gymtask.config import raise_if_any, require_int
from gymtask.errors import ConfigurationError
from gymtask.moments import RunningStatistics, check_shape, count_rows
from gymtask.replay import MultiReplaySamples
from gymtask.running_returns import Rows, RunningReturns
from gymtask.workers.layout import Leaf, Space, space_leaves

__all__ = ["ObservationNormalizer", "RewardNormalizer"]

Trajectories: TypeAlias = "MultiReplaySamples | TensorDictBase | Iterable[TensorDictBase]"
Key: TypeAlias = "str | tuple[str, ...]"
ObservationT = TypeVar("ObservationT", Tensor, TensorDictBase)


class ObservationNormalizer(nn.Module):
    """Observations with mean 0 and variance 1: (x - mean) / sqrt(variance + epsilon), clipped.

    Details 6 and 7 for continuous actions of Huang et al., "The 37 implementation details of
    proximal policy optimization" (ICLR blog track, 2022). The module's docstring shows the loop.
    Each row counts with the observation that it acted on; a final one, on which nobody acts, does
    not. Before the first update it only clips.

    Args:
        observation_space: The space, which stays as it is; or the shape of an observation, of any
            real dtype. With `frame_stack`, the space or shape of a single frame: that is what rows
            hold, and stacks of frames [..., k, *shape] are normalised all the same.
        keys: Of a Dict or Tuple space ("0", "1", ... of a Tuple), the parts to normalise, those of
            nested ones as tuples; the rest passes as it is. None takes all, which must then be
            Boxes of floats: an image or an index is normalised only where it is named.
        epsilon: Added to the variance, above 0.
        clip: Largest magnitude of what comes out, above 0; `math.inf` for no limit.

    Attributes:
        paths: For each part that is normalised the keys that lead to it; () for the whole.
        statistics: The `RunningStatistics` of each, in the same order.

    Raises:
        ConfigurationError: An argument breaks its rule, or a part is no Box of floats.
        SpaceError: A part of the space has no fixed shape.
    """

    def __init__(
        self,
        observation_space: Space | Sequence[int],
        *,
        keys: Sequence[Key] | None = None,
        epsilon: float = 1e-8,
        clip: float = 10.0,
    ) -> None:
        super().__init__()
        raise_if_any(list(_settings_problems(epsilon, clip)))
        self.epsilon, self.clip = float(epsilon), float(clip)
        self.paths: list[tuple[str, ...]] = [()]
        shapes: list[Sequence[int]] = []
        if isinstance(observation_space, gym.Space):
            leaves = _chosen(space_leaves(observation_space, "observation"), keys)
            self.paths, shapes = [leaf.path for leaf in leaves], [leaf.shape for leaf in leaves]
        elif keys is not None:
            raise ConfigurationError(f"`keys` must be None beside a shape, got {keys!r}")
        else:
            shapes.append(observation_space)
        # A list and no ModuleDict, which has no room for a part called "keys" or "a.b".
        self.statistics = nn.ModuleList(RunningStatistics(shape) for shape in shapes)

    def forward(self, observation: ObservationT) -> ObservationT:
        """Normalises observations [..., *shape], nested ones as a TensorDict; updates nothing.

        Returns:
            What is normalised as float32 of the same shape, on the device of the observation,
            differentiable; the rest as it is.

        Raises:
            ConfigurationError: The shape is another.
        """
        return self._map(self._normalized, observation)

    def denormalize(self, observation: ObservationT) -> ObservationT:
        """Undoes `forward`, as float32, but for what it clipped."""
        return self._map(self._denormalized, observation)

    def update(self, trajectories: Trajectories) -> None:
        """Counts the observation of each row, those of all processes together.

        Args:
            trajectories: What was collected: TensorDicts [T], one of them, or `MultiReplaySamples`.

        Raises:
            ConfigurationError: A key is missing, a shape is another, or a value is not finite;
                nothing has then been counted.
        """
        pieces, parts, values = _pieces(trajectories), list(self._parts()), []
        for path, part in zip(self.paths, parts, strict=True):
            none = part.mean.new_empty(0, *part.shape)
            key = ("observation", *path)
            values.append(_column(pieces, key, part.shape) if pieces else none)
        count_rows(parts, values, [_name(path) for path in self.paths])

    def extra_repr(self) -> str:
        """What `repr` shows."""
        parts = "" if self.paths == [()] else f"keys={self.paths}, "
        return f"{parts}epsilon={self.epsilon}, clip={self.clip}"

    def _parts(self) -> Iterator[RunningStatistics]:
        for module in self.statistics:
            assert isinstance(module, RunningStatistics)
            yield module

    def _map(
        self, function: Callable[[Tensor, RunningStatistics], Tensor], observation: ObservationT
    ) -> ObservationT:
        nested = isinstance(observation, TensorDictBase)
        result: Any = observation
        if nested:
            result = result.copy()  # a copy holds the same tensors
        for path, statistics in zip(self.paths, self._parts(), strict=True):
            value = result
            if path:
                value = result.get(path, None) if nested else None
            check_shape(value, statistics.shape, _name(path))
            normalized = function(value, statistics)
            if not path:
                return normalized  # type: ignore[return-value]
            result[path] = normalized
        return result  # type: ignore[no-any-return]

    def _normalized(self, value: Tensor, statistics: RunningStatistics) -> Tensor:
        # In float64, as the difference of large numbers has few digits left in float32.
        mean, scale = _placed(statistics, self.epsilon, value)
        return ((value - mean) / scale).clamp(-self.clip, self.clip).float()

    def _denormalized(self, value: Tensor, statistics: RunningStatistics) -> Tensor:
        mean, scale = _placed(statistics, self.epsilon, value)
        return (value * scale + mean).float()


class RewardNormalizer(nn.Module):
    """Rewards in units of the discounted return's deviation: r / sqrt(variance + epsilon), clipped.

    The variance is that of the running return of each row,

        R[t] = r[t]                       an episode's first row
        R[t] = r[t] + gamma * R[t - 1]    any other

    as in OpenAI Baselines and Stable-Baselines3 (`VecNormalize`); details 8 and 9 for continuous
    actions of Huang et al., "The 37 implementation details of proximal policy optimization" (ICLR
    blog track, 2022). No mean is taken off, which would change what is best to do. (Gymnasium's
    `NormalizeReward` leaves what went before out of a terminated episode's last row. As a wrapper
    of a single environment it also carries that row, or all of an episode that is truncated, into
    the next episode. R begins anew after both kinds of ends.)

    An episode that goes on in a later collection goes on here, too. Where rows of it are missing (a
    piece that `min_trajectory_length` left out), R begins anew with the next ones. `forward` takes
    rewards as they were collected; the module's docstring shows the loop. Before the first update
    it only clips.

    Args:
        num_envs: Number of environments, `config.environment.total_envs` of a task.
        gamma: Discount of one step, in [0, 1]; that of the task.
        epsilon: Added to the variance, above 0.
        clip: Largest magnitude of what comes out, above 0; `math.inf` for no limit.

    Attributes:
        statistics: `RunningStatistics` of the running returns, of all processes together.
        running_returns: Those of the open episodes, of this process alone.

    Raises:
        ConfigurationError: An argument breaks its rule.
    """

    def __init__(
        self, num_envs: int, *, gamma: float = 0.99, epsilon: float = 1e-8, clip: float = 10.0
    ) -> None:
        super().__init__()
        problems = list(require_int("num_envs", num_envs, 1))
        if not _is_number(gamma) or not 0 <= gamma <= 1:
            problems.append(f"`gamma` must be a number in [0, 1], got {gamma!r}")
        raise_if_any([*problems, *_settings_problems(epsilon, clip)])
        self.epsilon, self.clip = float(epsilon), float(clip)
        self.statistics = RunningStatistics()
        self.running_returns = RunningReturns(num_envs, float(gamma))

    def forward(self, reward: Tensor) -> Tensor:
        """Normalises rewards of any shape, as float32 of the same; updates nothing."""
        _, scale = _placed(self.statistics, self.epsilon, reward)
        return (reward / scale).clamp(-self.clip, self.clip).float()

    def update(self, trajectories: Trajectories) -> None:
        """Counts the running return of each row, those of all processes together.

        Args:
            trajectories: What was collected: TensorDicts [T], one of them, or `MultiReplaySamples`,
                with the keys ("next", "reward"), ("next", "terminated"), ("next", "truncated"),
                "env_id", "trajectory_id" and "step", each [T].

        Raises:
            ConfigurationError: A key is missing, a shape or the number of an environment is wrong,
                or a reward is not finite; nothing has then been counted.
        """
        pieces = _pieces(trajectories)
        returns = np.zeros(0)
        if pieces:
            columns = (_column(pieces, key, ()) for key in _REWARD_KEYS)
            rows = Rows(*(column.numpy(force=True) for column in columns)).in_order()
            returns = self.running_returns.of(rows)
        # Also without rows: other processes may have some.
        count_rows([self.statistics], [torch.from_numpy(returns)], ["reward"])
        if pieces:
            self.running_returns.keep(rows, returns)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"epsilon={self.epsilon}, clip={self.clip}"


def _placed(statistics: RunningStatistics, epsilon: float, value: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and scale on the device of a value: rows are on the CPU when the task need not be."""
    mean, variance = statistics.mean, statistics.variance
    if mean.device != value.device:
        mean, variance = mean.to(value.device), variance.to(value.device)
    return mean, (variance + epsilon).sqrt()


# ---- rows ----------------------------------------------------------------------------------------

_REWARD_KEYS: tuple[Key, ...] = (
    *(("next", name) for name in ("reward", "terminated", "truncated")),
    *("env_id", "trajectory_id", "step"),
)


def _pieces(trajectories: Trajectories) -> list[TensorDictBase]:
    if isinstance(trajectories, MultiReplaySamples):
        return [trajectories.rows] if len(trajectories) else []
    one = isinstance(trajectories, TensorDictBase)
    pieces: list[Any] = [trajectories] if one else list(trajectories)
    for number, piece in enumerate(pieces):
        name = "trajectories" if one else f"trajectories[{number}]"
        if not isinstance(piece, TensorDictBase):
            got = type(piece).__name__
            raise ConfigurationError(f"`{name}` must be a TensorDict [T], got {got}")
        if piece.batch_dims != 1:
            got = str(list(piece.batch_size))
            raise ConfigurationError(f"`{name}` must have a batch shape [T], got {got}")
    return pieces


def _column(pieces: Sequence[TensorDictBase], key: Key, shape: tuple[int, ...]) -> Tensor:
    """The leaf of all pieces end to end, [sum T, *shape]."""
    parts = [piece.get(key, None) for piece in pieces]
    for number, part in enumerate(parts):
        name = f"trajectories[{number}].get({key!r})"
        if not isinstance(part, Tensor):
            keys = sorted(map(str, pieces[number].keys(True, True)))
            raise ConfigurationError(f"`{name}` must be a tensor, got the keys {keys}")
        if part.shape[1:] != shape:
            wanted = ", ".join(["T", *map(str, shape)])
            got = list(part.shape)
            raise ConfigurationError(f"`{name}` must have the shape [{wanted}], got {got}")
    return torch.cat(parts)


# ---- arguments -----------------------------------------------------------------------------------


def _chosen(leaves: Sequence[Leaf], keys: Sequence[Key] | None) -> list[Leaf]:
    """The leaves at or below the keys; of None, all, which must be Boxes of floats."""
    if keys is None:
        for leaf in leaves:
            if leaf.dtype.kind != "f":
                hint = "name what is to be normalised in `keys`" if leaf.path else "give its shape"
                raise ConfigurationError(
                    f"`{_name(leaf.path)}` must be a Box of floats to be normalised unasked, got"
                    f" {leaf.space}; {hint}"
                )
        return list(leaves)
    if isinstance(keys, str) or not all(isinstance(key, (str, tuple)) for key in keys):
        raise ConfigurationError(f"`keys` must be a list of keys, got {keys!r}")
    known = [leaf.path if len(leaf.path) != 1 else leaf.path[0] for leaf in leaves]
    chosen: list[Leaf] = []
    for key in keys:
        path = (key,) if isinstance(key, str) else key
        below = [leaf for leaf in leaves if path and leaf.path[: len(path)] == path]
        if not below:
            raise ConfigurationError(f"`keys` must be among {known}, got {key!r}")
        chosen += [leaf for leaf in below if leaf not in chosen]
    return chosen


def _name(path: Sequence[str]) -> str:
    return "observation" + "".join(f"[{key!r}]" for key in path)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _settings_problems(epsilon: object, clip: object) -> Iterator[str]:
    for name, value in (("epsilon", epsilon), ("clip", clip)):
        if not _is_number(value) or not value > 0:  # type: ignore[operator]
            yield f"`{name}` must be a number above 0, got {value!r}"
