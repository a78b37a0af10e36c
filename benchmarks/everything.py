"""Runs every benchmark of this folder and puts the tables into benchmarks/README.md.

    python benchmarks/everything.py --out benchmarks/results

About 35 minutes on two cores with all peers installed. Run it on a machine that does nothing else.
With `--tables` nothing is measured: the tables that lie in the folder are put in again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import summary

HERE = Path(__file__).parent
SCRIPTS = ("collect.py", "stragglers.py", "startup.py", "vector_step.py")
TABLES = (
    "collect_cartpole_8",
    "collect_cartpole_64",
    "collect_cheetah_8",
    "collect_pong_8",
    "stragglers",
    "startup_8",
    "startup_32",
    "vector_step",
)
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def insert(text: str, tables: Sequence[str]) -> str:
    """The text with the tables between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the README must hold {BEGIN} and after it {END}")
    return "\n\n".join([before + BEGIN, *(table.strip() for table in tables), END]) + after


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    for script in () if options.tables else SCRIPTS:
        command = [sys.executable, str(HERE / script), "--rounds", str(options.rounds)]
        subprocess.run([*command, "--out", str(options.out)], check=True)
    paths = [options.out / f"{name}.md" for name in TABLES]
    tables = [summary.table(options.out)]
    tables += [path.read_text() for path in paths if path.exists()]
    options.readme.write_text(insert(options.readme.read_text(), tables))
    print(f"{len(tables)} tables in {options.readme}")


if __name__ == "__main__":
    main()
