"""What a checkpoint holds of a run, and how a run takes it up again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gymnasium.envs.registration import EnvSpec
from torch import nn

from gymtask.errors import CheckpointError
from gymtask.maker import EnvironmentMaker
from gymtask.sampling import stream_seed
from gymtask.task import ReinforcementLearningTask, State
from gymtask.training.checkpoint import (
    FORMAT,
    RANK_FILE,
    STATE_FILE,
    module_problems,
    rng_state,
    set_rng_state,
    to_plain,
)
from gymtask.training.config import TrainerConfig
from gymtask.training.updates import Updater
from gymtask.workers.pool import WorkerPool

_NEEDED = frozenset(
    {"name", "model", "task", "optimizers", "schedulers", "state", "recent_returns", "num_envs"}
    | {"num_resumes", "num_evaluations", "num_clips"}
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
        recent: Returns of the last episodes.
        num_resumes: How often the run was resumed.
    """

    config: TrainerConfig
    task: ReinforcementLearningTask[Any, Any]
    model: nn.Module
    updater: Updater
    state: State
    recent: deque[float]
    num_resumes: int = 0

    def take(self, pool: WorkerPool) -> dict[str, dict[str, Any]]:
        """What each file of a checkpoint holds, plain values only.

        Raises:
            CheckpointError: The state of a module, an optimizer or a schedule is no plain value.
        """
        task, updater = self.task, self.updater
        content = {
            "format": FORMAT,
            "name": task.config.name,
            "task_class": f"{type(task).__module__}:{type(task).__qualname__}",
            "model": self.model.state_dict(),
            "task": task.state_dict(),
            "optimizers": {name: o.state_dict() for name, o in updater.optimizers.items()},
            "schedulers": [scheduler.state_dict() for scheduler in updater.schedulers],
            "state": asdict(self.state),
            "recent_returns": list(self.recent),
            "num_envs": pool.num_envs,
            "num_resumes": self.num_resumes,
            "num_evaluations": task.num_evaluations,
            "num_clips": task.num_clips,
            "config": plain_configs(self.config, task),
            "environment": _describe(pool.workers[0].maker),
        }
        rank = {"rng": rng_state(), "pool": pool.state_dict()}
        return {
            STATE_FILE: {name: to_plain(value, name) for name, value in content.items()},
            RANK_FILE: {name: to_plain(value, name) for name, value in rank.items()},
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

        Raises:
            CheckpointError: An optimizer has other groups of parameters than were saved.
        """
        self.model.load_state_dict(saved["model"])
        self.task.load_state_dict(saved["task"])
        for name, optimizer in self.updater.optimizers.items():
            try:
                optimizer.load_state_dict(saved["optimizers"][name])
            except ValueError as error:
                raise CheckpointError(f"optimizer {name!r} is another one: {error}") from error
        for scheduler, state in zip(self.updater.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        for name, value in saved["state"].items():
            setattr(self.state, name, value)
        self.recent.extend(saved["recent_returns"])
        self.num_resumes = saved["num_resumes"] + 1
        self.task.num_evaluations = saved["num_evaluations"]
        self.task.num_clips = saved["num_clips"]

    def restore_rank(self, saved: Mapping[str, Any], pool: WorkerPool) -> None:
        """Takes up the place of a new pool in the run, and the random generators.

        The environments begin new episodes, with seeds that no other part of the run has.
        """
        pool.load_state_dict(saved["pool"])
        env_seed = self.task.config.environment.env_seed
        pool.reset_seeds = [
            stream_seed(env_seed, "resume", index, self.num_resumes)
            for index in range(pool.num_envs)
        ]
        set_rng_state(saved["rng"])


def plain_configs(
    config: TrainerConfig, task: ReinforcementLearningTask[Any, Any]
) -> dict[str, Any]:
    """Both configs as dicts of plain values; what is no such value as text."""
    both = {"task": asdict(task.config), "trainer": asdict(config)}
    return {name: to_plain(value, name, as_text=True) for name, value in both.items()}


def _describe(maker: EnvironmentMaker) -> dict[str, Any]:
    """The id of an environment and its spec as JSON, where it has one that can be written so."""
    spec = None
    if isinstance(maker.env, EnvSpec):
        try:
            spec = maker.env.to_json()
        except (TypeError, ValueError):  # a spec with callables in it
            spec = None
    return {"id": maker.name, "spec": spec}
