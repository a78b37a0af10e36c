"""What the project's README says of speed, from the JSON that the benchmarks left.

    python benchmarks/headline.py benchmarks/results

A row of the table is the fastest of the candidates that it names; figures are medians over the
rounds, ratios are between two measurements of one round.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import Help
from summary import WORKS, Rates, read_rates

BASE = "by hand, SyncVectorEnv"
ROWS = {
    "by hand, `AsyncVectorEnv`": ("by hand, AsyncVectorEnv",),
    "by hand, the id's own `VectorEnv`": (
        "by hand, vector_entry_point",
        "by hand, AtariVectorEnv, 2 threads",
    ),
    "by hand, EnvPool, best of 1 and 2 threads": (
        "by hand, EnvPool, 1 thread",
        "by hand, EnvPool, 2 threads",
    ),
    "SB3, `DummyVecEnv` or `SubprocVecEnv`": ("SB3 DummyVecEnv", "SB3 SubprocVecEnv"),
    "TorchRL, `SerialEnv` or `ParallelEnv`": ("TorchRL SerialEnv", "TorchRL ParallelEnv"),
    "Tianshou, `DummyVectorEnv` or `ShmemVectorEnv`": (
        "Tianshou DummyVectorEnv",
        "Tianshou ShmemVectorEnv",
    ),
    "gymtask, sync": ("gymtask sync",),
    "gymtask, sync, actions and log-probabilities drawn as by hand": (
        "gymtask sync, actions as by hand",
    ),
    "gymtask, process, 2 workers, whole batches": ("gymtask process, whole batches",),
    "gymtask, native (the id's own `VectorEnv`)": ("gymtask native",),
}
WIDTH = 120  # characters of a line of the README


def ratio(rates: Rates, names: Sequence[str], base: str) -> float | None:
    """How many times as fast as the base the fastest of these is; None if none was measured."""
    measured = [name for name in names if name in rates]
    if not measured or base not in rates:
        return None
    name = max(measured, key=lambda each: statistics.median(rates[each]))
    return statistics.median(
        mine / theirs for mine, theirs in zip(rates[name], rates[base], strict=True)
    )


def table(works: dict[str, Rates]) -> str:
    """The ratios of all rows, the highest of each column in bold."""
    columns = list(works.values())
    found = [[ratio(rates, names, BASE) for rates in columns] for names in ROWS.values()]
    highest = [
        max((each or 0.0 for each in column), default=0.0) for column in zip(*found, strict=True)
    ]
    speeds = [f"{statistics.median(rates[BASE]):,.0f}" for rates in columns]
    lines = [
        f"| candidate | {' | '.join(works)} |",
        f"|---|{'---:|' * len(works)}",
        f"| {BASE.replace('SyncVectorEnv', '`SyncVectorEnv`')}, steps/s | {' | '.join(speeds)} |",
    ]
    for label, figures in zip(ROWS, found, strict=True):
        cells = [
            "" if each is None else f"**{each:.2f}**" if each == top else f"{each:.2f}"
            for each, top in zip(figures, highest, strict=True)
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def collecting(folder: Path) -> list[str]:
    """The table and what stands over it; nothing where no work was measured."""
    paths = {folder / f"{stem}.json": work for stem, work in WORKS.items()}
    works = {work: read_rates(path) for path, work in paths.items() if path.exists()}
    if not works:
        return []
    record = read(next(path for path in paths if path.exists()))
    rounds, cores = len(record["rows"][BASE]["rounds"]), record["machine"]["cores"]
    text = (
        f"Measured alternately, {rounds} rounds, on {cores} cores, as ratios to CleanRL's rollout"
        " loop written by hand over Gymnasium's `SyncVectorEnv`, with the same 2 × 64 policy and"
        " the same kept rollout (`python benchmarks/collect.py`); the highest in bold:"
    )
    return [wrapped(text), table(works)]


def stepping(folder: Path) -> list[str]:
    """The sentence on `make_vec` as a plain vector environment."""
    if not (path := folder / "vector_step.json").exists():
        return []
    rates, options = read_rates(path), read(path)["options"]
    ours, sync, own = (
        ratio(rates, [name], "AsyncVectorEnv")
        for name in ("gymtask.make_vec, process", "SyncVectorEnv", "vector_entry_point")
    )
    if ours is None or sync is None or own is None:
        return []
    text = (
        f"One step of `gymtask.make_vec` as a plain vector environment, {options['num_envs']}"
        f" CartPole-v1 in {options['workers']} workers: {ours:.1f} times as fast as"
        f" `AsyncVectorEnv`. `SyncVectorEnv` is {sync:.1f} times as fast, CartPole-v1's own"
        f" `VectorEnv`, in numpy, {own:.0f} times (`python benchmarks/vector_step.py`)."
    )
    return [wrapped(text)]


def straggling(folder: Path) -> list[str]:
    """The sentences on environments whose steps take unequal times."""
    shares: dict[str, list[str]] = {}
    for num_steps in ("512", "128"):
        if (path := folder / f"stragglers_{num_steps}.json").exists():
            rows = read(path)["rows"]
            shares[num_steps] = [
                percent(rows[name]["rounds"])
                for name in (
                    "gymtask process, first_come",
                    "gymtask process, equal",
                    "by hand, ready set",
                    "by hand, AsyncVectorEnv",
                )
            ]
    if "512" not in shares:
        return []
    first_come, equal, ready_set, lock_step = shares["512"]
    text = (
        f"Sixteen environments with lognormal step times are kept busy for {first_come} of what is"
        f' possible with `allocation="first_come"`, for {equal} with equal shares. A loop by hand'
        f" that acts for whoever is ready keeps them for {ready_set}, Gymnasium's `AsyncVectorEnv`"
        f" for {lock_step} (`python benchmarks/stragglers.py`, rollouts of 512 steps"
    )
    if "128" in shares:
        text += f"; of 128 steps: {', '.join(shares['128'])}"
    return [wrapped(f"{text}).")]


def percent(rounds: Sequence[Any]) -> str:
    """The median share of what is possible."""
    found = [metrics["share"] for metrics in rounds if metrics is not None]
    return f"{100 * statistics.median(found):.0f}\N{NO-BREAK SPACE}%" if found else "-"


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def wrapped(text: str) -> str:
    """The text in lines, none of which ends within a command."""
    whole = re.sub("`[^`]+`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.fill(whole, WIDTH, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def paragraphs(folder: Path) -> list[str]:
    """Everything, in Markdown."""
    return [*collecting(folder), *stepping(folder), *straggling(folder)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("folder", type=Path, help="where the JSON lies")
    print("\n\n".join(paragraphs(parser.parse_args(arguments).folder)))


if __name__ == "__main__":
    main()
