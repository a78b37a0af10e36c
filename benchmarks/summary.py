"""How many times as fast as each peer gymtask collects, from the JSON that `collect.py` left.

    python benchmarks/summary.py benchmarks/results

A row is the fastest of gymtask's candidates whose name begins so, a column the fastest of a peer's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import Help

WORKS = {
    "collect_cartpole_8": "CartPole-v1, 8",
    "collect_cartpole_64": "CartPole-v1, 64",
    "collect_cheetah_8": "HalfCheetah-v5, 8",
    "collect_pong_8": "ALE/Pong-v5, 8",
}
OURS = (
    "gymtask sync, actions as by hand",
    "gymtask sync",
    "gymtask process",
    "gymtask native",
    "gymtask native, EnvPool",
)
PEERS: dict[str, str | tuple[str, ...]] = {
    "hand, Sync": "by hand, SyncVectorEnv",
    "hand, Async": "by hand, AsyncVectorEnv",
    "hand, native": ("by hand, vector_entry_point", "by hand, AtariVectorEnv"),
    "hand, EnvPool": "by hand, EnvPool",
    "SB3": "SB3",
    "TorchRL": "TorchRL",
    "Tianshou": "Tianshou",
}

Rates = dict[str, list[float]]


def read_rates(path: Path) -> Rates:
    """Steps a second in each round, of the candidates that were measured in all of them."""
    rows: dict[str, Any] = json.loads(path.read_text())["rows"]
    complete = {name: row["rounds"] for name, row in rows.items() if None not in row["rounds"]}
    return {
        name: [metrics["steps_per_second"] for metrics in rounds]
        for name, rounds in complete.items()
    }


def fastest(rates: Rates, prefix: str | tuple[str, ...]) -> str | None:
    """The candidate with the highest median, of those whose name begins so."""
    # "gymtask sync" with actions drawn by hand is a row of its own.
    found = [name for name in rates if name.startswith(prefix)]
    found = [name for name in found if name == prefix or name not in OURS]
    return max(found, key=lambda name: statistics.median(rates[name]), default=None)


def cell(rates: Rates, ours: str, prefix: str | tuple[str, ...]) -> str:
    """Median (min to max) of the ratios of one round."""
    if (theirs := fastest(rates, prefix)) is None:
        return "-"
    ratios = [mine / other for mine, other in zip(rates[ours], rates[theirs], strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def table(folder: Path) -> str:
    """The whole table, in Markdown."""
    lines = [
        f"| times as fast as | {' | '.join(PEERS)} |",
        f"|---|{'---:|' * len(PEERS)}",
    ]
    for stem, work in WORKS.items():
        if not (path := folder / f"{stem}.json").exists():
            continue
        rates = read_rates(path)
        names = dict.fromkeys(name for each in OURS if (name := fastest(rates, each)))
        for name in names:
            cells = [cell(rates, name, prefix) for prefix in PEERS.values()]
            lines.append(f"| {work}: {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("folder", type=Path, help="where the JSON lies")
    print(table(parser.parse_args(arguments).folder))


if __name__ == "__main__":
    main()
