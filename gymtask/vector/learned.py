"""What a vector environment learns from its environments before it starts its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import Space, spaces
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from gymtask.errors import ConfigurationError
from gymtask.maker import EnvironmentMaker
from gymtask.workers.layout import children

GYMNASIUMS = (
    spaces.Box,
    spaces.Discrete,
    spaces.MultiDiscrete,
    spaces.MultiBinary,
    spaces.Text,
    spaces.OneOf,
    spaces.Graph,
    spaces.Sequence,
)


def learn(vector: Any, makers: Sequence[EnvironmentMaker]) -> None:
    """Sets `metadata`, `render_mode` and the four spaces of a vector environment.

    Makes the first environment, or all of them with observation_mode="different", and closes them.

    Raises:
        ConfigurationError: `observation_mode` breaks its rule.
    """
    mode = vector.observation_mode
    custom = isinstance(mode, tuple) and len(mode) == 2
    if custom and not all(isinstance(space, Space) for space in mode):
        raise TypeError(
            "`observation_mode` must be two spaces, the batched and the single one, got"
            f" {type(mode[0])} and {type(mode[1])}"
        )
    if not custom and (not isinstance(mode, str) or mode not in ("same", "different")):
        raise ConfigurationError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and"
            f" batch observation space, actual got {mode}"
        )
    first = makers[0]()
    try:
        _learn_from(vector, first, len(makers))
        if custom:
            vector.observation_space, vector.single_observation_space = mode
        elif mode == "same":
            vector.single_observation_space = first.observation_space
            vector.observation_space = batch_space(first.observation_space, len(makers))
        else:
            found = [first.observation_space, *map(_observation_space, makers[1:])]
            vector.single_observation_space = found[0]
            vector.observation_space = batch_differing_spaces(found)
    finally:
        first.close()


def _learn_from(vector: VectorEnv[Any, Any, Any], env: Any, num_envs: int) -> None:
    # A copy: the environment's own may be that of its class.
    vector.metadata = dict(env.metadata)
    vector.metadata["autoreset_mode"] = vector.autoreset_mode  # type: ignore[attr-defined]
    vector.render_mode = env.render_mode
    vector.single_action_space = env.action_space
    vector.action_space = batch_space(env.action_space, num_envs)


def _observation_space(maker: EnvironmentMaker) -> Space[Any]:
    env = maker()
    space = env.observation_space
    env.close()
    return space


def check_shareable(space: Space[Any]) -> None:
    """Checks a space that was asked to go through shared memory.

    Those of Gymnasium that have no fixed shape go over a pipe without a word.

    Raises:
        ConfigurationError: It is a custom one.
    """
    parts = children(space)
    if parts is not None:
        for _, part in parts:
            check_shareable(part)
    elif not isinstance(space, GYMNASIUMS):
        raise ConfigurationError(
            f"`shared_memory` must be False or None for a custom space, got True for {space}"
        )
