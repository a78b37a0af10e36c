"""How long workers take to start, and how much memory they need, with torch in the parent.

    python benchmarks/startup.py --rounds 5 --out DIR

One CartPole-v1 environment a worker. The clock runs from the call that starts the workers until the
first observations of all of them are there. Memory is the proportional set size (PSS, where a page
that n processes share counts as 1/n) of all processes that were started, helpers such as a fork
server included, divided by the number of workers.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import peers
import report
import torch
from alternate import Candidate, Close, Metrics, alternate, choose, preload
from envs import WORKS

import gymtask

BASE = "AsyncVectorEnv, fork"
PATIENCE = 15.0  # seconds; what takes longer to measure is measured once only
MAKE_ENV = WORKS[0].make_env

Start = Callable[[int], Close]


def start_async(context: str, num_workers: int) -> Close:
    envs = gym.vector.AsyncVectorEnv([MAKE_ENV] * num_workers, context=context)
    envs.reset(seed=0)
    return envs.close


def start_sb3(method: str, num_workers: int) -> Close:
    vec_env = import_module("stable_baselines3.common.vec_env")
    envs = vec_env.SubprocVecEnv([MAKE_ENV] * num_workers, start_method=method)
    envs.reset()
    close: Close = envs.close
    return close


def start_torchrl(num_workers: int) -> Close:
    make_env = partial(peers.torchrl_env, MAKE_ENV)
    envs = import_module("torchrl.envs").ParallelEnv(num_workers, make_env, mp_start_method="fork")
    envs.reset()
    close: Close = envs.close
    return close


class Task(gymtask.ReinforcementLearningTask):
    """Only its environments are used."""

    def get_environment(self) -> gymtask.Environment:
        return gymtask.Environment("CartPole-v1", disable_env_checker=True)

    def get_actions(self, *_: Any) -> Any:
        raise NotImplementedError

    def run_model(self, *_: Any) -> Any:
        raise NotImplementedError

    def compute_loss(self, *_: Any) -> Any:
        raise NotImplementedError


def start_gymtask(num_workers: int) -> Close:
    environment = gymtask.EnvironmentConfig(num_env_workers=num_workers)
    config = gymtask.ReinforcementLearningTaskConfig(
        name="startup", environment=environment, dataset=gymtask.DatasetConfig(num_update_steps=1)
    )
    pool = Task(config).get_worker_pool()
    pool.reset()
    return pool.close


def start_vector_env(num_workers: int) -> Close:
    made: Any = gymtask
    envs = made.ProcessVectorEnv([MAKE_ENV] * num_workers, num_workers=num_workers)
    envs.reset(seed=0)
    close: Close = envs.close
    return close


STARTS: tuple[tuple[str, Start, tuple[str, ...]], ...] = (
    (BASE, partial(start_async, "fork"), ()),
    ("AsyncVectorEnv, forkserver", partial(start_async, "forkserver"), ()),
    ("AsyncVectorEnv, spawn", partial(start_async, "spawn"), ()),
    ("SB3 SubprocVecEnv, forkserver", partial(start_sb3, "forkserver"), peers.SB3),
    ("TorchRL ParallelEnv, fork", start_torchrl, peers.TORCHRL),
    ("gymtask process", start_gymtask, ()),
    ("gymtask ProcessVectorEnv", start_vector_env, ()),
)


def measure(start: Start, needs: Sequence[str], num_workers: int) -> tuple[Metrics, Close]:
    """Seconds to start, and megabytes of the processes that were started."""
    for name in needs:  # here, as forking is slower the more the parent has imported
        import_module(name)
    begin = time.perf_counter()
    close = start(num_workers)
    seconds = time.perf_counter() - begin
    sizes = [pss(process) for process in descendants(os.getpid())]
    metrics = {
        "seconds": seconds,
        "pss_mb_per_worker": sum(sizes) / 1e6 / num_workers,
        "processes": float(len(sizes)),
    }
    return metrics, close


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    path = Path(f"/proc/{pid}/task")
    words = " ".join((thread / "children").read_text() for thread in path.iterdir()).split()
    return [found for word in words for found in (int(word), *descendants(int(word)))]


def pss(pid: int) -> int:
    """Bytes of memory of a process, where what n processes share counts as 1/n."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    return int(found.group(1)) * 1024 if found else 0


def run(num_workers: int, options: argparse.Namespace) -> None:
    """Measures, prints and writes one table."""
    every = [
        Candidate(name, partial(measure, start, needs, num_workers), needs)
        for name, start, needs in STARTS
    ]
    chosen = choose(every, BASE, options.only)
    getattr(gymtask, "ProcessVectorEnv", None)  # imported when first used: not on the clock
    preload([])
    outcomes = alternate(chosen, options.rounds, patience=PATIENCE)
    columns = (
        report.Column("MB PSS a worker", "pss_mb_per_worker", ".1f"),
        report.Column(f"time, ratio to {BASE}", "seconds", ".2f", ratio=True),
        report.Column("seconds", "seconds", ".2f"),
    )
    title = f"Start of {num_workers} CartPole-v1 workers, torch imported in the parent"
    notes = (
        f"What took more than {PATIENCE:g} s was measured once. Where a worker imports the main"
        " script (forkserver, spawn), it imports torch with it, as it does in most scripts.",
    )
    report.Report(
        f"startup_{num_workers}", title, BASE, columns, outcomes, vars(options), notes
    ).write(options.out)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=report.Help)
    parser.add_argument(
        "--num-workers", type=int, nargs="+", default=[8, 32], help="a table for each"
    )
    report.add_options(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for num_workers in options.num_workers:
        run(num_workers, options)


if __name__ == "__main__":
    main()
