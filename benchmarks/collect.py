"""How fast a policy collects: gymtask, loops written by hand, and other libraries.

    python benchmarks/collect.py --task cartpole --num-envs 8 --rounds 5 --seconds 0.8 --out DIR

Without `--task` all four pieces of work are done: CartPole-v1 with 8 and with 64 environments,
HalfCheetah-v5 with 8, ALE/Pong-v5 (four frames of 84 x 84) with 8. Every candidate acts with a
policy of 2 x 64 tanh units and keeps observation, action, reward, flags and log-probability of
each row. Reset rows of a vector environment that spends a call on them are not counted.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import floor
import gymnasium as gym
import hand
import ours
import peers
import report
import torch
from alternate import Build, Candidate, alternate, choose, preload, rate
from envs import WORKS, Work
from ours import HandTask, HookTask, LogProbTask, Setup, Task

import gymtask

BASE = "by hand, SyncVectorEnv"


def by_hand(work: Work) -> Iterator[tuple[str, Build, tuple[str, ...]]]:
    """The loop by hand over whatever vector environment there is for this work."""
    make_envs = [work.make_env] * work.num_envs
    over = partial(hand.over, num_steps=work.num_steps)
    yield BASE, over(lambda: gym.vector.SyncVectorEnv(make_envs)), ()
    yield "by hand, AsyncVectorEnv", over(lambda: gym.vector.AsyncVectorEnv(make_envs)), ()
    if work.task == "cartpole":
        yield "by hand, vector_entry_point", over(partial(hand.make_native, work)), ()
    if work.pixels:
        ale = partial(hand.make_ale, work.num_envs, 2)
        yield "by hand, AtariVectorEnv, 2 threads", over(ale), ("ale_py",)
    for threads in (1, 2):
        made = over(partial(peers.make_envpool_vector, work, threads), to_env=peers.envpool_action)
        yield f"by hand, EnvPool, {threads} thread{'s' * (threads > 1)}", made, peers.ENVPOOL
    for backend, options in (("Serial", {}), ("Multiprocessing", {"num_workers": 2})):
        made = over(partial(peers.make_pufferlib, work, backend, **options))
        yield f"by hand, PufferLib {backend}", made, peers.PUFFERLIB


def libraries(work: Work) -> Iterator[tuple[str, Build, tuple[str, ...]]]:
    """The collectors of other libraries."""
    make_envs = [work.make_env] * work.num_envs
    builders: tuple[tuple[str, Callable[..., Build], tuple[str, ...], tuple[str, ...]], ...] = (
        ("SB3", peers.sb3, peers.SB3, ("DummyVecEnv", "SubprocVecEnv")),
        ("TorchRL", peers.torchrl, peers.TORCHRL, ("SerialEnv", "ParallelEnv")),
        ("Tianshou", peers.tianshou, peers.TIANSHOU, ("DummyVectorEnv", "ShmemVectorEnv")),
    )
    for library, build, needs, kinds in builders:
        for kind in kinds:
            yield f"{library} {kind}", build(kind, make_envs, work.num_steps), needs


def floors(work: Work, workers: int) -> Iterator[tuple[str, Build, tuple[str, ...]]]:
    """Loops that do the work of a step and nothing else."""
    if not work.pixels:
        yield "floor, one process", floor.one_process(work), ()
        yield f"floor, {workers} processes", floor.processes(work, workers), ()
    if work.task == "cartpole":
        yield "floor, vector_entry_point", floor.native(work), ()


def environment(work: Work) -> gymtask.Environment:
    """What a task's `get_environment` returns."""
    if work.pixels:
        return gymtask.Environment(work.make_env)
    return gymtask.Environment(work.env_id, disable_env_checker=True)


def native_environment(work: Work) -> gymtask.Environment:
    """The same for native mode."""
    if work.pixels:
        make_envs: Any = partial(hand.make_ale, work.num_envs, 2)
        return gymtask.Environment(make_envs)
    return gymtask.Environment(work.env_id)


