"""Wrappers of single environments, which run in the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
from gymnasium import spaces as gym_spaces
from gymnasium.utils import RecordConstructorArgs

from gymtask.errors import MakerError, ObservationError


class InfoToObservation(
    gym.Wrapper[dict[str, Any], Any, Any, Any],
    RecordConstructorArgs,
):
    """Makes a part of the observation of what an environment tells beside it, an action mask say.

    What is part of the observation reaches the policy, the rows and the next rows; what is in the
    info dict of a reset reaches none of them. Taxi tells there which actions do anything::

        spaces = {"action_mask": gymnasium.spaces.MultiBinary(6)}
        wrapper = functools.partial(gymtask.InfoToObservation, spaces=spaces)
        environment = gymtask.Environment("Taxi-v4", wrappers=(wrapper,))

    `states["observation", "action_mask"]` is then int8 [n, 6] beside `states["observation",
    "observation"]`. A Dict observation keeps its keys and gets more. The info dict stays as it is.
    With `frame_stack` a mask is stacked as well; the newest is `[:, -1]`.

    Each mask is that of the very state that it stands in: at an episode's end that of the final
    observation, after it that of the next episode's first.

    Args:
        env: The environment.
        spaces: For each new key its space. The key must be in the info dict of each reset and step.
        method: The name of a method to call after each reset and step in place of a look into the
            info dict, such as "action_masks"; `spaces` must then have one key.

    Raises:
        MakerError: The keys, the spaces or the method do not suit the environment.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        spaces: Mapping[str, gym_spaces.Space[Any]],
        *,
        method: str | None = None,
    ) -> None:
        RecordConstructorArgs.__init__(self, spaces=spaces, method=method)
        gym.Wrapper.__init__(self, env)
        found = env.observation_space
        self._nested = isinstance(found, gym_spaces.Dict)
        parts = dict(found.spaces) if isinstance(found, gym_spaces.Dict) else {"observation": found}
        _check_spaces(spaces, parts, env)
        # Of pairs: a Dict space would sort the keys of a dict, those of the environment among them.
        self.observation_space = gym_spaces.Dict([*parts.items(), *spaces.items()])
        self._keys = tuple(spaces)
        self._ask = None if method is None else _find_method(env, method, spaces)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begins an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._joined(observation, info, "reset"), info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Takes one step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._joined(observation, info, "step"), reward, terminated, truncated, info

    def _joined(self, observation: Any, info: dict[str, Any], call: str) -> dict[str, Any]:
        if self._ask is not None:
            added = {self._keys[0]: self._ask()}
        else:
            try:
                added = {key: info[key] for key in self._keys}
            except KeyError as error:
                raise ObservationError(
                    f"the info dict of every {call} of {_name(self.env)} must hold {error}, as"
                    f" InfoToObservation makes a part of the observation of it, got only the keys"
                    f" {list(info)}; if a method tells it, pass `method`"
                ) from None
        return {**observation, **added} if self._nested else {"observation": observation, **added}


def _check_spaces(spaces: Any, parts: Mapping[str, Any], env: gym.Env[Any, Any]) -> None:
    if not (
        isinstance(spaces, Mapping)
        and spaces
        and all(isinstance(key, str) for key in spaces)
        and all(isinstance(space, gym_spaces.Space) for space in spaces.values())
    ):
        raise MakerError(
            "`spaces` must be a dict of a Gymnasium space for each new key of the observation, such"
            f' as {{"action_mask": MultiBinary(6)}}, got {spaces!r}'
        )
    taken = [key for key in spaces if key in parts]
    if taken:
        raise MakerError(
            f"`spaces` must not name keys that the observation of {_name(env)} has already, got"
            f" {taken} beside {list(parts)}; rename them there, or leave them out here"
        )


def _find_method(
    env: gym.Env[Any, Any], method: str, spaces: Mapping[str, Any]
) -> Callable[[], Any]:
    if len(spaces) != 1:
        raise MakerError(
            f"`spaces` must have one key where `method` is given, got {list(spaces)}; wrap the"
            " environment once for each method"
        )
    try:
        found = env.get_wrapper_attr(method)
    except AttributeError:
        found = None
    if not callable(found):
        raise MakerError(
            f"`method` must be the name of a method of {_name(env)} or of one of its wrappers, got"
            f" {method!r}; None looks into the info dict"
        )
    return found  # type: ignore[no-any-return]


def _name(env: gym.Env[Any, Any]) -> str:
    return env.spec.id if env.spec is not None else str(env)
