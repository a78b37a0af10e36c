"""`gymtask.load`, which checkpoints stay, and stopping at a target return."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import gymtask
from gymtask.errors import CheckpointError, ConfigurationError, HookError
from gymtask.testing import ScriptedEnv
from gymtask.training.checkpoint import list_checkpoints, load_checkpoint
from gymtask.training.logs import read_rows
from tests.integration.training_tasks import (
    CartPole,
    ScriptedTask,
    linear,
    make_config,
    make_trainer,
    network,
    parameters,
)


@dataclass
class Config(gymtask.ReinforcementLearningTaskConfig):
    name: str = "loaded"
    width: int = 3
    sizes: tuple[int, ...] = (1, 2)


class Loaded(ScriptedTask):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.register_buffer("target", torch.zeros(config.width))

    def get_model(self) -> nn.Module:
        return linear(7)

    def on_epoch_end(self, model: nn.Module, state: gymtask.State) -> None:
        self.target += 1.5  # type: ignore[operator]


def loaded_config(**fields: Any) -> Config:
    environment = gymtask.EnvironmentConfig(num_env_workers=0, num_envs=2)
    dataset = gymtask.DatasetConfig(num_update_steps=2)
    return Config(environment=environment, dataset=dataset, **{"max_epochs": 2, **fields})


# ---- load --------------------------------------------------------------------------------------


def test_task_and_model_come_back_with_all_that_they_held(tmp_path: Path) -> None:
    model = linear(1)
    task = Loaded(loaded_config(width=5, sizes=(4,)))
    state = make_trainer(tmp_path).train(task, model)
    again, network_again = gymtask.load(tmp_path)
    assert isinstance(again, Loaded)
    assert again.config == task.config
    assert replace(again.state, elapsed_time=state.elapsed_time) == state
    assert again.target.tolist() == [3.0] * 5  # type: ignore[union-attr, operator]
    assert parameters(network_again) == parameters(model)


def test_a_saved_run_is_evaluated_in_a_fresh_process(tmp_path: Path) -> None:
    make_trainer(tmp_path).train(Loaded(loaded_config()), linear(1))
    code = (
        "import gymtask, sys\n"
        "task, model = gymtask.load(sys.argv[1])\n"
        "print([e.length for e in gymtask.evaluate(task, model, num_episodes=3)])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[4, 4, 4]"


def test_what_is_given_is_filled_instead_of_made(tmp_path: Path) -> None:
    trained = network(0)
    make_trainer(tmp_path, 40).train(CartPole(make_config(max_epochs=1)), trained)
    task, model = CartPole(make_config(name="task")), network(9)
    assert gymtask.load(tmp_path, task=task, model=model) == (task, model)
    assert parameters(model) == parameters(trained)
    assert task.state.num_samples == 40


def test_a_task_without_get_model_asks_for_the_model(tmp_path: Path) -> None:
    make_trainer(tmp_path, 40).train(CartPole(make_config(max_epochs=1)), network(0))
    with pytest.raises(CheckpointError, match=r"define get_model\(\) in CartPole, or pass model="):
        gymtask.load(tmp_path, task=CartPole(make_config()))


def test_a_class_that_cannot_be_imported_asks_for_the_task(tmp_path: Path) -> None:
    class Local(ScriptedTask):
        pass

    make_trainer(tmp_path).train(Local(make_config(max_epochs=1)), linear())
    with pytest.raises(CheckpointError, match=r"cannot import `.*Local` .*; pass task=\.\.\."):
        gymtask.load(tmp_path)


def test_another_model_is_refused_by_shape(tmp_path: Path) -> None:
    make_trainer(tmp_path).train(Loaded(loaded_config()), linear())
    with pytest.raises(CheckpointError, match=r"model\['weight'\] is of shape \(2, 3\)"):
        gymtask.load(tmp_path, model=nn.Linear(4, 2))
    with pytest.raises(CheckpointError, match=r"task\['target'\] is of shape \(3,\)"):
        gymtask.load(tmp_path, task=Loaded(loaded_config(width=2)))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"`path` must be a checkpoint folder or a run .*has none"
    ):
        gymtask.load(tmp_path)


# ---- which checkpoints stay --------------------------------------------------------------------


LENGTH = [1]


def make_scripted() -> Any:
    return gymtask.testing.ScriptedEnv(LENGTH[0])


class ByLength(ScriptedTask):
    """Evaluation k plays episodes of `lengths[k]` steps, whose return is 1 + 2 + ... of them."""

    lengths = (2, 5, 3, 4)

    def get_environment(self) -> gymtask.Environment:
        return gymtask.Environment(make_scripted)

    def on_epoch_end(self, model: nn.Module, state: gymtask.State) -> None:
        LENGTH[0] = self.lengths[state.num_epochs - 1]


def names(run_dir: Path) -> list[int]:
    return [
        load_checkpoint(folder)[0]["state"]["num_epochs"] for folder in list_checkpoints(run_dir)
    ]


def best(run_dir: Path) -> int:
    state = load_checkpoint(run_dir / "checkpoints" / "best")[0]["state"]
    return int(state["num_epochs"])


def test_the_newest_and_the_best_checkpoints_stay(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, keep_checkpoints=1, eval_interval=1, num_eval_episodes=2)
    trainer.train(ByLength(make_config(max_epochs=4)), linear())
    assert names(tmp_path) == [2, 4]
    assert best(tmp_path) == 2
    assert not list(tmp_path.rglob(".tmp-*"))


def test_all_checkpoints_stay_by_default_and_training_returns_tell_the_best(tmp_path: Path) -> None:
    make_trainer(tmp_path, 900).train(CartPole(make_config(max_epochs=6)), network(0))
    assert names(tmp_path) == [1, 2, 3, 4, 5, 6]
    states = [load_checkpoint(folder)[0] for folder in list_checkpoints(tmp_path)]
    recent = [state["statistics"]["recent"] for state in states]
    means = [sum(each) / len(each) if len(each) == 100 else -math.inf for each in recent]
    assert means[-1] > -math.inf
    assert best(tmp_path) == 1 + means.index(max(means))


def test_the_newest_is_the_best_until_a_hundred_episodes_have_ended(tmp_path: Path) -> None:
    class Shorter(gym.Wrapper[Any, Any, Any, Any]):
        """Each step costs 1; the first episodes to end are the short ones."""

        def step(self, action: Any) -> Any:
            observation, _, *rest = self.env.step(action)
            return observation, -1.0, *rest

    class Costly(ScriptedTask):
        def get_environment(self) -> gymtask.Environment:
            return gymtask.Environment(partial(ScriptedEnv, [2, 30]), wrappers=[Shorter])

    make_trainer(tmp_path, 20, keep_checkpoints=1).train(
        Costly(make_config(max_epochs=7)), linear()
    )
    assert names(tmp_path) == [7]
    assert best(tmp_path) == 7


def test_an_evaluation_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    returns = iter([math.nan, 15.0, 21.0, 18.0])

    class Scored(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            observation, _, *rest = self.env.step(action)
            return observation, Scores.now, *rest

    class Scores(ScriptedTask):
        now = 0.0

        def get_environment(self) -> gymtask.Environment:
            return gymtask.Environment(partial(ScriptedEnv, 1), wrappers=[Scored])

        def on_epoch_end(self, model: nn.Module, state: gymtask.State) -> None:
            Scores.now = next(returns)

    fields: dict[str, Any] = {"eval_interval": 1, "keep_checkpoints": 1}
    make_trainer(tmp_path, **fields).train(Scores(make_config(max_epochs=4)), linear())
    assert best(tmp_path) == 3
    assert names(tmp_path) == [3, 4]


def test_the_best_evaluation_writes_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"eval_interval": 1, "num_eval_episodes": 2, "checkpoint_interval": 3}
    make_trainer(tmp_path, **fields).train(ByLength(make_config(max_epochs=4)), linear())
    assert names(tmp_path) == [1, 2, 3, 4]  # 1 and 2 were the best so far, 3 was due, 4 the last
    assert best(tmp_path) == 2


def test_a_resumed_run_knows_the_best_of_the_part_that_it_goes_on_from(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"eval_interval": 1, "num_eval_episodes": 2}
    make_trainer(tmp_path, **fields).train(ByLength(make_config(max_epochs=4)), linear())
    first = list_checkpoints(tmp_path)[0]
    trainer = make_trainer(None, keep_checkpoints=1, **fields)

    class Shorter(ByLength):
        lengths = (9, 1, 1, 1)

    trainer.train(Shorter(make_config(max_epochs=3)), linear(), resume=first)
    assert best(tmp_path) == 1  # not 2, which is superseded
    assert names(tmp_path) == [1, 3]


@pytest.mark.parametrize("file", ["state.pt", "rank-0.pt"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path).train(Loaded(loaded_config(max_epochs=3)), linear(1))
    newest = list_checkpoints(tmp_path)[-1] / file
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot read"):
        gymtask.load(newest.parent)  # asked for by name
    task, _ = gymtask.load(tmp_path)
    assert task.state.num_epochs == 2
    assert f"{newest} is damaged" in caplog.text
    state = make_trainer(None).train(Loaded(loaded_config(max_epochs=3)), linear(), resume=tmp_path)
    assert state.num_samples == 30


# ---- the target --------------------------------------------------------------------------------


def test_a_run_stops_at_the_target_return(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_interval=1, num_eval_episodes=2, target_return=15.0)
    state = trainer.train(ByLength(make_config(max_epochs=9)), linear())
    assert trainer.stopped_by == "target_return"
    assert state.num_epochs == 2  # the episodes of 5 steps: 1 + 2 + 3 + 4 + 5


def test_a_target_needs_evaluations() -> None:
    with pytest.raises(ConfigurationError, match="`eval_interval` must be set with target_return"):
        make_trainer(None, target_return=3.0)
    with pytest.raises(ConfigurationError, match="`target_return` must be a number or None"):
        make_trainer(None, target_return="much", eval_interval=1)
    with pytest.raises(ConfigurationError, match="`keep_checkpoints` must be an integer of at"):
        make_trainer(None, keep_checkpoints=0)


def test_a_run_that_reached_its_target_does_not_go_on(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"eval_interval": 1, "num_eval_episodes": 2, "target_return": 15.0}
    make_trainer(tmp_path, **fields).train(ByLength(make_config(max_epochs=9)), linear())
    again = make_trainer(None, **fields)
    state = again.train(ByLength(make_config(max_epochs=9)), linear(), resume=tmp_path)
    assert (again.stopped_by, state.num_epochs) == ("target_return", 2)


def test_going_on_from_the_best_sets_only_later_checkpoints_aside(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"eval_interval": 1, "num_eval_episodes": 2}
    make_trainer(tmp_path, **fields).train(ByLength(make_config(max_epochs=4)), linear())
    link = tmp_path / "checkpoints" / "best"
    task = ByLength(make_config(max_epochs=2))
    make_trainer(None, **fields).train(task, linear(), resume=link)
    assert names(tmp_path) == [1, 2]
    assert len(list(tmp_path.rglob("superseded-*"))) == 2
    assert best(tmp_path) == 2


def test_a_config_that_was_saved_as_text_is_refused(tmp_path: Path) -> None:
    @dataclass
    class WithPath(Config):
        folder: Path = Path("data")

    task = Loaded(WithPath(**vars(loaded_config())))
    make_trainer(tmp_path).train(task, linear())
    with pytest.raises(CheckpointError, match=r"`config.folder` must be a number.*pass task="):
        gymtask.load(tmp_path)


@dataclass
class Linear:
    """A setting within the settings."""

    rate: float = 1.0


@dataclass
class Cosine(Linear):
    """Another one of its kind."""


@dataclass(frozen=True)
class Frozen:
    """One that cannot be changed."""

    size: int = 1


class Range(NamedTuple):
    """A tuple with names."""

    low: float = 0.0


@dataclass
class Settings(Config):
    """Settings of many kinds."""

    schedule: Linear = field(default_factory=Linear)
    other: Linear | None = None
    frozen: Frozen = field(default_factory=Frozen)
    range: Any = None
    gamma: float = 0.9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule", Cosine()),
        ("other", Linear()),
        ("range", Range()),
        ("range", [Linear()]),
        ("range", Linear),
        ("range", {(1, 2): 3}),
        ("range", np.datetime64("2020-01-01")),
    ],
)
def test_settings_that_would_come_back_as_others_are_refused(
    name: str, value: Any, tmp_path: Path
) -> None:
    task = Loaded(replace(Settings(**vars(loaded_config())), **{name: value}))
    make_trainer(tmp_path).train(task, linear())
    with pytest.raises(CheckpointError, match=rf"`config.{name}` must be a number.*pass task="):
        gymtask.load(tmp_path)
    assert gymtask.load(tmp_path, task=task)[0] is task


def test_numbers_of_numpy_and_frozen_settings_come_back(tmp_path: Path) -> None:
    values = {"gamma": np.float64(0.5), "frozen": Frozen(7), "schedule": Linear(3.0)}
    config = Settings(**{**vars(loaded_config()), "max_samples": np.int64(1000), **values})
    make_trainer(tmp_path).train(Loaded(config), linear())
    task, _ = gymtask.load(tmp_path)
    assert task.config == config


# ---- what a run tells --------------------------------------------------------------------------


def test_logged_numbers_are_columns_of_means(tmp_path: Path) -> None:
    class Logs(ScriptedTask):
        def on_update_end(self, model: nn.Module, state: gymtask.State) -> None:
            self.log("steps", state.num_steps)
            if state.num_epochs:
                self.log("late", torch.tensor(7.0))

    make_trainer(tmp_path).train(Logs(make_config(max_epochs=2, updates=3)), linear())
    rows = read_rows(tmp_path / "metrics.csv")
    assert [row["steps"] for row in rows] == [2.0, 5.0]  # the means of 1, 2, 3 and of 4, 5, 6
    assert rows[1]["late"] == 7.0


def test_a_parameter_that_is_logged_counts_with_the_values_that_it_had(tmp_path: Path) -> None:
    class Logs(ScriptedTask):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.ones(()))
            self.seen: list[float] = []

        def compute_loss(self, *args: Any) -> Tensor:
            return super().compute_loss(*args) + self.scale

        def on_update_end(self, model: nn.Module, state: gymtask.State) -> None:
            self.log("scale", self.scale)
            self.seen.append(float(self.scale.detach()))

    task = Logs(make_config(max_epochs=1, updates=4))
    make_trainer(tmp_path, learning_rate=0.1).train(task, linear())
    (row,) = read_rows(tmp_path / "metrics.csv")
    assert len(set(task.seen)) == 4
    assert row["scale"] == pytest.approx(sum(task.seen) / 4)


def test_what_an_evaluation_logs_has_columns_of_its_own(tmp_path: Path) -> None:
    class Logs(ScriptedTask):
        def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
            self.log("greedy", optimal)
            return super().get_actions(model, states, optimal)

    task = Logs(make_config(max_epochs=2))
    task.log("greedy", 100.0)  # of a time before the run
    make_trainer(tmp_path, eval_interval=1).train(task, linear())
    rows = read_rows(tmp_path / "metrics.csv")
    assert [(row["greedy"], row["eval/greedy"]) for row in rows] == [(0.0, 1.0)] * 2


def test_what_a_clip_logs_is_not_of_training(tmp_path: Path) -> None:
    class Logs(ScriptedTask):
        def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
            self.log("greedy", optimal)
            return super().get_actions(model, states, optimal)

    task = Logs(make_config(max_epochs=3))
    make_trainer(tmp_path, clip_interval=1).train(task, linear())
    assert [row["greedy"] for row in read_rows(tmp_path / "metrics.csv")] == [0.0] * 3


@pytest.mark.parametrize("name", ["loss", "num_epochs", "episode/count"])
def test_a_name_that_a_column_has_already_cannot_be_logged(name: str, tmp_path: Path) -> None:
    class Logs(ScriptedTask):
        def on_update_end(self, model: nn.Module, state: gymtask.State) -> None:
            self.log(name, 1.0)

    with pytest.raises(HookError, match=rf"must be a column that is not there already.*{name}"):
        make_trainer(tmp_path).train(Logs(make_config(max_epochs=1)), linear())


def test_several_numbers_at_once_are_no_number_to_log() -> None:
    with pytest.raises(HookError, match=r"`value` of log\('kl'\) must be one number.*\(3,\)"):
        ScriptedTask(make_config()).log("kl", torch.zeros(3))


def test_rows_of_a_resumed_run_tell_of_what_was_before_the_checkpoint_too(tmp_path: Path) -> None:
    class Logs(CartPole):
        def on_epoch_end(self, model: nn.Module, state: gymtask.State) -> None:
            self.log("epoch", state.num_epochs)

    fields: dict[str, Any] = {"log_interval": 3, "eval_interval": 2, "num_eval_episodes": 2}

    def run(folder: Path, max_epochs: int, resume: Path | None = None) -> None:
        task = Logs(make_config(max_epochs=max_epochs))
        make_trainer(None if resume else folder, 50, **fields).train(task, network(), resume=resume)

    run(tmp_path / "unbroken", 6)
    run(tmp_path / "broken", 6)
    second = list_checkpoints(tmp_path / "broken")[1]  # in the middle of what a row tells
    run(tmp_path / "broken", 6, second)
    rows = [read_rows(tmp_path / name / "metrics.csv") for name in ("broken", "unbroken")]
    assert [row["num_epochs"] for row in rows[0]] == [3, 6]
    for row in (row for part in rows for row in part):
        for column in [name for name in row if "second" in name or "time" in name]:
            del row[column]
    assert rows[0] == rows[1]
    assert rows[0][0]["epoch"] == 2.0


def test_a_finished_run_and_a_task_of_another_class_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path).train(ScriptedTask(make_config(max_epochs=2)), linear())

    class Other(ScriptedTask):
        pass

    make_trainer(tmp_path).train(Other(make_config(max_epochs=2)), linear(), resume="auto")
    assert "has reached max_epochs already" in caplog.text
    assert (
        "Other goes on with a run of tests.integration.training_tasks:ScriptedTask" in caplog.text
    )
