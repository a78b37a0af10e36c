"""One row of memory per environment, and the body that steps an environment into its row.

The body is the same whether it runs in this process, in a thread or in another process; only the
memory under the arrays differs. An environment whose episode ends is reset in the same step: its
final observation is copied to a second row before the reset, so that an environment which reuses
its arrays cannot overwrite it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from gymtask.errors import ConfigurationError, ObservationError
from gymtask.maker import AnyEnv, EnvironmentMaker
from gymtask.workers.copies import copied
from gymtask.workers.layout import (
    Array,
    Leaf,
    Reader,
    Space,
    Writer,
    make_reader,
    make_writer,
    nest,
    space_leaves,
)
from gymtask.workers.random_state import Randomness, set_random_state

ALIGNMENT = 64  # bytes: a cache line, so that arrays written by different processes never share one


class Slots:
    """The arrays of N environments.

    Attributes:
        num_envs: N.
        observation_space: The space of one environment.
        action_space: The space of one environment.
        observation: Leaves [N, *shape]: what the policy acts on next; after an episode's end, the
            first observation of the next episode.
        final_observation: Leaves [N, *shape]: the last observation of the episode, where it has
            just ended.
        action: Leaves [N, *shape]: what the environment gets, in its own dtype and units.
        reward: float64 [N]: of the last step.
        flags: bool [N, 2]: terminated and truncated, of the last step.
        terminated: The first column of the flags.
        truncated: The second column of the flags.
        infos: For each environment, copies of the values of the asked info keys that its last step
            gave; nothing after a reset.
    """

    def __init__(
        self, observation_space: Space, action_space: Space, num_envs: int, memory: Any = None
    ) -> None:
        """Lays the arrays over `memory`, a writable buffer of `Slots.nbytes(...)` zero bytes.

        None allocates it.
        """
        self.num_envs = num_envs
        self.observation_space = observation_space
        self.action_space = action_space
        arrays = _carve(_fields(observation_space, action_space), num_envs, memory)
        num_observation = len(space_leaves(observation_space, "observation"))
        self.observation = arrays[:num_observation]
        self.final_observation = arrays[num_observation : 2 * num_observation]
        self.action = arrays[2 * num_observation : -2]
        self.reward, self.flags = arrays[-2:]
        self.terminated, self.truncated = self.flags[:, 0], self.flags[:, 1]
        self.infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]

    @staticmethod
    def nbytes(observation_space: Space, action_space: Space, num_envs: int) -> int:
        """Bytes of memory that the arrays take."""
        return sum(_padded(leaf, num_envs) for leaf in _fields(observation_space, action_space))

    def nested_observation(self, env_ids: Array, *, final: bool = False) -> Any:
        """Copies of the observations of `env_ids` [n], arranged as the space is."""
        leaves = self.final_observation if final else self.observation
        return nest(self.observation_space, [leaf[env_ids] for leaf in leaves])


def _fields(observation_space: Space, action_space: Space) -> list[Leaf]:
    observation = space_leaves(observation_space, "observation")
    action = space_leaves(action_space, "action")
    scalars = [
        Leaf((name,), observation_space, shape, np.dtype(kind))
        for name, shape, kind in (
            ("reward", (), float),
            ("flags", (2,), bool),
        )
    ]
    return [*observation, *observation, *action, *scalars]


def _padded(leaf: Leaf, num_envs: int) -> int:
    size = num_envs * int(np.prod(leaf.shape)) * leaf.dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def _carve(leaves: Sequence[Leaf], num_envs: int, memory: Any) -> list[Array]:
    if memory is None:
        memory = np.zeros(sum(_padded(leaf, num_envs) for leaf in leaves), dtype=np.uint8)
    arrays, offset = [], 0
    for leaf in leaves:
        shape = (num_envs, *leaf.shape)
        count = int(np.prod(shape))  # 0 would mean "all that is left" to numpy
        flat: Array = (
            np.frombuffer(memory, leaf.dtype, count, offset) if count else np.empty(0, leaf.dtype)
        )
        arrays.append(flat.reshape(shape))
        offset += _padded(leaf, num_envs)
    return arrays


class EnvironmentStepper:
    """Makes some of the environments and steps each into its row of the slots.

    Attributes:
        envs: The environments, by their index in the pool.
        keeps_infos: Whether the values of some info keys are kept.
        progress: Holds one index: that of the environment that is being made, stepped, reset or
            called, -1 when none is; after an exception, the one that raised. A list, or a view of
            memory in which others see it too.
        isolates: Whether `run` copies what it is given and gives: environments beside each other in
            a worker process are to share no more than in processes of their own.
        records_starts: Whether it is noted how each episode began.
        starts: How the open episode of each environment began, where that is noted: "seed" is that
            of its last reset that had one, and "random_state" is where its generators stood when
            the episode began, if that was later.
        keeps_starts: Whether those of episodes that ended stay in `ended_starts`.
        ended_starts: For each environment, in order of time, until somebody takes them.
    """

    def __init__(self, slots: Slots, makers: Mapping[int, EnvironmentMaker]) -> None:
        self.slots = slots
        self.progress: Any = [-1]
        self.isolates = self.records_starts = self.keeps_starts = False
        self.envs: dict[int, AnyEnv] = {}
        self.starts: dict[int, dict[str, Any]] = {}
        self.ended_starts: dict[int, list[dict[str, Any]]] = {}
        self._randomness: dict[int, Randomness] = {}
        self._makers = makers
        self._info_keys = {index: maker.info_keys for index, maker in makers.items()}
        self.keeps_infos = any(self._info_keys.values())
        self._write: Writer = make_writer(slots.observation_space, slots.observation)
        self._write_final: Writer = make_writer(slots.observation_space, slots.final_observation)
        self._read: Reader = make_reader(slots.action_space, slots.action)
        # Written through memoryviews, which take half of numpy's time for one element.
        self._reward, self._terminated, self._truncated = (
            cast(Any, memoryview(cast(Any, array)))
            for array in (slots.reward, slots.terminated, slots.truncated)
        )

    @property
    def current(self) -> int:
        """What `progress` holds."""
        return int(self.progress[0])

    @current.setter
    def current(self, index: int) -> None:
        self.progress[0] = index

    def make(self) -> None:
        """Makes the environments.

        Raises:
            ConfigurationError: One has other spaces than the slots.
        """
        for index, maker in self._makers.items():
            self.current = index
            self.envs[index] = maker()
            self._check_spaces(index)
        self.current = -1

    def _check_spaces(self, index: int) -> None:
        expected = (self.slots.observation_space, self.slots.action_space)
        for role, space in zip(("observation_space", "action_space"), expected, strict=True):
            found = getattr(self.envs[index], role)
            if found != space:
                raise ConfigurationError(
                    f"`{role}` of every environment must be that of environment 0, {space}, got"
                    f" {found} from environment {index}"
                )

    def step_all(self, env_ids: Sequence[int]) -> None:
        """Steps environments with their actions, one after another; an ended one begins anew."""
        envs, read, write, progress = self.envs, self._read, self._write, self.progress
        rewards, terminations, truncations = self._reward, self._terminated, self._truncated
        keeps_infos = self.keeps_infos
        for index in env_ids:
            progress[0] = index
            answer = envs[index].step(read(index))
            try:
                observation, reward, terminated, truncated, info = answer
                rewards[index] = reward
            except (TypeError, ValueError) as error:
                raise step_error(answer) from error
            terminations[index] = terminated
            truncations[index] = truncated
            if keeps_infos:
                # Copies: an environment may go on using what it returned.
                keys = self._info_keys[index]
                found = {key: copy.deepcopy(info[key]) for key in keys if key in info}
                self.slots.infos[index] = found
            if terminated or truncated:
                self._write_final(index, observation)
                if self.keeps_starts:
                    self.ended_starts.setdefault(index, []).append(self.starts[index])
                if self.records_starts:
                    self._note_start(index)
                observation, _ = begin_episode(envs[index])
            write(index, observation)
        progress[0] = -1

    def reset(self, index: int, seed: int | None) -> None:
        """Starts a new episode in environment `index`; a seed also seeds its action space."""
        slots, env = self.slots, self.envs[index]
        if self.records_starts:
            self._note_start(index, seed)
        observation, _ = begin_episode(env, seed=seed)
        if seed is not None:
            env.action_space.seed(seed)
        slots.reward[index], slots.flags[index] = 0.0, False
        slots.infos[index] = {}
        self._write(index, observation)

    def restart(self, index: int, start: dict[str, Any]) -> None:
        """Begins an episode as another one began, of which `starts` told."""
        self.reset(index, start["seed"])  # as it was once: what else this set is set now
        if "random_state" in start:
            set_random_state(self.envs[index], start["random_state"])
            self.reset(index, None)

    def _note_start(self, index: int, seed: int | None = None) -> None:
        if seed is not None:
            self.starts[index] = {"seed": seed}
            return
        before = self.starts.get(index, {}).get("seed")
        randomness = self._randomness.get(index)
        if randomness is None:
            randomness = self._randomness[index] = Randomness(self.envs[index])
        self.starts[index] = {"seed": before, "random_state": randomness.read()}

    def run(
        self,
        method: str,
        env_ids: Sequence[int],
        args: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        """Runs "reset", "call", "get_attr", "set_attr" or "render" on some environments.

        Or what lets episodes be begun again: "record_starts", "get_start", "take_starts" or
        "restart".

        Args:
            method: What to run.
            env_ids: The environments.
            args: Arguments for each environment of the pool, by its index.
            kwargs: Keywords for all of them.
        """
        results: list[Any] = []
        for index in env_ids:
            self.current = index
            if method in ("reset", "restart"):
                getattr(self, method)(index, *args[index])
            elif method == "record_starts":
                self.records_starts = True
                (self.keeps_starts,) = args[index]
            elif method == "get_start":
                results.append(self.starts[index])
            elif method == "take_starts":
                results.append(self.ended_starts.pop(index, []))
            elif self.isolates:
                own, keywords = copied((args[index], kwargs))
                results.append(copied(_APPLY[method](self.envs[index], *own, **keywords)))
            else:
                results.append(_APPLY[method](self.envs[index], *args[index], **kwargs))
            self.current = -1
        return results

    def close(self) -> None:
        """Closes all environments.

        The first exception is raised once all of them were asked to close.
        """
        failures = []
        envs, self.envs, self._randomness = self.envs, {}, {}
        for index, env in envs.items():
            try:
                env.close()
            except Exception as error:
                error.add_note(f"raised by close() of environment {index}")
                failures.append(error)
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # its traceback keeps this frame, which is not to keep it in turn


def step_error(answer: Any) -> ObservationError:
    """What is wrong with what step() returned."""
    if not isinstance(answer, tuple) or len(answer) != 5:
        got = f"{len(answer)} values" if isinstance(answer, tuple) else f"{answer!r:.80}"
        return ObservationError(
            "step() must return (observation, reward, terminated, truncated, info), got " + got
        )
    return ObservationError(f"the reward must be a number, got {answer[1]!r:.80}")


def begin_episode(env: AnyEnv, **keywords: Any) -> tuple[Any, Any]:
    """Resets an environment and gives the first observation and the info.

    Raises:
        ObservationError: It returned something else.
    """
    answer = env.reset(**keywords)
    try:
        observation, info = answer
    except (TypeError, ValueError) as error:
        raise ObservationError(
            f"reset() must return (observation, info), got {answer!r:.80}"
        ) from error
    return observation, info


def _call(env: AnyEnv, name: str, *args: Any, **kwargs: Any) -> Any:
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def _set_attr(env: AnyEnv, name: str, value: Any) -> None:
    # Gymnasium would put an attribute that nobody has on the outermost wrapper, where the dynamics
    # do not see it.
    if not env.set_wrapper_attr(name, value, force=False):
        setattr(env.unwrapped, name, value)


def _get_attr(env: AnyEnv, name: str) -> Any:
    return env.get_wrapper_attr(name)


def _render(env: AnyEnv) -> Any:
    return env.render()


_APPLY: dict[str, Callable[..., Any]] = {
    "call": _call,
    "get_attr": _get_attr,
    "set_attr": _set_attr,
    "render": _render,
}
