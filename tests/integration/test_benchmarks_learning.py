"""What compares learning: runs for a moment, keeps what was learnt, tells it without mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
import torch

import gymtask
from tests.integration.test_benchmarks import FOLDER, read, run


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the benchmark."""
    monkeypatch.syspath_prepend(FOLDER)
    import hand_ppo
    import learning
    import learning_headline
    import learning_report
    import learning_runs
    import learning_wall

    return SimpleNamespace(
        hand=hand_ppo,
        curves=learning,
        report=learning_report,
        headline=learning_headline,
        runs=learning_runs,
        wall=learning_wall,
    )


# ---- runs ----------------------------------------------------------------------------------------


def test_runs_are_kept_and_made_once_and_a_later_call_adds_others(tmp_path: Path) -> None:
    words = ["curves", "--steps", "1024", "--jobs", "2", "--runs", str(tmp_path / "runs")]
    words += ["--out", str(tmp_path), "--seeds", "1"]
    paths = [tmp_path / f"learning_{name}_CartPole-v1_1024.json" for name in ("hand", "ppo")]
    run(str(FOLDER / "learning.py"), *words, "--only", "hand_CartPole-v1")
    first = paths[0].read_text()
    printed = run(str(FOLDER / "learning.py"), *words, "--only", "hand_CartPole,ppo_CartPole")
    assert printed.startswith("1 runs")
    assert paths[0].read_text() == first
    for path in paths:
        (found,) = json.loads(path.read_text())["runs"].values()
        assert 9 <= found["value"] <= 500
        assert 8 <= found["greedy"] <= 500
        assert len(found["curve"]["steps"]) == len(found["curve"]["return"])
        assert found["command"].endswith("_CartPole-v1 --seed 1 --steps 1024")
        assert found["machine"]["cores"] >= 1
    table = (tmp_path / "learning_curves.md").read_text()
    assert "| CartPole-v1, 1024 | gymtask PPO | 1 | " in table
    assert "| CartPole-v1, 1024 | PPO by hand | 1 | " in table
    assert (tmp_path / "learning_CartPole-v1_1024.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "runs" / "ppo_CartPole-v1_1024_seed1" / "metrics.csv").exists()


def test_the_time_to_a_goal_is_measured(tmp_path: Path) -> None:
    words = ["wall", "--goal", "18", "--steps", "20000", "--only", "hand,gymtask"]
    words += ["--seeds", "1", "--out", str(tmp_path)]
    run(str(FOLDER / "learning.py"), *words)
    rows = read(tmp_path, "learning_wall")["rows"]
    for name in ("PPO by hand, as CleanRL's", "gymtask PPO"):
        assert rows[name]["error"] is None
        for found in rows[name]["rounds"]:
            assert found["steps"] % 1024 == 0
            assert found["steps_per_second"] == pytest.approx(found["steps"] / found["seconds"])
    assert rows["SB3 PPO"]["error"] in (None, "stable_baselines3 is not installed")
    assert "gymtask's median time is " in (tmp_path / "learning_wall.md").read_text()


def test_who_misses_the_goal_is_a_row_that_says_so(modules: SimpleNamespace) -> None:
    settings = modules.hand.Settings(num_envs=2, num_steps=16, total_steps=64)
    with pytest.raises(RuntimeError, match="475 was not reached in 64 steps"):
        modules.wall.measure(modules.wall.by_hand, settings, 1, 475.0)


# ---- figures -------------------------------------------------------------------------------------


def test_each_episode_counts_once_where_it_ended(modules: SimpleNamespace) -> None:
    episodes = modules.runs.Episodes()
    episodes.add(10, 1, 4.0)
    episodes.add(20, 0, math.nan)
    episodes.add(90, 1, 5.0)
    episodes.add(100, 3, 9.0)
    assert episodes.between(0, 100) == (4 + 5 + 27) / 5
    assert episodes.between(90, 100) == 9
    assert episodes.between(10, 80) is None
    curve = episodes.curve(100)
    assert curve["steps"] == [float(step) for step in range(1, 101)]
    assert {step: value for step, value in zip(*curve.values(), strict=True) if value} == {
        10.0: 4.0, 90.0: 5.0, 100.0: 9.0
    }  # fmt: skip


def learned(value: float, greedy: float) -> dict[str, Any]:
    where = {"machine": {"cores": 2, "cpu": "c", "memory_gib": 3, "omp_num_threads": "1"}}
    curve = {"steps": [50.0, 100.0], "return": [None, value]}
    run = {"value": value, "greedy": greedy, "curve": curve, "date": "2000-01-01"}
    return {**run, **where, "versions": {"python": "3"}}


def write(folder: Path, algorithm: str, env_id: str, *runs: dict[str, Any]) -> None:
    record = {"algorithm": algorithm, "env_id": env_id, "steps": 500_000}
    record["runs"] = {str(seed): each for seed, each in enumerate(runs, start=1)}
    (folder / f"learning_{algorithm}_{env_id}_500000.json").write_text(json.dumps(record))


def test_tables_give_mean_and_deviation_over_seeds_beside_what_is_published(
    tmp_path: Path, modules: SimpleNamespace
) -> None:
    write(tmp_path, "ppo", "CartPole-v1", learned(490, 500), learned(494, 500))
    write(tmp_path, "hand", "CartPole-v1", learned(480, 490))
    write(tmp_path, "dqn", "CartPole-v1", learned(470, 480))
    write(tmp_path, "ppo", "Acrobot-v1", learned(-80, -70), learned(-90, -70))
    table = modules.report.write(tmp_path)
    for row in (
        "CartPole-v1, 500k | gymtask PPO | 1, 2 | 492.0 ± 2.0 | 500.0 ± 0.0 | 490.04 ± 6.12 |",
        "CartPole-v1, 500k | PPO by hand | 1 | 480.0 | 490.0 | 490.04 ± 6.12 |",
        "CartPole-v1, 500k | gymtask DQN | 1 | 470.0 | 480.0 |  | 500 ± 0 (50k steps) |",
        "Acrobot-v1, 500k | gymtask PPO | 1, 2 | -85.0 ± 5.0 | -70.0 ± 0.0 | -86.36 ± 1.32 |",
    ):
        assert f"| {row}" in table
    assert [path.name for path in sorted(tmp_path.glob("*.png"))] == [
        "learning_Acrobot-v1_500000.png", "learning_CartPole-v1_500000.png"
    ]  # fmt: skip
    short, *rest = modules.headline.paragraphs(tmp_path)[1:]
    assert not rest  # no wall time was measured
    assert short.splitlines()[2:] == [
        "| CartPole-v1, 500k | 492.0 ± 2.0 | 480.0 | 490.04 ± 6.12 |",
        "| Acrobot-v1, 500k | -85.0 ± 5.0 |  | -86.36 ± 1.32 |",
    ]


def test_wall_times_are_compared_by_medians_and_only_where_all_seeds_reached_the_goal(
    tmp_path: Path, modules: SimpleNamespace
) -> None:
    def rounds(*pairs: tuple[float, float]) -> list[dict[str, float]]:
        names = "seconds", "steps_per_second"
        return [dict(zip(names, pair, strict=True)) for pair in pairs]

    wall = modules.wall
    found: dict[str, Any] = {
        wall.OURS: rounds((1, 10), (4, 20), (3, 30)),
        wall.SB3: rounds((10, 5), (30, 10), (20, 20)),
        wall.HAND: rounds((6, 16), (6, 16), (60, 16)),
    }
    shares = wall.shares_of(found)
    assert shares == {wall.SB3: (0.15, 0.5), wall.HAND: (0.5, 0.8)}
    rows = {name: {"rounds": each} for name, each in found.items()}
    record = {"rows": rows, "options": {"goal": "475.0"}}
    (tmp_path / "learning_wall.json").write_text(json.dumps(record))
    (text,) = modules.headline.paragraphs(tmp_path)
    words = " ".join(text.split())
    assert "return 475 in the mean, it takes 0.15 of the time of SB3's PPO" in words
    assert "0.50 of that of the script by hand (medians of 3 seeds," in words
    assert "a step takes 0.50 and 0.80 of theirs" in words
    found[wall.HAND][1] = None
    assert list(wall.shares_of(found)) == [wall.SB3]


# ---- PPO by hand ---------------------------------------------------------------------------------


def test_advantages_by_hand_are_those_of_gymtask_with_time_limits_as_failures(
    modules: SimpleNamespace,
) -> None:
    settings = modules.hand.Settings(num_envs=3, num_steps=7)
    envs = modules.hand.make_envs(settings, 3)
    rollout = modules.hand.Rollout(settings, envs)
    envs.close()
    torch.manual_seed(0)
    rollout.reward, rollout.value = torch.randn(7, 3), torch.randn(7, 3)
    rollout.done = (torch.rand(7, 3) < 0.3).float()
    last = torch.randn(3)
    expected, _ = gymtask.generalized_advantage_estimate(
        rollout.reward.T,
        value=rollout.value.T,
        next_value=torch.cat([rollout.value[1:], last[None]]).T,
        terminated=rollout.done.T.bool(),
        truncated=torch.zeros(3, 7, dtype=torch.bool),
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
    )
    torch.testing.assert_close(rollout.advantage(last, settings), expected.T)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_loss_by_hand_is_that_of_the_example(modules: SimpleNamespace, env_id: str) -> None:
    settings = modules.hand.Settings(env_id=env_id)
    config, _ = modules.runs.ppo_configs(settings, 1)
    task = modules.runs.example("ppo").PPO(config)
    ours = task.get_model()
    envs = modules.hand.make_envs(settings, 2)
    theirs = modules.hand.Agent(envs)
    envs.close()
    own = ours.state_dict()
    theirs.load_state_dict(
        {name: own[name].expand_as(value) for name, value in theirs.state_dict().items()}
    )
    torch.manual_seed(0)
    action_space = envs.single_action_space
    action = torch.randn(64, 1)
    if isinstance(action_space, gym.spaces.Discrete):
        action = torch.randint(2, (64,))
    observation = torch.randn(64, *envs.single_observation_space.shape)
    others = (torch.randn(64) for _ in range(4))
    rows = modules.hand.Rows(observation, action, *others)
    batch = {
        **{name: getattr(rows, name) for name in ("observation", "action", "log_prob")},
        "advantage": rows.advantage, "state_value": rows.value, "value_target": rows.target
    }  # fmt: skip
    loss = modules.hand.compute_loss(theirs, rows, settings)
    parts = task.compute_loss(ours, batch, task.state, task.run_model(ours, batch, task.state))
    torch.testing.assert_close(sum(parts.values()), loss)
    loss.backward()
    sum(parts.values()).backward()
    gradients = {name: each.grad for name, each in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def test_the_script_by_hand_evaluates_by_the_statistics_of_training(
    modules: SimpleNamespace,
) -> None:
    settings = modules.hand.Settings(env_id="Pendulum-v1", num_envs=1, num_steps=64)
    envs = modules.hand.make_envs(settings, 1)
    envs.reset(seed=1)
    for _ in range(20):
        envs.step(envs.action_space.sample())
    env = modules.hand.make_env(settings)
    modules.hand.copy_statistics(envs.envs[0], env)
    env.reset(seed=2)
    found = []
    for each in (envs.envs[0], env):
        while not isinstance(each, gym.wrappers.NormalizeObservation):
            each = each.env
        found.append((each.obs_rms.count, each.obs_rms.mean.tolist(), each.update_running_mean))
    assert found[0][:2] == found[1][:2]
    assert [each[2] for each in found] == [True, False]
    env.close()
    envs.close()
