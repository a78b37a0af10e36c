"""A run that goes on from a checkpoint is, bit for bit, the one that never stopped."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TransformObservation
from tensordict import TensorDict
from torch import Tensor, nn

import gymtask
from gymtask import sampling
from gymtask.resuming import open_episodes
from gymtask.task import State
from gymtask.training.checkpoint import list_checkpoints, load_checkpoint
from tests.integration.training_tasks import make_config, make_trainer
from tests.tasks import make_task


def pong() -> gym.Env[Any, Any]:
    """With sticky actions, which the emulator draws; every tenth pixel, and short episodes."""
    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", obs_type="grayscale", max_episode_steps=25)
    space = gym.spaces.Box(0, 255, (21, 16), np.uint8)
    return TransformObservation(env, lambda frame: frame[::10, ::10], space)


class HiddenGoal(gym.Env[Any, Any]):
    """Has a generator of its own, shows nothing of what it draws, and rewards at the end alone."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.observation_space = gym.spaces.Box(0, 200, (), dtype)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.goal, self.num_steps = self.rng.integers(100), 0
        return self.observation_space.dtype.type(0), {}  # type: ignore[union-attr]

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        ended = self.num_steps == 9
        number = self.observation_space.dtype.type(self.num_steps)  # type: ignore[union-attr]
        return number, float(self.goal) * ended, ended, False, {}


