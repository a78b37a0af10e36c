"""Runs every benchmark of this folder, or puts what they left into both READMEs.

    python benchmarks/everything.py
    python benchmarks/everything.py --tables

The first command measures, about 55 minutes on two cores with all peers installed; run it on a
machine that does nothing else. The second measures nothing: it puts the tables of the folder into
benchmarks/README.md, and what they say in short into README.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import headline
import learning_headline
import learning_report
import summary
from report import Help

HERE = Path(__file__).parent
SCRIPTS = {
    "collect.py": "--seconds 0.4",
    "stragglers.py": "--seconds 0.8",
    # Without spawn, which imports everything anew in each worker, as forkserver does here.
    "startup.py": "--only gymtask,fork",
    "vector_step.py": "--seconds 0.4",
    "replay.py": "--seconds 0.4",
    "memory.py": "",
    "update.py": "--seconds 1",
}
TABLES = (
    "collect_cartpole_8",
    "collect_cartpole_64",
    "collect_cheetah_8",
    "collect_pong_8",
    "stragglers_512",
    "stragglers_128",
    "startup_8",
    "startup_32",
    "vector_step",
    "replay_windows",
    "replay_following",
    "replay_single",
    "replay_prioritized",
    "replay_extend",
    "replay_interleaved",
    "memory",
    "learning_wall",
    "learning_curves",
    "update_plain",
    "update_fused",
)


def insert(path: Path, name: str, parts: Sequence[str]) -> None:
    """Puts parts between the two marks of that name in a file; without parts it stays as it is."""
    if not parts:
        print(f"nothing for {path} between its marks {name}")
        return
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = path.read_text().partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"{path} must hold {begin} and after it {end}")
    path.write_text("\n\n".join([before + begin, *parts, end]) + after)
    print(f"{len(parts)} parts in {path}")


def command(script: str, rounds: int, out: Path) -> list[str]:
    """How a benchmark is run."""
    words = [sys.executable, str(HERE / script), "--rounds", str(rounds)]
    # Tables name the command, and are read on other machines: no absolute path.
    return [*words, *shlex.split(SCRIPTS[script]), "--out", os.path.relpath(out)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--rounds", type=int, default=5, help="of every benchmark")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="where JSON, tables and plots lie"
    )
    parser.add_argument(
        "--tables", action="store_true", help="measure nothing, and write the READMEs instead"
    )
    parser.add_argument(
        "--into", type=Path, default=HERE.parent, help="the folder of README.md and benchmarks/"
    )
    options = parser.parse_args(arguments)
    if not options.tables:
        for script in SCRIPTS:
            subprocess.run(command(script, options.rounds, options.out), check=True)
        return
    paths = [options.out / f"{name}.md" for name in TABLES]
    learning_report.write(options.out)
    tables = [summary.table(options.out)]
    tables += [path.read_text() for path in paths if path.exists()]
    tables = [table.strip() for table in tables]
    insert(options.into / "benchmarks" / "README.md", "results", tables)
    insert(options.into / "README.md", "speed", headline.paragraphs(options.out))
    insert(options.into / "README.md", "learning", learning_headline.paragraphs(options.out))


if __name__ == "__main__":
    main()
