"""The base class of a task, with which one collects, samples windows and films."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, overload

from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import IterableDataset

from gymtask import clips, samples
from gymtask.config import validate
from gymtask.environment import Environment, warn_of_other_spaces
from gymtask.errors import HookError
from gymtask.hooks import ConfigT, ModelT, State, TaskHooks
from gymtask.logged import LoggedNumbers
from gymtask.options import CollectOptions
from gymtask.replay import MultiReplaySamples, ReplayBuffer, ReplayDataset
from gymtask.workers.pool import WorkerPool
from gymtask.workers.worker import BaseEnvironmentWorker, make_workers

__all__ = ["ReinforcementLearningTask", "State"]


class ReinforcementLearningTask(TaskHooks[ConfigT, ModelT]):
    """What is to be learnt, in four methods.

    They are `get_environment`, `get_actions`, `run_model` and `compute_loss`.

    The task is an `nn.Module`: what else has state and belongs in a checkpoint (a target network, a
    normaliser) is put on it. This is the loop that calls the hooks; `Trainer` runs it, and so can
    you::

        with task.get_worker_pool() as pool:
            for epoch in range(num_epochs):
                task.on_epoch_start(model, state)
                samples = task.collect_samples(model, pool, num_samples)
                #   each step:        actions = task.get_actions(model, states, optimal)
                #   once at the end:  values = task.get_values(model, states)
                #                     trajectory = task.postprocess_trajectory(trajectory)
                #                     trajectories = task.postprocess_trajectories(trajectories)
                for batch in task.build_rl_dataset(samples):
                    output = task.run_model(model, batch, state)
                    loss = task.compute_loss(model, batch, state, output)
                    ...  # backward, step
                    task.on_update_end(model, state)
                    if task.epoch_is_over(state):
                        break
                task.on_epoch_end(model, state)

    Trajectories are TensorDicts [T] and batches TensorDicts [B, W] with the keys "observation",
    "action", whatever else `get_actions` and the `postprocess` hooks added, ("next",
    "observation"), ("next", "reward"), ("next", "terminated"), ("next", "truncated"), ("next",
    "done"), "is_init", "step", "trajectory_id", "env_id". The README has a table of their shapes
    and dtypes ("What a row holds").

    Attributes:
        config: The task's config.
        state: Where the run stands, also during collection; `Trainer` moves it on, and a loop of
            your own may.
        batch_keys: Keys that training batches hold; None gives all of them.
        forward_methods: Names of methods of the model, beside `forward`, that run its parameters.
        num_evaluations: Evaluations made so far; each has random streams of its own.
        logged: Numbers for the next row of metrics.
        replay_buffer: That of a run with `dataset.off_policy`; None before it begins.
    """

    def __init__(self, config: ConfigT) -> None:
        """Checks the config.

        Raises:
            ConfigurationError: Fields are missing or break their rules; all of them are named.
        """
        super().__init__()
        validate(config)
        self.config = config
        self.state = State()
        self._environment: Environment | None = None
        self._has_compared_spaces = False
        self._num_clips = 0
        self.num_evaluations = 0
        self.replay_buffer: ReplayBuffer | None = None
        self.logged = LoggedNumbers()

    # ---- metrics ---------------------------------------------------------------------------------

    def log(self, name: str, value: Tensor | float) -> None:
        """Adds a number to the next row of metrics, which holds the mean of all since the last one.

        A tensor is read when the row is made, so that a GPU need not be waited for. `Trainer` makes
        the rows; a loop of your own reads the means with `take_logged`.

        Args:
            name: The column, such as "epsilon" or "kl"; in an evaluation it is "eval/epsilon".
            value: A number or a tensor ().

        Raises:
            HookError: It is a tensor of several numbers.
        """
        self.logged.add(f"eval/{name}" if self.state.phase == "eval" else name, value)

    def take_logged(self) -> dict[str, float]:
        """The means of what was logged, which begin anew."""
        return self.logged.take()

    # ---- environments ----------------------------------------------------------------------------

    def get_environment_cached(self) -> Environment:
        """The environment that tells spaces and the like, made once.

        Collecting and filming never step it.
        """
        if self._environment is None:
            environment = self.get_environment()
            if not isinstance(environment, Environment):
                raise HookError(
                    f"`get_environment` must return a gymtask.Environment, got {environment!r}"
                )
            self._environment = environment
        return self._environment

    def get_environment_workers(self, force_sync: bool = False) -> list[BaseEnvironmentWorker]:
        """The workers of the config, not started yet.

        Args:
            force_sync: Whether all environments run in this process, whatever the config says.
        """
        return make_workers(
            self.get_environment_cached().maker, self.config.environment, force_sync=force_sync
        )

    def get_worker_pool(self, force_sync: bool = False) -> WorkerPool:
        """Starts the workers.

        In native mode the id's own VectorEnv may have other spaces than a single environment of
        that id (ALE's has); a warning says so, once.
        """
        pool = WorkerPool.from_workers(self.get_environment_workers(force_sync))
        if pool.steps_together and not self._has_compared_spaces:
            self._has_compared_spaces = True
            try:
                warn_of_other_spaces(pool)
            except BaseException:  # where warnings are errors
                pool.close()
                raise
        return pool

    # ---- collection ------------------------------------------------------------------------------

    def iter_samples(
        self,
        model: ModelT,
        worker_pool: WorkerPool,
        *,
        total_samples: int | None = None,
        min_trajectory_length: int = 1,
        max_trajectory_length: int | None = None,
        min_batch_size: int = 1,
        max_batch_size: int | None = None,
        max_wait_time: float | None = None,
        optimal: bool = False,
        use_tqdm: bool = True,
        allocation: str = "equal",
        whole_episodes: bool = False,
        random_actions: bool = False,
    ) -> Iterator[TensorDict]:
        """Collects from the environments and yields one postprocessed trajectory [T] at a time.

        What is yielded of an episode is a piece: consecutive rows. A piece whose last row has no
        flag is cut; its episode goes on, in this call or the next. Closing the generator loses
        nothing: rows not yet yielded are the first of the next call.

        Args:
            model: The model that acts.
            worker_pool: The environments.
            total_samples: Rows to step, exactly; None goes on for ever.
            min_trajectory_length: Pieces shorter than this are left out; their rows count.
            max_trajectory_length: Pieces are cut at this length; their episodes go on.
            min_batch_size: Environments to wait for before the model acts; all that still owe rows,
                once they are fewer.
            max_batch_size: Environments that the model acts for at once, at most.
            max_wait_time: Seconds after which it acts for fewer than `min_batch_size`.
            optimal: Whether to act greedily.
            use_tqdm: Whether to show a progress bar.
            allocation: "equal" gives each environment the same number of rows, so that what is
                collected does not depend on timing; with "first_come" whoever is ready goes on,
                and it does.
            whole_episodes: Whether begun episodes are finished and nothing is cut; `total_samples`
                is then a lower bound.
            random_actions: Whether actions are drawn from the action space instead, as its
                `sample()` does; of a Discrete one those that ("observation", "action_mask") allows,
                where there is such a key. What an environment gets depends on the seed, its index
                and "run_step" alone. `get_actions` is still asked, for the carries.

        Raises:
            ConfigurationError: An argument breaks its rule; raised by the call itself, before
                anything moves.
        """
        options = CollectOptions(
            total_samples=total_samples,
            min_trajectory_length=min_trajectory_length,
            max_trajectory_length=max_trajectory_length,
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            max_wait_time=max_wait_time,
            optimal=optimal,
            use_tqdm=use_tqdm,
            allocation=allocation,
            whole_episodes=whole_episodes,
            random_actions=random_actions,
        )
        return samples.iter_samples(self, model, worker_pool, options)

    def collect_samples(
        self,
        model: ModelT,
        worker_pool: WorkerPool,
        total_samples: int,
        *,
        min_trajectory_length: int = 1,
        max_trajectory_length: int | None = None,
        min_batch_size: int = 1,
        max_batch_size: int | None = None,
        max_wait_time: float | None = None,
        optimal: bool = False,
        use_tqdm: bool = True,
        allocation: str = "equal",
        whole_episodes: bool = False,
        random_actions: bool = False,
    ) -> MultiReplaySamples:
        """Collects as `iter_samples` does, and returns all pieces, ordered by environment and time.

        `postprocess_trajectories` has seen them together. The result also holds `num_dropped`, the
        rows of pieces shorter than `min_trajectory_length`, and `episodes`, a record of each
        episode that ended in this call. Keys, shapes and dtypes of rows: "What a row holds" in the
        README. Towards the end, when fewer than `min_batch_size` environments still owe rows, the
        model acts for those alone.

        Raises:
            ConfigurationError: An argument breaks its rule.
            HookError: A hook returned something that its contract does not allow.
        """
        options = CollectOptions(
            total_samples=total_samples,
            min_trajectory_length=min_trajectory_length,
            max_trajectory_length=max_trajectory_length,
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            max_wait_time=max_wait_time,
            optimal=optimal,
            use_tqdm=use_tqdm,
            allocation=allocation,
            whole_episodes=whole_episodes,
            random_actions=random_actions,
        )
        return samples.collect_samples(self, model, worker_pool, options)

    def get_replay_buffer(self) -> ReplayBuffer:
        """Makes the buffer of off-policy training (`dataset.off_policy`).

        This one holds `dataset.replay_buffer_sample_size` transitions in memory, and shows frames
        as stacks where the environment does. Define it for priorities, n-step rewards, or rows on
        disk, in a folder that is new each time (`storage=tempfile.mkdtemp(dir="somewhere")`), also
        for a resumed run, whose checkpoint has a copy.
        """
        return ReplayBuffer(
            self.config.dataset.replay_buffer_sample_size,
            frame_stack=self.get_environment_cached().maker.frame_stack,
            seed=self.config.environment.env_seed,
        )

    def build_rl_dataset(
        self, samples: MultiReplaySamples | ReplayBuffer
    ) -> IterableDataset[TensorDict]:
        """The training batches [B, W] of one epoch: `num_update_steps` of them, pass after pass.

        Args:
            samples: The epoch's collection; with `dataset.off_policy` the buffer that it joined.

        Raises:
            WindowError: No trajectory holds a window of `dataset.num_samples` rows.
        """
        data, loader = self.config.dataset, self.config.train_dl
        return ReplayDataset(
            samples,
            data.num_samples,
            data.stride,
            loader.batch_size,
            data.replacement,
            data.num_update_steps,
            shuffle=loader.shuffle,
            drop_last=loader.drop_last,
            batch_keys=self.batch_keys,
            seed=None if loader.seed is None else loader.seed + self.state.num_epochs,
            pin_memory=loader.pin_memory,
        )

    # ---- clips -----------------------------------------------------------------------------------

    @property
    def num_clips(self) -> int:
        """Clips made so far; each has a random stream of its own."""
        return self._num_clips

    @num_clips.setter
    def num_clips(self, value: int) -> None:
        self._num_clips = value

    @overload
    def sample_clip(
        self,
        *,
        save_path: str | Path,
        return_images: Literal[True] = True,
        return_states: Literal[False] = False,
        model: ModelT | None = None,
        writer: str = "moviepy",
        standardize_images: bool = True,
        optimal: bool = True,
    ) -> None: ...

    @overload
    def sample_clip(
        self,
        *,
        return_images: Literal[True] = True,
        return_states: Literal[False] = False,
        model: ModelT | None = None,
        standardize_images: bool = True,
        optimal: bool = True,
    ) -> Tensor: ...

    @overload
    def sample_clip(
        self,
        *,
        return_images: Literal[True] = True,
        return_states: Literal[True],
        model: ModelT | None = None,
        standardize_images: bool = True,
        optimal: bool = True,
    ) -> tuple[Tensor, TensorDict]: ...

    @overload
    def sample_clip(
        self,
        *,
        return_images: Literal[False],
        return_states: Literal[True],
        model: ModelT | None = None,
        optimal: bool = True,
    ) -> TensorDict: ...

    def sample_clip(
        self,
        *,
        save_path: str | Path | None = None,
        return_images: bool = True,
        return_states: bool = False,
        model: ModelT | None = None,
        writer: str = "moviepy",
        standardize_images: bool = True,
        optimal: bool = True,
    ) -> Tensor | TensorDict | tuple[Tensor, TensorDict] | None:
        """Plays one episode of at most `environment.max_steps` steps, in an environment of its own.

        Args:
            save_path: Where to write it, as .mp4 or .gif; an existing file is replaced.
            return_images: Whether to return the pictures.
            return_states: Whether to return the rows.
            model: Acts; None takes random actions.
            writer: Name of the writer, see `write_video`.
            standardize_images: Whether pictures become uint8 [H, W, 3]; otherwise they stay as
                rendered.
            optimal: Whether to act greedily.

        Returns:
            The pictures, uint8 [L + 1, H, W, 3]; or the rows, TensorDict [L]; or both; or None with
            `save_path`.

        Raises:
            ConfigurationError: A `save_path` with `return_states` or without `return_images`,
                neither of the two, an environment that cannot give "rgb_array", or a writer or file
                type that does not exist.
        """
        return clips.sample_clip(
            self,
            model,
            save_path=save_path,
            return_images=return_images,
            return_states=return_states,
            writer=writer,
            standardize_images=standardize_images,
            optimal=optimal,
        )
