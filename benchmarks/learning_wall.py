"""How long PPO takes until CartPole-v1 is learnt: gymtask, Stable-Baselines3, a script by hand.

All three have the same hyperparameters and networks, and log nothing; Adam is torch's fused one in
gymtask's example alone (`update.py` tells what that saves). They stop after the first rollout at
whose end the last 100 training episodes return 475 in the mean. The clock runs from before
environments and networks are made; imports, and what a library does only once, are paid by a short
training that is not counted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import hand_ppo
import learning_runs
import report
import torch
from alternate import Candidate, Close, Metrics, Outcome, alternate, choose, preload
from hand_ppo import Settings

import gymtask

GOAL = 475.0
NUM_RECENT = 100
OURS, SB3, HAND = "gymtask PPO", "SB3 PPO", "PPO by hand, as CleanRL's"
# CleanRL's number of environments; otherwise such that all three reach the goal in half a minute.
SETTINGS = Settings(
    num_steps=256, learning_rate=2e-3, total_steps=300_000, entropy_coef=0.0
)  # fmt: skip
WARM_UP = 2048  # steps
TIME_LIMIT = 1800.0  # seconds


class Watch:
    """Sees when the goal is reached.

    Args:
        goal: The mean return of the last 100 training episodes.

    Attributes:
        found: Seconds and steps that it took; None before it is.
    """

    def __init__(self, goal: float) -> None:
        self.found: Metrics | None = None
        self._goal = goal
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._start = time.perf_counter()

    def __call__(self, steps: int, returns: Iterable[float]) -> bool:
        """Whether the goal is reached, after so many steps and with these episodes ended since."""
        self._recent.extend(returns)
        if len(self._recent) < NUM_RECENT or statistics.fmean(self._recent) < self._goal:
            return False
        seconds = time.perf_counter() - self._start
        self.found = {"seconds": seconds, "steps": steps, "steps_per_second": steps / seconds}
        return True


class GoalReached(Exception):
    """Ends `Trainer.train`."""


def by_gymtask(settings: Settings, seed: int, watch: Watch) -> None:
    """The example's task under the Trainer."""
    base: Any = learning_runs.example("ppo").PPO

    class Watched(base):  # type: ignore[misc]
        """Sees the episodes of each collection."""

        def collect_samples(self, model: Any, pool: Any, *args: Any, **keywords: Any) -> Any:
            samples = super().collect_samples(model, pool, *args, **keywords)
            if watch(pool.num_samples, (each.episode_return for each in samples.episodes)):
                raise GoalReached
            return samples

    config, trainer_config = learning_runs.ppo_configs(settings, seed)
    never = settings.total_steps
    trainer_config.log_interval, trainer_config.checkpoint_interval = never, None
    with tempfile.TemporaryDirectory() as folder:
        trainer_config.run_dir = str(Path(folder) / "run")
        torch.manual_seed(seed)
        task = Watched(config)
        with suppress(GoalReached):
            gymtask.Trainer(trainer_config).train(task, task.get_model())


def by_sb3(settings: Settings, seed: int, watch: Watch) -> None:
    """Stable-Baselines3's PPO."""
    make_vec_env = import_module("stable_baselines3.common.env_util").make_vec_env
    envs = make_vec_env(settings.env_id, n_envs=settings.num_envs, seed=seed)
    size = settings.num_envs * settings.num_steps
    model = import_module("stable_baselines3").PPO(
        "MlpPolicy",  # two networks of 2 x 64 tanh units, orthogonal; Adam with epsilon 1e-5
        envs,
        learning_rate=lambda left: settings.learning_rate * left,
        n_steps=settings.num_steps,
        batch_size=size // settings.num_minibatches,
        n_epochs=settings.num_passes,
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        clip_range=settings.clip_coef,
        clip_range_vf=settings.clip_coef,
        ent_coef=settings.entropy_coef,
        vf_coef=settings.value_coef / 2,  # its loss is without the factor 1/2
        max_grad_norm=settings.max_grad_norm,
        device="cpu",
        seed=seed,
    )

    def after_step(*_: Any) -> bool:
        if model.num_timesteps % size:  # looks at the end of each rollout, as the others do
            return True
        return not watch(model.num_timesteps, [each["r"] for each in model.ep_info_buffer])

    model.learn(settings.total_steps, callback=after_step, log_interval=None)


def by_hand(settings: Settings, seed: int, watch: Watch) -> None:
    """The script in the style of CleanRL."""
    hand_ppo.train(settings, seed, watch)


