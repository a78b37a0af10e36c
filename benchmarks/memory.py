"""How much memory stacks of frames need: gymtask's ReplayBuffer beside other libraries.

    python benchmarks/memory.py --rounds 1 --out DIR

100,000 steps in episodes of 200, each seen as the last four frames of 84 x 84 uint8; action, reward
and flags lie beside. Measured in a process of its own is how much the resident memory (RSS) grows
from before the store is made until it is full and a batch was drawn. The batch must show the stacks
that were stored, the first frame of an episode repeated; what follows is compared where an episode
goes on.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ctypes
import gc
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from alternate import Candidate, Close, Metrics, alternate, choose, preload
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray
from tensordict import TensorDict

import gymtask

Array = NDArray[Any]

BASE = "frames alone"
SIDE, STACK, LENGTH = 84, 4, 200  # of a frame, of a stack, and steps of an episode
BATCH = 32
WARM_UP = 2 * LENGTH  # steps that are stored before, so that what is loaded late does not count


@dataclass(frozen=True)
class Episode:
    """The steps of one episode.

    Attributes:
        frames: uint8 [T + 1, 84, 84]; the first bytes of one tell its number.
        flags: bool [T]: terminated.
    """

    frames: Array
    flags: Array

    @property
    def stacks(self) -> Array:
        """What is seen at each step and after the last, uint8 [T + 1, 4, 84, 84]."""
        places = np.arange(len(self.frames))[:, None] + np.arange(1 - STACK, 1)
        found: Array = self.frames[places.clip(min=0)]
        return found


def episodes(num_frames: int) -> Iterator[Episode]:
    """So many steps."""
    random = np.random.default_rng(0)
    for first in range(0, num_frames, LENGTH):
        length = min(LENGTH, num_frames - first)
        frames = random.integers(0, 256, (length + 1, SIDE, SIDE), np.uint8)
        # An episode has one frame more than steps.
        numbers = first + first // LENGTH + np.arange(length + 1, dtype=np.int32)
        frames.reshape(length + 1, -1)[:, :4] = numbers.view(np.uint8).reshape(-1, 4)
        yield Episode(frames, np.arange(length) == length - 1)


def check(seen: Any, following: Any) -> None:
    """Raises unless stacks [B, 4, 84, 84] are those of episodes, each followed by the next one."""
    numbers, after = numbers_of(seen), numbers_of(following)
    first, step = numbers[:, -1] // (LENGTH + 1) * (LENGTH + 1), numbers[:, -1] % (LENGTH + 1)
    # The frames of a stack count up to that of the step; there is none before the first.
    expected = first[:, None] + (step[:, None] + np.arange(1 - STACK, 1)).clip(min=0)
    if not np.array_equal(numbers, expected):
        raise ValueError("a stack has other frames than were stored")
    expected = first[:, None] + (step[:, None] + np.arange(2 - STACK, 2)).clip(min=0)
    goes_on = step < LENGTH - 1
    if not np.array_equal(after[goes_on], expected[goes_on]):
        raise ValueError("the stack that follows has other frames than were stored")


def numbers_of(stacks: Any) -> Array:
    """The numbers of the frames of stacks, int32 [B, 4]."""
    beginnings = np.asarray(stacks).reshape(BATCH, STACK, -1)[..., :4].copy()
    found: Array = beginnings.view(np.int32)[..., 0]
    return found


class Frames:
    """By hand: nothing but the frames, each once."""

    needs: tuple[str, ...] = ()

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.build()
        for episode in episodes(num_frames):
            self.add(episode)
        self.draw()

    def build(self) -> None:
        self.frames, self.at = np.empty((self.num_frames, SIDE, SIDE), np.uint8), 0

    def add(self, episode: Episode) -> None:
        count = len(episode.flags)
        self.frames[self.at : self.at + count] = episode.frames[:-1]
        self.at += count

    def draw(self) -> None:
        """Draws a batch and checks it."""

    @property
    def num_bytes(self) -> int | None:
        """Of its tables, None where they cannot be seen."""
        return self.frames.nbytes


class Gymtask(Frames):
    """gymtask's ReplayBuffer, which keeps single frames and stacks them when they are drawn."""

    def build(self) -> None:
        self.buffer = gymtask.ReplayBuffer(self.num_frames, frame_stack=STACK)

    def add(self, episode: Episode) -> None:
        self.buffer.extend(rows_of(episode, torch.from_numpy(episode.frames)))

    def draw(self) -> None:
        batch = self.buffer.sample(BATCH)
        check(batch["observation"], batch["next", "observation"])

    @property
    def num_bytes(self) -> int | None:
        ring = self.buffer._ring
        return ring.records.array.nbytes + ring.side.array.nbytes + array_bytes(ring.links)


