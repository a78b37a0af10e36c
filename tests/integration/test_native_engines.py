"""Native mode with VectorEnvs that others wrote: CartPole's own, ALE's, EnvPool's; and training."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torch import Tensor

import gymtask
from gymtask.errors import MakerError
from gymtask.trainer import evaluate
from tests.integration.native_envs import vector_of
from tests.integration.pool_envs import open_pool, step_all
from tests.integration.training_tasks import CartPole, make_trainer, network, parameters
from tests.tasks import make_task


def tabled(num_actions: int, num_envs: int = 4, steps: int = 2000) -> Any:
    """A policy of actions that were drawn beforehand, so that it sees nothing."""
    drawn = np.random.default_rng(3).integers(num_actions, size=(num_envs, steps))
    table = torch.from_numpy(drawn)

    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        return table[states["env_id"], states["run_step"]]

    return act


# ---- CartPole-v1 ---------------------------------------------------------------------------------


def test_cartpoles_own_vector_env_gives_episodes_of_a_plain_loop_over_it() -> None:
    task = make_task(3, 1, "native", env="CartPole-v1", get_actions=tabled(2, 3))
    with task.get_worker_pool() as pool:
        found = torch.cat(
            [task.collect_samples(None, pool, 100, use_tqdm=False).to_tensordict() for _ in "abc"]
        )
    act = tabled(2, 3)
    env = gym.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
    observation, _ = env.reset(seed=0)
    rows: list[list[tuple[Any, ...]]] = [[], [], []]
    ended, step = np.zeros(3, bool), np.zeros(3, int)
    while min(map(len, rows)) < 100:
        states = {"env_id": torch.arange(3), "run_step": torch.tensor([len(own) for own in rows])}
        action = act(None, None, states, False).numpy()
        after, reward, terminated, truncated, _ = env.step(action)
        for index in np.flatnonzero(~ended):
            row = (observation[index], action[index], after[index], reward[index])
            rows[index].append((*row, terminated[index], truncated[index], step[index]))
        step = np.where(ended, 0, step + 1)  # who had ended was only reset
        ended = terminated | truncated
        observation = after
    env.close()
    for index in range(3):
        own = found[found["env_id"] == index].flatten_keys("/")
        keys = ("observation", "action", "next/observation", "next/reward")
        keys += ("next/terminated", "next/truncated", "step")
        assert len(own) == 100
        for place, key in enumerate(keys):
            expected = np.stack([row[place] for row in rows[index][:100]])
            assert torch.equal(own[key].double(), torch.from_numpy(expected).double()), key


def test_a_time_limit_reaches_the_vector_env() -> None:
    with open_pool("CartPole-v1", "native", envs=2, workers=1, max_episode_steps=3) as pool:
        pool.reset()
        step_all(pool, [0, 1])
        step_all(pool, [1, 0])
        steps = step_all(pool, [0, 1])
    assert (steps.truncated.tolist(), steps.terminated.tolist()) == ([True] * 2, [False] * 2)


def test_pictures_come_from_the_vector_env_and_clips_from_a_single_one() -> None:
    with open_pool("CartPole-v1", "native", envs=2, workers=1, render_mode="rgb_array") as pool:
        pool.reset()
        assert [picture.shape for picture in pool.render()] == [(400, 600, 3)] * 2
    task = make_task(2, 1, "native", env="CartPole-v1")
    assert task.sample_clip().shape[1:] == (400, 600, 3)


# ---- training ------------------------------------------------------------------------------------


class NativeCartPole(CartPole):
    def get_environment(self) -> gymtask.Environment:
        return gymtask.Environment("CartPole-v1")


class VectorCartPole(CartPole):
    """Over a callable that makes a VectorEnv, as it is often written."""

    def get_environment(self) -> gymtask.Environment:
        def make(num_envs: int, seed: int) -> Any:
            assert (num_envs, seed) in ((4, 1337), (2, 1337))
            single = lambda: gym.make("CartPole-v1")  # noqa: E731
            return vector_of(single, AutoresetMode.SAME_STEP)(num_envs)

        return gymtask.Environment(make)


def config(mode: str) -> gymtask.ReinforcementLearningTaskConfig:
    return gymtask.ReinforcementLearningTaskConfig(
        name="cartpole",
        max_epochs=2,
        environment=gymtask.EnvironmentConfig(num_env_workers=1, num_envs=4, env_worker_mode=mode),
        dataset=gymtask.DatasetConfig(num_update_steps=3),
    )


@pytest.mark.parametrize("kind", [NativeCartPole, VectorCartPole])
def test_a_trainer_runs_in_native_mode_and_counts_rows(
    kind: type[CartPole], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path / "run", 200, eval_interval=1, num_eval_episodes=2)
    state = trainer.train(kind(config("native")), network())
    assert (state.num_epochs, state.num_samples) == (2, 400)


def test_training_in_native_mode_is_training_in_sync_mode(tmp_path: Path) -> None:
    def weights(task: CartPole, mode: str) -> list[float]:
        model = network()
        make_trainer(tmp_path / mode, 200, whole_episodes=True).train(task, model)
        return parameters(model)

    native = weights(VectorCartPole(config("native")), "native")
    assert native == weights(CartPole(config("sync")), "sync")


def test_each_evaluation_in_native_mode_has_shares_and_seeds_of_its_own() -> None:
    task, model = NativeCartPole(config("native")), network()
    records = evaluate(task, model, num_episodes=6, num_envs=4)
    assert [record.env_id for record in records] == [0, 0, 1, 1, 2, 3]
    again = evaluate(task, model, num_episodes=6, num_envs=4)
    assert [record.length for record in again] != [record.length for record in records]


def test_a_clip_of_a_vector_env_is_refused_by_name() -> None:
    task = make_task(2, 1, "native", env=lambda num_envs: None)
    with pytest.raises(
        MakerError, match=r"must make a gymnasium.Env without `num_envs`; a VectorE"
    ):
        task.sample_clip()


# ---- ALE -----------------------------------------------------------------------------------------


def pong(mode: AutoresetMode, **kwargs: Any) -> Any:
    """Episodes of 11 to 15 steps in all autoreset modes."""
    vector_env = pytest.importorskip("ale_py.vector_env")

    def make(num_envs: int) -> Any:
        return vector_env.AtariVectorEnv(
            "pong",
            num_envs,
            img_height=16,
            img_width=16,
            stack_num=2,
            max_num_frames_per_episode=15,
            autoreset_mode=mode,
            num_threads=1,
            **kwargs,
        )

    return make


def pong_rows(mode: AutoresetMode, whole: bool = False) -> list[TensorDict]:
    task = make_task(3, 1, "native", env=pong(mode), get_actions=tabled(6, 3))
    with task.get_worker_pool() as pool:
        return [
            task.collect_samples(None, pool, 70, use_tqdm=False, whole_episodes=whole)
            .to_tensordict()
            .exclude(("next", "end"))
            for _ in range(2)
        ]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_ale_ends_its_episodes_where_it_should(mode: AutoresetMode) -> None:
    rows = torch.cat(pong_rows(mode))
    assert len(rows) == 140
    done = rows["next", "done"]
    assert done.sum() >= 6
    assert rows["observation"].dtype == torch.uint8
    for index in range(3):
        own = rows[rows["env_id"] == index]
        inside = ~own["next", "done"][:-1]
        # What a row leads to is what the next one acts on, but at an episode's end.
        assert torch.equal(own["next", "observation"][:-1][inside], own["observation"][1:][inside])
        assert torch.equal(own["is_init"][1:], ~inside)


@pytest.mark.parametrize("whole", [False, True])
def test_ale_gives_the_same_rows_in_each_of_its_modes(whole: bool) -> None:
    ours, theirs = (
        pong_rows(mode, whole) for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) >= 70
        assert (mine == other).all()


def test_an_ale_batch_smaller_than_all_is_refused() -> None:
    with pytest.raises(MakerError, match=r"all of them in one batch \(batch_size\)"):
        open_pool(pong(AutoresetMode.NEXT_STEP, batch_size=2), "native", envs=3, workers=1)


def test_ale_takes_the_seeds_of_an_evaluation() -> None:
    task = make_task(3, 1, "native", env=pong(AutoresetMode.NEXT_STEP))
    records = evaluate(task, None, num_episodes=4)
    assert [record.env_id for record in records] == [0, 0, 1, 2]


# ---- EnvPool -------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v4", "Pong-v5"])
def test_envpool_gives_true_rows(env_id: str) -> None:
    pytest.importorskip("envpool")
    warnings.simplefilter("ignore")
    envpool: Any = importlib.import_module("envpool")

    def make(num_envs: int, seed: int) -> Any:
        return envpool.make_gymnasium(env_id, num_envs=num_envs, seed=seed, max_episode_steps=9)

    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        if env_id == "HalfCheetah-v4":
            return gymtask.sampling.uniform(states, 6) * 2 - 1
        return (states["run_step"] + states["env_id"]) % 2

    task = make_task(
        3,
        1,
        "native",
        get_environment=lambda self: gymtask.Environment(make, info_keys=("elapsed_step",)),
        get_actions=act,
    )
    with task.get_worker_pool() as pool:
        rows = task.collect_samples(None, pool, 100, use_tqdm=False).to_tensordict()
    assert len(rows) == 100
    assert rows["next", "truncated"].sum() >= 3
    assert torch.equal(rows["next", "info", "elapsed_step"], rows["step"] + 1)
    for index in range(3):
        own = rows[rows["env_id"] == index]
        inside = ~own["next", "done"][:-1]
        assert torch.equal(own["next", "observation"][:-1][inside], own["observation"][1:][inside])
        assert torch.equal(own["is_init"][1:], ~inside)
