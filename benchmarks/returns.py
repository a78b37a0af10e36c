"""How fast advantages are computed: gymtask beside a loop over time and, if installed, TorchRL.

    python benchmarks/returns.py --rounds 7 --out returns.json

Candidates run alternately, round by round, in one process and on the same data: float32 [N, T] on
the CPU, an episode ending at a row with the given probability, half of the ends by a limit. Only
ratios within one round are compared. `error` is the largest difference from the float64 loop.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gymtask.returns import generalized_advantage_estimate

GAMMA, LAMBDA = 0.99, 0.95
SHAPES = [(8, 2048), (64, 128), (1000,)]
OURS = "gymtask"

Candidate = Callable[[], Sequence[Tensor]]


def make_rollout(shape: tuple[int, ...], end_probability: float) -> dict[str, Tensor]:
    """Random arguments of `generalized_advantage_estimate`."""
    generator = torch.Generator().manual_seed(0)
    reward, value, next_value = torch.randn(3, *shape, generator=generator)
    done = torch.rand(shape, generator=generator) < end_probability
    by_limit = torch.rand(shape, generator=generator) < 0.5
    floats = {"reward": reward, "value": value, "next_value": next_value}
    return {**floats, "terminated": done & ~by_limit, "truncated": done & by_limit}


def loop(rollout: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The definition, one row of time after the other, all lanes at once."""
    reward, value, next_value = (rollout[k].to(dtype) for k in ("reward", "value", "next_value"))
    delta = reward + GAMMA * next_value * ~rollout["terminated"] - value
    carry = GAMMA * LAMBDA * (~(rollout["terminated"] | rollout["truncated"])).to(dtype)
    advantage, following = torch.zeros_like(delta), torch.zeros_like(delta[..., 0])
    for t in reversed(range(delta.shape[-1])):
        following = delta[..., t] + carry[..., t] * following
        advantage[..., t] = following
    return advantage, advantage + value


def make_candidates(rollout: dict[str, Tensor]) -> dict[str, Candidate]:
    """Everything that is compared, by name."""
    ours = partial(generalized_advantage_estimate, gamma=GAMMA, gae_lambda=LAMBDA, **rollout)
    candidates: dict[str, Candidate] = {OURS: ours, "loop in torch": partial(loop, rollout)}
    if find_spec("torchrl"):
        torchrl = import_module("torchrl.objectives.value.functional")
        full = rollout | {"done": rollout["terminated"] | rollout["truncated"]}
        names = ("value", "next_value", "reward", "done", "terminated")
        theirs = [full[name].unsqueeze(-1) for name in names]  # its layout is [N, T, 1]
        for name in ("vec_generalized_advantage_estimate", "generalized_advantage_estimate"):
            candidates[f"TorchRL {name}"] = partial(getattr(torchrl, name), GAMMA, LAMBDA, *theirs)
    return candidates


def measure(candidate: Candidate, seconds: float) -> float:
    """Microseconds a call, over at least so many seconds."""
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        candidate()
        count += 1
    return 1e6 * spent / count


def compare(shape: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Runs all candidates on one shape, prints their table and returns its numbers."""
    rollout = make_rollout(shape, options.end_probability)
    exact, _ = loop(rollout, torch.float64)
    candidates = make_candidates(rollout)
    # The first call, outside the clock, is the one that is checked.
    errors = {k: float((c()[0].reshape(shape) - exact).abs().max()) for k, c in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(options.rounds):
        for name, candidate in candidates.items():
            times[name].append(measure(candidate, options.seconds))
    print(f"\n{list(shape)}\n\n| candidate | us a call, median | time of gymtask's | error |")
    print("|---|---:|---:|---:|")
    for name, each in times.items():
        ratio = statistics.median(t / ours for t, ours in zip(each, times[OURS], strict=True))
        print(f"| {name} | {statistics.median(each):,.0f} | {ratio:.1f} | {errors[name]:.0e} |")
    return {"shape": shape, "microseconds": times, "errors": errors}


def main() -> None:
    """Compares all shapes and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each candidate in a round")
    parser.add_argument("--end-probability", type=float, default=0.01)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [compare(shape, options) for shape in SHAPES]
    if options.out:
        record = {"torch": torch.__version__, "options": vars(options), "results": results}
        options.out.write_text(json.dumps(record, indent=2, default=str))


if __name__ == "__main__":
    main()
