"""How well gymtask's examples learn, beside published figures and a PPO by hand; how soon they do.

    python benchmarks/learning.py curves --seeds 1,2,3 --jobs 2 --out benchmarks/results
    python benchmarks/learning.py curves --only ppo_CartPole-v1,hand_CartPole-v1 --steps 100000
    python benchmarks/learning.py wall --seeds 1,2,3 --out benchmarks/results

`curves` trains every algorithm on every environment with every seed, each run in a process of its
own and with a run directory; runs that --out holds already are not made again. `wall` measures how
long PPO takes on CartPole-v1 until the last 100 training episodes return 475 in the mean: gymtask,
Stable-Baselines3 and a script by hand, with the same hyperparameters, in turn. `one` is one run of
`curves`, in this process.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import learning_report
import learning_runs
import learning_wall
import torch
from learning_works import DEFAULT, WORKS, Work
from report import Help, surroundings


@dataclass(frozen=True)
class Job:
    """One run that is to be made."""

    work: Work
    seed: int

    @property
    def name(self) -> str:
        return f"{self.work.name}_{self.work.steps}_seed{self.seed}"


def chosen(only: str | None, steps: int | None) -> list[Work]:
    """The works that `--only` names, in the size that was asked for.

    A word stands for the work of that name, or for all whose name contains it.
    """
    works = list(DEFAULT)
    if only:
        works = []
        for word in only.split(","):
            exact = [work for work in WORKS if work.name == word]
            found = exact or [work for work in WORKS if word.lower() in work.name.lower()]
            if not found:
                names = ", ".join(work.name for work in WORKS)
                raise SystemExit(f"--only must name works, got {word!r}; there are: {names}")
            works += [work for work in found if work not in works]
    return [replace(work, steps=steps) for work in works] if steps else works


def missing(works: Sequence[Work], seeds: Sequence[int], out: Path) -> Iterator[Job]:
    """The runs that are not there yet; the first seed of all before the second of any."""
    done = {work.stem: learning_report.read(out / f"{work.stem}.json") for work in works}
    for seed in seeds:
        for work in works:
            if str(seed) not in done[work.stem].get("runs", {}):
                yield Job(work, seed)


def make(job: Job, runs: Path, out: Path) -> None:
    """Makes one run in a process of its own, and adds it to its file."""
    answer = runs / f"{job.name}.json"
    words = [sys.executable, str(Path(__file__)), "one", job.work.name, "--seed", str(job.seed)]
    words += ["--steps", str(job.work.steps), "--run-dir", str(runs / job.name)]
    log = runs / f"{job.name}.log"
    with log.open("w") as file:
        done = subprocess.run([*words, "--answer", str(answer)], stdout=file, stderr=file)
    if done.returncode:
        print(f"{job.name} failed, see {log}", file=sys.stderr, flush=True)
        return
    found = json.loads(answer.read_text())
    # What makes this very run again, wherever it is.
    command = f"python benchmarks/learning.py one {job.work.name} --seed {job.seed}"
    where = {**surroundings(), "command": f"{command} --steps {job.work.steps}"}
    add(job, {**found, **where}, out)
    print(f"{job.name}: {found['value']} in {found['seconds']:.0f} s", flush=True)


def add(job: Job, found: dict[str, Any], out: Path) -> None:
    """Adds a run to the file of its work."""
    path = out / f"{job.work.stem}.json"
    record = learning_report.read(path) or {
        "algorithm": job.work.algorithm, "env_id": job.work.env_id, "steps": job.work.steps
    }  # fmt: skip
    record["settings"] = found.pop("settings")
    runs = {**record.get("runs", {}), str(job.seed): found}
    record["runs"] = {seed: runs[seed] for seed in sorted(runs, key=int)}
    path.write_text(json.dumps(record, indent=1) + "\n")


def curves(options: argparse.Namespace) -> None:
    """Makes all runs that are missing; then tables and plots of all that there are."""
    out = options.out or Path(tempfile.mkdtemp(prefix="learning-"))
    runs = options.runs or Path(tempfile.mkdtemp(prefix="learning-runs-"))
    for folder in (out, runs):
        folder.mkdir(parents=True, exist_ok=True)
    works = chosen(options.only, options.steps)
    jobs = list(missing(works, options.seeds, out))
    print(f"{len(jobs)} runs, with run directories in {runs}", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for _ in pool.map(lambda job: make(job, runs, out), jobs):
            pass
    print(learning_report.write(out))


def one(options: argparse.Namespace) -> None:
    """Makes one run, here."""
    torch.set_num_threads(1)
    work = next(work for work in WORKS if work.name == options.work)
    steps = options.steps or work.steps
    run_dir = options.run_dir or Path(tempfile.mkdtemp(prefix="learning-run-")) / work.name
    start = time.perf_counter()
    found = learning_runs.run(work.algorithm, work.env_id, steps, options.seed, run_dir)
    print(f"return {found['value']}, greedy {found['greedy']}; {time.perf_counter() - start:.0f} s")
    if options.answer:
        options.answer.write_text(json.dumps(found))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    commands = parser.add_subparsers(dest="command", required=True)
    many = commands.add_parser("curves", help="how well all learn", formatter_class=Help)
    many.add_argument("--only", help="works or parts of their names, comma-separated")
    many.add_argument("--steps", type=int, help="of a run; without it as the work has it")
    many.add_argument("--seeds", type=numbers, default="1,2,3", help="a run with each")
    many.add_argument("--jobs", type=int, default=1, help="runs at a time")
    many.add_argument("--runs", type=Path, help="folder for run directories; a temporary one")
    many.add_argument("--out", type=Path, help="folder for JSON, table and plots")
    many.set_defaults(do=curves)
    timed = commands.add_parser("wall", help="how soon PPO has learnt", formatter_class=Help)
    timed.add_argument("--only", help="words, comma-separated: parts of names, beside the base")
    goal, steps = learning_wall.GOAL, learning_wall.SETTINGS.total_steps
    timed.add_argument("--goal", type=float, default=goal, help="mean return of 100 episodes")
    timed.add_argument("--steps", type=int, default=steps, help="after which one has failed")
    timed.add_argument("--seeds", type=numbers, default="1,2,3", help="a round with each")
    timed.add_argument("--out", type=Path, help="folder for JSON, Markdown table and plot")
    timed.set_defaults(do=learning_wall.run)
    single = commands.add_parser("one", help="one run, in this process", formatter_class=Help)
    single.add_argument("work", choices=[work.name for work in WORKS], help="what is learnt")
    single.add_argument("--steps", type=int, help="of the run; without it as the work has it")
    single.add_argument("--seed", type=int, default=1, help="of everything")
    single.add_argument("--run-dir", type=Path, help="a temporary one without it")
    single.add_argument("--answer", type=Path, help="file for what was found, JSON")
    single.set_defaults(do=one)
    options = parser.parse_args(arguments)
    options.do(options)


if __name__ == "__main__":
    main()
