"""The configuration of a training run: what `Trainer` is given, beside the task's own config."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from gymtask.config import (
    DatasetConfig,
    ReinforcementLearningTaskConfig,
    raise_if_any,
    require_bool,
    require_choice,
    require_config,
    require_int,
    require_number,
    require_seed,
    unknown_attributes,
)

ALLOCATIONS = ("equal", "first_come")
STRATEGIES = ("auto", "ddp")
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


@dataclass
class SamplingConfig:
    """What each epoch collects; `collect_samples` explains the keywords of the same names.

    Attributes:
        num_epoch_samples: Environment transitions an epoch.
        min_batch_size: Environments to wait for before the model acts.
        max_batch_size: Environments that the model acts for at once, at most.
        max_wait_time: Seconds after which it acts for fewer than `min_batch_size`.
        min_trajectory_length: Pieces shorter than this are left out; their rows count.
        max_trajectory_length: Pieces are cut at this length; their episodes go on.
        force_sync: Whether all environments run in this process, whatever the task's config says.
        optimal: Whether to collect greedily.
        allocation: "equal" or "first_come".
        whole_episodes: Whether begun episodes are finished and nothing is cut; `num_epoch_samples`
            is then a lower bound.
        num_warmup_samples: Transitions with random actions that are collected before the first
            epoch, into the buffer of off-policy training.
    """

    num_epoch_samples: int = 2048
    min_batch_size: int = 1
    max_batch_size: int | None = None
    max_wait_time: float | None = None
    min_trajectory_length: int = 1
    max_trajectory_length: int | None = None
    force_sync: bool = False
    optimal: bool = False
    allocation: str = "equal"
    whole_episodes: bool = False
    num_warmup_samples: int = 0


@dataclass
class TrainerConfig:
    """How a task is trained; the limits of a run are in the task's config.

    Attributes:
        sampling: What each epoch collects.
        run_dir: Where everything is written; None makes runs/<name>/<time>, a new one each time.
        learning_rate: Of the Adam that trains a task without `get_optimizers`.
        clip_grad_norm: Largest norm of the gradients of an optimizer; None leaves them as they are.
        accelerator: "auto", "cpu", "gpu", "cuda" or "mps".
        devices: Processes on this machine, each with a device of its own; -1: all devices.
        num_nodes: Machines.
        strategy: "auto", or "ddp" for several processes: each has the task's environments, with
            seeds and ids of their own, and a part of `num_epoch_samples`; each update takes
            `batch_size` windows from each, and the mean of their gradients.
        precision: "32-true", "16-mixed" or "bf16-mixed".
        compile: Whether updates run the model through `torch.compile`.
        accumulate_grad_batches: Batches of an update, whose gradients are averaged.
        seed: Seed of torch, numpy, python and the action noise; None takes the task's `env_seed`.
        log_interval: Epochs from one row of metrics to the next.
        eval_interval: Epochs from one evaluation to the next; None: never.
        num_eval_episodes: Episodes of an evaluation.
        checkpoint_interval: Epochs from one checkpoint to the next; the end of a run writes one,
            too. None: never, not even where a run is told to stop.
        clip_interval: Epochs from one clip to the next; None: never.
        keep_checkpoints: How many of the newest checkpoints are kept, beside the best one, to which
            checkpoints/best leads; None: all. The best is that of the highest mean return: of an
            evaluation, where there are evaluations (one that is the best so far writes a
            checkpoint), else of the last 100 episodes, and until as many have ended the newest.
        target_return: Mean return of an evaluation at which the run stops; None: none.
        checkpoint_replay: Whether checkpoints of off-policy training hold the replay buffer. Only
            the newest one keeps it.
        record_actions: Whether episodes are recorded, so that they can be filmed afterwards: how
            each one began and what was done in it, in episodes/. `gymtask.load_episodes` reads
            them, `gymtask.film` plays one again. Not in native mode.
    """

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    run_dir: str | None = None
    learning_rate: float = 1e-3
    clip_grad_norm: float | None = None
    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str = "32-true"
    compile: bool = False
    accumulate_grad_batches: int = 1
    seed: int | None = None
    log_interval: int = 1
    eval_interval: int | None = None
    num_eval_episodes: int = 10
    checkpoint_interval: int | None = 1
    clip_interval: int | None = None
    keep_checkpoints: int | None = None
    target_return: float | None = None
    checkpoint_replay: bool = True
    record_actions: bool = False


def validate_trainer(config: TrainerConfig) -> None:
    """Checks every field.

    Raises:
        ConfigurationError: Names every field that breaks its rule, with the rule and the value.
    """
    require_config("config", config, TrainerConfig)
    raise_if_any(list(unknown_attributes(config)))
    fields = list(_sampling_fields(config.sampling))
    joint = [] if fields else list(_sampling_joint(config.sampling))
    raise_if_any([*fields, *joint, *_training(config)])


def longest_piece(sampling: SamplingConfig, num_envs: int, total_samples: int) -> int | None:
    """Rows of the longest piece that a collection can give; None where nothing limits it."""
    if sampling.whole_episodes:
        return None
    equal = sampling.allocation == "equal"
    longest = -(-total_samples // num_envs) if equal else total_samples
    cut = sampling.max_trajectory_length
    return longest if cut is None else min(longest, cut)


def shortest_piece(sampling: SamplingConfig, dataset: DatasetConfig) -> int:
    """Rows that a piece must have to be of use.

    It is kept, and in on-policy training it holds a window; in a replay buffer it may be a part of
    a longer trajectory.
    """
    span = 1 if dataset.off_policy else (dataset.num_samples - 1) * dataset.stride + 1
    return max(span, sampling.min_trajectory_length)


def fit_problems(
    sampling: SamplingConfig, task: ReinforcementLearningTaskConfig, num_envs: int
) -> Iterator[str]:
    """Yields what keeps valid settings of a trainer and of a task from working together."""
    if sampling.min_batch_size > num_envs:
        yield (
            f"`sampling.min_batch_size` must be at most the number of environments ({num_envs}), "
            f"got {sampling.min_batch_size}"
        )
    dataset, limit = task.dataset, task.max_samples
    if sampling.num_warmup_samples and not dataset.off_policy:
        yield (
            "`sampling.num_warmup_samples` must be 0 without dataset.off_policy (random actions are"
            f" of use in a replay buffer alone), got {sampling.num_warmup_samples}"
        )
    # The first collection: if that can hold no window, none can.
    total = min(sampling.num_epoch_samples, limit) if limit else sampling.num_epoch_samples
    longest = longest_piece(sampling, num_envs, total)
    needed = shortest_piece(sampling, dataset)
    if longest is not None and longest < needed:
        yield (
            f"no trajectory can hold a window: `dataset.num_samples` ({dataset.num_samples}), "
            f"`dataset.stride` ({dataset.stride}) and `sampling.min_trajectory_length` "
            f"({sampling.min_trajectory_length}) ask for {needed} rows, but the longest piece of "
            f"{total} samples from {num_envs} environments has {longest}"
        )


def _sampling_fields(config: SamplingConfig) -> Iterator[str]:
    for name in ("num_epoch_samples", "min_batch_size", "min_trajectory_length"):
        yield from require_int(f"sampling.{name}", getattr(config, name), 1)
    yield from require_int("sampling.num_warmup_samples", config.num_warmup_samples, 0)
    for name in ("max_batch_size", "max_trajectory_length"):
        yield from _optional_int(f"sampling.{name}", getattr(config, name))
    if config.max_wait_time is not None:
        yield from require_number("sampling.max_wait_time", config.max_wait_time)
    for name in ("force_sync", "optimal", "whole_episodes"):
        yield from require_bool(f"sampling.{name}", getattr(config, name))
    yield from require_choice("sampling.allocation", config.allocation, ALLOCATIONS)


def _sampling_joint(config: SamplingConfig) -> Iterator[str]:
    for low, high in (
        ("min_batch_size", "max_batch_size"),
        ("min_trajectory_length", "max_trajectory_length"),
    ):
        least, most = getattr(config, low), getattr(config, high)
        if most is not None and least > most:
            yield f"`sampling.{low}` must be at most sampling.{high} ({most}), got {least}"
    if config.whole_episodes and config.max_trajectory_length is not None:
        yield (
            "`sampling.max_trajectory_length` must be None with whole_episodes=True (nothing is "
            f"cut), got {config.max_trajectory_length}"
        )


def _training(config: TrainerConfig) -> Iterator[str]:
    path = config.run_dir
    if path is not None and (not isinstance(path, (str, os.PathLike)) or not os.fspath(path)):
        yield f"`run_dir` must be a path or None, got {path!r}"
    yield from require_number("learning_rate", config.learning_rate, positive=True)
    if config.clip_grad_norm is not None:
        yield from require_number("clip_grad_norm", config.clip_grad_norm, positive=True)
    yield from require_choice("accelerator", config.accelerator, ACCELERATORS)
    yield from require_choice("strategy", config.strategy, STRATEGIES)
    yield from require_choice("precision", config.precision, PRECISIONS)
    yield from require_bool("compile", config.compile)
    yield from require_int("accumulate_grad_batches", config.accumulate_grad_batches, 1)
    yield from require_int("num_nodes", config.num_nodes, 1)
    if config.devices != -1:
        yield from require_int("devices", config.devices, 1)
    if config.strategy == "auto" and (config.devices, config.num_nodes) != (1, 1):
        yield (
            '`strategy` must be "ddp" for more than one process, got "auto" with devices='
            f"{config.devices} and num_nodes={config.num_nodes}"
        )
    if config.seed is not None:
        yield from require_seed("seed", config.seed)
    yield from require_int("log_interval", config.log_interval, 1)
    yield from require_int("num_eval_episodes", config.num_eval_episodes, 1)
    for name in ("eval_interval", "checkpoint_interval", "clip_interval", "keep_checkpoints"):
        yield from _optional_int(name, getattr(config, name))
    yield from _target(config)
    for name in ("checkpoint_replay", "record_actions"):
        yield from require_bool(name, getattr(config, name))


def _target(config: TrainerConfig) -> Iterator[str]:
    target = config.target_return
    if target is None:
        return
    if isinstance(target, bool) or not isinstance(target, (int, float)) or math.isnan(target):
        yield f"`target_return` must be a number or None, got {target!r}"
    if config.eval_interval is None:
        yield "`eval_interval` must be set with target_return (evaluations tell), got None"


def _optional_int(name: str, value: object) -> Iterator[str]:
    if value is not None:
        yield from require_int(name, value, 1)