class SB3(Frames):
    """SB3's ReplayBuffer, which keeps stacks, those that follow in the place of the next row."""

    needs = ("stable_baselines3.common.buffers",)

    def build(self) -> None:
        spaces = Box(0, 255, (STACK, SIDE, SIDE), np.uint8), Discrete(6)
        kind = import_module(self.needs[0]).ReplayBuffer
        options = {"optimize_memory_usage": True, "handle_timeout_termination": False}
        self.buffer: Any = kind(self.num_frames, *spaces, device="cpu", **options)

    def add(self, episode: Episode) -> None:
        action, reward = np.zeros(1, np.int64), np.zeros(1, np.float32)
        stacks = episode.stacks[:, None]
        for step, flag in enumerate(episode.flags):
            self.buffer.add(stacks[step], stacks[step + 1], action, reward, flag, [{}])

    def draw(self) -> None:
        batch = self.buffer.sample(BATCH)
        check(batch.observations, batch.next_observations)

    @property
    def num_bytes(self) -> int | None:
        return array_bytes(self.buffer)


class Tianshou(Frames):
    """Tianshou's ReplayBuffer, which keeps the last frame of a stack, and none that follows."""

    needs = ("tianshou.data",)

    def build(self) -> None:
        self.data = import_module(self.needs[0])
        options = {"ignore_obs_next": True, "save_only_last_obs": True, "stack_num": STACK}
        self.buffer: Any = self.data.ReplayBuffer(self.num_frames, **options)

    def add(self, episode: Episode) -> None:
        stacks = episode.stacks
        for step, flag in enumerate(episode.flags):
            row = {"obs": stacks[step], "obs_next": stacks[step + 1], "act": 0, "rew": 0.0}
            ends = {"terminated": flag, "truncated": False, "info": {}}
            self.buffer.add(self.data.Batch(**row, **ends))

    def draw(self) -> None:
        batch, _ = self.buffer.sample(BATCH)
        check(batch.obs, batch.obs_next)

    @property
    def num_bytes(self) -> int | None:
        meta = self.buffer._meta
        found = (getattr(meta[key], "nbytes", 0) for key in meta.get_keys())
        return array_bytes(self.buffer) + sum(found)


class Cpprb(Frames):
    """cpprb's ReplayBuffer, with stacks compressed and those that follow not stored."""

    needs = ("cpprb",)

    def build(self) -> None:
        kinds: dict[str, Any] = {"obs": {"shape": (SIDE, SIDE, STACK), "dtype": np.uint8}}
        kinds |= {"act": {"dtype": np.int64}, "rew": {}}
        kinds |= {name: {"dtype": np.bool_} for name in ("terminated", "truncated")}
        options = {"next_of": "obs", "stack_compress": "obs"}
        kind = import_module(self.needs[0]).ReplayBuffer
        self.buffer: Any = kind(self.num_frames, kinds, **options)

    def add(self, episode: Episode) -> None:
        stacks = np.moveaxis(episode.stacks, 1, -1)
        zeros = np.zeros(len(episode.flags))
        rows = {"obs": stacks[:-1], "next_obs": stacks[1:], "act": zeros, "rew": zeros}
        self.buffer.add(**rows, terminated=episode.flags, truncated=zeros)
        self.buffer.on_episode_end()

    def draw(self) -> None:
        batch = self.buffer.sample(BATCH)
        check(*(np.moveaxis(batch[key], -1, 1) for key in ("obs", "next_obs")))

    @property
    def num_bytes(self) -> int | None:
        return None


