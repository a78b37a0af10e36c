"""VectorEnvs that the tests of native mode share, and what they compare them with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torch import Tensor

import gymtask
from gymtask.testing import ScriptedEnv

MODES = list(AutoresetMode)
MODE_IDS = [mode.name for mode in MODES]


def vector_of(env: Callable[..., Any], mode: AutoresetMode, **kwargs: Any) -> Callable[..., Any]:
    """What makes a SyncVectorEnv of such environments."""

    def make(num_envs: int) -> SyncVectorEnv:
        return SyncVectorEnv([functools.partial(env, **kwargs)] * num_envs, autoreset_mode=mode)

    return make


class DriftEnv(gym.Env[Any, Any]):
    """Adds the action and a random step to a place; an episode ends beyond 3, or after 12 steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-99, 99, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        self.place = self.np_random.uniform(-1, 1)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.place += float(action[0]) + self.np_random.normal()
        info = {"far": self.place} if abs(self.place) > 1 else {}
        return self._observe(), self.place / 2, abs(self.place) > 3, self.count == 12, info

    def _observe(self) -> Any:
        return np.array([self.place, self.count], np.float32)


class DriftVectorEnv(VectorEnv[Any, Any, Any]):
    """The same in numpy, with a generator for each environment."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int, **_: Any) -> None:
        self.num_envs = num_envs
        single = DriftEnv()
        self.single_observation_space = single.observation_space
        self.single_action_space = single.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.place = np.zeros(num_envs)
        self.count = np.zeros(num_envs, int)
        self.ended = np.zeros(num_envs, bool)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        mask = np.ones(self.num_envs, bool)
        if options is not None:
            mask = options["reset_mask"]
        if seed is not None:
            self.randoms = [np.random.default_rng(seed + i) for i in range(self.num_envs)]
        self._begin(mask)
        return self._observe(), {}

    def _begin(self, mask: Any) -> None:
        for index in np.flatnonzero(mask):
            self.place[index] = self.randoms[index].uniform(-1, 1)
        self.count[mask] = 0
        self.ended[mask] = False

    def _move(self, actions: Any, moving: Any) -> tuple[Any, Any, Any]:
        for index in np.flatnonzero(moving):
            self.place[index] += float(actions[index, 0]) + self.randoms[index].normal()
        self.count[moving] += 1
        terminated = moving & (np.abs(self.place) > 3)
        truncated = moving & (self.count == 12)
        self.ended = terminated | truncated
        return np.where(moving, self.place / 2, 0.0), terminated, truncated

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        resting = self.ended.copy()
        reward, terminated, truncated = self._move(actions, ~resting)
        self._begin(resting)
        return self._observe(), reward, terminated, truncated, self._infos()

    def _infos(self) -> dict[str, Any]:
        return {"far": self.place.copy(), "_far": np.abs(self.place) > 1}

    def _observe(self) -> Any:
        return np.stack([self.place, self.count], -1).astype(np.float32)


class DriftSameStep(DriftVectorEnv):
    """Gives whole batches of final observations and infos; its mode is a string."""

    metadata: dict[str, Any] = {"autoreset_mode": "SameStep"}  # noqa: RUF012

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        reward, terminated, truncated = self._move(actions, np.ones(self.num_envs, bool))
        infos = self._infos()
        if self.ended.any():
            infos = {**infos, "final_obs": self._observe(), "final_info": self._infos()}
            self._begin(self.ended)
        return self._observe(), reward, terminated, truncated, infos


class DriftDisabled(DriftVectorEnv):
    """Its mode is an attribute alone, and its arrays are written again and again."""

    metadata: dict[str, Any] = {}  # noqa: RUF012
    autoreset_mode = AutoresetMode.DISABLED

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        assert not self.ended.any(), "an environment was stepped beyond its end"
        reward, terminated, truncated = self._move(actions, np.ones(self.num_envs, bool))
        return self._observe(), reward, terminated, truncated, self._infos()

    def _observe(self) -> Any:
        if not hasattr(self, "array"):
            self.array = np.zeros((self.num_envs, 2), np.float32)
        self.array[:] = super()._observe()
        return self.array


class DriftUnmasked(DriftVectorEnv):
    """Sends an info of all environments without a mask, of all kinds."""

    def _infos(self) -> dict[str, Any]:
        return {
            "count": self.count.copy(),
            "name": [f"number {index}" for index in range(self.num_envs)],
            "version": 3,
            "nested": {"pair": np.stack([self.count, self.count], -1)},
            "objects": np.array([{"n": n} for n in self.count.tolist()], object),
        }


class SpacesEnv(gym.Env[Any, Any]):
    """Observes a dict of a tuple, a number and a picture; acts by a dict. Three to five steps."""

    def __init__(self) -> None:
        pair = spaces.Tuple([spaces.Discrete(9, start=3), spaces.MultiBinary(2)])
        self.observation_space = spaces.Dict(
            {"pair": pair, "picture": spaces.Box(0, 255, (2, 2), np.uint8)}
        )
        self.action_space = spaces.Dict(
            {"turn": spaces.Discrete(3, start=-1), "push": spaces.Box(-1, 1, (2,), np.float64)}
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.length = 0, int(self.np_random.integers(3, 6))
        self.last = {"turn": 0, "push": np.zeros(2)}
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.count, self.last = self.count + 1, action
        reward = float(action["push"].sum()) + int(action["turn"])
        return self._observe(), reward, self.count == self.length, False, {}

    def _observe(self) -> Any:
        turn = int(self.last["turn"])
        picture = np.full((2, 2), 10 * self.count + turn + 1, np.uint8)
        pair = (np.int64(3 + self.count), np.array([turn > 0, self.count % 2], np.int8))
        return {"pair": pair, "picture": picture}


def rows_of(samples: Sequence[gymtask.MultiReplaySamples]) -> list[dict[str, bytes]]:
    """The bytes of every value, of one collection after another; each key with its dtype."""
    return [table_of(part.to_tensordict()) for part in samples]


def table_of(rows: TensorDict) -> dict[str, bytes]:
    """The bytes under each key."""
    flat = rows.flatten_keys("/")
    found: dict[str, bytes] = {}
    for key in sorted(flat.keys()):
        value = flat.get(key)
        if isinstance(value, Tensor):
            found[f"{key} {value.dtype} {tuple(value.shape)}"] = value.numpy().tobytes()
        else:  # not of tensors
            found[key] = repr(value).encode()
    return found


class Scripts(VectorEnv[Any, Any, Any]):
    """A VectorEnv of ScriptedEnvs, of which some promise is broken.

    Args:
        num_envs: N.
        broken: What `step` returns, changed.
        metadata: Its metadata.
    """

    def __init__(
        self,
        num_envs: int,
        broken: Callable[[list[Any]], Any] = lambda answer: answer,
        metadata: Mapping[str, Any] | None = None,
        mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        self.inner = vector_of(ScriptedEnv, mode, lengths=2)(num_envs)
        self.num_envs = num_envs
        for name in ("observation_space", "action_space"):
            setattr(self, name, getattr(self.inner, name))
            setattr(self, f"single_{name}", getattr(self.inner, f"single_{name}"))
        self.metadata = {"autoreset_mode": mode} if metadata is None else dict(metadata)
        self.broken = broken

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.inner.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        return tuple(self.broken(list(self.inner.step(actions))))

    def close_extras(self, **kwargs: Any) -> None:
        self.inner.close()


def assert_same(found: list[dict[str, bytes]], expected: list[dict[str, bytes]]) -> None:
    """Compares collections, and names the keys that differ."""
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert list(ours) == list(theirs)
        assert [(number, key) for key in ours if ours[key] != theirs[key]] == []
