"""Where the randomness of an environment stands, so that an episode can be begun again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from gymtask.maker import AnyEnv

RandomState = dict[str, Any]
Reader = Callable[[Any], Any]

SMALL = 64  # elements of an array that is taken for a running value


class Randomness:
    """All of an environment that outlives an episode and is known.

    Those are the random generators in the attributes of the environment, of its wrappers and of
    their spaces; the generator in the Arcade Learning Environment, which decides on sticky actions;
    running statistics; and the numbers that Gymnasium's own wrappers keep. An environment may have
    more; whoever plays an episode again looks whether it repeats itself.
    """

    def __init__(self, env: AnyEnv) -> None:
        self._env = env
        self._types: list[list[type]] = []
        self._known: list[dict[str, Reader]] = []
        self._layers = list(_layers(env))

    def read(self) -> RandomState:
        """The states, plain values by place."""
        # What there is to read is looked for again only where an attribute has become another kind
        # of thing: this is done for each episode.
        types = [[*map(type, vars(layer).values())] for layer in self._layers]
        if types != self._types:
            self._layers, self._types = list(_layers(self._env)), types
            self._known = [_readers(layer) for layer in self._layers]
        found: RandomState = {
            "layers": [
                {name: read(vars(layer)[name]) for name, read in known.items()}
                for layer, known in zip(self._layers, self._known, strict=True)
            ]
        }
        inner: Any = self._env.unwrapped
        if _is_ale(inner):
            state = inner.clone_state(include_rng=True).serialize()
            found["ale"] = np.frombuffer(state, np.uint8).copy()
        return found


def set_random_state(env: AnyEnv, state: RandomState) -> None:
    """Puts an environment, which was reset before, where another one's randomness stood.

    What it has no place for is left out.
    """
    for layer, values in zip(_layers(env), state["layers"], strict=False):
        for name, value in values.items():
            _write(layer, name, value)
    inner: Any = env.unwrapped
    if "ale" in state and _is_ale(inner):
        kind = type(inner.clone_state(include_rng=True))
        inner.restore_state(kind(np.asarray(state["ale"]).tobytes()))


def _layers(env: Any) -> Iterator[Any]:
    """The wrappers from the outermost on, the environment, and after each its spaces."""
    while env is not None:
        yield env
        for value in list(vars(env).values()):
            if isinstance(value, gym.Space):
                yield from _spaces(value)
        env = env.env if isinstance(env, gym.Wrapper) else None


def _spaces(space: Any) -> Iterator[Any]:
    yield space
    parts = getattr(space, "spaces", ())
    for part in parts.values() if isinstance(parts, dict) else parts:
        yield from _spaces(part)


def _readers(layer: Any) -> dict[str, Reader]:
    """For the attributes of a layer that are kept, how their states are read."""
    # The numbers of other wrappers and environments may be handles that mean nothing elsewhere.
    keeps_numbers = isinstance(layer, gym.Wrapper) and type(layer).__module__.startswith(
        "gymnasium.wrappers."
    )
    found: dict[str, Reader] = {}
    for name, value in vars(layer).items():
        if isinstance(value, np.random.Generator):
            found[name] = _read_generator
        elif isinstance(value, np.random.RandomState):
            found[name] = _read_legacy
        elif isinstance(value, random.Random):
            found[name] = _read_python
        elif _is_statistics(value):
            found[name] = _read_statistics
        elif keeps_numbers and isinstance(value, (bool, int, float)):
            found[name] = _read_number
        elif keeps_numbers and _is_small_array(value):
            found[name] = np.array
    return found


def _is_small_array(value: Any) -> bool:
    is_array = isinstance(value, (np.generic, np.ndarray))
    return is_array and value.size <= SMALL and value.dtype != object


def _read_generator(value: np.random.Generator) -> Any:
    return value.bit_generator.state


def _read_legacy(value: np.random.RandomState) -> Any:
    return value.get_state(legacy=False)


def _read_python(value: random.Random) -> Any:
    return list(value.getstate())


def _read_statistics(value: Any) -> Any:
    return {key: np.array(each) for key, each in vars(value).items()}


def _read_number(value: Any) -> Any:
    return value


def _write(layer: Any, name: str, value: Any) -> None:
    present = vars(layer).get(name)
    if isinstance(present, np.random.Generator):
        present.bit_generator.state = value
    elif isinstance(present, np.random.RandomState):
        present.set_state(value)
    elif isinstance(present, random.Random):
        version, internal, gauss = value
        present.setstate((version, tuple(internal), gauss))
    elif _is_statistics(present):
        for key, each in value.items():
            setattr(present, key, _like(getattr(present, key), each))
    elif isinstance(present, (bool, int, float, np.generic, np.ndarray)):
        setattr(layer, name, _like(present, value))


def _like(present: Any, value: Any) -> Any:
    """A value of the very type of the present one: a number of Python's is not one of numpy's."""
    if isinstance(present, np.ndarray):
        return np.array(value, present.dtype)
    return type(present)(value)


def _is_statistics(value: Any) -> bool:
    return type(value).__name__ == "RunningMeanStd"  # a module that most workers do not need


def _is_ale(inner: Any) -> bool:
    return hasattr(inner, "ale") and hasattr(inner, "clone_state")
