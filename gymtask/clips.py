"""One episode for the eye: frames and states of an environment made for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gymtask.acting import Actor, Answer, eval_mode
from gymtask.environment import Environment, require_rgb_array
from gymtask.errors import ConfigurationError, HookError
from gymtask.maker import EnvironmentMaker
from gymtask.sampling import NoiseStreams, stream_seed
from gymtask.spaces import nest_tensors
from gymtask.tape import Key, Piece
from gymtask.trajectory import assemble
from gymtask.video import standardize_frame, write_video
from gymtask.workers.layout import Array, space_leaves

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

    Attributes:
        environment: The environment, made for this clip alone; the caller closes it.

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
        maker = _maker_of(task)
        self._images = images
        self._max_steps = config.max_steps
        self._seed = stream_seed(config.env_seed, "clip", 0, count)
        self._model = model
        self.environment = Environment.from_maker(
            maker.with_render_mode("rgb_array") if images else maker,
            action_clip=config.action_clip,
        )
        try:
            env = self.environment.env
            if images:
                require_rgb_array(env, maker)
            self._actor = None if model is None else self._make_actor(task, count, optimal)
        except BaseException:
            self.environment.close()
            raise
        self._observation_keys: list[Key] = [
            ("observation", *leaf.path)
            for leaf in space_leaves(env.observation_space, "observation")
        ]
        self._action_keys: list[Key] = [
            ("action", *leaf.path) for leaf in space_leaves(env.action_space, "action")
        ]
        self._seen: dict[Key, Array] = {}  # what the policy sees of the present observation
        self._states: dict[Key, list[Array]] = {}
        self._rows: dict[Key, list[Array]] = {}
        self._infos: list[dict[str, Any]] = []
        self._length = 0

    def _make_actor(
        self, task: ReinforcementLearningTask[Any, Any], count: int, optimal: bool
    ) -> Actor:
        environment = self.environment
        actor = Actor(
            task,
            observation_space=environment.env.observation_space,
            action_space=environment.action_space,
            capacity=1,
            noise=NoiseStreams((task.config.environment.env_seed, "clip", count), 1),
            maker=environment.maker,
        )
        actor.begin(self._model, optimal=optimal)
        return actor

    def frames(self, standardize: bool) -> Iterator[Any]:
        """Plays the episode and yields its L + 1 pictures, or None for each if none is rendered.

        Args:
            standardize: Whether pictures become uint8 [H, W, 3].
        """
        environment = self.environment
        state = environment.reset(seed=self._seed)
        carry = {} if self._actor is None else dict(self._actor.initial_carry)
        self._observe(state, carry)
        yield self._picture(standardize)
        while not environment.terminated(state) and self._length < self._max_steps:
            action = self._choose(carry)
            state = environment.step(action)
            self._record(state)
            self._observe(state, carry)
            yield self._picture(standardize)

    def states(self) -> TensorDict:
        """The rows played so far, TensorDict [L]."""
        piece = Piece.from_arrays(
            states={key: np.stack(values) for key, values in self._states.items()},
            rows={key: np.stack(values) for key, values in self._rows.items()},
            infos=self._infos,
        )
        return assemble([piece], self.environment.maker.info_keys)

    def _picture(self, standardize: bool) -> Any:
        if not self._images:
            return None
        picture = self.environment.picture()
        return standardize_frame(picture) if standardize else picture

    def _observe(self, state: TensorDict, carry: Mapping[Key, Array]) -> None:
        for key in self._observation_keys:
            seen = self._seen[key] = state[key].numpy()
            # A copy of the newest frame: a view would keep the whole stack.
            frame = seen if self.environment.maker.frame_stack is None else np.array(seen[-1])
            self._states.setdefault(key, []).append(frame)
        for key, value in carry.items():
            self._states.setdefault(key, []).append(value)

    def _choose(self, carry: dict[Key, Array]) -> Tensor | TensorDictBase:
        """The next action as `Environment.step` takes it.

        Its row is stored, and `carry` is moved on.
        """
        if self._actor is None:
            action = self.environment.sample_action()
            rows = {key: action[key[1:]] if key[1:] else action for key in self._action_keys}
            self._keep({key: row.numpy() for key, row in rows.items()})
            return action  # type: ignore[no-any-return]
        answer = self._ask(self._actor)
        actions = dict(zip(self._action_keys, answer.actions, strict=True))
        self._keep({key: rows[0].copy() for key, rows in {**actions, **answer.extras}.items()})
        carry.update({key: rows[0].copy() for key, rows in answer.carries.items()})
        if self._actor.debug:
            self._actor.release(1)
        tensors = [torch.from_numpy(np.array(self._rows[key][-1])) for key in self._action_keys]
        nested = nest_tensors(self.environment.action_space, tensors)
        return TensorDict(nested, batch_size=[]) if isinstance(nested, dict) else nested

    def _ask(self, actor: Actor) -> Answer:
        arrays = actor.states.arrays
        for key, values in self._states.items():
            arrays[key][0] = self._seen.get(key, values[-1])
        arrays[("step",)][0] = arrays[("run_step",)][0] = self._length
        arrays[("is_init",)][0] = self._length == 0
        arrays[("env_id",)][0] = arrays[("trajectory_id",)][0] = 0
        with eval_mode(self._model, actor.task):
            return actor.act(np.zeros(1, np.int64))

    def _keep(self, rows: Mapping[Key, Array]) -> None:
        """Stores what was chosen, which must be of the same kind in every step."""
        first = {key: self._rows[key][0] for key in self._rows if key[0] != "next"}
        if self._length and _kinds(rows) != _kinds(first):
            raise HookError(
                "`get_actions` must return the same keys, shapes and dtypes in every step, got"
                f" {_kinds(rows)} after {_kinds(first)}"
            )
        for key, row in rows.items():
            self._rows.setdefault(key, []).append(row)

    def _record(self, state: TensorDict) -> None:
        self._length += 1
        for name in ("reward", "terminated", "truncated"):
            self._rows.setdefault(("next", name), []).append(state[name].numpy())
        info, keys = self.environment.info, self.environment.maker.info_keys
        # Copies, since an environment may fill the same arrays again.
        self._infos.append({key: copy.deepcopy(info[key]) for key in keys if key in info})


def _maker_of(task: ReinforcementLearningTask[Any, Any]) -> EnvironmentMaker:
    environment = task.get_environment()
    if not isinstance(environment, Environment):
        raise HookError(f"`get_environment` must return a gymtask.Environment, got {environment!r}")
    return environment.maker


def _kinds(rows: Mapping[Key, Array]) -> dict[str, str]:
    return {"/".join(key): f"{row.dtype} {row.shape}" for key, row in sorted(rows.items())}


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
        frames = clip.frames(standardize_images)
        if save_path is not None:
            write_video(frames, save_path, fps=clip.environment.fps, writer=writer)
            pictures = []
        else:
            # Copies, since an environment may draw into the same array again.
            pictures = [np.array(frame) if return_images else None for frame in frames]
    task.num_clips += 1
    if save_path is not None:
        return None
    if not return_images:
        return clip.states()
    images = _stacked(pictures)
    return (images, clip.states()) if return_states else images


def _stacked(pictures: Sequence[Any]) -> Tensor:
    """Pictures of one shape and dtype as a tensor [L + 1, ...]."""
    first = pictures[0]
    for number, picture in enumerate(pictures):
        if picture.shape != first.shape or picture.dtype != first.dtype:
            raise ConfigurationError(
                f"pictures must all be of the first one's kind, {first.dtype} {first.shape}, got"
                f" {picture.dtype} {picture.shape} at picture {number}"
            )
    return torch.from_numpy(np.stack(pictures))
