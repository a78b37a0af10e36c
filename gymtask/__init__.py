"""Joins Gymnasium's vector environments to PyTorch training.

Names are imported when they are first used, so that a worker process, which needs a few modules
only, does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gymtask import errors as errors
    from gymtask import recurrent as recurrent
    from gymtask import sampling as sampling
    from gymtask import testing as testing
    from gymtask.config import MISSING as MISSING
    from gymtask.config import DataLoaderConfig as DataLoaderConfig
    from gymtask.config import DatasetConfig as DatasetConfig
    from gymtask.config import EnvironmentConfig as EnvironmentConfig
    from gymtask.config import ErrorHandlingConfig as ErrorHandlingConfig
    from gymtask.config import ReinforcementLearningTaskConfig as ReinforcementLearningTaskConfig
    from gymtask.environment import Environment as Environment
    from gymtask.episodes import RecordedEpisode as RecordedEpisode
    from gymtask.episodes import film as film
    from gymtask.errors import ConfigurationError as ConfigurationError
    from gymtask.errors import CutReturnWarning as CutReturnWarning
    from gymtask.errors import GymtaskError as GymtaskError
    from gymtask.moments import RunningStatistics as RunningStatistics
    from gymtask.normalize import ObservationNormalizer as ObservationNormalizer
    from gymtask.normalize import RewardNormalizer as RewardNormalizer
    from gymtask.replay import EpisodeRecord as EpisodeRecord
    from gymtask.replay import MultiReplaySamples as MultiReplaySamples
    from gymtask.replay import Prioritization as Prioritization
    from gymtask.replay import ReplayBuffer as ReplayBuffer
    from gymtask.replay import ReplayDataset as ReplayDataset
    from gymtask.replay import ReplaySamples as ReplaySamples
    from gymtask.returns import discounted_returns as discounted_returns
    from gymtask.returns import generalized_advantage_estimate as generalized_advantage_estimate
    from gymtask.returns import lambda_returns as lambda_returns
    from gymtask.returns import n_step_returns as n_step_returns
    from gymtask.returns import vtrace as vtrace
    from gymtask.task import ReinforcementLearningTask as ReinforcementLearningTask
    from gymtask.task import State as State
    from gymtask.trainer import SamplingConfig as SamplingConfig
    from gymtask.trainer import Trainer as Trainer
    from gymtask.trainer import TrainerConfig as TrainerConfig
    from gymtask.trainer import evaluate as evaluate
    from gymtask.trainer import load as load
    from gymtask.trainer import load_episodes as load_episodes
    from gymtask.vector.make import make_vec as make_vec
    from gymtask.vector.process import ProcessVectorEnv as ProcessVectorEnv
    from gymtask.video import write_video as write_video
    from gymtask.workers.pool import WorkerPool as WorkerPool
    from gymtask.workers.worker import BaseEnvironmentWorker as BaseEnvironmentWorker
    from gymtask.workers.worker import Steps as Steps
    from gymtask.wrappers import InfoToObservation as InfoToObservation

    __version__: str

_HOMES = {
    "config": (
        "MISSING",
        "DataLoaderConfig",
        "DatasetConfig",
        "EnvironmentConfig",
        "ErrorHandlingConfig",
        "ReinforcementLearningTaskConfig",
    ),
    "environment": ("Environment",),
    "episodes": ("RecordedEpisode", "film"),
    "errors": ("ConfigurationError", "CutReturnWarning", "GymtaskError"),
    "moments": ("RunningStatistics",),
    "normalize": ("ObservationNormalizer", "RewardNormalizer"),
    "replay": (
        "EpisodeRecord",
        "MultiReplaySamples",
        "Prioritization",
        "ReplayBuffer",
        "ReplayDataset",
        "ReplaySamples",
    ),
    "returns": (
        "discounted_returns",
        "generalized_advantage_estimate",
        "lambda_returns",
        "n_step_returns",
        "vtrace",
    ),
    "task": ("ReinforcementLearningTask", "State"),
    "trainer": ("SamplingConfig", "Trainer", "TrainerConfig", "evaluate", "load", "load_episodes"),
    "vector.make": ("make_vec",),
    "vector.process": ("ProcessVectorEnv",),
    "video": ("write_video",),
    "workers.pool": ("WorkerPool",),
    "workers.worker": ("BaseEnvironmentWorker", "Steps"),
    "wrappers": ("InfoToObservation",),
}
_MODULES = ("errors", "recurrent", "sampling", "testing")
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "MISSING",
    "BaseEnvironmentWorker",
    "ConfigurationError",
    "CutReturnWarning",
    "DataLoaderConfig",
    "DatasetConfig",
    "Environment",
    "EnvironmentConfig",
    "EpisodeRecord",
    "ErrorHandlingConfig",
    "GymtaskError",
    "InfoToObservation",
    "MultiReplaySamples",
    "ObservationNormalizer",
    "Prioritization",
    "ProcessVectorEnv",
    "RecordedEpisode",
    "ReinforcementLearningTask",
    "ReinforcementLearningTaskConfig",
    "ReplayBuffer",
    "ReplayDataset",
    "ReplaySamples",
    "RewardNormalizer",
    "RunningStatistics",
    "SamplingConfig",
    "State",
    "Steps",
    "Trainer",
    "TrainerConfig",
    "WorkerPool",
    "discounted_returns",
    "errors",
    "evaluate",
    "film",
    "generalized_advantage_estimate",
    "lambda_returns",
    "load",
    "load_episodes",
    "make_vec",
    "n_step_returns",
    "recurrent",
    "sampling",
    "testing",
    "vtrace",
    "write_video",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"gymtask.{name}")
    if name == "__version__":
        value = importlib.import_module("importlib.metadata").version("gymtask")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f"gymtask.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'gymtask' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
