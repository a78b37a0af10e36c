"""A replay buffer that is larger than memory is filled, sampled and overwritten.

    python benchmarks/larger_than_memory.py --gigabytes 30 --seconds 30 --folder DIR

Rows hold a frame of 84 x 84 uint8, an action, a reward and flags, and lie in a file in DIR, which
is deleted at the end. All the while the memory of this process that no file backs (RssAnon) is
read from /proc/self/status: it must stay below `--most-gigabytes`. What else is resident are pages
of the file, which the system takes back where it needs them. Every batch is checked.

The limit is the machine's memory, or that of the control group in which this runs, for example by

    systemd-run --scope --property MemoryMax=10G python benchmarks/larger_than_memory.py
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from tensordict import TensorDict

import gymtask

SIDE, LENGTH = 84, 1000  # of a frame, and steps of an episode
BATCH, WIDTH = 256, 8  # rows of a batch, and of a window
NUM_BYTES = 4  # of a frame that tell its number


class Memory:
    """Peaks of what this process has in memory, while it is open.

    Attributes:
        peaks: By name of a line of /proc/self/status, in bytes.
    """

    def __init__(self, interval: float = 0.02) -> None:
        self.peaks = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
        self.num_readings = 0
        self._interval, self._is_over = interval, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._read()

    def _watch(self) -> None:
        while not self._is_over.wait(self._interval):
            self._read()

    def _read(self) -> None:
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in self.peaks:
                self.peaks[name] = max(self.peaks[name], int(value.split()[0]) * 1024)
        self.num_readings += 1


def memory_limit() -> tuple[int, str]:
    """The bytes of memory that this process may have, and who says so."""
    limits = [(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine's memory")]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root, name = Path("/sys/fs/cgroup"), "memory.max"
        if controllers:  # version 1, where each controller has a tree of its own
            root, name = root / controllers, "memory.limit_in_bytes"
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):  # a limit holds for all groups below, too
            with contextlib.suppress(OSError, ValueError):  # of no memory controller; or "max"
                limits.append((int((folder / name).read_text()), f"the control group {folder}"))
    return min(limits)


def episodes() -> Iterator[TensorDict]:
    """Episodes without end, whose frames tell their numbers: one more than those before."""
    frames = np.random.default_rng(0).integers(0, 256, (LENGTH + 1, SIDE, SIDE), np.uint8)
    flags = torch.arange(LENGTH) == LENGTH - 1
    first = 0
    while True:
        numbers = first + np.arange(LENGTH + 1, dtype=np.uint32)
        frames.reshape(LENGTH + 1, -1)[:, :NUM_BYTES] = numbers.view(np.uint8).reshape(-1, 4)
        seen = torch.from_numpy(frames)
        following = {"observation": seen[1:], "reward": torch.zeros(LENGTH), "terminated": flags}
        following |= {"truncated": torch.zeros(LENGTH, dtype=torch.bool), "done": flags}
        action = torch.zeros(LENGTH, dtype=torch.int64)
        rows = {"observation": seen[:-1], "action": action, "next": following}
        yield TensorDict(rows, [LENGTH])
        first += LENGTH + 1


def check(batch: TensorDict, oldest: int) -> None:
    """Raises unless frames lead to the next ones, and no frame is older than this number."""
    numbers, after = (
        np.ascontiguousarray(frames.flatten(2)[..., :NUM_BYTES].numpy()).view(np.uint32)[..., 0]
        for frames in (batch["observation"], batch["next", "observation"])
    )
    if not (after == numbers + 1).all() or not (np.diff(numbers, axis=1) == 1).all():
        raise ValueError("a frame is not followed by the next one")
    if numbers.min() < oldest:
        raise ValueError("a frame was overwritten long ago")


def measure(folder: Path, num_rows: int, seconds: float) -> dict[str, Any]:
    """Fills a buffer of so many rows, draws single rows and windows, and overwrites some."""
    buffer = gymtask.ReplayBuffer(num_rows, folder / "rows", seed=0)
    endless, figures, added = episodes(), dict[str, Any](), 0

    def add(until: float, rows: int) -> int:
        """Adds rows until so many are there or it is this late."""
        before = buffer.num_added
        while buffer.num_added < rows and time.perf_counter() < until:
            buffer.extend(next(endless))
        return buffer.num_added - before

    def draw(until: float, batch_size: int, width: int) -> int:
        count = 0
        while time.perf_counter() < until:
            check(buffer.sample(batch_size, width), buffer.num_added - num_rows)
            count += batch_size * width
        return count

    works = {
        "filled, rows/s": lambda: add(float("inf"), num_rows),
        f"{BATCH} rows drawn, rows/s": lambda: draw(start + seconds, BATCH, 1),
        f"{BATCH // WIDTH} windows of {WIDTH} drawn, rows/s": lambda: draw(
            start + seconds, BATCH // WIDTH, WIDTH
        ),
        "overwritten, rows/s": lambda: add(start + seconds, 2 * num_rows),
    }
    for name, work in works.items():
        start = time.perf_counter()
        added = work()
        figures[name] = added / (time.perf_counter() - start)
        print(f"{name}: {figures[name]:,.0f}", file=sys.stderr, flush=True)
    files = list((folder / "rows").iterdir())
    return {"files, GB": sum(file.stat().st_size for file in files) / 1e9, **figures}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=report.Help)
    parser.add_argument("--gigabytes", type=float, default=30.0, help="of the rows")
    parser.add_argument("--most-gigabytes", type=float, default=2.0, help="that RssAnon may reach")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each kind of draw")
    parser.add_argument("--folder", default=".", help="on a disk, not in memory (tmpfs)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    limit, where = memory_limit()
    num_rows = int(options.gigabytes * 1e9 / (SIDE**2 + 16)) // LENGTH * LENGTH
    made = tempfile.TemporaryDirectory(prefix="larger", dir=options.folder)
    with made as folder, Memory() as memory:
        figures = measure(Path(folder), num_rows, options.seconds)
    figures |= {f"peak of {name}, GB": peak / 1e9 for name, peak in memory.peaks.items()}
    figures |= {"limit, GB": limit / 1e9, "files / limit": figures["files, GB"] * 1e9 / limit}
    figures |= {"rows": num_rows, "readings of memory": memory.num_readings, "limit is": where}
    print(json.dumps(figures, indent=1))
    if memory.peaks["RssAnon"] > options.most_gigabytes * 1e9:
        raise SystemExit("RssAnon was above --most-gigabytes")


if __name__ == "__main__":
    main()
