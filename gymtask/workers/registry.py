"""The environments that are registered in this process, on their way to a worker."""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Sequence

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from gymtask.maker import RecipePickler, without_main


def pickle_registry() -> bytes:
    """The specs that this process knows, as bytes.

    One that cannot be pickled is left out, since nobody may ever ask for it.
    """
    specs = list(gym.registry.values())
    try:
        return _pickle([without_main(spec) for spec in specs])
    except Exception:  # some can, nearly always all
        kept = []
        for spec in specs:
            with contextlib.suppress(Exception):
                _pickle([without_main(spec)])
                kept.append(without_main(spec))
        return _pickle(kept)


def register_all(data: bytes) -> None:
    """Registers what `pickle_registry` gave, in place of what has the same ids."""
    # A package that registers its environments when it is imported does so again in a worker.
    warnings.filterwarnings("ignore", message=r".*Overriding environment .* already in registry")
    for spec in pickle.loads(data):
        gym.registry[spec.id] = spec


def _pickle(specs: Sequence[EnvSpec]) -> bytes:
    file = io.BytesIO()
    RecipePickler(file, "a registered environment").dump(specs)
    return file.getvalue()
