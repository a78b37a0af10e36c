"""Fixtures that the tests of whole parts share."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium as gym
import pytest

from tests.integration.pool_envs import GravityEnv


@pytest.fixture
def gravity_id() -> Iterator[str]:
    """An id that is registered while the test runs, for `GravityEnv` with a time limit."""
    gym.register("PoolGravity-v0", GravityEnv, max_episode_steps=50)
    yield "PoolGravity-v0"
    del gym.registry["PoolGravity-v0"]
