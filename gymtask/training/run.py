"""One training run: what is made for it, its epochs, its limits, and what is saved of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from lightning_fabric import Fabric
from torch import Tensor, nn

from gymtask.config import raise_if_any
from gymtask.environment import Environment, require_rgb_array
from gymtask.errors import CollectionInterrupted, ConfigurationError, HookError, WindowError
from gymtask.replay import MultiReplaySamples
from gymtask.task import ReinforcementLearningTask, State
from gymtask.training import checkpoint
from gymtask.training.config import TrainerConfig, fit_problems, longest_piece, shortest_piece
from gymtask.training.curve import LearningCurve
from gymtask.training.evaluation import run_evaluation
from gymtask.training.logs import Progress, Statistics, make_loggers
from gymtask.training.off_policy import Replay, drop_older
from gymtask.training.run_dir import find_start, make_run_dir, run_dir_of
from gymtask.training.snapshot import Snapshot, plain_configs
from gymtask.training.stopping import StopRequests
from gymtask.training.updates import Updater

STOP_TIMEOUT = 2.0
"""Seconds that environments get to close, at most, after a signal."""

logger = logging.getLogger(__name__)


class Run:
    """One call of `Trainer.train`, whose docstring says what happens when.

    It is entered, started once, and trained once; leaving it closes the environments and the logs.

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
        self._num_envs = _check_fit(config, task)
        env_seed = task.config.environment.env_seed
        self._seed = env_seed if config.seed is None else config.seed
        checkpoint.seed_generators(self._seed)
        self.state = task.state = State()
        task.num_clips = task.num_evaluations = 0
        fabric = self._fabric = _make_fabric(config.accelerator)
        task.to(fabric.device)
        self._updater = Updater(fabric, task, model, config.learning_rate, config.clip_grad_norm)
        self._statistics = Statistics()
        self._snapshot = Snapshot(
            config, task, model, self._updater, self.state, self._statistics.recent
        )
        self._replay: Replay | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    # ---- start and end ---------------------------------------------------------------------------

    def start(self, resume: str | Path | None) -> Path:
        """Starts the environments, in a new run or where a checkpoint stands.

        Returns:
            The run directory.
        """
        name = self._task.config.name
        folder = find_start(resume, name, self._config.run_dir)
        saved = None if folder is None else checkpoint.load_checkpoint(folder)
        if saved is not None:
            self._snapshot.check(saved[0], self._num_envs)
            self._snapshot.restore(saved[0])
        if self._task.config.dataset.off_policy:
            self._start_replay(folder)
        self._start_pool()
        if folder is None:
            self._run_dir = make_run_dir(self._config.run_dir, name)
        else:
            self._run_dir = run_dir_of(folder)
        checkpoint.tidy(self._run_dir, folder)
        self._start_logs()
        self._model.train()
        self._task.train()
        if saved is not None:
            logger.info("going on from %s", folder)
            self._snapshot.restore_rank(saved[1], self._pool)
        return self._run_dir

    def _start_replay(self, folder: Path | None) -> None:
        sampling = self._config.sampling
        longest = longest_piece(sampling, self._num_envs, sampling.num_epoch_samples)
        self._replay = Replay(self._task, sampling.num_warmup_samples, longest)
        if folder is not None:
            self._replay.restore(folder)

    def _start_pool(self) -> None:
        self._pool = self._task.get_worker_pool(force_sync=self._config.sampling.force_sync)
        self._stack.callback(self._close_pool)
        self._pool.noise_key = (self._seed, "noise", 0)
        self._pool.interrupt = self._is_called_off

    def _close_pool(self) -> None:
        patience = self._pool.cleanup_time
        self._pool.close(min(patience, STOP_TIMEOUT) if self._requests.signal else patience)

    def _start_logs(self) -> None:
        text = yaml.safe_dump(plain_configs(self._config, self._task), sort_keys=False)
        (self._run_dir / "config.yaml").write_text(text, encoding="utf-8")
        self._loggers = make_loggers(self._run_dir, self.state)
        for log in self._loggers:
            self._stack.callback(log.finalize, "finished")
        self._curve = LearningCurve(self._run_dir)
        self._progress = Progress(self._task.config, self.state)
        self._stack.callback(self._progress.close)

    def train(self) -> str:
        """Runs epochs until there is a reason to stop, saves, and returns the reason."""
        limit = self._task.config.max_seconds
        # What the clock would have shown when this run, resumed parts included, began.
        self._began = time.monotonic() - self.state.elapsed_time
        self._deadline = math.inf if limit is None else self._began + limit
        self._num_samples_before = self.state.num_samples
        self._logged = self.state.num_epochs
        self._warm_up()
        while (reason := self._reason_to_stop()) is None:
            self._epoch()
        logger.info("stopping: %s", reason)
        self._count()
        self._progress.show(self.state, self._statistics.recent)
        if self._logged != self.state.num_epochs:
            self._log()
        if self._config.checkpoint_interval is not None:
            self._save()
        if self._curve.drawn or not self._requests.signal:  # the first drawing may take seconds
            self._curve.draw(force=True)
        return reason

    # ---- when to stop ----------------------------------------------------------------------------

    def _is_called_off(self) -> bool:
        """Whether to stop at the next step; asked between any two steps and updates."""
        return self._requests.signal is not None or time.monotonic() >= self._deadline

    def _reason_to_stop_epoch(self) -> str | None:
        if self._is_called_off():
            return self._requests.signal or "max_seconds"
        max_steps = self._task.config.max_steps
        return None if max_steps is None or self.state.num_steps < max_steps else "max_steps"

    def _reason_to_stop(self) -> str | None:
        reason, limits = self._reason_to_stop_epoch(), self._task.config
        if reason is not None:
            return reason
        if limits.max_epochs is not None and self.state.num_epochs >= limits.max_epochs:
            return "max_epochs"
        wanted = self._num_wanted()
        longest = longest_piece(self._config.sampling, self._num_envs, wanted)
        needed = shortest_piece(self._config.sampling, limits.dataset)
        if wanted <= 0 or (longest is not None and longest < needed):
            return "max_samples"
        return None

    def _num_wanted(self) -> int:
        """Samples of the next collection."""
        wanted, limit = self._config.sampling.num_epoch_samples, self._task.config.max_samples
        return wanted if limit is None else min(wanted, limit - self.state.num_samples)

    def _count(self) -> None:
        """Brings samples and time up to now."""
        num_samples = self._num_samples_before + self._pool.num_samples
        self.state.num_epoch_samples += num_samples - self.state.num_samples
        self.state.num_samples = num_samples
        self.state.elapsed_time = time.monotonic() - self._began

    def _warm_up(self) -> None:
        """Collects what a replay buffer is to hold before there is training."""
        if self._replay is None or not self._replay.num_missing or self._reason_to_stop():
            return
        wanted, limit = self._replay.num_missing, self._task.config.max_samples
        if limit is not None:
            wanted = min(wanted, limit - self.state.num_samples)
        # A resumed run whose buffer was not saved has a policy to fill it with.
        begins = self.state.num_samples < self._config.sampling.num_warmup_samples
        samples = self._collect(wanted, random_actions=begins)
        if samples is not None:
            self._replay.buffer.extend(samples)

    # ---- an epoch --------------------------------------------------------------------------------

    def _epoch(self) -> None:
        state = self.state
        state.phase = "collect"
        state.num_epoch_steps = state.num_epoch_samples = 0
        self._task.on_epoch_start(self._model, state)
        wanted = self._num_wanted()
        samples = self._collect(wanted)
        dataset = None if samples is None else self._dataset(samples, wanted)
        if dataset is None:
            return
        state.phase = "train"
        self._train(dataset)
        state.num_epochs += 1
        self._task.on_epoch_end(self._model, state)
        if self._is_due(self._config.eval_interval):
            self._evaluate()
        if self._is_due(self._config.log_interval):
            self._log()
        if self._is_due(self._config.clip_interval):
            self._film()
        self._count()
        if self._is_due(self._config.checkpoint_interval):
            self._save()
            self._curve.draw()
        self._progress.show(state, self._statistics.recent)

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self.state.num_epochs % interval == 0

    def _collect(self, wanted: int, random_actions: bool = False) -> MultiReplaySamples | None:
        """So many samples; None when the collection was called off."""
        options = asdict(self._config.sampling)
        for name in ("num_epoch_samples", "force_sync", "num_warmup_samples"):
            del options[name]
        try:
            with self._statistics.timed("collect"):
                samples = self._task.collect_samples(
                    self._model,
                    self._pool,
                    wanted,
                    use_tqdm=False,
                    random_actions=random_actions,
                    **options,
                )
        except CollectionInterrupted:
            return None
        finally:
            self._count()
        self._statistics.add_collection(
            samples.episodes, self.state.num_epoch_samples, samples.num_dropped
        )
        return samples

    def _dataset(self, samples: MultiReplaySamples, wanted: int) -> Iterable[Any] | None:
        """The epoch's batches; None where what was left before max_samples holds no window."""
        if self._replay is not None:
            return self._replay.dataset(samples)
        try:
            return self._task.build_rl_dataset(samples)
        except WindowError:
            shortened = wanted < self._config.sampling.num_epoch_samples
            if not shortened or self.state.num_epochs == 0:
                raise
            logger.info("the last %d samples hold no window", self.state.num_epoch_samples)
            return None

    def _train(self, dataset: Iterable[Any]) -> None:
        state, first_step = self.state, self.state.num_steps
        values: dict[str, list[Tensor]] = {}
        with self._statistics.timed("train"):
            for batch in _endless(dataset):
                if self._fabric.device.type != "cpu":
                    batch = self._fabric.to_device(batch)
                for name, value in self._updater.update(batch, state).items():
                    values.setdefault(name, []).append(value)
                state.num_steps += 1
                state.num_epoch_steps += 1
                self._count()
                self._task.on_update_end(self._model, state)
                if self._task.epoch_is_over(state) or self._reason_to_stop_epoch():
                    break
            # Read once an epoch: on a GPU each look would wait for all that was sent before.
            numbers = {name: torch.stack(listed).tolist() for name, listed in values.items()}
        _check_finite(numbers, first_step, state.num_epoch_steps)
        self._statistics.add_updates(numbers)

    # ---- what is due after an epoch --------------------------------------------------------------

    def _evaluate(self) -> None:
        if self._is_called_off():
            return
        with self._statistics.timed("eval"):
            try:
                episodes = run_evaluation(
                    self._task,
                    self._model,
                    self._config.num_eval_episodes,
                    force_sync=self._config.sampling.force_sync,
                    noise_seed=self._seed,
                    interrupt=self._is_called_off,
                )
            except CollectionInterrupted:
                return
        self._statistics.add_evaluation(episodes)

    def _film(self) -> None:
        if self._is_called_off():
            return
        path = self._run_dir / "clips" / f"epoch-{self.state.num_epochs:06d}.mp4"
        path.parent.mkdir(exist_ok=True)
        with checkpoint.preserved_rng():
            self._task.sample_clip(save_path=path, model=self._model)

    def _log(self) -> None:
        self._count()
        row = self._statistics.take_row(self.state, self._updater.learning_rates())
        for log in self._loggers:
            log.log_metrics(row, self.state.num_samples)
        self._logged = self.state.num_epochs

    def _save(self) -> None:
        name = checkpoint.checkpoint_name(self.state.num_epochs, self.state.num_samples)
        folder = self._run_dir / checkpoint.FOLDER / name
        if folder.exists():  # nothing was done since it was written
            return
        replay = self._replay if self._config.checkpoint_replay else None
        save_replay = None if replay is None else replay.save
        checkpoint.save_checkpoint(folder, self._snapshot.take(self._pool), save_replay)
        if replay is not None:
            drop_older(self._run_dir, folder)


