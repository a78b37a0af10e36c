"""One training run: what is made for it, its epochs, its limits, and what is saved of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from lightning_fabric.loggers.logger import Logger
from torch import Tensor, nn

from gymtask.errors import CollectionInterrupted, WindowError
from gymtask.replay import MultiReplaySamples
from gymtask.task import ReinforcementLearningTask, State
from gymtask.training import checkpoint
from gymtask.training.config import TrainerConfig, longest_piece
from gymtask.training.curve import LearningCurve
from gymtask.training.evaluation import run_evaluation
from gymtask.training.films import film
from gymtask.training.keeping import UNKNOWN, Keeper
from gymtask.training.limits import Limits
from gymtask.training.logs import NUM_RECENT, Progress, Statistics, make_loggers
from gymtask.training.off_policy import Replay
from gymtask.training.ranks import Ranks
from gymtask.training.recording import Recorder, tidy_episodes
from gymtask.training.run_dir import find_start, make_run_dir, run_dir_of
from gymtask.training.setup import check_fit, make_fabric
from gymtask.training.snapshot import Snapshot, plain_configs
from gymtask.training.stopping import StopRequests
from gymtask.training.updates import Updater, check_finite, endless

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
        loggers: Sequence[Logger],
    ) -> None:
        self._config, self._task, self._model, self._requests = config, task, model, requests
        self._given_loggers = loggers
        self._num_envs = check_fit(config, task)
        env_seed = task.config.environment.env_seed
        self._seed = env_seed if config.seed is None else config.seed
        checkpoint.seed_generators(self._seed)
        self.state = task.state = State()
        task.num_clips = task.num_evaluations = 0
        task.take_logged()  # which is of what was before
        fabric = self._fabric = make_fabric(config)
        ranks = self._ranks = Ranks.of(fabric)
        task.to(fabric.device)
        self._updater = Updater(fabric, ranks, task, model, config)
        checkpoint.seed_generators(self._seed + ranks.rank)
        self._statistics = Statistics()
        self._snapshot = Snapshot(
            config, task, model, self._updater, self.state, self._statistics, ranks
        )
        self._replay: Replay | None = None
        self._evaluated_at = -1
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self._ranks.rank

    # ---- start and end ---------------------------------------------------------------------------

    def start(self, resume: str | Path | None) -> Path:
        """Starts the environments, in a new run or where a checkpoint stands.

        Returns:
            The run directory.
        """
        name, ranks = self._task.config.name, self._ranks
        folder = ranks.first(
            find_start(resume, name, self._config.run_dir) if ranks.is_first else None
        )
        saved = None if folder is None else checkpoint.load_checkpoint(folder, ranks.rank)
        if saved is not None:
            self._snapshot.check(saved[0], self._num_envs)
            self._snapshot.restore(saved[0])
        total_envs = self._num_envs * ranks.size
        self._limits = Limits(self._config, self._task, self._requests, ranks, total_envs)
        if self._task.config.dataset.off_policy:
            self._start_replay(folder)
        self._start_pool()
        self._run_dir = ranks.first(self._find_run_dir(folder) if ranks.is_first else Path())
        self._keeper = Keeper(
            self._run_dir, self._config.keep_checkpoints, self._snapshot.best, ranks
        )
        clip = self._task.config.environment.action_clip
        self._recorder = Recorder(self._run_dir, self._pool, ranks.rank, action_clip=clip)
        self._start_logs()
        self._model.train()
        self._task.train()
        if saved is not None:
            logger.info("going on from %s", folder)
            self._snapshot.restore_rank(saved[1], self._pool)
        return self._run_dir

    def _find_run_dir(self, folder: Path | None) -> Path:
        if folder is None:
            run_dir = make_run_dir(self._config.run_dir, self._task.config.name)
        else:
            run_dir = run_dir_of(folder)
        checkpoint.tidy(run_dir, folder)
        tidy_episodes(run_dir, folder)
        return run_dir

    def _start_replay(self, folder: Path | None) -> None:
        sampling, ranks = self._config.sampling, self._ranks
        longest = longest_piece(sampling, self._num_envs, ranks.share(sampling.num_epoch_samples))
        num_warmup_samples = ranks.share(sampling.num_warmup_samples)
        self._replay = Replay(self._task, num_warmup_samples, longest, ranks.rank)
        if folder is not None:
            self._replay.restore(folder)

    def _start_pool(self) -> None:
        pool = self._pool = self._task.get_worker_pool(force_sync=self._config.sampling.force_sync)
        self._stack.callback(self._close_pool)
        pool.first_env = self._ranks.rank * self._num_envs
        pool.total_envs = self._ranks.size * self._num_envs
        pool.noise_key = (self._seed, "noise", 0)
        pool.agree = self._ranks.any if self._ranks.size > 1 else None
        if not pool.steps_together:
            pool.record_starts(keep=self._config.record_actions)

    def _close_pool(self) -> None:
        patience = self._pool.cleanup_time
        self._pool.close(min(patience, STOP_TIMEOUT) if self._requests.signal else patience)

    def _start_logs(self) -> None:
        self._loggers: list[Logger] = []
        self._progress = Progress(self._task.config, self.state, shown=self._ranks.is_first)
        self._stack.callback(self._progress.close)
        self._curve = LearningCurve(self._run_dir)
        if not self._ranks.is_first:
            return
        plain = plain_configs(self._config, self._task)
        text = yaml.safe_dump(plain, sort_keys=False)
        (self._run_dir / "config.yaml").write_text(text, encoding="utf-8")
        self._loggers = [*make_loggers(self._run_dir, self.state), *self._given_loggers]
        for log in self._loggers:
            self._stack.callback(log.finalize, "finished")
        for log in self._given_loggers:
            with suppress(NotImplementedError):  # Fabric's CSVLogger takes none
                log.log_hyperparams(plain)

    def train(self) -> str:
        """Runs epochs until there is a reason to stop, saves, and returns the reason."""
        self._limits.begin()
        self._statistics.begin()
        self._pool.interrupt = self._limits.is_called_off
        self._num_samples_before = self.state.num_samples
        self._logged = self.state.num_epochs
        self._warm_up()
        first_epoch = self.state.num_epochs
        while (reason := self._reason_to_stop()) is None:
            self._epoch()
        if first_epoch and first_epoch == self.state.num_epochs and self._ranks.is_first:
            logger.warning(
                "nothing was done: the run in %s has reached %s already", self._run_dir, reason
            )
        if self._requests.signal is not None and self._ranks.is_first:
            logger.warning("stopped by %s; everything is in %s", reason, self._run_dir)
        self._count_samples()
        self._progress.show(self.state, self._statistics.recent)
        if self._logged != self.state.num_epochs:
            self._log()
        self._recorder.write(self.state)
        if self._config.checkpoint_interval is not None:
            self._save()
        self._draw(force=True)
        return reason

    def _reason_to_stop(self) -> str | None:
        return self._limits.reason(self._snapshot.last_evaluation)

    def _count_samples(self) -> None:
        """Brings samples and time up to now."""
        num_samples = self._num_samples_before + self._ranks.total(self._pool.num_samples)
        self.state.num_epoch_samples += num_samples - self.state.num_samples
        self.state.num_samples = num_samples
        self.state.elapsed_time = self._limits.elapsed_time

    def _warm_up(self) -> None:
        """Collects what a replay buffer is to hold before there is training."""
        if self._replay is None:
            return
        missing = self._ranks.total(self._replay.num_missing)
        if not missing or self._reason_to_stop():
            return
        self.state.phase = "collect"
        # A resumed run whose buffer was not saved has a policy to fill it with.
        begins = self._replay.is_restored or self.state.num_samples < missing
        samples = self._collect(self._limits.num_wanted(missing), random_actions=begins)
        if samples is not None:
            self._replay.add(samples)

    # ---- an epoch --------------------------------------------------------------------------------

    def _epoch(self) -> None:
        state = self.state
        state.phase = "collect"
        state.num_epoch_steps = state.num_epoch_samples = 0
        self._task.on_epoch_start(self._model, state)
        wanted = self._limits.num_wanted(self._config.sampling.num_epoch_samples)
        samples = self._collect(wanted)
        with self._statistics.timed("train"):
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
        state.elapsed_time = self._limits.elapsed_time
        if self._is_due(self._config.checkpoint_interval) or self._has_best_evaluation():
            self._save()
        self._progress.show(state, self._statistics.recent)

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self.state.num_epochs % interval == 0

    def _collect(self, wanted: int, random_actions: bool = False) -> MultiReplaySamples | None:
        """This process's share of so many samples; None when the collection was called off."""
        options = asdict(self._config.sampling)
        for name in ("num_epoch_samples", "force_sync", "num_warmup_samples"):
            del options[name]
        samples = None
        with self._statistics.timed("collect"), suppress(CollectionInterrupted):
            samples = self._task.collect_samples(
                self._model,
                self._pool,
                self._ranks.share(wanted),
                use_tqdm=False,
                random_actions=random_actions,
                **options,
            )
        self._count_samples()
        if self._ranks.any(samples is None):
            return None
        assert samples is not None
        self._statistics.add_collection(
            self._ranks.joined(samples.episodes),
            self.state.num_epoch_samples,
            self._ranks.total(samples.num_dropped),
        )
        return samples

    def _dataset(self, samples: MultiReplaySamples, wanted: int) -> Iterable[Any] | None:
        """The epoch's batches; None where what was left before max_samples holds no window."""
        dataset, problem = None, None
        try:
            if self._replay is not None:
                dataset = self._replay.dataset(samples)
            else:
                dataset = self._task.build_rl_dataset(samples)
        except WindowError as error:
            problem = error
        if not self._ranks.any(problem is not None):
            return dataset
        shortened = wanted < self._config.sampling.num_epoch_samples
        if not shortened or self.state.num_epochs == 0:
            raise problem or WindowError("another process of the run has no window to train on")
        logger.info("the last %d samples hold no window", self.state.num_epoch_samples)
        return None

    def _train(self, dataset: Iterable[Any]) -> None:
        state, first_step = self.state, self.state.num_steps
        values: dict[str, list[Tensor]] = {}
        with self._statistics.timed("train"):
            batches = endless(dataset)
            while True:
                several = list(islice(batches, self._config.accumulate_grad_batches))
                if self._fabric.device.type != "cpu":
                    several = [self._fabric.to_device(batch) for batch in several]
                for name, value in self._updater.update(several, state).items():
                    values.setdefault(name, []).append(value)
                state.num_steps += 1
                state.num_epoch_steps += 1
                state.elapsed_time = self._limits.elapsed_time
                self._task.on_update_end(self._model, state)
                if self._limits.ends_epoch(self._task.epoch_is_over(state)):
                    break
            # Read once an epoch: on a GPU each look would wait for all that was sent before.
            numbers = {name: torch.stack(listed).tolist() for name, listed in values.items()}
        numbers = self._ranks.mean(numbers)
        check_finite(numbers, first_step, state.num_epoch_steps)
        self._statistics.add_updates(numbers)

    # ---- what is due after an epoch --------------------------------------------------------------

    def _evaluate(self) -> None:
        episodes = None
        with self._statistics.timed("eval"):
            if self._ranks.is_first and not self._limits.is_called_off():
                with suppress(CollectionInterrupted):
                    episodes = run_evaluation(
                        self._task,
                        self._model,
                        self._config.num_eval_episodes,
                        force_sync=self._config.sampling.force_sync,
                        noise_seed=self._seed,
                        interrupt=self._limits.is_called_off,
                    )
            episodes = self._ranks.first(episodes)
        if episodes is None:
            return
        self._statistics.add_evaluation(episodes)
        mean = sum(episode.episode_return for episode in episodes) / len(episodes)
        self._snapshot.last_evaluation, self._evaluated_at = mean, self.state.num_epochs

    def _film(self) -> None:
        if not self._ranks.is_first or self._limits.is_called_off():
            return
        film(self._task, self._model, self._run_dir, self.state, self._loggers)

    def _log(self) -> None:
        self.state.elapsed_time = self._limits.elapsed_time
        rates, logged = self._updater.learning_rates(), self._task.take_logged()
        row = self._statistics.take_row(self.state, rates, logged)
        for log in self._loggers:
            log.log_metrics(row, self.state.num_samples)
        self._logged = self.state.num_epochs
        self._recorder.write(self.state)
        self._draw()

    def _draw(self, *, force: bool = False) -> None:
        # The first drawing may take seconds.
        if self._ranks.is_first and (self._curve.drawn or not self._requests.signal):
            self._curve.draw(force=force)

    def _save(self) -> None:
        name = checkpoint.checkpoint_name(self.state.num_epochs, self.state.num_samples)
        folder = self._run_dir / checkpoint.FOLDER / name
        if folder.exists():  # nothing was done since it was written
            return
        self._recorder.write(self.state)  # before: what is newer than a checkpoint is not kept
        replay = self._replay if self._config.checkpoint_replay else None
        score = self._score()
        if self._keeper.is_best(score):
            self._keeper.best = (score, name)
        self._snapshot.best = self._keeper.best
        files = self._snapshot.take(self._pool)
        is_awaited = self._requests.signal is not None
        save = None if replay is None else partial(replay.save, is_awaited=is_awaited)
        self._keeper.save(name, files, save)

    def _has_best_evaluation(self) -> bool:
        """Whether an evaluation has just been the best, which is worth a checkpoint of its own."""
        is_wanted = None not in (self._config.checkpoint_interval, self._config.eval_interval)
        return is_wanted and self._keeper.is_best(self._score())

    def _score(self) -> float | None:
        """What tells which checkpoint is best: the last evaluation's mean return, if it was made.

        Where there are no evaluations, that of the last episodes.
        """
        if self._config.eval_interval is None:
            recent = self._statistics.recent  # the first to end would be the short ones
            return sum(recent) / len(recent) if len(recent) == NUM_RECENT else UNKNOWN
        is_new = self._evaluated_at == self.state.num_epochs
        return self._snapshot.last_evaluation if is_new else None
