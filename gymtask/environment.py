"""`Environment`: what a task says its environment is, and one of it to step by hand."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gymtask.errors import ActionError, ConfigurationError, PoolStateError
from gymtask.maker import AnyEnv, EnvironmentMaker, EnvSource, Wrapper
from gymtask.spaces import ActionCodec, nest_tensors, stored_dtype
from gymtask.video import render_fps, standardize_frame
from gymtask.workers.layout import Array, Space, make_reader, make_writer, space_leaves
from gymtask.workers.pool import WorkerPool
from gymtask.workers.worker import spaces_of

logger = logging.getLogger(__name__)


class Environment:
    """A Gymnasium environment whose states are TensorDicts, and the recipe that workers make it by.

    Nothing is made before it is needed. The recipe alone is pickled. One episode by hand::

        with Environment("CartPole-v1") as env:
            state = env.reset(seed=7)
            while not env.terminated(state):
                state = env.step(env.sample_action())

    A state is a TensorDict [] with "observation", "reward" (float32, 0 after a reset),
    "terminated", "truncated", "done" (bool) and "step" (int64, steps since the reset).

    With `env_worker_mode="native"` a callable returns a `VectorEnv`; it gets `num_envs` and `seed`
    if its signature takes them::

        def make(num_envs, seed):
            return envpool.make_gymnasium("Pong-v5", num_envs=num_envs, seed=seed)

        gymtask.Environment(make)

    There is no single environment then: what needs one (`get_environment_cached().reset()`,
    `sample_clip`, `force_sync`) raises a `MakerError`. So do `wrappers` in native mode, as they
    take single environments.

    Args:
        env: An id ("CartPole-v1", "module:Name-v0"), an `EnvSpec`, or a callable that returns a
            `gymnasium.Env`.
        wrappers: Callables `env -> env`, applied in order.
        render_mode: How it is rendered; clips choose their own.
        max_episode_steps: Time limit in place of the one that the id is registered with.
        info_keys: Keys of the info dict that trajectories keep: for "lives", ("next", "info",
            "lives") holds the values and ("next", "info", "_lives") which rows have one. Where an
            environment gave none a float is NaN and an integer 0. What is no number or array stays
            as it is. A key that no step ever gives is warned of once an episode has ended.
        keep_float64: Whether float64 observations are stored as such instead of as float32.
        frame_stack: Shows the last so many observations of the episode, [frame_stack, *shape], the
            newest last, its first one repeated, as `gymnasium.wrappers.FrameStackObservation`
            does: in `observation_space`, states, `get_actions`, `get_values` and training batches.
            Workers, trajectories and hooks hold single ones, each stored once.
        **make_kwargs: Further keywords of `gymnasium.make`, or of the callable.

    Attributes:
        maker: The recipe.
        info: The info dict that the last reset or step gave.

    Raises:
        MakerError: An argument breaks its rule.
        gymnasium.error.Error: The id is unknown or deprecated.
    """

    def __init__(
        self,
        env: EnvSource,
        *,
        wrappers: Sequence[Wrapper] = (),
        render_mode: str | None = None,
        max_episode_steps: int | None = None,
        info_keys: Sequence[str] = (),
        keep_float64: bool = False,
        frame_stack: int | None = None,
        **make_kwargs: Any,
    ) -> None:
        self._setup(
            EnvironmentMaker.create(
                env,
                wrappers=wrappers,
                render_mode=render_mode,
                max_episode_steps=max_episode_steps,
                info_keys=info_keys,
                keep_float64=keep_float64,
                frame_stack=frame_stack,
                kwargs=make_kwargs,
            )
        )

    @classmethod
    def from_maker(cls, maker: EnvironmentMaker, *, action_clip: bool = False) -> Environment:
        """An environment of that recipe; `action_clip` is that of the config."""
        environment = cls.__new__(cls)
        environment._setup(maker, action_clip)
        return environment

    def _setup(self, maker: EnvironmentMaker, action_clip: bool = False) -> None:
        self.maker = maker
        self.info: dict[str, Any] = {}
        self._action_clip = action_clip
        self._env: AnyEnv | None = None
        self._observation: list[Array] = []
        self._num_steps = -1  # steps since the reset; -1 before the first
        self._ended = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Environment.from_maker, (self.maker,)

    def __repr__(self) -> str:
        return f"Environment({self.maker.name!r})"

    @property
    def env(self) -> AnyEnv:
        """The Gymnasium environment, made when it is first asked for.

        Raises:
            SpaceError: A space cannot be stored.
            ConfigurationError: It does not take the render mode.
        """
        if self._env is None:
            env = self._make()
            try:
                self._lay_out(env)
            except BaseException:
                env.close()
                raise
            self._env = env
        return self._env

    def _make(self) -> AnyEnv:
        try:
            return self.maker()
        except TypeError as error:
            if self.maker.render_mode is None or "render_mode" not in str(error):
                raise
            raise ConfigurationError(
                f"`render_mode` must be one that {self.maker.name} can be made with, got"
                f" {self.maker.render_mode!r} ({error}); let what makes the environment take"
                " `render_mode` and hand it on"
            ) from error

    def _lay_out(self, env: AnyEnv) -> None:
        """Makes one row of memory for each leaf: the same checks and casts as in a worker."""
        space, keep = env.observation_space, self.maker.keep_float64
        leaves = space_leaves(space, "observation")
        self._observation = [np.zeros((1, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._stored = [stored_dtype(leaf.dtype, keep_float64=keep) for leaf in leaves]
        self._write = make_writer(space, self._observation)
        self._space, stack = space, self.maker.frame_stack
        if stack is not None:
            self._space = batch_space(space, stack)
            kinds = zip(leaves, self._stored, strict=True)
            self._frames = [np.zeros((stack, *leaf.shape), dtype) for leaf, dtype in kinds]
        self._codec = ActionCodec(env.action_space, clip=self._action_clip)

    @property
    def observation_space(self) -> Space:
        """The space of observations as states hold them, that of stacks with `frame_stack`."""
        _ = self.env  # made now, if it was not
        return self._space

    @property
    def action_space(self) -> Space:
        """The space of actions."""
        return self.env.action_space

    @property
    def fps(self) -> float:
        """Frames per second that it is meant to be shown at; 30 where it does not say."""
        return render_fps(self.env)

    def reset(self, seed: int | None = None) -> TensorDict:
        """Starts an episode; a seed also seeds `sample_action`."""
        env = self.env
        self._num_steps = -1  # where the reset fails there is no episode to go on with
        observation, self.info = env.reset(seed=seed)
        if seed is not None:
            env.action_space.seed(seed)
        self._num_steps, self._ended = 0, False
        return self._state(observation, 0.0, False, False)

    def step(self, action: Any) -> TensorDict:
        """Takes one step.

        Args:
            action: A tensor [*shape] as trajectories store it (for Discrete the index from 0), or
                a nested TensorDict; numbers and numpy arrays are taken for tensors, dicts for
                TensorDicts.

        Raises:
            PoolStateError: The episode has ended, or none was begun.
            ActionError: The action does not fit the action space.
            ObservationError: The observation does not fit the observation space.
        """
        if self._num_steps < 0 or self._ended:
            why = "the episode has ended" if self._ended else "no episode was begun"
            raise PoolStateError(f"cannot step, as {why}; call reset() first")
        env = self.env
        rows = self._codec.decode(self._codec.encode(_batch_of_one(action), 1))
        arrays = [
            row.astype(leaf.dtype) for row, leaf in zip(rows, self._codec.leaves, strict=True)
        ]
        read = make_reader(env.action_space, arrays)
        observation, reward, terminated, truncated, self.info = env.step(read(0))
        self._num_steps += 1
        self._ended = bool(terminated or truncated)
        return self._state(observation, float(reward), bool(terminated), bool(truncated))

    def terminated(self, state: TensorDict) -> bool:
        """Whether the episode ended with this state, for either reason."""
        return bool(state["done"])

    def sample_action(self) -> Any:
        """A random action as `step` takes it, a tensor or a nested TensorDict."""
        sample = self.env.action_space.sample()
        rows = self._codec.rows_of(sample)
        return TensorDict(rows, batch_size=[]) if isinstance(rows, dict) else rows

    def render(self, state: TensorDict | None = None) -> Array:
        """The present picture, uint8 [H, W, 3].

        Args:
            state: Accepted for those who pass it; an environment renders where it stands.

        Raises:
            ConfigurationError: The render mode is not "rgb_array", or no picture came.
        """
        require_rgb_array(self.env, self.maker)
        return np.array(standardize_frame(self.picture()))  # a copy: some use one buffer for all

    def picture(self) -> Any:
        """What the environment renders, as it is.

        Raises:
            ConfigurationError: It renders nothing.
        """
        try:
            frame: Any = self.env.render()
        except NotImplementedError as error:
            raise render_mode_error(self.env, self.maker) from error
        except Exception as error:
            raise ConfigurationError(
                f"{self.maker.name} must be able to render, got {type(error).__name__}: {error}"
                "; without a display MuJoCo needs the environment variable MUJOCO_GL=egl or osmesa,"
                " and pygame SDL_VIDEODRIVER=dummy"
            ) from error
        if frame is None:
            raise ConfigurationError(
                f"render() of {self.maker.name} must return a picture with render_mode="
                f"{self.env.render_mode!r}, got None at step {self._num_steps}"
            )
        return frame

    def close(self) -> None:
        """Closes the environment, if one was made; the next use makes a new one."""
        env, self._env = self._env, None
        self._num_steps, self._ended, self.info = -1, False, {}
        if env is not None:
            env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _state(
        self, observation: Any, reward: float, terminated: bool, truncated: bool
    ) -> TensorDict:
        self._write(0, observation)
        leaves = [
            torch.from_numpy(array.astype(dtype))[0]
            for array, dtype in zip(self._observation, self._stored, strict=True)
        ]
        if self.maker.frame_stack is not None:
            leaves = self._stacked(leaves)
        return TensorDict(
            {
                "observation": nest_tensors(self.env.observation_space, leaves),
                "reward": torch.tensor(reward, dtype=torch.float32),
                "terminated": torch.tensor(terminated),
                "truncated": torch.tensor(truncated),
                "done": torch.tensor(terminated or truncated),
                "step": torch.tensor(self._num_steps),
            },
            batch_size=[],
        )

    def _stacked(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The last frames, of which these are the newest."""
        for frames, leaf in zip(self._frames, leaves, strict=True):
            frames[:-1] = frames[1:]
            frames[-1 if self._num_steps else slice(None)] = leaf.numpy()
        return [torch.from_numpy(frames.copy()) for frames in self._frames]