def _check_fit(config: TrainerConfig, task: ReinforcementLearningTask[Any, Any]) -> int:
    """Checks that trainer and task work together, and returns the number of environments.

    Raises:
        ConfigurationError: They do not; all reasons are named.
    """
    workers = task.get_environment_workers(config.sampling.force_sync)
    num_envs = sum(len(worker.env_ids) for worker in workers)
    raise_if_any(list(fit_problems(config.sampling, task.config, num_envs)))
    if config.clip_interval is not None:
        maker = task.get_environment_cached().maker
        with Environment.from_maker(maker.with_render_mode("rgb_array")) as environment:
            require_rgb_array(environment.env, maker)
            environment.reset()
            environment.render()  # without a display or driver this fails, now and not in an hour
    return num_envs


def _make_fabric(accelerator: str) -> Fabric:
    try:
        return Fabric(accelerator=accelerator, devices=1)
    except RuntimeError as error:
        raise ConfigurationError(
            f"`accelerator` must be one that this machine has, got {accelerator!r}"
        ) from error


def _endless(dataset: Iterable[Any]) -> Iterator[Any]:
    """Batches of one pass after another.

    Raises:
        HookError: A pass gave none.
    """
    while True:
        batch = None
        for batch in dataset:
            yield batch
        if batch is None:
            raise HookError("`build_rl_dataset` must give at least one batch, got none")


def _check_finite(
    numbers: Mapping[str, Sequence[float]], first_step: int, num_updates: int
) -> None:
    """Looks for the first update that was not finite; the parameters are spoilt from there on.

    Raises:
        HookError: Names the update.
    """
    for place in range(num_updates):
        for name, listed in numbers.items():
            # A task may return some of its losses in some updates only: those are in the sum.
            if len(listed) == num_updates and not math.isfinite(listed[place]):
                raise HookError(
                    f"`{name}` must be finite, got {listed[place]} in update "
                    f"{first_step + place} (counted from 0)"
                )
