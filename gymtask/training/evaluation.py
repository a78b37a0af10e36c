"""Evaluation: a fixed number of episodes, the same number from each environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from gymtask import collector
from gymtask.config import raise_if_any, require_bool, require_int
from gymtask.errors import ConfigurationError
from gymtask.replay import EpisodeRecord
from gymtask.sampling import stream_seed
from gymtask.task import ReinforcementLearningTask
from gymtask.training.checkpoint import preserved_rng
from gymtask.workers.pool import WorkerPool
from gymtask.workers.worker import BaseEnvironmentWorker, make_workers

ModelT = TypeVar("ModelT")


def evaluate(
    task: ReinforcementLearningTask[Any, ModelT],
    model: ModelT,
    *,
    num_episodes: int = 10,
    num_envs: int | None = None,
    optimal: bool = True,
) -> list[EpisodeRecord]:
    """Plays episodes in environments of its own and tells how they went.

    How many episodes each environment plays is settled beforehand, in shares that differ by at most
    one: to take the first ones that finish would favour the short ones. Each evaluation of a task
    has seeds of its own, (env_seed, "eval", environment, number of the evaluation), for the
    environments as for the noise of `gymtask.sampling`. It leaves no trace in training: the global
    random generators, `task.state` and the modes of model and task are afterwards what they were
    before.

    Statistics of Gymnasium's own NormalizeObservation belong to an environment and begin anew here;
    `gymtask.ObservationNormalizer` belongs to the task and shows the policy what it has learnt on.
    An environment without a time limit, and a policy that never comes to an end, have no end here
    either: give `Environment(max_episode_steps=...)`.

    Args:
        task: Gives environments and acts.
        model: Is given to `get_actions` in eval mode, without gradients.
        num_episodes: Number of episodes.
        num_envs: Environments to play them in, at most `num_episodes`; None: as many as the task's
            config says. Up to that number they are the task's own workers' first ones.
        optimal: Whether to act greedily.

    Returns:
        A record of each episode, ordered by environment and time.

    Raises:
        ConfigurationError: An argument breaks its rule.
    """
    if not isinstance(task, ReinforcementLearningTask):
        raise ConfigurationError(f"`task` must be a ReinforcementLearningTask, got {task!r:.80}")
    problems = [*require_int("num_episodes", num_episodes, 1), *require_bool("optimal", optimal)]
    if num_envs is not None:
        problems += require_int("num_envs", num_envs, 1)
    raise_if_any(problems)
    return run_evaluation(task, model, num_episodes, num_envs, optimal)


def run_evaluation(
    task: ReinforcementLearningTask[Any, ModelT],
    model: ModelT,
    num_episodes: int,
    num_envs: int | None = None,
    optimal: bool = True,
    *,
    force_sync: bool = False,
    noise_seed: int | None = None,
    interrupt: Callable[[], bool] | None = None,
) -> list[EpisodeRecord]:
    """Does what `evaluate` says.

    Args:
        task: As in `evaluate`.
        model: As in `evaluate`.
        num_episodes: As in `evaluate`.
        num_envs: As in `evaluate`.
        optimal: As in `evaluate`.
        force_sync: Whether all environments run in this process.
        noise_seed: Seed of the action noise; None takes the task's `env_seed`.
        interrupt: Asked between steps; True ends the evaluation.

    Raises:
        CollectionInterrupted: `interrupt` answered True.
    """
    env_seed, count = task.config.environment.env_seed, task.num_evaluations
    task.num_evaluations += 1
    workers = _workers(task, num_episodes, num_envs, force_sync)
    with preserved_rng(), WorkerPool.from_workers(workers) as pool:
        n = pool.num_envs
        pool.reset_seeds = [stream_seed(env_seed, "eval", index, count) for index in range(n)]
        pool.noise_key = (env_seed if noise_seed is None else noise_seed, "eval", count)
        pool.interrupt = interrupt
        # Policies that draw from torch's own generator get a stream of this evaluation, too.
        torch.manual_seed(stream_seed(env_seed, "eval", n, count))
        shares = [num_episodes // n + (index < num_episodes % n) for index in range(n)]
        phase, task.state.phase = task.state.phase, "eval"
        try:
            return collector.run_episodes(task, model, pool, shares, optimal=optimal)
        finally:
            task.state.phase = phase


def _workers(
    task: ReinforcementLearningTask[Any, Any],
    num_episodes: int,
    num_envs: int | None,
    force_sync: bool,
) -> list[BaseEnvironmentWorker]:
    """The first of the task's own workers, which it may have made different; more are all alike."""
    workers = task.get_environment_workers(force_sync)
    total = sum(len(worker.env_ids) for worker in workers)
    wanted = min(num_episodes, total if num_envs is None else num_envs)
    if wanted > total:
        config = replace(task.config.environment, num_envs=wanted)
        maker = task.get_environment_cached().maker
        return make_workers(maker, config, force_sync=force_sync)
    kept = [
        replace(worker, env_ids=tuple(index for index in worker.env_ids if index < wanted))
        for worker in workers
    ]
    return [worker for worker in kept if worker.env_ids]
