"""The recurrent example: its maze, the memory that is cut, short runs, and what it learns."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from tensordict import TensorDict

import gymtask

EXAMPLE = Path(__file__).parents[2] / "examples" / "recurrent_ppo.py"
WAYS = {(0, 1, 1): 0, (1, 1, 0): 2}  # the action that the sign asks for


def load_example() -> ModuleType:
    """The script, as a module that pickles and dataclasses find."""
    spec = importlib.util.spec_from_file_location("example_recurrent_ppo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


def run_main(monkeypatch: pytest.MonkeyPatch, run_dir: Path, *words: str) -> dict[bool, float]:
    """Runs the script, and gives the mean return of 60 greedy (True) and sampled episodes."""
    evaluate: Callable[..., Any] = gymtask.evaluate
    means: dict[bool, float] = {}

    def spy(*args: Any, **options: Any) -> Any:
        episodes = evaluate(*args, **{**options, "num_episodes": 60})
        means[options["optimal"]] = statistics.fmean(each.episode_return for each in episodes)
        return episodes

    monkeypatch.setattr(gymtask, "evaluate", spy)
    arguments = ["recurrent_ppo.py", "--trainer.run-dir", str(run_dir), *words]
    monkeypatch.setattr(sys, "argv", [*arguments, "--trainer.accelerator", "cpu"])
    example.main()
    return means


def make_task(**fields: Any) -> Any:
    return example.RecurrentPPO(example.Config(**fields))


# ---- the maze ------------------------------------------------------------------------------------


def test_the_maze_is_an_environment_by_gymnasiums_rules() -> None:
    check_env(example.TMaze(render_mode="rgb_array"), skip_render_check=True)


def test_only_the_first_step_tells_the_way_and_only_that_way_pays() -> None:
    env, signs = example.TMaze(), set()
    for episode in range(40):
        observation, _ = env.reset(seed=1 if episode == 0 else None)
        sign = tuple(observation.astype(int))
        signs.add(sign)
        for position in range(1, 11):
            observation, reward, terminated, truncated, _ = env.step(1)
            assert tuple(observation) == ((0, 1, 0) if position == 10 else (1, 0, 1))
            assert (reward, terminated, truncated) == (0.0, False, False)
        right = WAYS[sign]
        turn = right if episode % 2 else 2 - right
        assert env.step(turn)[1:4] == (4.0 if episode % 2 else -0.1, True, False)
    assert signs == WAYS.keys()


def test_bumping_and_going_back_cost_and_show_no_sign() -> None:
    env = example.TMaze(length=2)
    env.reset(seed=0)
    for action, seen, reward in [
        (3, (1, 0, 1), -0.1),  # a wall behind; the sign is gone
        (0, (1, 0, 1), -0.1),
        (1, (1, 0, 1), 0.0),
        (1, (0, 1, 0), 0.0),
        (1, (0, 1, 0), -0.1),
        (3, (1, 0, 1), -0.1),
    ]:
        observation, found, terminated, _, _ = env.step(action)
        assert (tuple(observation), found, terminated) == (seen, reward, False)


def test_signs_come_from_the_environments_own_generator() -> None:
    def signs(seed: int) -> list[Any]:
        env = example.TMaze()
        first = [env.reset(seed=seed)[0]]
        return [tuple(each) for each in [*first, *(env.reset()[0] for _ in range(20))]]

    np.random.seed(0)
    before = signs(5)
    np.random.seed(1)
    assert signs(5) == before != signs(6)


# ---- the task ------------------------------------------------------------------------------------


def collect(task: Any, total: int = 200) -> tuple[Any, gymtask.MultiReplaySamples]:
    torch.manual_seed(0)
    model = task.get_model()
    torch.nn.init.orthogonal_(model.actor.weight)  # so that logits tell states apart
    with task.get_worker_pool() as pool:
        return model, task.collect_samples(model, pool, total, use_tqdm=False)


@pytest.mark.parametrize("burn_in", [0, 3])
def test_before_the_first_update_no_probability_has_changed(burn_in: int) -> None:
    task = make_task(burn_in=burn_in)
    model, samples = collect(task, 800)
    task.config.dataset.num_update_steps = 2
    for batch in task.build_rl_dataset(samples):
        assert set(batch.keys()) == set(task.batch_keys)
        output = task.run_model(model, batch, task.state)
        found = output[0].log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(found.detach(), batch["log_prob"])
        losses = task.compute_loss(model, batch, task.state, output)
        counts = example.after_burn_in(batch["is_init"], burn_in)
        assert counts.all() == (burn_in == 0)
        assert float(losses["policy"].detach()) == pytest.approx(0.0, abs=1e-5)
        value_loss = (output[1].detach() - batch["value_target"])[counts].square().mean()
        assert float(losses["value"].detach()) == pytest.approx(0.25 * float(value_loss), rel=1e-5)


def test_the_cut_memory_is_that_of_an_episodes_start_at_every_row() -> None:
    for recurrent in (True, False):
        _, samples = collect(make_task(recurrent=recurrent))
        rows = samples.to_tensordict()
        assert bool((rows["hidden"][~rows["is_init"]] != 0).any()) == recurrent
        assert bool((rows["next", "cell"] != 0).any()) == recurrent


def test_without_memory_the_sign_makes_no_difference_at_the_junction() -> None:
    for recurrent in (True, False):
        task = make_task(recurrent=recurrent)
        torch.manual_seed(0)
        model = task.get_model()
        torch.nn.init.orthogonal_(model.actor.weight)
        logits = []
        for sign in WAYS:
            way = torch.tensor([sign, *[(1, 0, 1)] * 9, (0, 1, 0)]).float().unsqueeze(0)
            is_init = torch.arange(11).unsqueeze(0) == 0
            zeros = torch.zeros(1, 11, 64)
            content = {"observation": way, "is_init": is_init, "hidden": zeros, "cell": zeros}
            logits.append(model(TensorDict(content, batch_size=[1, 11]), 0)[0][0, -1])
        assert torch.equal(*logits) != recurrent


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--no-recurrent", "--burn-in", "4", "--no-clip")])
def test_it_runs_on_a_tiny_budget(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    means = run_main(monkeypatch, tmp_path, "--max-samples", "4096", *words)
    assert means.keys() == {True, False}
    assert (tmp_path / "metrics.csv").exists()
    assert (tmp_path / "clips" / "final.mp4").exists() == (not words)


def test_minibatches_of_one_row_leave_the_network_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--max-samples", "512", "--train-dl.batch-size", "1", "--dataset.num-samples", "1"]
    run_main(monkeypatch, tmp_path, *words, "--dataset.num-update-steps", "4", "--no-clip")
    _, model = gymtask.load(tmp_path, task=make_task(), model=make_task().get_model())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("flag", ["--recurrent", "--no-recurrent"])
def test_the_shortest_corridor_is_learnt_in_seconds_with_memory_alone(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [flag, "--length", "1", "--dataset.num-samples", "2", "--max-samples", "12288"]
    words += ["--trainer.sampling.num-epoch-samples", "512", "--dataset.num-update-steps", "16"]
    words += ["--train-dl.batch-size", "64", "--learning-rate", "1e-2", "--no-clip"]
    means = run_main(monkeypatch, tmp_path, *words)
    assert (means[False] > 3.3) == (flag == "--recurrent")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_memory_solves_the_maze(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--no-clip", "--environment.env-seed", str(seed)]
    assert run_main(monkeypatch, tmp_path, *words)[True] >= 0.95 * 4.0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_memory_it_stays_at_chance(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--no-clip", "--no-recurrent", "--environment.env-seed", str(seed)]
    means = run_main(monkeypatch, tmp_path, *words)
    # Half of the turns pay: (4 - 0.1) / 2, with a standard deviation of 0.27 over 60 episodes.
    assert means[False] == pytest.approx(1.95, abs=0.85)
    assert means[True] <= 2.8