class OldGenerators(HiddenGoal):
    """The same with generators of older kinds."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.legacy, self.python = np.random.RandomState(seed), random.Random(seed)
        answer = super().reset(seed=seed)
        self.goal = self.legacy.randint(100) + self.python.randint(0, 99)
        return answer


def rewards_normalised() -> gym.Env[Any, Any]:
    return NormalizeObservation(NormalizeReward(gym.make("CartPole-v1"), 0.9))


MADE: dict[str, Any] = {
    "Pong": pong,
    "HiddenGoal": HiddenGoal,
    "uint8": partial(HiddenGoal, np.uint8),
    "OldGenerators": OldGenerators,
    "NormalizeReward": rewards_normalised,
}
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {},
    "HalfCheetah-v5": {"max_episode_steps": 60},
    "LunarLander-v3": {},
    "BipedalWalker-v3": {},
    "FrozenLake-v1": {},
    **{name: {} for name in MADE},
}


class Witness(gymtask.ReinforcementLearningTask):
    """Trains with all that has state: noise, torch's generator, a recurrent carry, replay."""

    def __init__(self, config: Any, name: str, keywords: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self.env_name, self.keywords = name, keywords or {}
        self.rows: list[TensorDict] = []

    def get_environment(self) -> gymtask.Environment:
        if self.env_name in MADE:
            return gymtask.Environment(MADE[self.env_name], **self.keywords)
        return gymtask.Environment(self.env_name, **ENVIRONMENTS[self.env_name], **self.keywords)

    def features(self, observation: Tensor) -> Tensor:
        batch = observation.shape[: observation.dim() - self.dims]
        return observation.reshape(*batch, -1).float() / self.scale

    def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> TensorDict:
        output = model(self.features(states["observation"])) + states["carry"]
        if self.is_discrete:
            action = sampling.categorical(output, states)
        else:
            action = sampling.gaussian(output, 0.5, states)
        carry = 0.5 * states["carry"] + 0.1 * output
        return TensorDict({"action": action, "next": {"carry": carry}}, batch_size=[len(states)])

    def get_initial_carry(self, model: nn.Module) -> TensorDict:
        return TensorDict({"carry": torch.full((self.outputs,), 0.25)})

    def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
        self.rows += [trajectory.clone() for trajectory in trajectories]
        return trajectories

    def run_model(self, model: nn.Module, batch: TensorDict, state: State) -> Tensor:
        return model(self.features(batch["observation"]))

    def compute_loss(
        self, model: nn.Module, batch: TensorDict, state: State, output: Tensor
    ) -> Tensor:
        return (output - batch["next", "reward"].unsqueeze(-1) - torch.rand(())).square().mean()

    def make_model(self) -> nn.Module:
        space = self.get_environment_cached().observation_space
        actions = self.get_environment_cached().action_space
        self.dims = len(space.shape or ())
        self.scale = 255.0 if space.dtype == np.uint8 else 1.0
        self.is_discrete = hasattr(actions, "n")
        self.outputs = int(actions.n) if hasattr(actions, "n") else int(np.prod(actions.shape))
        torch.manual_seed(0)
        return nn.Linear(max(1, int(np.prod(space.shape))), self.outputs)


def make_witness(
    name: str, max_epochs: int, off_policy: bool, mode: str = "sync", **keywords: Any
) -> Witness:
    config = make_config(3, workers=0 if mode == "sync" else 2, max_epochs=max_epochs, updates=4)
    config.environment.env_worker_mode = mode
    config.dataset.off_policy, config.dataset.replay_buffer_sample_size = off_policy, 400
    return Witness(config, name, keywords)


def run(
    run_dir: Path | None,
    name: str,
    max_epochs: int,
    off_policy: bool,
    *,
    resume: Path | None = None,
    mode: str = "sync",
    **keywords: Any,
) -> tuple[list[Tensor], list[TensorDict]]:
    """Trains, and gives the parameters and the rows that were collected."""
    task = make_witness(name, max_epochs, off_policy, mode, **keywords)
    model = task.make_model()
    if resume is not None:
        nn.init.zeros_(model.weight)  # type: ignore[arg-type]
    fields: dict[str, Any] = {"num_warmup_samples": 70} if off_policy else {}
    trainer = make_trainer(run_dir, 130, min_batch_size=3, **fields)
    trainer.train(task, model, resume=resume)
    return [parameter.detach() for parameter in model.parameters()], task.rows


def assert_same(ours: tuple[Any, Any], unbroken: tuple[Any, Any], num_rows: int) -> None:
    for mine, other in zip(ours[0], unbroken[0], strict=True):
        assert torch.equal(mine, other)
    mine, other = torch.cat(ours[1]), torch.cat(unbroken[1])[-num_rows:]
    assert len(mine) == num_rows
    for key in other.keys(include_nested=True, leaves_only=True):
        assert torch.equal(mine[key], other[key]), key


@pytest.mark.parametrize("off_policy", [False, True], ids=["on policy", "off policy"])
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, name: str, off_policy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    unbroken = run(tmp_path / "whole", name, 4, off_policy)
    run(tmp_path / "parts", name, 2, off_policy)
    resumed = run(None, name, 3, off_policy, resume=tmp_path / "parts")
    assert len(torch.cat(resumed[1])) == 130
    resumed = run(None, name, 4, off_policy, resume=tmp_path / "parts")  # a second time
    assert_same(resumed, unbroken, 130)
    assert "does not repeat" not in caplog.text


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_workers_take_up_their_episodes_too(tmp_path: Path, mode: str) -> None:
    unbroken = run(tmp_path / "whole", "CartPole-v1", 3, True, mode=mode)
    run(tmp_path / "parts", "CartPole-v1", 2, True, mode=mode)
    resumed = run(None, "CartPole-v1", 3, True, mode=mode, resume=tmp_path / "parts")
    assert_same(resumed, unbroken, 130)


def test_long_open_episodes_are_played_again_in_short_pieces(tmp_path: Path) -> None:
    class Peak(Witness):
        def get_worker_pool(self, force_sync: bool = False) -> Any:
            self.pool = super().get_worker_pool(force_sync)
            return self.pool

        def on_epoch_start(self, model: nn.Module, state: State) -> None:
            tape = self.pool.memory and self.pool.memory._tape.capacity
            capacities.append(tape)

    capacities: list[Any] = []
    for resume in (None, tmp_path):
        config = make_config(3, max_epochs=2 if resume is None else 3)
        config.environment.num_env_workers = 0
        task = Peak(config, "LunarLander-v3", {"max_episode_steps": 10_000})
        model = task.make_model()
        trainer = make_trainer(tmp_path if resume is None else None, 3000, min_batch_size=3)
        trainer.train(task, model, resume=resume)
    assert capacities[0] is None
    assert capacities[-1] < 1500


def test_a_run_may_go_on_in_another_mode(tmp_path: Path) -> None:
    unbroken = run(tmp_path / "whole", "CartPole-v1", 3, False)
    run(tmp_path / "parts", "CartPole-v1", 2, False)
    resumed = run(None, "CartPole-v1", 3, False, mode="process", resume=tmp_path / "parts")
    assert_same(resumed, unbroken, 130)


def test_frames_of_stacks_are_there_again(tmp_path: Path) -> None:
    unbroken = run(tmp_path / "whole", "CartPole-v1", 3, True, frame_stack=3)
    run(tmp_path / "parts", "CartPole-v1", 2, True, frame_stack=3)
    resumed = run(None, "CartPole-v1", 3, True, frame_stack=3, resume=tmp_path / "parts")
    assert_same(resumed, unbroken, 130)


def test_records_tell_the_returns_of_whole_episodes(tmp_path: Path) -> None:
    def returns(resume: Path | None, run_dir: Path | None, max_epochs: int) -> list[float]:
        task = make_witness("CartPole-v1", max_epochs, False)
        make_trainer(run_dir, 130, min_batch_size=3).train(task, task.make_model(), resume=resume)
        folder = list_checkpoints(run_dir or resume or Path())[-1]
        found: list[float] = load_checkpoint(folder)[0]["statistics"]["recent"]
        return found

    unbroken = returns(None, tmp_path / "whole", 3)
    returns(None, tmp_path / "parts", 2)
    assert returns(tmp_path / "parts", None, 3) == unbroken


def test_an_environment_with_randomness_of_its_own_is_named_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unseeded(gym.Wrapper[Any, Any, Any, Any]):
        """Shakes what environment 1 shows, by a generator that no seed reaches."""

        def reset(self, **keywords: Any) -> Any:
            if keywords.get("seed") is not None and not hasattr(self, "number"):
                self.number = keywords["seed"] - 1337
                self.random = [np.random.default_rng()]  # where nobody looks
            return super().reset(**keywords)

        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            if self.number == 1:
                observation = observation + self.random[0].normal(0, 1e-3, 4).astype(np.float32)
            return observation, *rest

    fields: dict[str, Any] = {"wrappers": (Unseeded,)}
    run(tmp_path / "run", "CartPole-v1", 1, False, **fields)
    _, rows = run(None, "CartPole-v1", 2, False, resume=tmp_path / "run", **fields)
    assert "the environments [1] begin new ones" in caplog.text
    firsts = {int(piece["env_id"][0]): piece for piece in reversed(rows)}
    assert [bool(firsts[index]["is_init"][0]) for index in range(3)] == [False, True, False]


def test_warm_up_is_over_though_short_pieces_were_left_out(tmp_path: Path) -> None:
    def train(run_dir: Path | None, max_epochs: int, resume: Path | None = None) -> State:
        task = make_witness("CartPole-v1", max_epochs, True)
        fields = {"num_warmup_samples": 150, "min_trajectory_length": 12, "min_batch_size": 3}
        return make_trainer(run_dir, 130, **fields).train(task, task.make_model(), resume=resume)

    unbroken = train(tmp_path / "whole", 3)
    train(tmp_path / "parts", 2)
    assert train(None, 3, tmp_path / "parts").num_samples == unbroken.num_samples == 540


def test_rows_that_were_not_handed_out_leave_episodes_untold() -> None:
    task = make_task(env="CartPole-v1")
    with task.get_worker_pool() as pool:
        pool.record_starts()
        for piece in task.iter_samples(None, pool, total_samples=40, use_tqdm=False):
            assert len(piece)
            break
        assert open_episodes(pool) is None
        task.collect_samples(None, pool, 100, use_tqdm=False)
        told = open_episodes(pool)
        assert told is not None
        assert [len(one["actions"][0]) for one in told] == pool.memory.step.tolist()


SCRIPT = """
import sys
from pathlib import Path
from tests.integration.test_exact_resume import run
run(Path(sys.argv[1]) if sys.argv[2] == "new" else None, "CartPole-v1", 400, True,
    resume=None if sys.argv[2] == "new" else Path(sys.argv[1]))
"""


@pytest.mark.parametrize("after", [2, 5])
def test_a_run_that_was_killed_goes_on_as_if_nothing_had_been(tmp_path: Path, after: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), "new"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while len(list_checkpoints(tmp_path / "run")) < after:
        assert process.poll() is None
    process.kill()
    process.wait()
    number = len(list_checkpoints(tmp_path / "run"))
    resumed = run(None, "CartPole-v1", number + 2, True, resume=tmp_path / "run")
    assert not list(tmp_path.rglob(".tmp-*"))
    unbroken = run(tmp_path / "whole", "CartPole-v1", number + 2, True)
    assert_same(resumed, unbroken, 260)
    counters = json.dumps(load_checkpoint(list_checkpoints(tmp_path / "run")[-1])[0]["state"])
    assert json.loads(counters)["num_samples"] == 70 + 130 * (number + 2)