class TorchRL(Frames):
    """TorchRL's ReplayBuffer, which keeps stacks as they are."""

    needs = ("torchrl.data.replay_buffers",)

    def build(self) -> None:
        data = import_module(self.needs[0])
        storage = data.LazyTensorStorage(self.num_frames)
        self.buffer: Any = data.ReplayBuffer(storage=storage, batch_size=BATCH)

    def add(self, episode: Episode) -> None:
        self.buffer.extend(rows_of(episode, torch.from_numpy(episode.stacks)))

    def draw(self) -> None:
        batch = self.buffer.sample()
        check(batch["observation"], batch["next", "observation"])

    @property
    def num_bytes(self) -> int | None:
        return int(self.buffer.storage._storage.bytes())


def rows_of(episode: Episode, seen: torch.Tensor) -> TensorDict:
    """An episode as gymtask and TorchRL take it, of what is seen, [T + 1, ...]."""
    count, ended = len(episode.flags), torch.from_numpy(episode.flags)
    flags = {"terminated": ended, "truncated": torch.zeros(count, dtype=torch.bool), "done": ended}
    following = {"observation": seen[1:], "reward": torch.zeros(count), **flags}
    action = torch.zeros(count, dtype=torch.int64)
    return TensorDict({"observation": seen[:-1], "action": action, "next": following}, [count])


def array_bytes(owner: Any) -> int:
    """Of the arrays that are attributes."""
    return sum(value.nbytes for value in vars(owner).values() if isinstance(value, np.ndarray))


KINDS: dict[str, type[Frames]] = {
    BASE: Frames,
    "gymtask frame_stack=4": Gymtask,
    "SB3 optimize_memory_usage": SB3,
    "Tianshou save_only_last_obs": Tianshou,
    "cpprb stack_compress, next_of": Cpprb,
    "TorchRL LazyTensorStorage": TorchRL,
}


def measure(kind: type[Frames], num_frames: int) -> tuple[Metrics, Close]:
    """Megabytes of a full store."""
    kind(WARM_UP)
    before = resident()
    store = kind(num_frames)
    metrics = {"rss_mb": (resident() - before) / 1e6}
    if store.num_bytes is not None:
        metrics["tables_mb"] = store.num_bytes / 1e6
    return metrics, lambda: None


def resident() -> int:
    """Bytes that this process has in memory, once all that is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def computed(num_frames: int) -> tuple[Metrics, Close]:
    """What TorchRL's two stacks a step need, and what lies beside them."""
    nbytes = num_frames * (2 * STACK * SIDE**2 + 15)
    return {"rss_mb": nbytes / 1e6, "tables_mb": nbytes / 1e6}, lambda: None


def candidates(num_frames: int) -> list[Candidate]:
    """Everything that is compared; what does not fit into memory is computed."""
    found = [
        Candidate(name, partial(measure, kind, num_frames), kind.needs)
        for name, kind in KINDS.items()
    ]
    free = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    if free is not None and 2 * computed(num_frames)[0]["rss_mb"] > int(free.group(1)) / 1e3:
        found[-1] = Candidate(f"{found[-1].name}, computed", partial(computed, num_frames))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=report.Help)
    parser.add_argument("--num-frames", type=int, default=100_000, help="steps that are stored")
    report.add_options(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = choose(candidates(options.num_frames), BASE, options.only)
    preload(chosen)
    outcomes = alternate(chosen, options.rounds)
    columns = (
        report.Column("tables, MB", "tables_mb", ",.1f"),
        report.Column("RSS growth, MB", "rss_mb", ",.1f"),
        report.Column(f"RSS growth, ratio to {BASE}", "rss_mb", ".2f", ratio=True),
    )
    frames = options.num_frames * SIDE**2 / 1e6
    title = f"Memory of {options.num_frames:,} steps seen as 4 frames of 84 x 84"
    notes = (
        f"84 · 84 · {options.num_frames:,} bytes are {frames:,.1f} MB. SB3 and Tianshou do not keep"
        " what follows an episode's last step. TorchRL can keep single frames, too, and stack those"
        " of slices (`CatFrames`, `NextStateReconstructor`), but not those of single steps.",
    )
    report.Report("memory", title, BASE, columns, outcomes, vars(options), notes).write(options.out)


if __name__ == "__main__":
    main()
