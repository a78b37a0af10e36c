"""`Environment`: what a task says its environment is, and one of it to step by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict

from gymtask.errors import ConfigurationError, PoolStateError
from gymtask.maker import AnyEnv, EnvironmentMaker, EnvSource, Wrapper
from gymtask.spaces import ActionCodec, nest_tensors, stored_dtype
from gymtask.video import render_fps, standardize_frame
from gymtask.workers.layout import Array, Space, make_reader, make_writer, space_leaves


class Environment:
    """A Gymnasium environment whose states are TensorDicts.

    The recipe from which workers make theirs.

    Nothing is made before it is needed. The recipe alone is pickled. One episode by hand::

        with Environment("CartPole-v1") as env:
            state = env.reset(seed=7)
            while not env.terminated(state):
                state = env.step(env.sample_action())

    A state is a TensorDict [] with "observation", "reward" (float32, 0 after a reset),
    "terminated", "truncated", "done" (bool) and "step" (int64, steps since the reset).

    Args:
        env: An id ("CartPole-v1", "module:Name-v0"), an `EnvSpec`, or a callable that returns a
            `gymnasium.Env`.
        wrappers: Callables `env -> env`, applied in order.
        render_mode: How it is rendered; clips choose their own.
        max_episode_steps: Time limit in place of the one that the id is registered with.
        info_keys: Keys of the info dict that trajectories keep under ("next", "info", key).
        keep_float64: Whether float64 observations are stored as such instead of as float32.
        **make_kwargs: Further keywords of `gymnasium.make`, or of the callable.

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
                kwargs=make_kwargs,
            )
        )

    @classmethod
    def from_maker(cls, maker: EnvironmentMaker) -> Environment:
        """An environment of that recipe."""
        environment = cls.__new__(cls)
        environment._setup(maker)
        return environment

    def _setup(self, maker: EnvironmentMaker) -> None:
        self.maker = maker
        self.action_clip = (
            False  # as in the config: whether float actions outside a Box are clipped
        )
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
        """The Gymnasium environment, made when it is first asked for."""
        if self._env is None:
            self._env = self.maker()
            space = self._env.observation_space
            # One row of memory for each leaf: the same checks and casts as in a worker.
            self._observation = [
                np.zeros((1, *leaf.shape), leaf.dtype)
                for leaf in space_leaves(space, "observation")
            ]
            self._write = make_writer(space, self._observation)
            self._codec = ActionCodec(self._env.action_space, clip=self.action_clip)
        return self._env

    @property
    def observation_space(self) -> Space:
        """The space of observations."""
        return self.env.observation_space

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
        observation, _ = self.env.reset(seed=seed)
        if seed is not None:
            self.env.action_space.seed(seed)
        self._num_steps, self._ended = 0, False
        return self._state(observation, 0.0, False, False)

    def step(self, action: Any) -> TensorDict:
        """Takes one step.

        Args:
            action: A tensor [*shape] as trajectories store it (for Discrete the index from 0), or
                nested ones.

        Raises:
            PoolStateError: The episode has ended, or none was begun.
            ActionError: The action does not fit the action space.
        """
        env = self.env
        if self._num_steps < 0 or self._ended:
            why = "the episode has ended" if self._ended else "no episode was begun"
            raise PoolStateError(f"cannot step, as {why}; call reset() first")
        batch = (
            action.unsqueeze(0)
            if hasattr(action, "unsqueeze")
            else torch.as_tensor(action).unsqueeze(0)
        )
        rows = self._codec.decode(self._codec.encode(batch, 1))
        arrays = [
            row.astype(leaf.dtype) for row, leaf in zip(rows, self._codec.leaves, strict=True)
        ]
        read = make_reader(env.action_space, arrays)
        observation, reward, terminated, truncated, _ = env.step(read(0))
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
        frame: Any = self.env.render()
        if frame is None:
            raise ConfigurationError(
                f"render() must return a picture, got None at step {self._num_steps}"
            )
        return standardize_frame(frame)

    def close(self) -> None:
        """Closes the environment, if one was made; the next use makes a new one."""
        env, self._env = self._env, None
        self._num_steps, self._ended = -1, False
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
        keep = self.maker.keep_float64
        leaves = [
            (
                torch.from_numpy(array[0].astype(stored_dtype(array.dtype, keep_float64=keep)))
                if array.ndim > 1
                else torch.tensor(array[0].astype(stored_dtype(array.dtype, keep_float64=keep)))
            )
            for array in self._observation
        ]
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


def require_rgb_array(env: AnyEnv, maker: EnvironmentMaker) -> None:
    """Checks that an environment gives pictures.

    Raises:
        ConfigurationError: Its render mode is another one; the error names it and the fix.
    """
    if env.render_mode != "rgb_array":
        raise ConfigurationError(
            f"`render_mode` must be 'rgb_array' to get pictures of {maker.name}, got"
            f" {env.render_mode!r}; pass render_mode='rgb_array' to gymtask.Environment, or let the"
            " callable that makes the environment take `render_mode` and hand it on"
        )
