"""The replay buffers of other libraries, each imported only where it is built."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from stores import ALPHA, BATCH, BETA, KEYS, NUM_ENVS, Array, Store, Values, by_key, tensordict

NEXT = "next_observation"


class TorchRL(Store):
    """TorchRL's ReplayBuffer; the ends of windows are not marked as truncated."""

    needs = ("torchrl.data.replay_buffers",)

    def build(self) -> None:
        data = import_module(self.needs[0])
        sampler, kind = data.RandomSampler(), data.ReplayBuffer
        if self.work.prioritized:  # the plain buffer would leave index and weight out
            sampler = data.PrioritizedSampler(self.capacity, ALPHA, BETA)
            kind = data.TensorDictReplayBuffer
        if self.work.width > 1:
            options: Any = {"end_key": ("next", "done"), "truncated_key": None}
            options |= {"slice_len": self.work.width, "cache_values": True}
            sampler = data.SliceSampler(**options)
        where = {"scratch_dir": self.work.folder} if "Memmap" in self.how else {}
        storage = getattr(data, self.how)(self.capacity, **where)
        size = BATCH * self.work.width
        self.buffer: Any = kind(storage=storage, sampler=sampler, batch_size=size)
        self.fill()

    def piece(self, values: Values) -> Any:
        return tensordict(values, own_axis=True)

    def extend(self, piece: Any) -> None:
        self.buffer.extend(piece)

    def draw(self) -> Any:
        return self.buffer.sample()

    def read(self, batch: Any) -> dict[str, Any]:
        return by_key(batch)

    def weight(self, batch: Any) -> Any:
        return batch["priority_weight"]

    def prioritize(self, index: Any, priority: Array) -> None:
        self.buffer.update_priority(torch.as_tensor(index), torch.from_numpy(priority))


class Tianshou(Store):
    """Tianshou's ReplayBuffer; windows are drawn by hand, and each key is asked for."""

    needs = ("tianshou.data",)

    names = ("obs", "act", "obs_next", "rew", "terminated", "truncated", "done")

    def build(self) -> None:
        data = import_module(self.needs[0])
        kind = data.PrioritizedReplayBuffer if self.work.prioritized else data.ReplayBuffer
        order = {"alpha": ALPHA, "beta": BETA} if self.work.prioritized else {}
        self.buffer: Any = kind(self.capacity, **order)
        values = self.work.rows.some(slice(0, self.capacity), KEYS)
        rows = {name: values[key].copy() for key, name in zip(KEYS, self.names, strict=True)}
        # Its `add` takes one row after the other, which takes minutes.
        self.buffer.set_batch(data.Batch(**rows, info=data.Batch(), policy=data.Batch()))
        self.buffer._size, self.buffer.last_index[:] = self.capacity, self.capacity - 1
        if self.work.prioritized:
            self.buffer.init_weight(np.arange(self.capacity))

    def draw(self) -> Any:
        if self.work.width == 1:
            return self.buffer.sample(BATCH)
        ends, width = self.windows()[:, -1], self.work.width
        return {name: self.buffer.get(ends, name, stack_num=width) for name in self.names}, ends

    def read(self, batch: Any) -> dict[str, Any]:
        return {key: batch[0][name] for key, name in zip(KEYS, self.names, strict=True)}

    def index(self, batch: Any) -> Any:
        return batch[1]

    def weight(self, batch: Any) -> Any:
        return batch[0].weight

    def prioritize(self, index: Any, priority: Array) -> None:
        self.buffer.update_weight(index, priority)


class Cpprb(Store):
    """cpprb's buffers; windows are drawn by hand and gathered by a private method.

    With "next_of" it stores one observation a row, and is told where trajectories end.
    """

    needs = ("cpprb",)

    def build(self) -> None:
        library = import_module(self.needs[0])
        found = self.piece(self.work.rows.some(slice(0, 1), self.work.keys)).items()
        kinds = {key: {"shape": each.shape[1:] or 1, "dtype": each.dtype} for key, each in found}
        self.options = {"beta": BETA} if self.work.prioritized else {}
        if self.work.prioritized:
            made = library.PrioritizedReplayBuffer(self.capacity, kinds, alpha=ALPHA, eps=1e-6)
        elif self.how == "next_of":
            del kinds[NEXT]
            made = library.ReplayBuffer(self.capacity, kinds, next_of="observation")
        else:
            made = library.ReplayBuffer(self.capacity, kinds)
        self.buffer: Any = made
        self.fill()

    def piece(self, values: Values) -> Any:
        if self.how == "next_of":  # which knows next values by this name
            return {NEXT if key == "next/observation" else key: values[key] for key in values}
        return values

    def extend(self, piece: Any) -> None:
        self.buffer.add(**piece)
        if self.how == "next_of":
            self.buffer.on_episode_end()

    def read(self, batch: Any) -> dict[str, Any]:
        return {"next/observation" if key == NEXT else key: batch[key] for key in batch}

    def draw(self) -> Any:
        if self.work.width > 1:
            return self.buffer._encode_sample(self.windows().ravel())
        return self.buffer.sample(BATCH, **self.options)

    def index(self, batch: Any) -> Any:
        return batch["indexes"]

    def weight(self, batch: Any) -> Any:
        return batch["weights"]

    def prioritize(self, index: Any, priority: Array) -> None:
        self.buffer.update_priorities(index, priority)


class SB3(Store):
    """SB3's ReplayBuffer of one environment, or of several; `terminated` is its only flag."""

    needs = ("stable_baselines3.common.buffers",)

    lacks = ("next/truncated", "next/done")

    def build(self) -> None:
        num_envs = NUM_ENVS if self.how == "several" else 1
        spaces = (Box(-np.inf, np.inf, (size,)) for size in (17, 6))
        kind = import_module(self.needs[0]).ReplayBuffer
        made = kind(self.capacity, *spaces, device="cpu", n_envs=num_envs)
        size = made.buffer_size * num_envs
        values = self.work.rows.some(slice(0, size), KEYS)
        tables = made.observations, made.actions, made.next_observations, made.rewards
        ends = made.timeouts, made.dones
        for key, table in zip((*KEYS[:4], *KEYS[5:]), (*tables, *ends), strict=True):
            rows = values[key].reshape(num_envs, made.buffer_size, *table.shape[2:])
            table[:] = rows.swapaxes(0, 1)
        made.full = True
        self.buffer: Any = made

    def piece(self, values: Values) -> Any:
        infos = [{"TimeLimit.truncated": bool(each)} for each in values["next/truncated"]]
        names = ("observation", "next/observation", "action", "next/reward", "next/done")
        return *(values[name] for name in names), infos

    def extend(self, piece: Any) -> None:
        self.buffer.add(*piece)

    def draw(self) -> Any:
        return self.buffer.sample(BATCH)

    def read(self, batch: Any) -> dict[str, Any]:
        return {
            "observation": batch.observations,
            "action": batch.actions,
            "next/observation": batch.next_observations,
            "next/reward": batch.rewards,
            "next/terminated": batch.dones,
        }
