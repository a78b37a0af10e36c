"""How fast transitions are stored and drawn: gymtask, tables by hand, other libraries.

    python benchmarks/replay.py --table windows --rounds 5 --seconds 0.4 --out DIR

Without `--table` all tables are made. Every store is full before the clock runs, of the same
1,000,000 transitions: trajectories of 200 to 1,000 rows with observation float32 [17], action
float32 [6], next observation, reward, terminated, truncated, done. A batch of each candidate is
compared with these rows before, key by key, and its windows must lie inside trajectories.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import report
import torch
from alternate import Build, Candidate, Close, Rollout, alternate, choose, preload, rate
from peer_stores import SB3, Cpprb, Tianshou, TorchRL
from stores import (
    ALPHA,
    BATCH,
    BETA,
    BLOCK,
    IDS,
    KEYS,
    NUM_ENVS,
    WIDTH,
    Gymtask,
    Packed,
    Rows,
    Store,
    Summed,
    Tables,
    Values,
    Work,
)

BASE = "index_select per key"
MEMORY, DISK = "LazyTensorStorage", "LazyMemmapStorage"

# What is timed, of a store. A rollout returns the batches drawn, or the rows added.


def drawing(store: Store) -> Rollout:
    """Batches, one after the other."""
    store.check()

    def rollout() -> int:
        store.draw()
        return 1

    return rollout


def following(store: Store, environments: int = 1) -> Rollout:
    """Rows of one environment or of several are added before each batch is drawn."""
    rows, keys = store.work.rows, store.work.keys
    several = environments > 1
    found = rows.pieces(BLOCK // NUM_ENVS, keys) if several else rows.trajectories(keys, short=True)
    pieces = list(map(store.piece, found))
    if not store.finds_ends:  # so its windows are only sure to be right before
        store.check()
    else:
        for piece in pieces:
            store.extend(piece)
        store.check()
    endless = cycle(pieces)

    def rollout() -> int:
        store.extend(next(endless))
        store.draw()
        return 1

    return rollout


def reprioritizing(store: Store) -> Rollout:
    """Batches drawn by priority; then their rows get other priorities."""
    random = np.random.default_rng(0)
    priority = random.random(store.capacity) + 0.1
    store.prioritize(np.arange(store.capacity), priority)
    store.check()
    batch = store.draw()
    index, weight = (np.asarray(part).ravel() for part in (store.index(batch), store.weight(batch)))
    # A weight is a power of the priority, times a number that all of a batch have in common.
    common = weight * priority[index] ** (ALPHA * BETA)
    if not np.allclose(common, common[0], rtol=1e-3):
        raise ValueError("the weights of a batch are not those of its priorities")
    priorities = cycle(random.random((100, BATCH)) + 0.1)

    def rollout() -> int:
        batch = store.draw()
        store.prioritize(store.index(batch), next(priorities))
        return 1

    return rollout


def adding(store: Store, found: Callable[[Work], Iterator[Values]]) -> Rollout:
    """Pieces are added, one a call."""
    pieces = [(store.piece(values), len(values["action"])) for values in found(store.work)]
    for piece, _ in pieces:
        store.extend(piece)
    store.check()
    endless = cycle(pieces)

    def rollout() -> int:
        piece, count = next(endless)
        store.extend(piece)
        return count

    return rollout


@dataclass(frozen=True)
class Entry:
    """One candidate.

    Attributes:
        name: How the table calls it.
        kind: The store.
        how: Its second argument.
        operate: What is timed, None for what the table says.
        keys: What a row holds, None for what the table says.
    """

    name: str
    kind: type[Store]
    how: str = ""
    operate: Callable[[Store], Rollout] | None = None
    keys: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Table:
    """What one table compares.

    Attributes:
        title: What is done.
        unit: What is counted.
        operate: What is timed.
        entries: The candidates; ratios are against the first.
        width: Rows of a window.
        prioritized: Whether rows are drawn by priority.
        keys: What a row holds.
        notes: Sentences under the table.
    """

    title: str
    unit: str
    operate: Callable[[Store], Rollout]
    entries: tuple[Entry, ...]
    width: int = 1
    prioritized: bool = False
    keys: tuple[str, ...] = KEYS
    notes: tuple[str, ...] = ()


PACKED_NOTE = (
    "A packed record is a row of one table of float32, flags too; like gymtask's, its batch is cut"
    " into keys that are not contiguous; `made contiguous` copies each key."
)
CPPRB_NOTE = (
    "TorchRL draws a trajectory, each as likely as any other, and a window of it; the others draw"
    " any window. Tianshou and cpprb draw no windows like these: rows drawn by hand are read with"
    " `get(index, key, stack_num=8)` and with a private method."
)

TABLES = {
    "windows": Table(
        f"{BATCH} windows of {WIDTH} rows",
        "batches/s",
        drawing,
        (
            Entry(BASE, Tables, "index_select"),
            Entry("torch fancy index per key", Tables, "torch fancy index"),
            Entry("numpy take per key", Tables, "numpy take"),
            Entry("packed record, index_select", Packed),
            Entry("packed record, one copy a window", Packed, "one copy a window"),
            Entry("gymtask in memory", Gymtask),
            Entry("gymtask in memory, made contiguous", Gymtask, "made contiguous"),
            Entry("gymtask on disk", Gymtask, "on disk"),
            Entry("TorchRL SliceSampler", TorchRL, MEMORY),
            Entry("TorchRL SliceSampler on disk", TorchRL, DISK),
            Entry("Tianshou, windows drawn by hand", Tianshou),
            Entry("cpprb, windows drawn by hand", Cpprb),
        ),
        width=WIDTH,
        notes=(PACKED_NOTE, CPPRB_NOTE),
    ),
    "following": Table(
        f"{BLOCK} rows are added, then {BATCH} windows of {WIDTH} rows drawn",
        "batches/s",
        following,
        (
            Entry(BASE, Tables, "index_select"),
            Entry("gymtask in memory", Gymtask),
            Entry("gymtask on disk", Gymtask, "on disk"),
            Entry(
                "gymtask in memory, rows of 8 environments",
                Gymtask,
                operate=partial(following, environments=NUM_ENVS),
                keys=KEYS + IDS,
            ),
            Entry("TorchRL SliceSampler", TorchRL, MEMORY),
        ),
        width=WIDTH,
        notes=(
            "The rows are a whole trajectory. The tables by hand draw from an array of starts that"
            " nobody keeps up to date. Of 8 environments come 8 rows each, with trajectory_id and"
            " step, which gymtask links with those before.",
        ),
    ),
    "single": Table(
        f"{BATCH} single transitions",
        "batches/s",
        drawing,
        (
            Entry(BASE, Tables, "index_select"),
            Entry("numpy take per key", Tables, "numpy take"),
            Entry("packed record, index_select", Packed),
            Entry("gymtask in memory", Gymtask),
            Entry("gymtask in memory, made contiguous", Gymtask, "made contiguous"),
            Entry("gymtask on disk", Gymtask, "on disk"),
            Entry("SB3 ReplayBuffer", SB3),
            Entry("TorchRL RandomSampler", TorchRL, MEMORY),
            Entry("TorchRL RandomSampler on disk", TorchRL, DISK),
            Entry("Tianshou ReplayBuffer", Tianshou),
            Entry("cpprb ReplayBuffer", Cpprb),
        ),
        notes=(PACKED_NOTE, "SB3's batches hold one flag, terminated."),
    ),
    "prioritized": Table(
        f"{BATCH} transitions drawn by priority, whose priorities are then set",
        "batches/s",
        reprioritizing,
        (
            Entry(f"{BASE}, without priorities", Tables, "index_select", drawing),
            Entry("numpy take per key, sums over all rows", Summed, "numpy take"),
            Entry("gymtask in memory", Gymtask),
            Entry("TorchRL PrioritizedSampler", TorchRL, MEMORY),
            Entry("cpprb PrioritizedReplayBuffer", Cpprb),
            Entry("Tianshou PrioritizedReplayBuffer", Tianshou),
        ),
        prioritized=True,
        notes=("Batches also hold index and weight.",),
    ),
    "extend": Table(
        "trajectories of 200 to 1,000 rows are added",
        "rows/s",
        partial(adding, found=lambda work: work.rows.trajectories(work.keys)),
        (
            Entry("numpy slice write per key", Tables, "numpy take"),
            Entry("torch slice write per key", Tables, "index_select"),
            Entry("gymtask in memory", Gymtask),
            Entry("gymtask on disk", Gymtask, "on disk"),
            Entry("TorchRL", TorchRL, MEMORY),
            Entry("TorchRL on disk", TorchRL, DISK),
            Entry("cpprb", Cpprb),
            Entry("cpprb, one observation a row", Cpprb, "next_of"),
        ),
    ),
    "interleaved": Table(
        f"one row of each of {NUM_ENVS} environments is added at a time",
        "rows/s",
        partial(adding, found=lambda work: work.rows.pieces(1, work.keys)),
        (
            Entry("numpy slice write per key", Tables, "numpy take"),
            Entry("gymtask in memory", Gymtask),
            Entry("gymtask on disk", Gymtask, "on disk"),
            Entry("SB3", SB3, "several", keys=KEYS),
            Entry("TorchRL", TorchRL, MEMORY),
            Entry("cpprb", Cpprb),
        ),
        keys=KEYS + IDS,
        notes=(
            "Rows also hold trajectory_id and step, by which gymtask links them; SB3 does without,"
            " as each environment has its own lane of the buffer.",
        ),
    ),
}


def builder(entry: Entry, table: Table, rows: Rows, folder: str) -> Build:
    """Makes the store and what is timed of it."""

    def build() -> tuple[Rollout, Close]:
        files = Path(tempfile.mkdtemp(dir=folder))
        keys = table.keys if entry.keys is None else entry.keys
        work = Work(rows, files / "store", table.width, table.prioritized, keys)
        operate = table.operate if entry.operate is None else entry.operate
        return operate(entry.kind(work, entry.how)), partial(shutil.rmtree, files)

    return build


def run(name: str, rows: Rows, folder: str, options: argparse.Namespace) -> None:
    """Measures, prints and writes one table."""
    table = TABLES[name]
    base = table.entries[0].name
    every = [
        Candidate(
            entry.name,
            partial(rate, builder(entry, table, rows, folder), options.seconds),
            entry.kind.needs,
        )
        for entry in table.entries
    ]
    chosen = choose(every, base, options.only)
    preload(chosen)
    outcomes = alternate(chosen, options.rounds)
    columns = (
        report.Column(table.unit, "steps_per_second"),
        report.Column(f"ratio to {base}", "steps_per_second", ".2f", ratio=True),
    )
    title = f"{table.title}, in a store of {rows.capacity:,}"
    report.Report(
        f"replay_{name}", title, base, columns, outcomes, vars(options), table.notes
    ).write(options.out)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=report.Help)
    parser.add_argument("--table", choices=list(TABLES), help="one instead of all")
    parser.add_argument("--num-rows", type=int, default=1_000_000, help="transitions of a store")
    report.add_options(parser, seconds=0.4)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = Rows(options.num_rows)
    with tempfile.TemporaryDirectory(prefix="replay") as folder:
        for name in [options.table] if options.table else TABLES:
            run(name, rows, folder, options)


if __name__ == "__main__":
    main()
