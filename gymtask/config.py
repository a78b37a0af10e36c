"""The configuration of a task: plain dataclasses, checked all at once when a task is built.

A field that is left at `MISSING` must be set. Every rule that is broken is named in one
`ConfigurationError`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Integral
from typing import Any

from gymtask.errors import ConfigurationError

MISSING: Any = "???"
"""Marks a field without a default; the value is the one that OmegaConf and Hydra use too."""

WORKER_MODES = ("sync", "thread", "process", "native")


@dataclass
class EnvironmentConfig:
    """How environments are run.

    Nothing is checked here, so that fields can be set one by one: when a task is built, one
    `ConfigurationError` names every field that breaks its rule, with the rule and the value, and
    every attribute that is no field.

    Attributes:
        num_env_workers: Number of workers; 0 runs the environments in this process.
        env_worker_mode: "sync", "thread", "process" or "native": one VectorEnv that steps all
            environments together, whatever `num_env_workers` says.
        env_seed: Environment i is first reset with `env_seed + i`, and never again with a seed. A
            VectorEnv with one generator for all (native mode, CartPole-v1's own) is reset with
            `env_seed` alone, so that its rows depend on `num_envs`.
        env_cleanup_time: Seconds that workers get to close their environments before they are
            killed.
        max_steps: Largest number of steps of a clip.
        num_envs: Number of environments, split over the workers in sizes that differ by at most
            one; None gives each worker one.
        action_clip: Whether finite float actions outside a Box are clipped on their way to the
            environment. The stored row keeps the policy's own action.
        daemon: Whether worker processes are daemonic; a daemonic process cannot start children
            through `multiprocessing`.
    """

    num_env_workers: int = 1
    env_worker_mode: str = "process"
    env_seed: int = 1337
    env_cleanup_time: float = 5.0
    max_steps: int = 1000
    num_envs: int | None = None
    action_clip: bool = False
    daemon: bool = True

    @property
    def total_envs(self) -> int:
        """Number of environments after defaults are resolved."""
        return max(1, self.num_env_workers) if self.num_envs is None else self.num_envs


@dataclass
class DatasetConfig:
    """Which windows of the collected trajectories a training step sees.

    Attributes:
        num_samples: Window length W, in rows.
        num_update_steps: Training steps after each collection.
        stride: Gap between the rows of a window, in steps; 1 takes consecutive rows.
        replay_buffer_sample_size: Capacity of the buffer of off-policy training, in transitions. It
            has no part in on-policy training, which sees each collection alone.
        replacement: True draws windows uniformly with replacement; False visits every window once
            per pass.
        off_policy: Whether collections join a `ReplayBuffer` that lives across epochs, from which
            windows are drawn.
    """

    num_samples: int = 1
    num_update_steps: int = MISSING
    stride: int = 1
    replay_buffer_sample_size: int = 10000
    replacement: bool = True
    off_policy: bool = False


@dataclass
class DataLoaderConfig:
    """How windows become batches.

    Attributes:
        batch_size: Windows a batch.
        shuffle: Without replacement: whether each pass visits the windows in a new random order
            (True) or in stored order (False). It has no part with replacement.
        num_workers: Loader processes; must be 0, since a batch of windows is one gather.
        pin_memory: Whether batches lie in page-locked memory.
        drop_last: Without replacement: whether a pass leaves out a last batch that is not full.
        timeout: Seconds to wait for a loader process; must be 0 while `num_workers` is 0.
        prefetch_factor: Batches loaded ahead by each loader process; must be None while
            `num_workers` is 0.
        persistent_workers: Whether loader processes outlive a pass; must be False while
            `num_workers` is 0.
        seed: Seed of the order of windows; None takes it from torch's generator.
    """

    batch_size: int = 32
    shuffle: bool = True
    num_workers: int = 0
    pin_memory: bool = False
    drop_last: bool = False
    timeout: float = 0.0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    seed: int | None = None


@dataclass
class ErrorHandlingConfig:
    """What happens when a worker fails.

    Attributes:
        on_worker_failure: "raise" ends the run with an error that names the environment.
    """

    on_worker_failure: str = "raise"


@dataclass
class ReinforcementLearningTaskConfig:
    """Everything a task needs to know.

    The stop conditions are checked after every epoch and every update.

    Attributes:
        max_epochs: Stop after this many epochs.
        max_steps: Stop after this many training steps (updates of the model).
        max_samples: Stop after this many environment transitions.
        max_seconds: Stop after this many seconds, counted over resumed runs.
        train_dl: How windows become training batches.
        valid_dl: Has no part in training on collected data; a value set here is refused.
        test_dl: Has no part in training on collected data; a value set here is refused.
        name: Name of the task, the first part of its run directory.
        errors: What happens when a worker fails.
        environment: How environments are run.
        dataset: Which windows a training step sees.
    """

    max_epochs: int | None = None
    max_steps: int | None = None
    max_samples: int | None = None
    max_seconds: float | None = None
    train_dl: DataLoaderConfig = field(default_factory=DataLoaderConfig)
    valid_dl: DataLoaderConfig = field(default_factory=DataLoaderConfig)
    test_dl: DataLoaderConfig = field(default_factory=DataLoaderConfig)
    name: str = MISSING
    errors: ErrorHandlingConfig = field(default_factory=ErrorHandlingConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)


def raise_if_any(problems: list[str]) -> None:
    """Raises one `ConfigurationError` that lists all `problems`, or nothing when there are none."""
    if problems:
        raise ConfigurationError("\n".join(problems))


def require_int(name: str, value: object, minimum: int) -> Iterator[str]:
    """Yields the broken rule, if any, of a whole number that must be at least `minimum`."""
    # Integral and not int: a count may well be a numpy integer.
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        yield f"`{name}` must be an integer of at least {minimum}, got {value!r}"


def require_seed(name: str, value: object) -> Iterator[str]:
    """Yields the broken rule, if any, of a seed, which torch's generators must take too."""
    problems = list(require_int(name, value, 0))
    yield from problems
    if not problems and int(value) >= 2**63:  # type: ignore[call-overload]
        yield f"`{name}` must be below 2**63, got {value!r}"


def require_number(name: str, value: object, *, positive: bool = False) -> Iterator[str]:
    """Yields the broken rule, if any, of a finite number of at least (`positive`: above) 0."""
    is_number = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    )
    if not is_number or value < 0 or (positive and value == 0):  # type: ignore[operator]
        yield f"`{name}` must be a number {'above' if positive else 'of at least'} 0, got {value!r}"


