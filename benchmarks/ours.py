"""gymtask's candidates: the same policy and the same kept rows, in a task of a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from alternate import Close, Rollout
from hand import Policy
from tensordict import TensorDict
from torch import Tensor

import gymtask


class Task(gymtask.ReinforcementLearningTask[gymtask.ReinforcementLearningTaskConfig, Policy]):
    """Draws actions with `gymtask.sampling`, and computes log-probabilities once a collection.

    Args:
        config: The task's config.
        environments: One for all, or one for each worker.
        policy: What acts; the hooks after a collection are not given the model.
    """

    def __init__(
        self,
        config: gymtask.ReinforcementLearningTaskConfig,
        environments: Sequence[gymtask.Environment],
        policy: Policy,
    ) -> None:
        super().__init__(config)
        self.environments, self.policy = list(environments), policy

    def get_environment(self) -> gymtask.Environment:
        return self.environments[0]

    def get_environment_workers(
        self, force_sync: bool = False
    ) -> list[gymtask.BaseEnvironmentWorker]:
        workers = super().get_environment_workers(force_sync)
        if len(self.environments) == 1:
            return workers
        pairs = zip(workers, self.environments, strict=True)
        return [replace(worker, maker=environment.maker) for worker, environment in pairs]

    def get_actions(self, model: Policy, states: TensorDict, optimal: bool) -> Tensor | TensorDict:
        output = model.net(states["observation"])
        if model.discrete:
            return gymtask.sampling.categorical(output, states)
        return gymtask.sampling.gaussian(output, model.log_std.exp(), states)

    def finish(self, samples: gymtask.MultiReplaySamples) -> None:
        """Log-probabilities of all rows of a collection, in one pass."""
        rows = samples.to_tensordict()
        with torch.no_grad():
            output = self.policy.net(rows["observation"])
            rows["log_prob"] = self.policy.log_prob(output, rows["action"])

    def run_model(self, model: Policy, batch: TensorDict, state: gymtask.State) -> None:
        """Not used: nothing is learnt here."""

    def compute_loss(
        self, model: Policy, batch: TensorDict, state: gymtask.State, output: Any
    ) -> Tensor:
        return torch.zeros(())


class HandTask(Task):
    """Draws actions and log-probabilities step by step, exactly as the loop by hand does."""

    def get_actions(self, model: Policy, states: TensorDict, optimal: bool) -> Tensor | TensorDict:
        action, log_prob = model.act(states["observation"])
        return TensorDict({"action": action, "log_prob": log_prob}, batch_size=states.batch_size)

    def finish(self, samples: gymtask.MultiReplaySamples) -> None:
        """All is there."""


class HookTask(Task):
    """Computes log-probabilities in a hook, which is given a TensorDict for each trajectory."""

    def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
        observation = torch.cat([each["observation"] for each in trajectories])
        action = torch.cat([each["action"] for each in trajectories])
        with torch.no_grad():
            log_prob = self.policy.log_prob(self.policy.net(observation), action)
        parts = torch.split(log_prob, [len(each) for each in trajectories])
        for trajectory, part in zip(trajectories, parts, strict=True):
            trajectory["log_prob"] = part
        return trajectories

    def finish(self, samples: gymtask.MultiReplaySamples) -> None:
        """All is there."""


class LogProbTask(Task):
    """Computes log-probabilities step by step, where a second forward pass would cost more."""

    def get_actions(self, model: Policy, states: TensorDict, optimal: bool) -> Tensor | TensorDict:
        logits = model.net(states["observation"])
        action = gymtask.sampling.categorical(logits, states)
        kept = {"action": action, "log_prob": model.log_prob(logits, action)}
        return TensorDict(kept, batch_size=states.batch_size)

    def finish(self, samples: gymtask.MultiReplaySamples) -> None:
        """All is there."""


@dataclass(frozen=True)
class Setup:
    """How gymtask runs the environments and asks for rows.

    Attributes:
        mode: The `env_worker_mode`.
        workers: Number of workers.
        kind: The task.
        min_batch_size: Environments that the policy waits for.
        max_batch_size: Environments that it acts for at once.
        allocation: As `collect_samples` takes it.
    """

    mode: str
    workers: int = 1
    kind: type[Task] = Task
    min_batch_size: int = 1
    max_batch_size: int | None = None
    allocation: str = "equal"


def build(
    environments: Sequence[gymtask.Environment],
    policy: Policy,
    num_envs: int,
    num_steps: int,
    setup: Setup,
) -> tuple[Rollout, Close]:
    """Starts the environments; each rollout collects `num_steps` rows of each."""
    torch.manual_seed(0)
    config = gymtask.ReinforcementLearningTaskConfig(
        name="benchmark",
        environment=gymtask.EnvironmentConfig(
            num_env_workers=setup.workers,
            num_envs=num_envs,
            env_worker_mode=setup.mode,
            action_clip=True,
        ),
        dataset=gymtask.DatasetConfig(num_update_steps=1),
    )
    task = setup.kind(config, environments, policy)
    pool = task.get_worker_pool()

    total = num_envs * num_steps

    def rollout() -> int:
        samples = task.collect_samples(
            policy,
            pool,
            total,
            min_batch_size=setup.min_batch_size,
            max_batch_size=setup.max_batch_size,
            allocation=setup.allocation,
            use_tqdm=False,
        )
        task.finish(samples)
        return total

    return rollout, pool.close
