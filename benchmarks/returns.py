"""How fast returns and advantages are computed: gymtask beside a plain loop, TorchRL and SB3.

    python benchmarks/returns.py --rounds 5 --out DIR

Float32 on the CPU, [N, T] or [T], the same rows for all; an episode ends at a row with the given
probability, half of the ends by a limit. `error` is the largest difference from the definition in
float64. SB3 knows no next values and no limits, so its results are others; its time is not.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import report
import torch
from alternate import Candidate, Close, Metrics, alternate, choose, preload
from torch import Tensor

import gymtask

GAMMA, LAMBDA, N = 0.99, 0.95, 5
SHAPES = ((8, 2048), (64, 128), (1000,))
BASE = "gymtask"
WARM_UP = 0.05  # seconds

Rows = dict[str, Tensor]
Call = Callable[[], Any]
Prepare = Callable[[Rows], Call]


def make_rows(shape: tuple[int, ...], end_probability: float) -> Rows:
    """Random arguments of all functions."""
    generator = torch.Generator().manual_seed(0)
    names = ("reward", "value", "next_value", "log_prob", "behaviour_log_prob")
    floats = dict(zip(names, torch.randn(5, *shape, generator=generator), strict=True))
    done = torch.rand(shape, generator=generator) < end_probability
    by_limit = torch.rand(shape, generator=generator) < 0.5
    return {**floats, "terminated": done & ~by_limit, "truncated": done & by_limit}


# The definitions: one row of time after the other, all lanes at once.


def loop(x: Tensor, carry: Tensor) -> Tensor:
    """`y[t] = x[t] + carry[t] * y[t + 1]`."""
    y, following = torch.zeros_like(x), torch.zeros_like(x[..., 0])
    for t in reversed(range(x.shape[-1])):
        following = x[..., t] + carry[..., t] * following
        y[..., t] = following
    return y


def stops(rows: Rows) -> Tensor:
    """Where nothing flows back; not at the last row of time, as nothing follows there."""
    return rows["terminated"] | rows["truncated"]


def cuts(rows: Rows) -> Tensor:
    """Where a sum ends."""
    cut = stops(rows)
    cut[..., -1] = True
    return cut


def one_step(rows: Rows) -> Tensor:
    return rows["reward"] + GAMMA * rows["next_value"] * ~rows["terminated"]


def loop_discounted(rows: Rows) -> Tensor:
    x = torch.where(cuts(rows), one_step(rows), rows["reward"])
    return loop(x, GAMMA * (~stops(rows)).to(x.dtype))


def loop_gae(rows: Rows) -> Sequence[Tensor]:
    delta = one_step(rows) - rows["value"]
    advantage = loop(delta, GAMMA * LAMBDA * (~stops(rows)).to(delta.dtype))
    return advantage, advantage + rows["value"]


def loop_lambda(rows: Rows) -> Tensor:
    bootstrapped = one_step(rows)
    mixed = LAMBDA * rows["reward"] + (1 - LAMBDA) * bootstrapped
    x = torch.where(cuts(rows), bootstrapped, mixed)
    return loop(x, GAMMA * LAMBDA * (~stops(rows)).to(x.dtype))


def loop_n_step(rows: Rows) -> Tensor:
    bootstrapped, cut = one_step(rows), cuts(rows)
    sums = bootstrapped
    for _ in range(N - 1):
        sums = torch.where(cut, bootstrapped, rows["reward"] + GAMMA * sums.roll(-1, -1))
    return sums


def loop_vtrace(rows: Rows) -> Sequence[Tensor]:
    rho = (rows["log_prob"] - rows["behaviour_log_prob"]).exp().clamp(max=1.0)
    bootstrapped, value = one_step(rows), rows["value"]
    target = value + loop(rho * (bootstrapped - value), GAMMA * rho * ~stops(rows))
    followed = rows["reward"] + GAMMA * target.roll(-1, -1)
    return rho * (torch.where(cuts(rows), bootstrapped, followed) - value), target


# The candidates.


def ours(name: str, names: Sequence[str], options: dict[str, float], rows: Rows) -> Call:
    every = ("reward", "terminated", "truncated", *names)
    given = {each: rows[each] for each in every}
    return partial(getattr(gymtask, name), **given, gamma=GAMMA, **options)


def torchrl(name: str, names: Sequence[str], options: Sequence[float], rows: Rows) -> Call:
    function = getattr(import_module(TORCHRL), name)
    full = rows | {"done": stops(rows)}
    every = (*names, "reward", "done", "terminated")
    # Its layout is [N, T, 1].
    return partial(function, *options, *(full[each].unsqueeze(-1) for each in every))


def sb3(rows: Rows) -> Call:
    buffers, spaces = import_module(SB3), import_module("gymnasium.spaces")
    given = (rows["reward"], rows["value"], stops(rows))
    reward, value, done = (x.reshape(-1, x.shape[-1]).t().numpy() for x in given)
    steps, lanes = reward.shape
    observation, action = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)
    options = {"device": "cpu", "gamma": GAMMA, "gae_lambda": LAMBDA, "n_envs": lanes}
    buffer = buffers.RolloutBuffer(steps, observation, action, **options)
    buffer.rewards[:], buffer.values[:], buffer.episode_starts[1:] = reward, value, done[:-1]
    return partial(buffer.compute_returns_and_advantage, torch.zeros(lanes), done[-1])


TORCHRL = "torchrl.objectives.value.functional"
SB3 = "stable_baselines3.common.buffers"
VALUES = ("value", "next_value")
LOGS = ("log_prob", "behaviour_log_prob")


@dataclass(frozen=True)
class Compared:
    """A function of gymtask, and what it is compared with.

    Attributes:
        definition: The loop.
        names: Arguments beside those that all functions have.
        options: Numbers beside gamma.
        peers: Functions of TorchRL: name, arguments beside those that all have, numbers.
    """

    definition: Callable[[Rows], Any]
    names: tuple[str, ...]
    options: dict[str, float]
    peers: tuple[tuple[str, tuple[str, ...], tuple[float, ...]], ...] = ()


COMPARED = {
    "generalized_advantage_estimate": Compared(
        loop_gae,
        VALUES,
        {"gae_lambda": LAMBDA},
        (
            ("vec_generalized_advantage_estimate", VALUES, (GAMMA, LAMBDA)),
            ("generalized_advantage_estimate", VALUES, (GAMMA, LAMBDA)),
        ),
    ),
    "discounted_returns": Compared(loop_discounted, ("next_value",), {}),
    "lambda_returns": Compared(
        loop_lambda,
        ("next_value",),
        {"lambda_": LAMBDA},
        (("vec_td_lambda_return_estimate", ("next_value",), (GAMMA, LAMBDA)),),
    ),
    "n_step_returns": Compared(loop_n_step, ("next_value",), {"n": N}),
    "vtrace": Compared(
        loop_vtrace,
        (*VALUES, *LOGS),
        {},
        (("vtrace_advantage_estimate", (*LOGS, *VALUES), (GAMMA,)),),
    ),
}


def candidates(name: str, end_probability: float, seconds: float) -> list[Candidate]:
    """Everything that is compared for one function."""
    compared = COMPARED[name]
    entries: list[tuple[str, Prepare, tuple[str, ...]]] = [
        (BASE, partial(ours, name, compared.names, compared.options), ()),
        ("loop in torch", lambda rows: partial(compared.definition, rows), ()),
    ]
    for peer, names, options in compared.peers:
        entries.append((f"TorchRL {peer}", partial(torchrl, peer, names, options), (TORCHRL,)))
    if name == "generalized_advantage_estimate":
        entries.append(("SB3 compute_returns_and_advantage", sb3, (SB3,)))
    return [
        Candidate(
            each, partial(measure, prepare, compared.definition, end_probability, seconds), needs
        )
        for each, prepare, needs in entries
    ]


def measure(
    prepare: Prepare,
    definition: Callable[[Rows], Any],
    end_probability: float,
    seconds: float,
) -> tuple[Metrics, Close]:
    """Microseconds a call for each shape, and the largest error of the first result."""
    metrics, errors = {}, []
    for shape in SHAPES:
        rows = make_rows(shape, end_probability)
        call = prepare(rows)
        if (result := call()) is not None:
            wide = {k: v.double() if v.is_floating_point() else v for k, v in rows.items()}
            pairs = zip(as_tuple(result), as_tuple(definition(wide)), strict=True)
            errors += [float((a.reshape(shape) - b).abs().max()) for a, b in pairs]
        timed(call, WARM_UP)
        gc.collect()
        metrics[label(shape)] = timed(call, seconds / len(SHAPES))
    if errors:
        metrics["error"] = max(errors)
    return metrics, lambda: None


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def timed(call: Call, seconds: float) -> float:
    """Microseconds a call, over at least so many seconds."""
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        call()
        count += 1
    return 1e6 * spent / count


def label(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def columns() -> list[report.Column]:
    found = [report.Column("error", "error", ".0e")]
    for shape in map(label, SHAPES):
        found.append(report.Column(f"{shape}, µs", shape))
        found.append(report.Column(f"{shape}, ratio to {BASE}", shape, ".1f", ratio=True))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--function", choices=list(COMPARED), help="one instead of all")
    parser.add_argument("--end-probability", type=float, default=0.005)
    report.add_options(parser, seconds=0.6)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in [options.function] if options.function else COMPARED:
        every = candidates(name, options.end_probability, options.seconds)
        chosen = choose(every, BASE, options.only)
        preload(chosen)
        title = f"{name}, an end at {100 * options.end_probability:g} % of rows"
        outcomes = alternate(chosen, options.rounds)
        found = report.Report(f"returns_{name}", title, BASE, columns(), outcomes, vars(options))
        found.write(options.out)


if __name__ == "__main__":
    main()
