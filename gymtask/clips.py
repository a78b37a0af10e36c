"""One episode for the eye: frames and states of an environment made for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gymtask.acting import Actor, eval_mode
from gymtask.environment import Environment, require_rgb_array
from gymtask.errors import ConfigurationError
from gymtask.sampling import NoiseStreams, stream_seed
from gymtask.spaces import nest_tensors
from gymtask.trajectory import Key, Piece, assemble
from gymtask.video import standardize_frame, write_video
from gymtask.workers.layout import Array

if TYPE_CHECKING:
    from gymtask.task import ReinforcementLearningTask


class Clip:
    """Plays one episode, frame by frame.

    Args:
        task: Tells the environment, the seed, the longest clip, and how to act.
        model: Acts; None takes random actions.
        count: Number of the clip in its run; each has a stream of its own.
        optimal: Whether to act greedily.
        images: Whether it is rendered.

    Raises:
        ConfigurationError: It is to be rendered, and the environment gives no pictures.
    """

    def __init__(
        self,
        task: ReinforcementLearningTask[Any, Any],
        model: Any,
        *,
        count: int,
        optimal: bool,
        images: bool,
    ) -> None:
        config = task.config.environment
        maker = task.get_environment().maker
        self._images = images
        self._max_steps = config.max_steps
        self._seed = stream_seed(config.env_seed, "clip", 0, count)
        self._model = model
        self.environment = Environment.from_maker(
            maker.with_render_mode("rgb_array") if images else maker
        )
        self.environment.action_clip = config.action_clip
        try:
            env = self.environment.env
            if images:
                require_rgb_array(env, maker)
            self._actor = Actor(
                task,
                model,
                observation_space=env.observation_space,
                action_space=env.action_space,
                capacity=1,
                noise=NoiseStreams((config.env_seed, "clip", count), 1),
                optimal=optimal,
                keep_float64=maker.keep_float64,
            )
        except BaseException:
            self.environment.close()
            raise
        self._states: dict[Key, list[Array]] = {}
        self._rows: dict[Key, list[Array]] = {}
        self._length = 0

    def frames(self, standardize: bool) -> Iterator[Any]:
        """Plays the episode and yields its L + 1 pictures, or None for each if none is rendered.

        Args:
            standardize: Whether pictures become uint8 [H, W, 3].
        """
        environment = self.environment
        try:
            state = environment.reset(seed=self._seed)
            carry = dict(self._actor.initial_carry)
            self._observe(state, carry)
            yield self._picture(standardize)
            while not environment.terminated(state) and self._length < self._max_steps:
                action = self._choose(carry)
                state = environment.step(action)
                self._record(state)
                self._observe(state, carry)
                yield self._picture(standardize)
        finally:
            environment.close()

    def states(self) -> TensorDict:
        """The rows played so far, TensorDict [L]."""
        piece = Piece(
            env_id=0,
            trajectory_id=0,
            first_step=0,
            first_run_step=0,
            length=self._length,
            states={key: np.stack(values) for key, values in self._states.items()},
            rows={key: np.stack(values) for key, values in self._rows.items()},
        )
        return assemble([piece], ())

    def _picture(self, standardize: bool) -> Any:
        if not self._images:
            return None
        frame: Any = self.environment.env.render()
        if frame is None:
            raise ConfigurationError(
                f"render() must return a picture, got None at step {self._length}"
            )
        return standardize_frame(frame) if standardize else frame

    def _observe(self, state: TensorDict, carry: dict[Key, Array]) -> None:
        for column in self._actor.observation_columns:
            self._states.setdefault(column.key, []).append(state[column.key].numpy())
        for key, value in carry.items():
            self._states.setdefault(key, []).append(value)

    def _choose(self, carry: dict[Key, Array]) -> Tensor | TensorDictBase:
        """The next action as `Environment.step` takes it.

        Its row is stored, and `carry` is moved on.
        """
        if self._model is None:
            action = self.environment.sample_action()
            for leaf in self._actor.codec.leaves:
                key = ("action", *leaf.path)
                value = action[leaf.path] if leaf.path else action
                self._rows.setdefault(key, []).append(value.numpy())
            return action  # type: ignore[no-any-return]
        arrays = self._actor.arrays
        for key, values in self._states.items():
            arrays[key][0] = values[-1]
        arrays[("step",)][0] = arrays[("run_step",)][0] = self._length
        arrays[("is_init",)][0] = self._length == 0
        arrays[("env_id",)][0] = arrays[("trajectory_id",)][0] = 0
        with eval_mode(self._model):
            answer = self._actor.act(np.zeros(1, np.int64))
        leaves = self._actor.codec.leaves
        actions = {
            ("action", *leaf.path): rows for leaf, rows in zip(leaves, answer.actions, strict=True)
        }
        for key, rows in {**actions, **answer.extras}.items():
            self._rows.setdefault(key, []).append(rows[0].copy())
        carry.update({key: rows[0].copy() for key, rows in answer.carries.items()})
        self._actor.release(1)
        tensors = [torch.from_numpy(np.array(self._rows[key][-1])) for key in actions]
        nested = nest_tensors(self.environment.action_space, tensors)
        return TensorDict(nested, batch_size=[]) if isinstance(nested, dict) else nested

    def _record(self, state: TensorDict) -> None:
        self._length += 1
        for name in ("reward", "terminated", "truncated"):
            self._rows.setdefault(("next", name), []).append(state[name].numpy())


def sample_clip(
    task: ReinforcementLearningTask[Any, Any],
    model: Any,
    *,
    save_path: str | Path | None,
    return_images: bool,
    return_states: bool,
    writer: str,
    standardize_images: bool,
    optimal: bool,
) -> Tensor | TensorDict | tuple[Tensor, TensorDict] | None:
    """Does the work of `ReinforcementLearningTask.sample_clip`."""
    if save_path is not None and (return_states or not return_images):
        raise ConfigurationError(
            f"`save_path` must be None to return states, or not to render, got {save_path!r}"
            f" with return_images={return_images} and return_states={return_states}"
        )
    if not return_images and not return_states:
        raise ConfigurationError(
            "`return_images` or `return_states` must be True, got False for both"
        )
    clip = Clip(task, model, count=task.num_clips, optimal=optimal, images=return_images)
    with clip.environment:
        task.num_clips += 1
        frames = clip.frames(standardize_images)
        if save_path is not None:
            write_video(frames, save_path, fps=clip.environment.fps, writer=writer)
            return None
        pictures = list(frames)
    if not return_images:
        return clip.states()
    images = torch.from_numpy(np.stack(pictures))
    return (images, clip.states()) if return_states else images
