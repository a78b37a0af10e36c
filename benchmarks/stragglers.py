"""How well a collector keeps 16 environments busy whose steps take very different times.

    python benchmarks/stragglers.py --rounds 5 --seconds 1 --out DIR

Each step sleeps for a time of its environment's own fixed sequence: lognormal, mean 2 ms, sigma 1.5
(a step in a hundred takes more than 20 ms). At best every environment always steps: 16 / (mean step
time) steps a second. That limit is taken for the very steps that were made while a candidate was
measured, in two forms: with the mean of the times that were asked for, and with the mean that such
a step really takes on this machine when one environment is alone, measured just before, since a
sleep is always longer than asked for. The longer a rollout, the less it counts that at its end some
have nothing to do: there are two tables, for rollouts of 512 and of 128 steps of each environment.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import hand
import numpy as np
import ours
import peers
import report
import torch
from alternate import Build, Candidate, Close, Metrics, alternate, choose, preload, timed
from envs import NUM_SLEEPS, NUM_STRAGGLERS, Straggler, open_counter, sleep_times
from ours import Setup
from ready_set import ReadySetLoop

import gymtask

BASE = "by hand, AsyncVectorEnv"
ALONE = 200  # steps of one environment alone, to see how much longer than asked for they take

Make = Callable[[list[partial[Straggler]]], Build]


def by_hand(num_steps: int, make_envs: list[partial[Straggler]]) -> Build:
    return hand.over(lambda: gym.vector.AsyncVectorEnv(make_envs), num_steps)


def by_ready_set(num_steps: int, make_envs: list[partial[Straggler]]) -> Build:
    def build() -> tuple[Callable[[], int], Close]:
        loop = ReadySetLoop(make_envs, num_steps)
        return loop, loop.close

    return build


def by_gymtask(num_steps: int, allocation: str, make_envs: list[partial[Straggler]]) -> Build:
    setup = Setup("process", NUM_STRAGGLERS, min_batch_size=1, allocation=allocation)
    environments = [gymtask.Environment(make_env) for make_env in make_envs]
    policy = hand.Policy(Straggler.observation_space, Straggler.action_space)
    return partial(ours.build, environments, policy, NUM_STRAGGLERS, num_steps, setup)


def candidates(num_steps: int, seconds: float) -> list[Candidate]:
    """Everything that is compared: lock step first, then whoever is ready."""
    subproc = partial(peers.tianshou, "SubprocVectorEnv", num_steps=num_steps)
    ready = partial(subproc, asynchronous=True, wait_num=1)
    parallel = partial(peers.torchrl, "ParallelEnv", num_steps=num_steps)
    multi = partial(peers.torchrl, "MultiAsyncCollector", num_steps=num_steps)
    made: tuple[tuple[str, Make, tuple[str, ...]], ...] = (
        (BASE, partial(by_hand, num_steps), ()),
        ("SB3 SubprocVecEnv", partial(peers.sb3, "SubprocVecEnv", num_steps=num_steps), peers.SB3),
        ("TorchRL ParallelEnv", parallel, peers.TORCHRL),
        ("Tianshou SubprocVectorEnv", subproc, peers.TIANSHOU),
        ("Tianshou AsyncCollector, wait_num=1", ready, peers.TIANSHOU),
        ("TorchRL MultiAsyncCollector", multi, peers.TORCHRL),
        ("by hand, ready set", partial(by_ready_set, num_steps), ()),
        ("gymtask process, equal", partial(by_gymtask, num_steps, "equal"), ()),
        ("gymtask process, first_come", partial(by_gymtask, num_steps, "first_come"), ()),
    )
    return [Candidate(name, partial(measure, make, seconds), needs) for name, make, needs in made]


def measure(make: Make, seconds: float) -> tuple[Metrics, Close]:
    """Steps a second, and which share of the limit that is."""
    extra = extra_time()
    with tempfile.NamedTemporaryFile() as file:
        np.zeros((NUM_STRAGGLERS, 2)).tofile(file.name)
        counter = open_counter(file.name)
        rollout, close = make([partial(Straggler, i, file.name) for i in range(NUM_STRAGGLERS)])()
        timed(rollout, min(0.3, seconds))
        gc.collect()
        before = counter.copy()
        steps = timed(rollout, seconds)
        after = counter.copy()
    asked = mean_asked(before[:, 0].astype(int), after[:, 0].astype(int))
    counted, spent = (after - before).sum(0)
    metrics = {
        "steps_per_second": steps,
        "share": steps * (asked + extra) / NUM_STRAGGLERS,
        "share_of_asked": steps * asked / NUM_STRAGGLERS,
        "milliseconds_asked": asked * 1e3,
        "milliseconds_alone": (asked + extra) * 1e3,
        "milliseconds_spent": spent / counted * 1e3,
    }
    return metrics, close


def extra_time() -> float:
    """Seconds by which a step of one environment, alone, is longer than what it asks for."""
    env, action = Straggler(0), np.int64(0)
    start = time.perf_counter()
    for _ in range(ALONE):
        env.step(action)
    asked: float = sum(env.sleeps[:ALONE])
    return (time.perf_counter() - start - asked) / ALONE


def mean_asked(first: Any, end: Any) -> float:
    """Mean of the times that were asked for in steps `first` to `end` of each environment."""
    times = sleep_times()
    slept = [
        times[i, np.arange(first[i], end[i]) % NUM_SLEEPS] for i in range(NUM_STRAGGLERS)
    ]  # fmt: skip
    return float(np.concatenate(slept).mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=report.Help)
    parser.add_argument(
        "--num-steps",
        type=int,
        nargs="+",
        default=[512, 128],
        help="of each environment in a rollout; a table for each",
    )
    report.add_options(parser, seconds=1.0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    preload(choose(candidates(1, options.seconds), BASE, options.only))
    for num_steps in options.num_steps:
        run(num_steps, options)


def run(num_steps: int, options: argparse.Namespace) -> None:
    """Measures, prints and writes one table."""
    chosen = choose(candidates(num_steps, options.seconds), BASE, options.only)
    outcomes = alternate(chosen, options.rounds)
    columns = (
        report.Column("steps/s", "steps_per_second"),
        report.Column("share of 16 / mean step time", "share", ".2f"),
        report.Column("the same, sleep as asked for", "share_of_asked", ".2f"),
        report.Column(f"ratio to {BASE}", "steps_per_second", ".2f", ratio=True),
    )
    notes = (
        "The mean step time is that of one environment alone on this machine, and in the column"
        " after it the mean of the sleeps that were asked for.",
    )
    title = f"{NUM_STRAGGLERS} stragglers, rollouts of {num_steps} steps each"
    report.Report(
        f"stragglers_{num_steps}", title, BASE, columns, outcomes, vars(options), notes
    ).write(options.out)  # fmt: skip


if __name__ == "__main__":
    main()
