"""Episodes that were recorded, and films of them: an episode is played again when it is wanted.

Pictures cost more than all the rest of training; what an episode is known by is small: how its
random generators stood when it began, and what was done in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec

from gymtask.environment import Environment, require_rgb_array
from gymtask.errors import ConfigurationError, EpisodeError
from gymtask.maker import EnvironmentMaker
from gymtask.replay import EpisodeRecord
from gymtask.spaces import ActionCodec
from gymtask.video import standardize_frame, write_video
from gymtask.workers.layout import Array, make_reader
from gymtask.workers.random_state import set_random_state


@dataclass(frozen=True)
class RecordedEpisode(EpisodeRecord):
    """An episode that can be played again, as `gymtask.load_episodes` reads it.

    Attributes:
        start: How it began: "seed" is that of the environment's last reset that had one, and
            "random_state" is where its generators stood when the episode began, if that was later.
        actions: For each leaf of the action space [T, *shape], as trajectories store them.
        environment: The environment's "id", "spec" (JSON, None where there is none), "kwargs",
            "max_episode_steps", number of "wrappers", and whether actions are clipped
            ("action_clip").
    """

    start: Mapping[str, Any] = field(repr=False, compare=False)
    actions: Sequence[Array] = field(repr=False, compare=False)
    environment: Mapping[str, Any] = field(repr=False, compare=False)


def film(
    episode: RecordedEpisode,
    path: str | Path,
    *,
    environment: Environment | None = None,
    fps: float | None = None,
    writer: str = "moviepy",
) -> None:
    """Plays an episode again, in an environment made for it, and writes the pictures to a file.

    Args:
        episode: Of L steps, which give L + 1 pictures.
        path: Where, as `gymtask.write_video` takes it; a file that is there is replaced once the
            new one is whole.
        environment: What it was played in, `task.get_environment()`; None makes it from its spec,
            which will do where there were no wrappers.
        fps: Pictures per second; None takes the environment's own.
        writer: As `gymtask.write_video` takes it.

    Raises:
        ConfigurationError: The environment must be given, or gives no pictures.
        EpisodeError: Played again, the episode was another one; no file is written.
        VideoError: The film could not be encoded.
    """
    if not isinstance(episode, RecordedEpisode):
        raise ConfigurationError(
            "`episode` must be a RecordedEpisode, as gymtask.load_episodes gives, got"
            f" {type(episode).__name__}"
        )
    maker = _made_of(episode) if environment is None else environment.maker
    with Environment.from_maker(maker.with_render_mode("rgb_array")) as made:
        require_rgb_array(made.env, maker)
        frames = _frames(episode, made)
        write_video(frames, path, fps=made.fps if fps is None else fps, writer=writer)


def _made_of(episode: RecordedEpisode) -> EnvironmentMaker:
    """The recipe, from what was recorded of it."""
    kept = episode.environment
    if kept["spec"] is None or kept["wrappers"] or kept["kwargs"] is None:
        raise ConfigurationError(
            f"`environment` must be given to film an episode of {kept['id']}, as a recording holds"
            " neither wrappers nor callables, got None; pass task.get_environment()"
        )
    return EnvironmentMaker.create(
        EnvSpec.from_json(kept["spec"]),
        max_episode_steps=kept["max_episode_steps"],
        kwargs=kept["kwargs"],
    )


def _frames(episode: RecordedEpisode, environment: Environment) -> Iterator[Any]:
    """The L + 1 pictures; at the end it is checked that the episode was the same."""
    env, total, ended = environment.env, 0.0, (False, False)
    env.reset(seed=episode.start["seed"])
    if "random_state" in episode.start:
        set_random_state(env, episode.start["random_state"])
        env.reset()
    yield standardize_frame(environment.picture())
    codec = ActionCodec(env.action_space, clip=bool(episode.environment["action_clip"]))
    rows = codec.decode([np.asarray(leaf) for leaf in episode.actions])
    arrays = [row.astype(leaf.dtype) for row, leaf in zip(rows, codec.leaves, strict=True)]
    read = make_reader(env.action_space, arrays)
    for step in range(episode.length):
        if any(ended):
            raise _other(episode, f"it ended after {step} steps")
        _, reward, terminated, truncated, _ = env.step(read(step))
        total, ended = total + float(reward), (bool(terminated), bool(truncated))
        yield standardize_frame(environment.picture())
    if ended != (episode.terminated, episode.truncated):
        raise _other(episode, f"(terminated, truncated) was {ended} at its end")
    if not np.array_equal(total, episode.episode_return, equal_nan=True):
        raise _other(episode, f"its return was {total}")


def _other(episode: RecordedEpisode, got: str) -> EpisodeError:
    return EpisodeError(
        f"episode {episode.trajectory_id} of {episode.environment['id']} did not repeat itself:"
        f" {got}, where {episode.length} steps with a return of {episode.episode_return} and"
        f" (terminated, truncated) = {episode.terminated, episode.truncated} were recorded; pass"
        " the `environment` that it was played in; one with memory or randomness of its own"
        " cannot be filmed so"
    )
