"""What the project's README says of learning, from the JSON that `learning.py` left.

    python benchmarks/learning_headline.py benchmarks/results

Figures of training are means over seeds, those of wall time medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from headline import wrapped
from learning_report import Learned, learned, read, short, shown
from learning_wall import HAND, SB3, shares_of
from report import Help


def learning(folder: Path) -> list[str]:
    """The table of PPO, and what stands over it; nothing where nothing was learnt."""
    every = [each for each in learned(folder) if each.work.algorithm in ("ppo", "hand")]
    groups: dict[tuple[str, int], dict[str, Learned]] = {}
    for each in every:
        group = groups.setdefault((each.work.env_id, each.work.steps), {})
        group[each.work.algorithm] = each
    lines = []
    for (env_id, steps), group in groups.items():
        if (ours := group.get("ppo")) is None:
            continue
        hand = group["hand"].cell("value") if "hand" in group else ""
        cells = [f"{env_id}, {short(steps)}", ours.cell("value"), hand, shown(ours.work.cleanrl)]
        lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return []
    text = (
        "`examples/ppo.py` with CleanRL's hyperparameters: the mean return of the training episodes"
        " of a run's last 10\N{NO-BREAK SPACE}% of steps, mean ± standard deviation over seeds"
        " (`python benchmarks/learning.py curves`), beside a PPO written by hand as CleanRL's and"
        " what CleanRL has published:"
    )
    heads = ["| environment, steps | gymtask | by hand | CleanRL |", "|---|---:|---:|---:|"]
    return [wrapped(text), "\n".join([*heads, *lines])]


def wall_time(folder: Path) -> list[str]:
    """The sentence on how long it takes; nothing where one did not reach the goal."""
    rows = read(folder / "learning_wall.json").get("rows", {})
    shares = shares_of({name: row["rounds"] for name, row in rows.items()})
    if not {HAND, SB3} <= shares.keys():
        return []
    options, number = read(folder / "learning_wall.json")["options"], len(rows[SB3]["rounds"])
    text = (
        f"Until 100 training episodes of CartPole-v1 return {float(options['goal']):g} in the mean,"
        f" it takes {shares[SB3].time:.2f} of the time of SB3's PPO with the same hyperparameters,"
        f" {shares[HAND].time:.2f} of that of the script by hand (medians of {number} seeds,"
        f" `python benchmarks/learning.py wall`); a step takes {shares[SB3].step:.2f} and"
        f" {shares[HAND].step:.2f} of theirs, learning included (with torch's fused Adam, which the"
        " other two do not have, and a value at time limits, which the script does not have)."
    )
    return [wrapped(text)]


def paragraphs(folder: Path) -> list[str]:
    """Everything, in Markdown."""
    return [*learning(folder), *wall_time(folder)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("folder", type=Path, help="where the JSON lies")
    print("\n\n".join(paragraphs(parser.parse_args(arguments).folder)))


if __name__ == "__main__":
    main()
