"""The body that steps the environments of a `VectorEnv`, with Gymnasium's three autoreset modes.

A pool keeps real transitions only; a `VectorEnv` has promises of its own: when an ended episode is
reset, what the row says then, and all of `info`. What both do to environments otherwise (making,
calling, closing them) is the pool's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode

from gymtask.errors import SpaceError
from gymtask.maker import EnvironmentMaker
from gymtask.workers.copies import copied
from gymtask.workers.given_actions import GivenActions
from gymtask.workers.layout import Space, flatten, space_leaves
from gymtask.workers.slots import EnvironmentStepper, Slots, begin_episode, step_error

EMPTY: dict[str, Any] = {}  # not the one that was given: it may be another's, who fills it
NOTHING: Space = spaces.Tuple(())  # the space of what does not lie in shared memory


def has_fixed_shape(space: Space) -> bool:
    """Whether the values of a space can lie in arrays."""
    try:
        space_leaves(space, "observation")
    except SpaceError:
        return False
    return True


@dataclass
class Row:
    """What one environment has to say of a step or a reset beside what lies in the slots.

    Attributes:
        info: What it gave; after an episode's end in SAME_STEP mode, that of the reset.
        observation: Where observations do not lie in the slots.
        final_info: In SAME_STEP mode, the info of the episode's last step.
        final_observation: Likewise its observation, where it does not lie in the slots, or not with
            the very types that the environment gave it.
    """

    info: dict[str, Any]
    observation: Any = None
    final_info: dict[str, Any] | None = None
    final_observation: Any = None


@dataclass(frozen=True)
class VectorProgram:
    """Steps environments for a `VectorEnv`, in shared memory.

    Attributes:
        makers: Makes each of the environments of a worker.
        observation_space: The space of one environment.
        action_space: The space of one environment.
        num_envs: Environments of all workers.
        autoreset_mode: When an ended episode is reset.
        same_spaces: Whether all observation spaces must be the same; else their shapes and dtypes.
        shared_memory: Whether observations go there, if their space allows it.
    """

    makers: Mapping[int, EnvironmentMaker]
    observation_space: Space
    action_space: Space
    num_envs: int
    autoreset_mode: AutoresetMode
    same_spaces: bool
    shared_memory: bool

    @property
    def shares_observations(self) -> bool:
        """Whether observations lie in shared memory."""
        return self.shared_memory and has_fixed_shape(self.observation_space)

    @property
    def _slot_spaces(self) -> tuple[Space, Space]:
        return (self.observation_space if self.shares_observations else NOTHING), NOTHING

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        size = Slots.nbytes(*self._slot_spaces, self.num_envs)
        if has_fixed_shape(self.action_space):
            size += GivenActions.nbytes(self.action_space, self.num_envs)
        return size

    def lay_out(self, memory: memoryview) -> tuple[Slots, GivenActions | None]:
        """What lies in the memory; no actions, where their space has no fixed shape."""
        start = Slots.nbytes(*self._slot_spaces, self.num_envs)
        slots = Slots(*self._slot_spaces, self.num_envs, memory[:start])
        if not has_fixed_shape(self.action_space):
            return slots, None
        return slots, GivenActions(self.action_space, self.num_envs, memory[start:])

    def __call__(self, memory: memoryview, env_ids: Sequence[int]) -> VectorStepper:
        """See `worker_main.Program`."""
        stepper = VectorStepper(self, *self.lay_out(memory), copied if len(env_ids) > 1 else None)
        stepper.isolates = len(env_ids) > 1
        return stepper


class VectorStepper(EnvironmentStepper):
    """Makes some of the environments and steps each into its row of the slots.

    Args:
        program: What it is to do.
        slots: What the program lies in; likewise the actions.
        actions: None, where their space has no fixed shape, or `run` is given them.
        keep: Copies an info, where other environments may change it before it is read.
    """

    def __init__(
        self,
        program: VectorProgram,
        slots: Slots,
        actions: GivenActions | None,
        keep: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(slots, program.makers)
        self._keep = keep
        self._program = program
        self._actions = actions
        self._ended: set[int] = set()  # NEXT_STEP: environments whose next step is a reset
        self._rows: dict[int, Row] = {}  # of the last step

    def _check_spaces(self, index: int) -> None:
        program, env = self._program, self.envs[index]
        single, found = program.observation_space, env.observation_space
        if program.same_spaces and found != single:
            raise RuntimeError(
                "with observation_mode='same' the sub-environments observation spaces are not"
                f" equivalent. Expected {single}, got {found} from environment {index}. If this is"
                " intentional, use `observation_mode='different'` instead."
            )
        if not program.same_spaces and not is_space_dtype_shape_equiv(single, found):
            raise RuntimeError(
                f"the observation spaces of all environments must share shapes and dtypes, those of"
                f" {single}, got {found} from environment {index}"
            )
        if env.action_space != program.action_space:
            raise RuntimeError(
                f"the action space of every environment must be that of environment 0,"
                f" {program.action_space}, got {env.action_space} from environment {index}"
            )

    def step_all(self, env_ids: Sequence[int]) -> None:
        """Steps environments with the actions in shared memory; see `news`."""
        assert self._actions is not None
        self._rows = self._step(env_ids, self._actions.reader())

    def news(self, env_ids: Sequence[int]) -> Any:
        """A `Row` for each environment that has something to say, None if nobody has."""
        return self._rows or None

    def _step(self, env_ids: Sequence[int], read: Callable[[int], Any]) -> dict[int, Row]:
        rows: dict[int, Row] = {}
        envs, ended, progress, write = self.envs, self._ended, self.progress, self._write
        rewards, terminations, truncations = self._reward, self._terminated, self._truncated
        shared, keep = self._program.shares_observations, self._keep
        for index in env_ids:
            progress[0] = index
            final = None
            if index in ended:
                ended.discard(index)
                observation, info = begin_episode(envs[index])
                rewards[index], terminations[index], truncations[index] = 0.0, False, False
            else:
                answer = envs[index].step(read(index))
                try:
                    observation, reward, terminated, truncated, info = answer
                    rewards[index] = reward
                except (TypeError, ValueError) as error:
                    raise step_error(answer) from error
                terminations[index], truncations[index] = terminated, truncated
                if terminated or truncated:
                    observation, info, final = self._end(index, observation, info)
            if keep is not None:
                info = keep(info) if info else EMPTY
            if not shared:
                kept = observation if keep is None else copied(observation)
                rows[index] = Row(info, kept, *(final or ()))
                continue
            write(index, observation)
            if info or (final and (final[0] or final[1] is not None)):
                rows[index] = Row(info, None, *(final or ()))
        progress[0] = -1
        return rows

    def _end(self, index: int, observation: Any, info: Any) -> tuple[Any, Any, Any]:
        """Ends an episode as the autoreset mode has it.

        Returns:
            The observation and the info that the row is to have, and in SAME_STEP mode the last
            info and the last observation of the episode, None if that lies in the slots.
        """
        if self._program.autoreset_mode == AutoresetMode.NEXT_STEP:
            self._ended.add(index)
        if self._program.autoreset_mode != AutoresetMode.SAME_STEP:
            return observation, info, None
        # Copies, before the reset: an environment may go on using what it returned.
        last = None
        if self._program.shares_observations and self._is_plain(observation):
            self._write_final(index, observation)
        else:
            last = copied(observation)
        final = (copied(info) if info else {}, last)
        return *begin_episode(self.envs[index]), final

    def _is_plain(self, observation: Any) -> bool:
        """Whether the slots would give back just this, of the very types and dtypes."""
        try:
            values = flatten(self.slots.observation_space, observation)
        except (TypeError, LookupError):
            return False
        return all(
            type(value) is np.ndarray
            and value.dtype == array.dtype
            and value.shape == array.shape[1:] != ()
            for value, array in zip(values, self.slots.final_observation, strict=True)
        )

    def run(
        self, method: str, env_ids: Sequence[int], args: Any, kwargs: dict[str, Any]
    ) -> list[Any]:
        """Runs "step" or "reset" on those for which there are arguments, else as the pool's.

        Returns:
            After "step" and "reset", one dict with the rows of those that have something to say.
        """
        if method == "step":
            own = self.isolates
            read = (lambda index: copied(args[index])) if own else args.__getitem__
            return [self._step(env_ids, read)]
        if method != "reset":
            return super().run(method, env_ids, args, kwargs)
        rows: dict[int, Row] = {}
        for index in env_ids:
            if index in args:
                self.current = index
                rows[index] = self._reset(index, *args[index])
                self.current = -1
        return [rows]

    def _reset(self, index: int, seed: int | None, options: Any) -> Row:
        own, keep = copied(options) if self.isolates else options, self._keep
        observation, info = begin_episode(self.envs[index], seed=seed, options=own)
        self._ended.discard(index)
        if keep is not None:
            info = keep(info) if info else EMPTY
        if not self._program.shares_observations:
            return Row(info, observation if keep is None else copied(observation))
        self._write(index, observation)
        return Row(info)
