"""How fast vector environments step without a policy: random actions, drawn beforehand.

    python benchmarks/vector_step.py --rounds 5 --seconds 1 --out DIR

64 CartPole-v1 environments, used as any `gymnasium.vector.VectorEnv` is; all of them spend a call
on the reset after an episode's end, and the slots of those calls are counted for all alike.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import peers
import report
import torch
from alternate import Build, Candidate, Close, Rollout, alternate, choose, preload, rate
from envs import Work

import gymtask

BASE = "AsyncVectorEnv"
NUM_CALLS = 128  # of step in a rollout


def over(make: Callable[[], Any], to_env: Callable[[Any], Any] | None = None) -> Build:
    """Builds rollouts of random actions over what `make` returns."""

    def build() -> tuple[Rollout, Close]:
        envs = make()
        envs.reset(seed=0)
        drawn = np.random.default_rng(0).integers(0, 2, (NUM_CALLS, envs.num_envs))
        actions = list(drawn if to_env is None else to_env(drawn))

        def rollout() -> int:
            for action in actions:
                envs.step(action)
            return int(drawn.size)

        return rollout, envs.close

    return build


def candidates(num_envs: int, workers: int, seconds: float) -> list[Candidate]:
    """Everything that is compared."""
    work = Work("cartpole", "CartPole-v1", num_envs, NUM_CALLS)
    make_envs = [work.make_env] * num_envs
    made: Any = gymtask
    make_vec = partial(gym.make_vec, work.env_id, num_envs)
    envpool = over(partial(peers.make_envpool_vector, work, 2), peers.envpool_action)
    builds: tuple[tuple[str, Build, tuple[str, ...]], ...] = (
        (BASE, over(lambda: gym.vector.AsyncVectorEnv(make_envs)), ()),
        ("SyncVectorEnv", over(lambda: gym.vector.SyncVectorEnv(make_envs)), ()),
        ("vector_entry_point", over(partial(make_vec, "vector_entry_point")), ()),
        ("EnvPool, 2 threads", envpool, peers.ENVPOOL),
        (
            "gymtask.make_vec, process",
            over(lambda: made.make_vec(work.env_id, num_envs, "process", num_workers=workers)),
            (),
        ),
        ("gymtask.make_vec, sync", over(lambda: made.make_vec(work.env_id, num_envs, "sync")), ()),
        (
            "gymtask.ProcessVectorEnv",
            over(lambda: made.ProcessVectorEnv(make_envs, num_workers=workers)),
            (),
        ),
    )
    return [Candidate(name, partial(rate, build, seconds), needs) for name, build, needs in builds]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=report.Help)
    parser.add_argument("--num-envs", type=int, default=64, help="environments")
    parser.add_argument("--workers", type=int, default=2, help="of gymtask's process mode")
    report.add_options(parser, seconds=1.0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    every = candidates(options.num_envs, options.workers, options.seconds)
    chosen = choose(every, BASE, options.only)
    preload(chosen)
    columns = (
        report.Column("steps/s", "steps_per_second"),
        report.Column(f"ratio to {BASE}", "steps_per_second", ".2f", ratio=True),
    )
    title = f"CartPole-v1, {options.num_envs} environments as a VectorEnv, random actions"
    outcomes = alternate(chosen, options.rounds)
    report.Report("vector_step", title, BASE, columns, outcomes, vars(options)).write(options.out)


if __name__ == "__main__":
    main()