def envpool_environment(work: Work) -> gymtask.Environment:
    """The same for native mode over EnvPool."""
    return gymtask.Environment(partial(peers.make_envpool, work, 1))


def gymtasks(work: Work, workers: int) -> Iterator[tuple[str, Build, tuple[str, ...]]]:
    """The candidates of gymtask itself."""
    # The first layer of a policy on frames costs too much to be run again for log-probabilities.
    kind: type[Task] = LogProbTask if work.pixels else Task
    process = Setup("process", workers, kind)
    setups = {
        "sync": Setup("sync", kind=kind),
        "sync, actions as by hand": Setup("sync", kind=HandTask),
        "sync, log-probabilities in a hook": Setup("sync", kind=HookTask),
        "process": process,
        "process, whole batches": replace(process, min_batch_size=work.num_envs),
        "process, half batches": replace(process, max_batch_size=work.num_envs // 2),
    }
    needs = ("ale_py", "cv2") if work.pixels else ()
    for name, setup in setups.items():
        yield f"gymtask {name}", partial(start, environment, work, setup), needs
    native = Setup("native", kind=kind)
    if work.task != "cheetah":
        yield "gymtask native", partial(start, native_environment, work, native), needs
    pool = partial(start, envpool_environment, work, native)
    yield "gymtask native, EnvPool", pool, (*needs, *peers.ENVPOOL)


def start(
    make: Callable[[Work], gymtask.Environment], work: Work, setup: Setup
) -> tuple[Callable[[], int], Callable[[], None]]:
    env = work.make_env()
    policy = hand.Policy(env.observation_space, env.action_space)
    env.close()
    return ours.build([make(work)], policy, work.num_envs, work.num_steps, setup)


def candidates(work: Work, workers: int, seconds: float) -> list[Candidate]:
    """Everything that is compared on this work."""
    found = (*by_hand(work), *libraries(work), *gymtasks(work, workers), *floors(work, workers))
    return [Candidate(name, partial(rate, build, seconds), needs) for name, build, needs in found]


def run(work: Work, options: argparse.Namespace) -> None:
    """Measures, prints and writes one table."""
    chosen = choose(candidates(work, options.workers, options.seconds), BASE, options.only)
    preload(chosen)
    outcomes = alternate(chosen, options.rounds)
    columns = (
        report.Column("steps/s", "steps_per_second"),
        report.Column(f"ratio to {BASE}", "steps_per_second", ".2f", ratio=True),
    )
    title = f"{work.env_id}, {work.num_envs} environments, rollouts of {work.num_steps} steps each"
    report.Report(
        f"collect_{work.task}_{work.num_envs}",
        title,
        BASE,
        columns,
        outcomes,
        vars(options),
        ("Median (min to max) over the rounds; the ratio is that of one round.",),
    ).write(options.out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=report.Help)
    tasks = sorted({work.task for work in WORKS})
    parser.add_argument("--task", choices=tasks, help="what is done; all without it")
    parser.add_argument("--num-envs", type=int, help="environments; without it as the work has it")
    parser.add_argument("--num-steps", type=int, help="of each environment in a rollout; likewise")
    parser.add_argument("--workers", type=int, default=2, help="of gymtask's process mode")
    report.add_options(parser, seconds=0.8)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for work in chosen_works(options):
        run(work, options)


def chosen_works(options: Any) -> list[Work]:
    """The works of `--task`, in the size that was asked for."""
    works = [work for work in WORKS if options.task in (None, work.task)]
    if options.num_envs:
        exact = [work for work in works if work.num_envs == options.num_envs]
        one_each = {work.task: work for work in reversed(works)}.values()
        works = exact or [replace(work, num_envs=options.num_envs) for work in one_each]
    if options.num_steps:
        works = [replace(work, num_steps=options.num_steps) for work in works]
    return works


if __name__ == "__main__":
    main()
