"""What a benchmark leaves: JSON, a Markdown table and a plot, with machine, versions, command."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alternate import Outcome

PACKAGES = (
    "gymtask",
    "gymnasium",
    "torch",
    "numpy",
    "tensordict",
    "ale-py",
    "mujoco",
    "stable-baselines3",
    "torchrl",
    "tianshou",
    "envpool",
    "cpprb",
    "pufferlib",
)


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Prints the description as it stands, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


@dataclass(frozen=True)
class Column:
    """One figure of a table.

    Attributes:
        head: Its heading.
        key: The metric it shows.
        form: How it is formatted.
        ratio: Whether it is the ratio to the base's figure of the same round.
    """

    head: str
    key: str
    form: str = ",.0f"
    ratio: bool = False


@dataclass(frozen=True)
class Report:
    """One table.

    Attributes:
        stem: The name of its files.
        title: What was done.
        base: The candidate that ratios are against.
        columns: The figures; the last one is plotted.
        outcomes: What was measured, by candidate.
        options: Of the run.
        notes: Sentences under the table.
    """

    stem: str
    title: str
    base: str
    columns: Sequence[Column]
    outcomes: dict[str, Outcome]
    options: dict[str, Any]
    notes: Sequence[str] = ()

    def figures(self, name: str, column: Column) -> list[float]:
        """The column's figure of each round in which it could be measured."""
        found = []
        base = self.outcomes[self.base].rounds
        for mine, theirs in zip(self.outcomes[name].rounds, base, strict=True):
            if mine is None or column.key not in mine or (column.ratio and theirs is None):
                continue
            value = mine[column.key]
            found.append(value / theirs[column.key] if column.ratio and theirs else value)
        return found

    def cell(self, name: str, column: Column) -> str:
        """Median (min to max) of all rounds."""
        if not (found := self.figures(name, column)):
            return "-"
        if column.ratio and name == self.base:
            return f"{1:{column.form}}"
        low, middle, high = (
            f"{value:{column.form}}" for value in (min(found), statistics.median(found), max(found))
        )
        return middle if low == high else f"{middle} ({low} to {high})"

    def markdown(self) -> str:
        """Title, table, notes and where it was measured."""
        lines = [f"### {self.title}", ""]
        lines.append(" | ".join(["| candidate", *(column.head for column in self.columns)]) + " |")
        lines.append("|---|" + "---:|" * len(self.columns))
        for name, outcome in self.outcomes.items():
            cells = [self.cell(name, column) for column in self.columns]
            if outcome.error:
                cells[0] = " ".join(
                    ([] if cells[0] == "-" else [cells[0], "until it failed:"]) + [outcome.error]
                ).replace("|", "/")
            lines.append(" | ".join([f"| {name}", *cells]) + " |")
        lines += ["", *self.notes, ""] if self.notes else [""]
        return "\n".join([*lines, provenance(self.record()), ""])

    def record(self) -> dict[str, Any]:
        """Everything, for JSON."""
        rows = {}
        for name, outcome in self.outcomes.items():
            summary = {}
            for column in self.columns:
                if found := self.figures(name, column):
                    summary[column.head] = {
                        "median": statistics.median(found),
                        "min": min(found),
                        "max": max(found),
                    }
            rows[name] = {
                "summary": summary, "rounds": outcome.rounds, "error": outcome.error
            }  # fmt: skip
        return {
            "title": self.title,
            "base": self.base,
            "options": {key: str(value) for key, value in self.options.items()},
            **surroundings(),
            "rows": rows,
        }

    def write(self, folder: Path | None) -> None:
        """Prints the table and, with a folder, leaves all three files there."""
        text = self.markdown()
        print(f"\n{text}")
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.stem}.json").write_text(json.dumps(self.record(), indent=2) + "\n")
        (folder / f"{self.stem}.md").write_text(text)
        if find_spec("matplotlib"):
            self.plot(folder / f"{self.stem}.png")
        else:
            print("no plot, as matplotlib is not installed", file=sys.stderr)

    def plot(self, path: Path) -> None:
        """Bars of the last column's medians, with a line from the smallest to the largest."""
        # Imported here: a forked candidate needs none of it, and it is optional.
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        column = self.columns[-1]
        found = {name: self.figures(name, column) for name in reversed(self.outcomes)}
        found = {name: values for name, values in found.items() if values}
        middles = [statistics.median(values) for values in found.values()]
        errors = [
            [middle - min(values), max(values) - middle]
            for middle, values in zip(middles, found.values(), strict=True)
        ]
        figure, axes = pyplot.subplots(figsize=(8, 1 + 0.32 * len(found)), layout="constrained")
        colors = ["tab:blue" if name.startswith("gymtask") else "tab:gray" for name in found]
        transposed = list(zip(*errors, strict=True))
        axes.barh(list(found), middles, xerr=transposed, color=colors, ecolor="black", capsize=2)
        axes.set_xlabel(column.head)
        axes.set_title(self.title, fontsize="medium")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def surroundings() -> dict[str, Any]:
    """Machine, versions and command."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "system": f"{platform.system()} {platform.machine()}",
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }
    words = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    command, date = shlex.join(words), time.strftime("%Y-%m-%d")
    return {"machine": machine, "versions": versions, "command": command, "date": date}


def cpu_name() -> str:
    """The model of the processor, as the kernel tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def provenance(record: dict[str, Any]) -> str:
    """One sentence on where the figures come from."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"`{record['command']}` on {record['date']}: {machine['cores']} cores ({machine['cpu']}),"
        f" {machine['memory_gib']} GiB, OMP_NUM_THREADS={machine['omp_num_threads']}; {versions}."
    )


def add_options(parser: argparse.ArgumentParser, seconds: float | None = None) -> None:
    """The options that all benchmarks have."""
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    if seconds is not None:
        parser.add_argument(
            "--seconds", type=float, default=seconds, help="of each candidate in each round"
        )
    parser.add_argument(
        "--only", help="words, comma-separated: candidates whose name has one, and the base"
    )
    parser.add_argument("--out", type=Path, help="folder for JSON, Markdown table and plot")
