"""What a run is made with, checked before anything starts."""

from __future__ import annotations

import logging
from typing import Any

from lightning_fabric import Fabric

from gymtask.acting import overrides
from gymtask.config import raise_if_any
from gymtask.environment import Environment, require_rgb_array
from gymtask.errors import ConfigurationError
from gymtask.task import ReinforcementLearningTask
from gymtask.training.config import TrainerConfig, fit_problems

logger = logging.getLogger(__name__)


def check_fit(config: TrainerConfig, task: ReinforcementLearningTask[Any, Any]) -> int:
    """Checks that trainer and task work together, and returns the environments of a process.

    Raises:
        ConfigurationError: They do not; all reasons are named.
    """
    workers = task.get_environment_workers(config.sampling.force_sync)
    num_envs = sum(len(worker.env_ids) for worker in workers)
    raise_if_any(list(fit_problems(config.sampling, task.config, num_envs)))
    mode = task.config.environment.env_worker_mode
    if config.record_actions and mode == "native" and not config.sampling.force_sync:
        raise ConfigurationError(
            "`record_actions` must be False in native mode, as a VectorEnv cannot begin one of its"
            " episodes again, got True; use another env_worker_mode"
        )
    if overrides(task, "get_replay_buffer") and not task.config.dataset.off_policy:
        logger.warning(
            "get_replay_buffer() of %s has no part in training, as dataset.off_policy is False",
            type(task).__name__,
        )
    if config.clip_interval is not None:
        maker = task.get_environment_cached().maker
        with Environment.from_maker(maker.with_render_mode("rgb_array")) as environment:
            require_rgb_array(environment.env, maker)
            environment.reset()
            environment.render()  # without a display or driver this fails, now and not in an hour
    return num_envs


def make_fabric(config: TrainerConfig) -> Fabric:
    """What knows the devices; starts the other processes, where there are to be several.

    Raises:
        ConfigurationError: This machine has no such devices.
    """
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=config.devices,
            num_nodes=config.num_nodes,
            strategy=config.strategy,
            precision=config.precision,  # type: ignore[arg-type]
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            "`accelerator`, `devices` and `precision` must be such as this machine has, got"
            f" {config.accelerator!r}, {config.devices} and {config.precision!r}: {error}"
        ) from error
    fabric.launch()
    return fabric