def require_bool(name: str, value: object) -> Iterator[str]:
    """Yields the broken rule, if any, of a truth value."""
    if not isinstance(value, bool):
        yield f"`{name}` must be True or False, got {value!r}"


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> Iterator[str]:
    """Yields the broken rule, if any, of a value that must be one of `choices`."""
    if value not in choices:
        yield f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}"


def missing_fields(config: object, prefix: str = "") -> Iterator[str]:
    """Yields "name must be set" for every field, also of nested configs, that is `MISSING`."""
    for item in fields(config):  # type: ignore[arg-type]
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from missing_fields(value, f"{prefix}{item.name}.")
        elif isinstance(value, str) and value == MISSING:
            yield f"{prefix}{item.name} must be set"


def unknown_attributes(config: object, prefix: str = "") -> Iterator[str]:
    """Yields every attribute of `config`, and of the configs in it, that is no field: a typo."""
    names = {item.name for item in fields(config)}  # type: ignore[arg-type]
    for name, value in vars(config).items():
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            kind = type(config).__name__
            yield f"`{prefix}{name}` must be a field of {kind}, got {value!r}{hint}"
        elif is_dataclass(value) and not isinstance(value, type):
            yield from unknown_attributes(value, f"{prefix}{name}.")


def require_config(name: str, value: object, kind: type[Any]) -> None:
    """Checks that a config, and each config in it, is of its own class.

    Raises:
        ConfigurationError: It is something else.
    """
    if not isinstance(value, kind):
        raise ConfigurationError(f"`{name}` must be a {kind.__name__}, got {value!r:.80}")
    for item in fields(value):
        made = item.default_factory
        if isinstance(made, type) and is_dataclass(made):
            require_config(f"{name}.{item.name}", getattr(value, item.name), made)