def _batch_of_one(action: Any) -> Tensor | TensorDictBase:
    """The action as `get_actions` gives them, for one environment."""
    if isinstance(action, Mapping):
        action = TensorDict(action, batch_size=[])
    elif not isinstance(action, (Tensor, TensorDictBase)):
        try:
            action = torch.as_tensor(action)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ActionError(
                f"`action` must be a tensor, or a TensorDict, got {action!r:.80}"
            ) from error
    return action.unsqueeze(0)  # type: ignore[no-any-return]


def warn_of_other_spaces(pool: WorkerPool) -> None:
    """Warns if the VectorEnv of a pool is another environment than a single one of the same id."""
    maker = pool.workers[0].maker
    if not isinstance(maker.env, EnvSpec):  # a callable makes no single one
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is only looked at
            single = spaces_of(maker)
    except Exception as error:  # native mode needs none
        logger.debug("no single environment of %s to compare with: %s", maker.name, error)
        return
    both = {
        "observation": (pool.observation_space, single[0]),
        "action": (pool.action_space, single[1]),
    }
    differing = [
        f"{kind} space {theirs} where a single environment has {ours}"
        for kind, (theirs, ours) in both.items()
        if theirs != ours
    ]
    if differing:
        stacks = f" (in stacks of {maker.frame_stack})" if maker.frame_stack else ""
        warnings.warn(
            f"the VectorEnv of {maker.name} in native mode is another environment than the single"
            f" one: {' and '.join(differing)}. Build the model from pool.observation_space{stacks}"
            " and pool.action_space; get_environment_cached(), sample_clip() and force_sync=True"
            " use the single one",
            stacklevel=3,
        )


def require_rgb_array(env: AnyEnv, maker: EnvironmentMaker) -> None:
    """Checks that an environment gives pictures.

    Raises:
        ConfigurationError: Its render mode is another one, or one that it does not know; the error
            names it and the fix.
    """
    # An environment that declares no modes at all may still render: its first picture tells.
    known = (env.metadata or {}).get("render_modes") or ["rgb_array"]
    if env.render_mode != "rgb_array" or "rgb_array" not in known:
        raise render_mode_error(env, maker)


def render_mode_error(env: AnyEnv, maker: EnvironmentMaker) -> ConfigurationError:
    """The error that says which render mode an environment has, and what to do about it."""
    known = (env.metadata or {}).get("render_modes")
    return ConfigurationError(
        f"`render_mode` must be 'rgb_array' to get pictures of {maker.name}, got"
        f" {env.render_mode!r} from an environment whose render modes are {known}; pass"
        " render_mode='rgb_array' to gymtask.Environment, or let the callable that makes the"
        " environment take `render_mode` and hand it on"
    )
