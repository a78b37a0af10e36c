"""Each bad input gives one error that names the thing, the rule and the value, early."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from torch import nn

import gymtask
from gymtask.errors import ActionError, ConfigurationError, ObservationError, WindowError
from gymtask.testing import ScriptedEnv
from tests.tasks import collect, make_task


def test_an_unknown_id_is_gymnasiums_own_error() -> None:
    with pytest.raises(gym.error.NameNotFound, match="CartPool"):
        gymtask.Environment("CartPool-v1")


def test_a_missing_field_is_named_with_its_path() -> None:
    class Task(gymtask.ReinforcementLearningTask):
        get_environment = get_actions = run_model = compute_loss = None  # type: ignore[assignment]

    config = gymtask.ReinforcementLearningTaskConfig(name="test")
    with pytest.raises(ConfigurationError, match=r"^dataset\.num_update_steps must be set$"):
        Task(config)


def test_all_bad_fields_are_named_in_one_message() -> None:
    config = gymtask.ReinforcementLearningTaskConfig(
        name="a/b",
        max_epochs=-1,
        environment=gymtask.EnvironmentConfig(
            num_env_workers=3, num_envs=2, env_worker_mode="fork", env_seed=-1
        ),
        dataset=gymtask.DatasetConfig(num_update_steps=0, stride=-2),
        train_dl=gymtask.DataLoaderConfig(num_workers=2, batch_size=0),
        valid_dl=gymtask.DataLoaderConfig(batch_size=7),
    )
    with pytest.raises(ConfigurationError) as caught:
        type(make_task())(config)
    expected = [
        "`max_epochs` must be an integer of at least 0, got -1",
        "`name` must be a non-empty string without '/', got 'a/b'",
        "`environment.env_worker_mode` must be one of 'sync', 'thread', 'process', 'native', got"
        " 'fork'",
        "`environment.env_seed` must be an integer of at least 0, got -1",
        "`environment.num_envs` must be at least num_env_workers (3), got 2",
        "`dataset.num_update_steps` must be an integer of at least 1, got 0",
        "`dataset.stride` must be an integer of at least 1, got -2",
        "`train_dl.batch_size` must be an integer of at least 1, got 0",
        "`train_dl.num_workers` must be 0 (batches are gathered in this process), got 2",
        "`valid_dl.batch_size` must be left at its default (training uses train_dl alone), got 7",
    ]
    assert str(caught.value).splitlines() == expected


def test_min_batch_size_above_the_environments_is_refused_before_a_run_starts(
    tmp_path: Path,
) -> None:
    sampling = gymtask.SamplingConfig(min_batch_size=3)
    trainer = gymtask.Trainer(gymtask.TrainerConfig(sampling=sampling, run_dir=str(tmp_path / "r")))
    with pytest.raises(ConfigurationError, match=r"min_batch_size.*\(2\), got 3"):
        trainer.train(make_task(), nn.Linear(1, 1))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (
            torch.zeros(3, dtype=torch.int64),
            r"must have shape \(2,\) for 2 environments, got \(3,\)",
        ),
        (torch.zeros(2), r"can be cast to torch.int64 .* got torch.float32"),
        (torch.tensor([0, 5]), r"must lie in 0 to 1.*got \[0, 5\]"),
    ],
)
def test_bad_actions_are_refused_before_a_row_is_stored(
    mode: str, actions: torch.Tensor, message: str
) -> None:
    task = make_task(mode=mode, get_actions=lambda self, model, states, optimal: actions)
    with task.get_worker_pool() as pool:
        with pytest.raises(ActionError, match=message):
            task.collect_samples(None, pool, 10, use_tqdm=False)
        assert pool.run_step.tolist() == [0, 0]
        assert pool.get_attr("life") == (0, 0)


def test_a_clip_of_an_environment_without_pictures_is_refused_before_its_first_step(
    tmp_path: Path,
) -> None:
    made: list[ScriptedEnv] = []

    def blind() -> ScriptedEnv:
        made.append(ScriptedEnv(3))
        return made[-1]

    rule = r"`render_mode` must be 'rgb_array'.*got None.*render_mode='rgb_array'"
    with pytest.raises(ValueError, match=rule):
        make_task(env=blind).sample_clip(save_path=tmp_path / "clip.mp4")
    assert made[-1].life == 0
    assert not (tmp_path / "clip.mp4").exists()


def test_a_negative_stride_is_refused() -> None:
    samples = collect(make_task(), 20)
    with pytest.raises(
        ConfigurationError, match=r"`stride` must be an integer of at least 1, got -1"
    ):
        samples.sample(2, stride=-1)


def test_a_window_longer_than_every_trajectory_names_both_lengths() -> None:
    task = make_task()
    samples = collect(task, 20)
    task.config.dataset.num_samples, task.config.dataset.stride = 4, 2
    message = "window of 7 rows (clip_size 4, stride 2): the longest of 6 has 5"
    with pytest.raises(WindowError, match=re.escape(message)):
        task.build_rl_dataset(samples)


@pytest.mark.parametrize("space", ["Text", "Sequence", "Graph", "OneOf"])
def test_a_space_without_fixed_shape_is_refused_by_name(space: str, mode: str) -> None:
    kinds: dict[str, Any] = {
        "Text": gym.spaces.Text(5),
        "Sequence": gym.spaces.Sequence(gym.spaces.Discrete(2)),
        "Graph": gym.spaces.Graph(gym.spaces.Discrete(2), None),
        "OneOf": gym.spaces.OneOf([gym.spaces.Discrete(2)]),
    }

    class Odd(ScriptedEnv):
        def __init__(self) -> None:
            super().__init__()
            inner = gym.spaces.Dict({"odd": kinds[space]})
            self.observation_space = inner  # type: ignore[assignment]

    task = make_task(env=Odd, mode=mode)
    with pytest.raises(ConfigurationError, match=rf"observation space must be .* got {space}"):
        task.get_worker_pool()


def test_an_environment_that_is_no_environment_is_named() -> None:
    def get_environment(self: Any) -> Any:
        return "CartPole-v1"

    task = make_task(get_environment=get_environment)
    with pytest.raises(ValueError, match=r"must return a gymtask.Environment, got 'CartPole-v1'"):
        task.get_worker_pool()


def test_a_maker_that_reaches_the_task_is_refused_by_name() -> None:
    def get_environment(self: Any) -> gymtask.Environment:
        return gymtask.Environment(lambda: ScriptedEnv(self.config.environment.max_steps))

    task = make_task(mode="process", get_environment=get_environment)
    with pytest.raises(ConfigurationError, match=r"must not reach a torch Module"):
        task.get_worker_pool()


def test_bad_values_never_reach_a_loss(tmp_path: Path) -> None:
    def compute_loss(self: Any, model: Any, batch: TensorDict, state: Any, output: Any) -> Any:
        return next(model.parameters()).sum() * float("nan")

    task = make_task(compute_loss=compute_loss)
    trainer = gymtask.Trainer(gymtask.TrainerConfig(run_dir=str(tmp_path / "r")))
    with pytest.raises(ValueError, match="loss"):
        trainer.train(task, nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((0.0, 1.0, False, {}), r"step\(\) must return .* got 4 values"),
        (None, r"step\(\) must return .* got None"),
        ((0.0, [1.0, 2.0], False, False, {}), r"the reward must be a number, got \[1.0, 2.0\]"),
        ((0.0, None, False, False, {}), r"the reward must be a number, got None"),
    ],
)
def test_a_step_that_returns_something_else_is_named(mode: str, answer: Any, message: str) -> None:
    class Odd(ScriptedEnv):
        def step(self, action: Any) -> Any:
            return answer

    with pytest.raises(ObservationError, match=message):
        collect(make_task(mode=mode, env=Odd), 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda task: type(task)(None),
            "`config` must be a ReinforcementLearningTaskConfig, got None",
        ),
        (lambda task: gymtask.Trainer(task.config), "`config` must be a TrainerConfig, got"),
        (
            lambda task: task.collect_samples(None, task, 10),
            r"`worker_pool` must be a WorkerPool, as get_worker_pool\(\) gives it",
        ),
        (lambda task: gymtask.evaluate(None, task), "`task` must be a ReinforcementLearningTask"),
        (
            lambda task: gymtask.Environment("CartPole-v1", wrappers=gym.Wrapper),
            "`wrappers` must be a list of callables",
        ),
    ],
)
def test_arguments_of_another_type_are_named(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call(make_task())


def test_a_typo_in_a_config_is_named_with_what_was_meant() -> None:
    task = make_task()
    task.config.max_epoch = 7  # type: ignore[attr-defined]
    task.config.environment.num_env = 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError) as caught:
        type(task)(task.config)
    assert "`max_epoch` must be a field" in str(caught.value)
    assert "`environment.num_env` must be a field of EnvironmentConfig, got 3" in str(caught.value)
    assert "did you mean 'num_envs'?" in str(caught.value)
