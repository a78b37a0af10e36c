"""The table and the plots of `learning.py curves`, from the JSON that its runs left.

python benchmarks/learning_report.py benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from learning_works import CLEANRL, WORKS, ZOO, Published, Work
from report import Help, provenance

STEM = "learning_curves"
COMMAND = "python benchmarks/learning.py curves --jobs 2 --out benchmarks/results"


@dataclass(frozen=True)
class Learned:
    """What is known of one work.

    Attributes:
        work: In the size that it was done in.
        runs: By seed.
    """

    work: Work
    runs: dict[str, dict[str, Any]]

    def figures(self, key: str) -> list[float]:
        """One of each run that has it: no episode may have ended in the last steps."""
        return [run[key] for run in self.runs.values() if run[key] is not None]

    def cell(self, key: str) -> str:
        """Mean and deviation over the seeds."""
        return spread(self.figures(key))


def spread(found: Sequence[float]) -> str:
    if not found:
        return "-"
    mean, deviation = statistics.fmean(found), statistics.pstdev(found)
    return f"{mean:.1f} ± {deviation:.1f}" if len(found) > 1 else f"{mean:.1f}"


def read(path: Path) -> dict[str, Any]:
    """What was kept of a work; empty where nothing was."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return record


def learned(folder: Path) -> list[Learned]:
    """Everything that a folder holds, an environment after another."""
    order = list(dict.fromkeys(work.env_id for work in WORKS))
    found = []
    for work in sorted(WORKS, key=lambda work: order.index(work.env_id)):
        paths = folder.glob(f"learning_{work.name}_*.json")
        for record in sorted(map(read, paths), key=lambda record: int(record["steps"])):
            done = Work(work.algorithm, work.env_id, record["steps"], work.cleanrl, work.zoo)
            found.append(Learned(done, record["runs"]))
    return found


def short(number: int) -> str:
    """So many steps, in words that fit a table."""
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if number % size == 0:
            return f"{number // size}{unit}"
    return str(number)


def shown(published: Published | None) -> str:
    return "" if published is None else str(published)


def table(every: Sequence[Learned]) -> str:
    """The table, what it means and where it comes from."""
    lines = [
        "### Learning, beside published figures",
        "",
        "| environment, steps | who | seeds | end of training | greedy | CleanRL | RL Zoo |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for each in every:
        work = each.work
        cells = [
            f"{work.env_id}, {short(work.steps)}",
            work.title,
            ", ".join(each.runs),
            each.cell("value"),
            each.cell("greedy"),
            shown(work.cleanrl),
            shown(work.zoo),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *notes(every), ""])


def notes(every: Sequence[Learned]) -> list[str]:
    text = (
        "End of training: the mean return of the training episodes that ended in the last 10 % of"
        " the steps. Greedy: the mean return of 100 episodes of the trained policy without noise,"
        " in environments with other seeds. Both are mean ± standard deviation over the seeds."
        f" [CleanRL]({CLEANRL}) gives the same over 3 seeds, for its smoothed training returns at"
        f" the end; [RL Baselines3 Zoo]({ZOO}) the mean ± deviation over the episodes of one run,"
        " with hyperparameters of its own. v3, v4: their version of the environment."
    )
    last = max((run for each in every for run in each.runs.values()), key=lambda run: run["date"])
    curves = "The curves are drawn beside the JSON, as `learning_ENVIRONMENT_STEPS.png`."
    return [text, "", curves, "", provenance({**last, "command": COMMAND})]


def plot_name(work: Work) -> str:
    return f"learning_{work.env_id}_{work.steps}"


def plot(folder: Path, every: Sequence[Learned]) -> None:
    """One plot of all that learnt on the same environment for so many steps."""
    # Imported here, as it is optional.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    work = every[0].work
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for each in every:
        curves = [run["curve"] for run in each.runs.values()]
        steps = curves[0]["steps"]
        returns = np.array([curve["return"] for curve in curves], dtype=float)
        known = ~np.isnan(returns).all(0)  # in some parts no episode ended
        x, y = np.array(steps)[known], returns[:, known]
        label = f"{each.work.title}, {len(curves)} seed{'s' * (len(curves) > 1)}"
        (line,) = axes.plot(x, np.nanmean(y, 0), label=label)
        low, high = np.nanpercentile(y, [25, 75], axis=0)
        axes.fill_between(x, low, high, alpha=0.2, linewidth=0, color=line.get_color())
    if (published := work.cleanrl) is not None:
        low, high = (published.mean + sign * published.deviation for sign in (-1, 1))
        note = f", {published.note}" if published.note else ""
        axes.axhspan(low, high, color="black", alpha=0.1, linewidth=0)
        axes.axhline(published.mean, color="black", linestyle="--", label=f"CleanRL's end{note}")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("mean return of training episodes")
    axes.set_title(f"{work.env_id}: mean and interquartile range over seeds", fontsize="medium")
    axes.legend(fontsize="small")
    figure.savefig(folder / f"{plot_name(work)}.png", dpi=120)
    pyplot.close(figure)


def write(folder: Path) -> str:
    """Leaves the table and the plots beside the JSON; returns the table."""
    every = learned(folder)
    if not every:
        return ""
    text = table(every)
    (folder / f"{STEM}.md").write_text(text)
    groups: dict[str, list[Learned]] = {}
    for each in every:
        groups.setdefault(plot_name(each.work), []).append(each)
    if find_spec("matplotlib"):
        for group in groups.values():
            plot(folder, group)
    else:
        print("no plots, as matplotlib is not installed", file=sys.stderr)
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("folder", type=Path, help="where the JSON lies")
    print(write(parser.parse_args(arguments).folder))


if __name__ == "__main__":
    main()
