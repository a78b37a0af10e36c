"""`Trainer`: collects, trains, logs, evaluates, films and saves until a limit is reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.logger import Logger
from torch import nn

from gymtask.errors import ConfigurationError
from gymtask.task import ReinforcementLearningTask, State
from gymtask.training.config import SamplingConfig, TrainerConfig, validate_trainer
from gymtask.training.evaluation import evaluate
from gymtask.training.loading import load
from gymtask.training.recording import load_episodes
from gymtask.training.run import Run
from gymtask.training.stopping import StopRequests

__all__ = ["SamplingConfig", "Trainer", "TrainerConfig", "evaluate", "load", "load_episodes"]


class Trainer:
    """Trains a model on a task, epoch by epoch, until a limit is reached.

    It reads `Trainer(TrainerConfig(learning_rate=3e-4)).train(task, model)`.

    Each epoch is, in this order (state.phase on the left)::

        collect  task.on_epoch_start(model, state)
                 samples = task.collect_samples(model, pool, num_epoch_samples, ...)
                     get_actions, get_values, postprocess_trajectory, postprocess_trajectories
        train    for batch in task.build_rl_dataset(samples):    # again, where it ends too early
                     output = task.run_model(module, batch, state)
                     loss = task.compute_loss(module, batch, state, output)
                     backward, clip, step of the optimizers, step of the schedules
                     state.num_steps and state.num_epoch_steps grow by one
                     task.on_update_end(model, state)
                     if task.epoch_is_over(state): break
                 state.num_epochs grows by one
                 task.on_epoch_end(model, state)
        eval     evaluation, where one is due; its results stand in the epoch's row of metrics
                 row of metrics, clip, checkpoint, where they are due

    With `dataset.off_policy` the samples join a replay buffer, and the batches are drawn from all
    that it holds. Before the first epoch it is filled with `sampling.num_warmup_samples` rows of
    random actions::

        collect  task.replay_buffer = task.get_replay_buffer()
                 samples = task.collect_samples(..., random_actions=True)
                 replay_buffer.extend(samples)
                 each epoch: samples as above; replay_buffer.extend(samples)
        train    for batch in task.build_rl_dataset(replay_buffer): as above

    Gradient steps for each transition are `dataset.num_update_steps` / `num_epoch_samples`. Where
    epochs are short, set the intervals of logging and checkpoints accordingly: they are in epochs.

    `model` is the bare module, `module` Fabric's wrapper around it, where there is anything for it
    to do (several processes, mixed precision), else the same. It is in train mode, which is set
    once at the start, except while it acts.

    The limits are those of the task's config; a run without any goes on until it is told to stop.

    - max_epochs, max_samples and the trainer's own target_return are looked at between two epochs.
      The last collection is shortened so that num_samples does not exceed max_samples (with
      `whole_episodes` it may). What is then left to collect may be too little for a window: such a
      rest is not collected, and the run stops below max_samples; where it was collected and yet
      holds none, it is not trained on.
    - max_steps and max_seconds also end an epoch between two updates, and max_seconds a collection
      and an evaluation between two steps.
    - Ctrl-C and SIGTERM do what a passed max_seconds does; a second one interrupts at once.

    A stop saves the moment's model, optimizers, counters and random generators, and returns. An
    epoch that it ends after an update counts as an epoch; rows that were collected and not trained
    on count as samples and are given up. A resumed run goes on with the next epoch.

    A run that is resumed from a checkpoint written between epochs goes on as the unbroken one would
    have, bit for bit where training is repeatable: the replay buffer is in the checkpoint, and open
    episodes are played again, from how their random generators stood when they began. Where one
    does not come to the same observation and return, or was in the middle of a collection, and in
    native mode, environments begin new episodes, whose seeds come from (env_seed, "resume",
    environment, number of resumes); a warning names them.

    With `strategy="ddp"` the program is a script, which Fabric starts once for each device, or
    torchrun. All processes call `train`; the first one evaluates, films, and writes logs and
    state.pt. Hooks run in each of them. Gradients, also those of the task's own parameters, are
    averaged over the processes before they are clipped.

    `train` seeds the global random generators of torch, numpy and Python. Training is repeatable
    from its seed, the model's first parameters apart: they are the caller's. In thread and process
    mode that takes `min_batch_size` at the number of environments: a network's output for a row
    depends, in its last bits, on how many rows are computed at once.

    Args:
        config: How to train; None takes all defaults.
        loggers: Lightning Fabric loggers that get each row of metrics too: its own, W&B's
            `wandb.integration.lightning.fabric.WandbLogger`, or a
            `lightning_fabric.loggers.logger.Logger` of your own.

    Attributes:
        config: As given; likewise `loggers`.
        run_dir: Where the last run wrote: config.yaml, metrics.csv, TensorBoard events,
            learning_curve.png, checkpoints/, clips/, episodes/.
        stopped_by: What ended it: "max_epochs", "max_steps", "max_samples", "max_seconds",
            "target_return", "SIGINT" or "SIGTERM".
        rank: Number of this process among those of the last run, from 0. What comes after training,
            such as an evaluation, is best left to the first one.

    Raises:
        ConfigurationError: Fields break their rules; all of them are named.
    """

    def __init__(
        self, config: TrainerConfig | None = None, *, loggers: Sequence[Logger] = ()
    ) -> None:
        self.config = TrainerConfig() if config is None else config
        validate_trainer(self.config)
        self.loggers = list(loggers)
        wrong = [each for each in self.loggers if not isinstance(each, Logger)]
        if wrong:
            raise ConfigurationError(
                "`loggers` must be Lightning Fabric loggers (lightning_fabric.loggers.Logger), got"
                f" {wrong[0]!r:.80}"
            )
        self.run_dir: Path | None = None
        self.stopped_by: str | None = None
        self.rank = 0

    def train(
        self,
        task: ReinforcementLearningTask[Any, Any],
        model: nn.Module,
        *,
        resume: str | Path | None = None,
    ) -> State:
        """Trains until a limit is reached, or until told to stop.

        Args:
            task: Is moved to the device, as the model is; its `state` is that of the run.
            model: A module.
            resume: What to go on from: a checkpoint folder, a run directory (its newest
                checkpoint), or "auto": the newest run of this task in runs/<name>, or `run_dir`
                where it is set; a new run where there is none. The run goes on in its own
                directory, with the limits and settings of the present configs; learning rates
                and the like are in the checkpoint, as parts of the optimizers.

        Returns:
            Where the run stands.

        Raises:
            ConfigurationError: The settings do not fit the task; nothing was started.
            CheckpointError: There is nothing to resume, or it belongs to another task or model.
            HookError: A hook returned something that its contract does not allow, a loss that is
                not finite for example.
            WindowError: No collected trajectory is long enough for a window.
        """
        if not isinstance(task, ReinforcementLearningTask) or not isinstance(model, nn.Module):
            raise ConfigurationError(
                "`task` and `model` must be a ReinforcementLearningTask and a torch.nn.Module, "
                f"got {type(task).__name__} and {type(model).__name__}"
            )
        with (
            StopRequests() as requests,
            Run(self.config, task, model, requests, self.loggers) as run,
        ):
            self.rank = run.rank
            self.run_dir = run.start(resume)
            self.stopped_by = run.train()
        return run.state
