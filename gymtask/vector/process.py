"""`ProcessVectorEnv`: Gymnasium's AsyncVectorEnv over shared memory, many environments a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import clear_mpi_env_vars, iterate

from gymtask.errors import ConfigurationError
from gymtask.maker import EnvironmentMaker
from gymtask.vector.arguments import (
    check_context,
    checked_autoreset_mode,
    checked_makers,
    checked_max_concurrency,
    checked_num_workers,
    checked_seeds,
    listed_values,
    split_options,
)
from gymtask.vector.crewed import CrewVectorEnv
from gymtask.vector.learned import check_shareable, learn
from gymtask.vector.rows import Batches
from gymtask.workers.crew import Crew, is_supported
from gymtask.workers.handle import Failure
from gymtask.workers.registry import pickle_registry
from gymtask.workers.vector_stepper import VectorProgram
from gymtask.workers.worker_main import pack_program

NOT_BY_CALL = ("reset", "step", "close", "_setattr", "_check_spaces")


class ProcessVectorEnv(CrewVectorEnv):
    """Steps environments in worker processes, several in each.

    It is used as `gymnasium.vector.AsyncVectorEnv` is, whose arguments and methods it has, and
    gives what that gives. Actions, observations, rewards, flags and final observations lie in
    shared memory. A worker does not import the user's `__main__`; functions and lambdas that are
    defined there travel to it.

    An exception in an environment reaches the caller as itself, with the worker's traceback as its
    cause, and closes all of them; a worker that dies is a `gymtask.errors.WorkerDiedError`.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        shared_memory: bool | None = None,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | Space[Any] | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: int | None = None,
    ) -> None:
        """Starts the workers and makes the environments in them.

        Args:
            env_fns: Functions that make the N environments. The first is called in this process
                too, to learn the spaces.
            shared_memory: Whether observations go through shared memory. None: if their space has a
                fixed shape; True insists on a space that Gymnasium can share; others go over a
                pipe.
            copy: Whether `reset` and `step` give copies of the observations; else the shared arrays
                themselves, which the next call writes again.
            context: Must be a start method of multiprocessing, for Gymnasium's sake; workers come
                from a fork server of gymtask's own.
            daemon: Whether the workers are daemonic, and cannot have children.
            worker: A function to run in each process instead, in the form that AsyncVectorEnv
                documents. It speaks AsyncVectorEnv's own protocol, so all is then done as there,
                at its speed, with one environment per worker.
            observation_mode: "same", "different" (other bounds, the same shapes and dtypes), or
                the batched and the single space.
            autoreset_mode: When an ended episode is reset.
            max_concurrency: Environments that run at once; there are then no more workers.
            num_workers: Processes; the environments are split over them in sizes that differ by at
                most one. None: one for each core that this process may use, at most N.

        Raises:
            ConfigurationError: A value breaks its rule.
            MakerError: A function cannot travel to a worker.
            RuntimeError: The spaces of the environments do not fit together.
        """
        limit = checked_max_concurrency(max_concurrency)
        mode = checked_autoreset_mode(autoreset_mode)
        makers = checked_makers(env_fns)
        count = checked_num_workers(len(makers) if worker else num_workers, len(makers))
        if worker is not None:
            if num_workers not in (None, len(makers)):
                raise ConfigurationError(
                    f"`num_workers` must be the number of environments ({len(makers)}) where a"
                    f" `worker` is given, which runs one environment, got {num_workers}"
                )
            limits: dict[str, Any] = {} if limit is None else {"max_concurrency": limit}
            if limits.keys() - signature(AsyncVectorEnv).parameters.keys():
                raise ConfigurationError(
                    f"`max_concurrency` must be None for a `worker` of one's own with Gymnasium"
                    f" {gymnasium.__version__}, got {limit}; upgrade gymnasium"
                )
            super().__init__(
                env_fns, shared_memory is not False, copy, context, daemon, worker,
                observation_mode, mode, **limits,  # type: ignore[arg-type]
            )  # fmt: skip
            return
        if not is_supported():
            raise ConfigurationError(
                "`env_fns` must go to gymnasium.vector.AsyncVectorEnv or SyncVectorEnv on this"
                " system: ProcessVectorEnv needs Linux"
            )
        check_context(context)
        self.env_fns, self.copy, self.context, self.daemon = env_fns, copy, context, daemon
        self.worker, self.observation_mode = worker, observation_mode  # type: ignore[assignment]
        self.autoreset_mode, self.max_concurrency = mode, limit
        self.num_envs = len(makers)
        learn(self, makers)
        if shared_memory:
            check_shareable(self.single_observation_space)
        self._start(makers, min(count, limit or count), shared_memory is not False)

    def _start(self, makers: list[EnvironmentMaker], num_workers: int, share: bool) -> None:
        def program(env_ids: Sequence[int]) -> VectorProgram:
            return VectorProgram(
                {index: makers[index] for index in env_ids},
                self.single_observation_space,
                self.single_action_space,
                self.num_envs,
                self.autoreset_mode,
                isinstance(self.observation_mode, str) and self.observation_mode == "same",
                share,
            )

        groups = [part.tolist() for part in np.array_split(np.arange(self.num_envs), num_workers)]
        registered = pickle_registry()
        recipes = [pack_program(program(group), registered) for group in groups]
        layout = program(())
        self.shared_memory = layout.shares_observations
        crew = Crew(groups, layout.nbytes)
        slots, self._actions = layout.lay_out(crew.memory)
        self._attach(crew, Batches(layout, slots))
        try:
            with clear_mpi_env_vars():
                crew.start(recipes, [self.daemon] * num_workers)
        except Failure as failure:
            self._fail(failure)
        except BaseException:
            self.close(terminate=True)
            raise
        self.processes = [handle.process for handle in crew.handles]  # type: ignore[misc]
        self.parent_pipes = [handle.pipe for handle in crew.handles]

    # ---- steps -----------------------------------------------------------------------------------

    def step_async(self, actions: Any) -> None:
        """Sends an action to each environment and returns at once.

        Args:
            actions: A batch of `action_space`, or anything that it can be iterated over as.

        Raises:
            ClosedEnvironmentError: It is closed.
            AlreadyPendingCallError: It was not waited for the last call.
        """
        crew = self._crew
        if crew is None:
            return super().step_async(actions)
        self._begin("step_async")
        self._rows = {}
        self._by_pipe = self._actions is None or not self._actions.write(actions)
        if self._by_pipe:
            listed = self._listed_actions(actions)
            self._command("step", dict(enumerate(listed)))
        else:
            self._asked = "step"
            try:
                for handle in crew.handles:
                    handle.queued = handle.env_ids
                crew.begin(crew.handles)
                self._state = AsyncState.WAITING_STEP
            except KeyboardInterrupt:
                self._give_up()
                raise

    def _listed_actions(self, actions: Any) -> list[Any]:
        listed = list(iterate(self.action_space, actions))
        if len(listed) != self.num_envs:
            raise ConfigurationError(
                f"`actions` must hold one for each of {self.num_envs} environments, got"
                f" {len(listed)}"
            )
        return listed

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Waits for the step and gives its rows.

        Args:
            timeout: Seconds to wait; None: for ever.

        Returns:
            Observations, rewards float64 [N], terminations bool [N], truncations bool [N], infos.

        Raises:
            ClosedEnvironmentError: It is closed.
            NoAsyncCallError: There was no `step_async`.
            multiprocessing.TimeoutError: It took longer. The step goes on, its rows are dropped.
            Exception: What an environment raised; all are then closed.
        """
        if self._crew is None:
            return super().step_wait(timeout)
        self._await("step", timeout)
        rewards, terminated, truncated = self._batches.outcome()
        infos = self._batches.step_infos(self._rows, terminated, truncated, self._add_info)
        return self._observe(), rewards, terminated, truncated, infos

    # ---- resets ----------------------------------------------------------------------------------

    def reset_async(
        self,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Asks for new episodes and returns at once.

        Args:
            seed: s for s + i in environment i, or a list of one for each.
            options: What each environment gets; with "reset_mask", bool [N], only those for which
                it is True are reset.

        Raises:
            ClosedEnvironmentError: It is closed.
            AlreadyPendingCallError: It was not waited for the last call.
        """
        if self._crew is None:
            return super().reset_async(seed, options)
        self._assert_is_running()
        seeds = checked_seeds(seed, self.num_envs)
        rest, asked = split_options(options, self.num_envs)
        self._begin("reset_async")
        self._command("reset", {index: (seeds[index], rest) for index in asked})

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Waits for the resets and gives the first observations, and infos.

        Args:
            timeout: Seconds to wait; None: for ever.

        Raises:
            ClosedEnvironmentError: It is closed.
            NoAsyncCallError: There was no `reset_async`.
            multiprocessing.TimeoutError: It took longer. The resets go on.
            Exception: What an environment raised; all are then closed.
        """
        if self._crew is None:
            return super().reset_wait(timeout)
        self._await("reset", timeout)
        return self._observe(), self._batches.infos(self._rows, self._add_info)

    # ---- everything else -------------------------------------------------------------------------

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Calls a method of each environment, or reads an attribute, and returns at once.

        Raises:
            ClosedEnvironmentError: It is closed.
            AlreadyPendingCallError: It was not waited for the last call.
            ConfigurationError: The method has another way here.
        """
        if self._crew is None:
            return super().call_async(name, *args, **kwargs)
        self._begin("call_async")
        if name in NOT_BY_CALL:
            raise ConfigurationError(f"`name` must not be {name!r}; call it directly")
        self._command("call", dict.fromkeys(range(self.num_envs), (name, *args)), kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits for the calls and gives N results.

        Args:
            timeout: Seconds to wait; None: for ever.

        Raises:
            ClosedEnvironmentError: It is closed.
            NoAsyncCallError: There was no `call_async`.
            multiprocessing.TimeoutError: It took longer. The results are dropped.
            Exception: What an environment raised; all are then closed.
        """
        if self._crew is None:
            return super().call_wait(timeout)
        return tuple(self._await("call", timeout))

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute on the wrapper that has it, else on the innermost environment.

        Args:
            name: The attribute.
            values: A list or tuple of one for each environment, or one for all.
        """
        if self._crew is None:
            return super().set_attr(name, values)
        self._assert_is_running()
        listed = listed_values(values, self.num_envs)
        self._begin("set_attr")
        self._command("set_attr", {i: (name, value) for i, value in enumerate(listed)})
        self._await("call", None)
