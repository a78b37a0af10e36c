"""What a checkpoint holds of a run, and how a run takes it up again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec
from torch import nn

from gymtask.errors import CheckpointError
from gymtask.maker import EnvironmentMaker
from gymtask.resuming import open_episodes, take_up_episodes
from gymtask.sampling import stream_seed
from gymtask.task import ReinforcementLearningTask, State
from gymtask.training.checkpoint import (
    FORMAT,
    PLAIN,
    STATE_FILE,
    module_problems,
    rank_file,
    rng_state,
    set_rng_state,
    to_arrays,
    to_plain,
)
from gymtask.training.config import TrainerConfig
from gymtask.training.logs import Statistics
from gymtask.training.ranks import Ranks
from gymtask.training.updates import Updater
from gymtask.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

_NEEDED = frozenset(
    {"name", "model", "task", "optimizers", "schedulers", "state", "statistics", "logged"}
    | {"num_envs", "num_ranks"}
    | {"num_resumes", "num_evaluations", "num_clips", "best", "last_evaluation"}
)


@dataclass
class Snapshot:
    """The parts of a run that go into a checkpoint, and come out of it.

    Attributes:
        config: Of the trainer.
        task: With its counts of clips and evaluations.
        model: The bare one.
        updater: Has the optimizers and schedules.
        state: The counters.
        statistics: What the next row of metrics will tell of.
        ranks: The processes of the run.
        num_resumes: How often the run was resumed.
        best: Score and name of the best checkpoint so far, this one included; None where there is
            none.
        last_evaluation: Mean return of the last evaluation; None before there was one.
    """

    config: TrainerConfig
    task: ReinforcementLearningTask[Any, Any]
    model: nn.Module
    updater: Updater
    state: State
    statistics: Statistics
    ranks: Ranks
    num_resumes: int = 0
    best: tuple[float, str] | None = None
    last_evaluation: float | None = None

    def take(self, pool: WorkerPool) -> dict[str, dict[str, Any]]:
        """What each file of a checkpoint that this process writes holds, plain values only.

        Raises:
            CheckpointError: The state of a module, an optimizer or a schedule is no plain value.
        """
        rank = {"rng": rng_state(), "pool": pool.state_dict(), "episodes": open_episodes(pool)}
        files = {rank_file(self.ranks.rank): rank}
        if self.ranks.is_first:
            files[STATE_FILE] = self._content(pool)
        else:  # its buffers may tell of environments of its own
            rank["task"] = self.task.state_dict()
        return {
            file: {name: to_plain(value, name) for name, value in values.items()}
            for file, values in files.items()
        }

    def _content(self, pool: WorkerPool) -> dict[str, Any]:
        """What all processes have alike."""
        task, updater = self.task, self.updater
        return {
            "format": FORMAT,
            "name": task.config.name,
            "task_class": _import_path(type(task)),
            "config_class": _import_path(type(task.config)),
            "model": self.model.state_dict(),
            "task": task.state_dict(),
            "optimizers": {name: o.state_dict() for name, o in updater.optimizers.items()},
            "schedulers": [scheduler.state_dict() for scheduler in updater.schedulers],
            "state": asdict(self.state),
            "statistics": self.statistics.state_dict(),
            "logged": task.logged.state_dict(),
            "num_envs": pool.num_envs,
            "num_ranks": self.ranks.size,
            "num_resumes": self.num_resumes,
            "best": self.best,
            "last_evaluation": self.last_evaluation,
            "config_texts": list(_texts(task.config, _default(task.config), "config")),
            "num_evaluations": task.num_evaluations,
            "num_clips": task.num_clips,
            "config": plain_configs(self.config, task),
            "environment": describe_environment(pool.workers[0].maker),
        }

    def check(self, saved: Mapping[str, Any], num_envs: int) -> None:
        """Compares what is there with what was saved.

        Raises:
            CheckpointError: Names everything that differs.
        """
        missing = sorted(_NEEDED - saved.keys())
        if missing:
            raise CheckpointError(
                f"a checkpoint must hold {sorted(_NEEDED)}, got none of {missing}"
            )
        problems = list(self._problems(saved, num_envs))
        if problems:
            raise CheckpointError("the checkpoint is of another run:\n" + "\n".join(problems))

    def _problems(self, saved: Mapping[str, Any], num_envs: int) -> Iterator[str]:
        for what, was, now in (
            ("`name` of the task", saved["name"], self.task.config.name),
            ("the number of environments", saved["num_envs"], num_envs),
            ("the number of processes", saved["num_ranks"], self.ranks.size),
            ("the optimizers", sorted(saved["optimizers"]), sorted(self.updater.optimizers)),
            (
                "the number of learning rate schedules",
                len(saved["schedulers"]),
                len(self.updater.schedulers),
            ),
        ):
            if was != now:
                yield f"{what} is {was!r} in the checkpoint, got {now!r}"
        yield from module_problems("model", self.model, saved["model"])
        yield from module_problems("task", self.task, saved["task"])

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes up all parts but the pool and the random generators.

        A warning tells where a task of another class goes on, and where another learning rate is
        asked for than the optimizer goes on with.

        Raises:
            CheckpointError: An optimizer has other groups of parameters than were saved.
        """
        kind = _import_path(type(self.task))
        if kind.split(":")[1] != saved["task_class"].split(":")[1]:
            logger.warning("%s goes on with a run of %s", kind, saved["task_class"])
        self.model.load_state_dict(saved["model"])
        self.task.load_state_dict(saved["task"])
        for name, optimizer in self.updater.optimizers.items():
            try:
                optimizer.load_state_dict(saved["optimizers"][name])
            except ValueError as error:
                raise CheckpointError(f"optimizer {name!r} is another one: {error}") from error
        self._compare_learning_rates(saved)
        for scheduler, state in zip(self.updater.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        for name, value in saved["state"].items():
            setattr(self.state, name, value)
        self.statistics.load_state_dict(saved["statistics"])
        self.task.logged.load_state_dict(saved["logged"])
        self.num_resumes = saved["num_resumes"] + 1
        self.best, self.last_evaluation = saved["best"], saved["last_evaluation"]
        self.task.num_evaluations = saved["num_evaluations"]
        self.task.num_clips = saved["num_clips"]

    def _compare_learning_rates(self, saved: Mapping[str, Any]) -> None:
        if not self.updater.has_own_adam or not self.ranks.is_first:
            return
        (optimizer,) = saved["optimizers"].values()
        group, now = optimizer["param_groups"][0], self.config.learning_rate
        was = group.get("initial_lr", group["lr"])  # which a schedule began with
        if was != now:
            logger.warning(
                "`learning_rate` is %s in the checkpoint, which the run goes on with, got %s; it is"
                " a part of the optimizer, which get_lr_schedulers(optimizers) can change",
                was,
                now,
            )

    def restore_rank(self, saved: Mapping[str, Any], pool: WorkerPool) -> None:
        """Takes up the place of a new pool in the run, and the random generators.

        Open episodes are played again. Where that is not possible, environments begin new ones,
        with seeds that no other part of the run has.
        """
        if "task" in saved:
            self.task.load_state_dict(saved["task"])
        pool.load_state_dict(saved["pool"])
        env_seed = self.task.config.environment.env_seed
        seeds = [
            stream_seed(env_seed, "resume", pool.first_env + index, self.num_resumes)
            for index in range(pool.num_envs)
        ]
        episodes = saved.get("episodes")
        if episodes is None or not pool.records_starts:
            pool.reset_seeds = seeds
        elif others := take_up_episodes(self.task, pool, to_arrays(episodes), seeds):
            logger.warning(
                "%s does not repeat its episodes from the state of its random generators: the"
                " environments %s begin new ones",
                pool.workers[0].maker.name,
                others,
            )
        set_rng_state(saved["rng"])


def plain_configs(
    config: TrainerConfig, task: ReinforcementLearningTask[Any, Any]
) -> dict[str, Any]:
    """Both configs as dicts of plain values; what is no such value as text."""
    both = {"task": asdict(task.config), "trainer": asdict(config)}
    return {name: to_plain(value, name, as_text=True) for name, value in both.items()}


def _default(config: Any) -> Any:
    """What `load` begins with; where it cannot make one it says so, and this is the config."""
    try:
        return type(config)()
    except Exception:
        return config


def _texts(value: Any, default: Any, name: str) -> Iterator[str]:
    """Which parts of a config are saved as text, or as dicts, and cannot be made from that.

    Args:
        value: What is saved.
        default: What stands in its place before; a dataclass is made as one of that class.
        name: Of the value.
    """
    if is_dataclass(value) and not isinstance(value, type):
        if type(value) is not type(default):
            yield name
            return
        for item in fields(value):
            mine, others = (getattr(each, item.name) for each in (value, default))
            yield from _texts(mine, others, f"{name}.{item.name}")
    elif isinstance(value, Mapping):
        if not all(type(key) in PLAIN for key in value):
            yield name
        yield from (text for key in value for text in _texts(value[key], None, f"{name}.{key}"))
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):  # of a NamedTuple
        yield from (text for place in value for text in _texts(place, None, name))
    elif type(value.item() if isinstance(value, np.generic) else value) not in PLAIN:
        yield name


def _import_path(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def describe_environment(maker: EnvironmentMaker) -> dict[str, Any]:
    """The id of an environment and its spec as JSON, where it has one that can be written so."""
    spec = None
    if isinstance(maker.env, EnvSpec):
        try:
            spec = maker.env.to_json()
        except (TypeError, ValueError):  # a spec with callables in it
            spec = None
    return {"id": maker.name, "spec": spec}