Learn = Callable[[Settings, int, Watch], None]
LEARNERS: dict[str, tuple[Learn, tuple[str, ...]]] = {
    SB3: (by_sb3, ("stable_baselines3",)),
    HAND: (by_hand, ()),
    OURS: (by_gymtask, ()),
}


def measure(learn: Learn, settings: Settings, seed: int, goal: float) -> tuple[Metrics, Close]:
    """Learns until the goal is reached."""
    learn(replace(settings, total_steps=WARM_UP), seed, Watch(math.inf))
    watch = Watch(goal)
    learn(settings, seed, watch)
    if watch.found is None:
        raise RuntimeError(f"a mean of {goal:g} was not reached in {settings.total_steps} steps")
    return watch.found, lambda: None


def run(options: argparse.Namespace) -> None:
    """Measures all of them with each seed in turn, prints and writes the table."""
    torch.set_num_threads(1)
    learning_runs.example("ppo")  # imported here, as what is forked need not import it again
    settings = replace(SETTINGS, total_steps=options.steps)
    outcomes: dict[str, Outcome] = {}
    for number, seed in enumerate(options.seeds):
        every = [
            Candidate(name, partial(measure, learn, settings, seed, options.goal), needs)
            for name, (learn, needs) in LEARNERS.items()
        ]
        chosen = choose(every, SB3, options.only)
        if number == 0:
            preload(chosen)
        for name, outcome in alternate(chosen, 1, limit=TIME_LIMIT).items():
            known = outcomes.setdefault(name, Outcome())
            known.rounds += outcome.rounds
            known.error = known.error or outcome.error
    columns = (
        report.Column("environment steps", "steps"),
        report.Column("steps/s", "steps_per_second"),
        report.Column("seconds", "seconds", ".1f"),
    )
    title = f"PPO until the last {NUM_RECENT} training episodes of CartPole-v1 return"
    report.Report(
        "learning_wall",
        f"{title} {options.goal:g} in the mean",
        SB3,
        columns,
        outcomes,
        {name: value for name, value in vars(options).items() if name != "do"},
        notes(settings, outcomes),
    ).write(options.out)


def notes(settings: Settings, outcomes: dict[str, Outcome]) -> list[str]:
    """What all have in common, and how many times as long gymtask takes as the others."""
    common = (
        f"Median (min to max) over the seeds. {settings.num_envs} environments, rollouts of"
        f" {settings.num_steps} steps each, {settings.num_passes} passes in"
        f" {settings.num_minibatches} minibatches, learning rate {settings.learning_rate:g} falling"
        f" to 0 over {settings.total_steps:,} steps, γ {settings.gamma:g}, λ"
        f" {settings.gae_lambda:g}; networks of 2 × 64 units each for policy and value."
        " The settings were chosen so that all three reach the goal within half a minute; how many"
        " steps it takes varies by half from seed to seed. gymtask's example has torch's fused"
        " Adam, the others have the usual one; at a time limit it and SB3 count the value of the"
        " last state, the script does not; SB3's clipped value loss is not the maximum of both."
    )
    rounds = {name: outcome.rounds for name, outcome in outcomes.items()}
    if not (shares := shares_of(rounds)):
        return [common]
    whole = ", ".join(f"{share.time:.2f} of that of {name}" for name, share in shares.items())
    steps = ", ".join(f"{share.step:.2f}" for share in shares.values())
    return [common, "", f"gymtask's median time is {whole}; its time for a step {steps}."]


class Share(NamedTuple):
    """How gymtask's medians over the seeds compare with another's, as ratios."""

    time: float
    step: float


def shares_of(rounds: Mapping[str, Sequence[Metrics | None]]) -> dict[str, Share]:
    """Those to each of the others that reached the goal with every seed."""

    def median(name: str, key: str) -> float | None:
        found = [metrics[key] for metrics in rounds.get(name, ()) if metrics is not None]
        complete = found and len(found) == len(rounds[name])
        return statistics.median(found) if complete else None

    shares = {}
    ours = median(OURS, "seconds"), median(OURS, "steps_per_second")
    for name in rounds:
        theirs = median(name, "seconds"), median(name, "steps_per_second")
        if name != OURS and all((*ours, *theirs)):
            shares[name] = Share(ours[0] / theirs[0], theirs[1] / ours[1])  # type: ignore[operator]
    return shares
