"""Where the random generators of an environment stand, so that an episode can be begun again."""

from __future__ import annotations

from typing import Any

import numpy as np

from gymtask.maker import AnyEnv

RandomState = dict[str, Any]


def random_state(env: AnyEnv) -> RandomState:
    """The states of the generators, plain values: {"np_random": ..., "ale": ...}.

    Beside Gymnasium's own that is the one within the Arcade Learning Environment, which decides on
    sticky actions. An environment that has neither, or another one too, may not repeat its episode;
    whoever replays one looks whether it did.
    """
    found: RandomState = {}
    inner = env.unwrapped
    generator = getattr(inner, "np_random", None)
    if isinstance(generator, np.random.Generator):
        found["np_random"] = generator.bit_generator.state
    if _is_ale(inner):
        emulator: Any = inner
        state = emulator.clone_state(include_rng=True).serialize()
        found["ale"] = np.frombuffer(state, np.uint8).copy()
    return found


def set_random_state(env: AnyEnv, state: RandomState) -> None:
    """Puts the generators of an environment, which was reset before, where another's stood.

    Raises:
        ValueError: It has generators of another kind.
    """
    inner: Any = env.unwrapped
    if "np_random" in state:
        inner.np_random.bit_generator.state = state["np_random"]
    if "ale" in state:
        kind = type(inner.clone_state(include_rng=True))
        inner.restore_state(kind(np.asarray(state["ale"]).tobytes()))


def _is_ale(inner: Any) -> bool:
    return hasattr(inner, "ale") and hasattr(inner, "clone_state")