def validate(config: ReinforcementLearningTaskConfig) -> None:
    """Checks every field of a task's config.

    Raises:
        ConfigurationError: Names every field that breaks its rule, with the rule and the value.
    """
    require_config("config", config, ReinforcementLearningTaskConfig)
    raise_if_any(
        [
            *unknown_attributes(config),
            *missing_fields(config),
            *_limits(config),
            *_environment(config.environment),
            *_dataset(config.dataset),
            *_dataloader("train_dl", config.train_dl),
            *_unused("valid_dl", config.valid_dl),
            *_unused("test_dl", config.test_dl),
            *require_choice(
                "errors.on_worker_failure", config.errors.on_worker_failure, ("raise",)
            ),
        ]
    )


def _limits(config: ReinforcementLearningTaskConfig) -> Iterator[str]:
    for name in ("max_epochs", "max_steps", "max_samples"):
        if getattr(config, name) is not None:
            yield from require_int(name, getattr(config, name), 0)
    if config.max_seconds is not None:
        yield from require_number("max_seconds", config.max_seconds)
    name = config.name
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        yield f"`name` must be a non-empty string without '/', got {name!r}"


def _environment(config: EnvironmentConfig) -> Iterator[str]:
    yield from require_int("environment.num_env_workers", config.num_env_workers, 0)
    yield from require_choice("environment.env_worker_mode", config.env_worker_mode, WORKER_MODES)
    yield from require_seed("environment.env_seed", config.env_seed)
    yield from require_number("environment.env_cleanup_time", config.env_cleanup_time)
    yield from require_int("environment.max_steps", config.max_steps, 1)
    yield from require_bool("environment.action_clip", config.action_clip)
    yield from require_bool("environment.daemon", config.daemon)
    if config.num_envs is None:
        return
    problems = list(require_int("environment.num_envs", config.num_envs, 1))
    yield from problems
    if (
        not problems
        and isinstance(config.num_env_workers, int)
        and config.num_envs < config.num_env_workers
    ):
        yield (
            f"`environment.num_envs` must be at least num_env_workers ({config.num_env_workers}), "
            f"got {config.num_envs}"
        )


def _dataset(config: DatasetConfig) -> Iterator[str]:
    yield from require_int("dataset.num_samples", config.num_samples, 1)
    if config.num_update_steps != MISSING:
        yield from require_int("dataset.num_update_steps", config.num_update_steps, 1)
    yield from require_int("dataset.stride", config.stride, 1)
    yield from require_int("dataset.replay_buffer_sample_size", config.replay_buffer_sample_size, 1)
    yield from require_bool("dataset.replacement", config.replacement)
    yield from require_bool("dataset.off_policy", config.off_policy)


def _dataloader(name: str, config: DataLoaderConfig) -> Iterator[str]:
    yield from require_int(f"{name}.batch_size", config.batch_size, 1)
    for flag in ("shuffle", "pin_memory", "drop_last"):
        yield from require_bool(f"{name}.{flag}", getattr(config, flag))
    if config.seed is not None:
        yield from require_seed(f"{name}.seed", config.seed)
    # A batch of windows is one gather from memory; processes that load batches ahead do not exist
    # yet.
    unused = {
        "num_workers": 0,
        "timeout": 0.0,
        "prefetch_factor": None,
        "persistent_workers": False,
    }
    for key, only in unused.items():
        if getattr(config, key) != only:
            yield (
                f"`{name}.{key}` must be {only!r} (batches are gathered in this process), got"
                f" {getattr(config, key)!r}"
            )


def _unused(name: str, config: DataLoaderConfig) -> Iterator[str]:
    default = DataLoaderConfig()
    for item in fields(config):
        value = getattr(config, item.name)
        if value != getattr(default, item.name):
            yield (
                f"`{name}.{item.name}` must be left at its default (training uses train_dl alone),"
                f" got {value!r}"
            )
