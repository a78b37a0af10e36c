"""One training run: what is made for it, its epochs, its limits, and what is saved of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from lightning_fabric import Fabric
from lightning_fabric.loggers import Logger
from torch import Tensor, nn

from gymtask import checkpoint
from gymtask.config import raise_if_any
from gymtask.curve import LearningCurve
from gymtask.environment import require_rgb_array
from gymtask.errors import CollectionInterrupted, ConfigurationError, HookError, WindowError
from gymtask.evaluation import run_evaluation
from gymtask.logs import Progress, Statistics, make_loggers, make_run_dir
from gymtask.replay import MultiReplaySamples
from gymtask.sampling import stream_seed
from gymtask.snapshot import restore, take
from gymtask.stopping import StopRequests
from gymtask.task import ReinforcementLearningTask, State
from gymtask.trainer_config import TrainerConfig, fit_problems, longest_piece, shortest_piece
from gymtask.updates import Updater
from gymtask.workers.pool import WorkerPool

RUNS = Path("runs")
"""Where run directories are made, seen from the directory that the program runs in."""

STOP_TIMEOUT = 3.0
"""Seconds that environments get to close, at most, after a signal."""

logger = logging.getLogger(__name__)


class Run:
    """One call of `Trainer.train`, whose docstring says what happens when.

    Attributes:
        state: Where it stands.
    """

    def __init__(
        self,
        config: TrainerConfig,
        task: ReinforcementLearningTask[Any, Any],
        model: nn.Module,
        requests: StopRequests,
    ) -> None:
        self._config, self._task, self._model, self._requests = config, task, model, requests
        _check_fit(config, task)
        env_seed = task.config.environment.env_seed
        self._seed = env_seed if config.seed is None else config.seed
        checkpoint.seed_generators(self._seed)
        self.state = task.state = State()
        task.num_clips = task.num_evaluations = 0
        fabric = Fabric(accelerator=config.accelerator, devices=1)
        task.to(fabric.device)
        self._device = fabric.device
        self._updater = Updater(fabric, task, model, config.learning_rate, config.clip_grad_norm)
        self._statistics = Statistics()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
