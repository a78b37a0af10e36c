"""Off-policy training: warm-up, the buffer that lives across epochs, and what is saved of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from gymtask.errors import CheckpointError, ConfigurationError, HookError, WindowError
from gymtask.replay import Prioritization, ReplayBuffer
from gymtask.task import State
from gymtask.training.checkpoint import list_checkpoints
from tests.integration.mask_envs import masked_environment
from tests.integration.training_tasks import (
    ScriptedTask,
    linear,
    make_config,
    make_trainer,
    parameters,
)
from tests.tasks import collect, make_task


class OffPolicy(ScriptedTask):
    """Remembers what the buffer held and which steps were drawn, at each update."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen: list[tuple[int, int]] = []  # (num_samples, rows of the buffer)
        self.shapes: set[tuple[int, ...]] = set()

    def compute_loss(
        self, model: nn.Module, batch: TensorDict, state: State, output: Tensor
    ) -> Tensor:
        assert self.replay_buffer is not None
        self.seen.append((state.num_samples, len(self.replay_buffer)))
        self.shapes.add(tuple(batch.batch_size))
        return super().compute_loss(model, batch, state, output)


def make_off_policy(
    capacity: int = 100, kind: type[OffPolicy] = OffPolicy, **fields: Any
) -> OffPolicy:
    config = make_config(**{"max_epochs": 3, **fields})
    config.dataset.off_policy = True
    config.dataset.replay_buffer_sample_size = capacity
    return kind(config)


# ---- epochs ------------------------------------------------------------------------------------


def test_collections_join_a_buffer_of_the_configured_capacity(tmp_path: Path) -> None:
    task = make_off_policy(capacity=24, updates=2)
    state = make_trainer(tmp_path, num_epoch_samples=10).train(task, linear())
    assert task.seen == [(10, 10)] * 2 + [(20, 20)] * 2 + [(30, 24)] * 2
    assert (state.num_samples, state.num_steps, state.num_epochs) == (30, 6, 3)
    assert task.replay_buffer is not None
    assert task.replay_buffer.capacity == 24


def test_windows_reach_over_collections(tmp_path: Path) -> None:
    task = make_off_policy(window=3, updates=2)  # episodes of 4 rows, collected one by one
    make_trainer(tmp_path, num_epoch_samples=2, num_warmup_samples=20).train(task, linear())
    assert task.shapes == {(8, 3)}


def test_warm_up_comes_first_and_counts_as_samples(tmp_path: Path) -> None:
    task = make_off_policy(updates=1)
    state = make_trainer(tmp_path, num_epoch_samples=10, num_warmup_samples=31).train(
        task, linear()
    )
    assert task.seen == [(41, 41), (51, 51), (61, 61)]
    assert (state.num_samples, state.num_epoch_samples) == (61, 10)


def test_the_last_collection_and_warm_up_stay_within_max_samples(tmp_path: Path) -> None:
    task = make_off_policy(max_samples=35, max_epochs=None)
    state = make_trainer(tmp_path / "a", 10, num_warmup_samples=20).train(task, linear())
    assert (state.num_samples, state.num_epochs) == (35, 2)
    task = make_off_policy(max_samples=15, max_epochs=None)
    trainer = make_trainer(tmp_path / "b", 10, num_warmup_samples=20)
    state = trainer.train(task, linear())
    assert (state.num_samples, state.num_epochs, trainer.stopped_by) == (15, 0, "max_samples")


def test_a_task_makes_its_own_buffer_and_updates_priorities(tmp_path: Path) -> None:
    class Prioritized(OffPolicy):
        def get_replay_buffer(self) -> ReplayBuffer:
            return ReplayBuffer(50, tmp_path / "rows", Prioritization(), n_step=2, seed=1)

        def compute_loss(
            self, model: nn.Module, batch: TensorDict, state: State, output: Tensor
        ) -> Tensor:
            assert batch["weight"].shape == batch["next", "discount"].shape == batch.batch_size
            self.index = batch["index"]
            return super().compute_loss(model, batch, state, output)

        def on_update_end(self, model: nn.Module, state: State) -> None:
            assert self.replay_buffer is not None
            self.replay_buffer.update_priorities(self.index, torch.full(self.index.shape, 5.0))

    task = make_off_policy(kind=Prioritized)
    make_trainer(tmp_path / "run").train(task, linear())
    assert task.replay_buffer is not None
    # Rows of the first epoch that were never drawn keep priority 1; all others have 5.
    assert task.replay_buffer.sample(300)["weight"].unique().numel() == 2
    assert any((tmp_path / "rows").iterdir())


# ---- random actions ----------------------------------------------------------------------------


class Chooser(gym.Env[Any, Any]):
    """Episodes of 5 steps in which any action of the space may be taken; it keeps them."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = spaces.Box(0.0, 1.0, (1,)), space

    def reset(self, **keywords: Any) -> Any:
        super().reset(seed=keywords.get("seed"))
        self.num_steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.num_steps += 1
        return np.zeros(1, np.float32), 0.0, self.num_steps == 5, False, {}


SPACES = {
    "discrete": spaces.Discrete(3, start=-1),
    "box": spaces.Box(np.float32([-2.0, 10.0]), np.float32([2.0, 10.5])),
    "float64": spaces.Box(-2.0, 2.0, (2,), np.float64),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,)),
    "bytes": spaces.Box(0, 255, (2,), np.uint8),
    "many": spaces.MultiDiscrete([2, 5]),
    "bits": spaces.MultiBinary(4),
    "nested": spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0.0, 1.0, (2,))}),
}


def some_action(space: spaces.Space[Any], rows: int) -> Any:
    if isinstance(space, spaces.Dict):
        parts = {key: some_action(part, rows) for key, part in space.items()}
        return TensorDict(parts, batch_size=[rows])
    if isinstance(space, spaces.Box) and space.dtype != np.uint8:
        return torch.zeros(rows, *space.shape)
    dtype = {"MultiBinary": torch.int8, "Box": torch.uint8}.get(type(space).__name__, torch.int64)
    return torch.zeros(rows, *(space.shape or ()), dtype=dtype)


def random_rows(name: str, *, workers: int = 1, mode: str = "sync", **keywords: Any) -> Any:
    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Any:
        action = some_action(SPACES[name], len(states))
        return TensorDict({"action": action}, batch_size=[len(states)])

    space = SPACES[name]
    task = make_task(3, workers, mode, env=lambda: Chooser(space), get_actions=get_actions)
    return collect(task, 90, random_actions=True, **keywords).to_tensordict()["action"]


@pytest.mark.parametrize("name", SPACES)
def test_random_actions_fit_the_space_in_stored_units_and_repeat(name: str) -> None:
    found = random_rows(name)
    assert (found == random_rows(name)).all()
    space = SPACES[name]
    if name == "discrete":
        assert sorted(set(found.tolist())) == [0, 1, 2]  # indices, not values of the space
    elif name == "box":
        low, high = torch.tensor(space.low), torch.tensor(space.high)  # type: ignore[attr-defined]
        assert ((found >= low) & (found <= high)).all()
        spread = (found.max(0).values - found.min(0).values) / (high - low)
        assert (spread > 0.9).all()
    elif name == "unbounded":
        assert 0.7 < found.std() < 1.3  # a standard normal, as Box.sample draws it
    else:
        assert found.unique(dim=0).shape[0] > 1 if name != "nested" else len(found) == 90


@pytest.mark.parametrize("keywords", [{"max_batch_size": 1}, {"workers": 3, "mode": "thread"}])
def test_random_actions_do_not_depend_on_batches_or_workers(keywords: dict[str, Any]) -> None:
    assert torch.equal(random_rows("box"), random_rows("box", **keywords))


def test_environments_draw_different_random_actions_and_go_on_in_the_next_call() -> None:
    space = spaces.Box(-1.0, 1.0, (2,))

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        return torch.zeros(len(states), 2)

    task = make_task(2, 1, "sync", env=lambda: Chooser(space), get_actions=get_actions)
    with task.get_worker_pool() as pool:
        rows = [
            task.collect_samples(None, pool, 20, use_tqdm=False, random_actions=True).rows["action"]
            for _ in range(2)
        ]
    assert len(torch.cat(rows).unique(dim=0)) == 40


@pytest.mark.parametrize("frame_stack", [None, 2])
@pytest.mark.parametrize("mode", ["sync", "process"])
def test_random_actions_are_those_that_the_mask_allows(mode: str, frame_stack: int | None) -> None:
    env = masked_environment("info", frame_stack=frame_stack)  # raises at a forbidden one
    task = make_task(3, 2, mode, get_environment=lambda self: env)
    with task.get_worker_pool() as pool:
        rows = task.collect_samples(None, pool, 900, use_tqdm=False, random_actions=True).rows
    chosen = rows["observation", "action_mask"].gather(-1, rows["action"].unsqueeze(-1))
    assert chosen.bool().all()
    # As often as any other that is allowed there.
    chances = rows["observation", "action_mask"] / rows["observation", "action_mask"].sum(
        -1, keepdim=True
    )
    counts = rows["action"].bincount(minlength=5)
    deviation = (chances * (1 - chances)).sum(0).sqrt()
    assert ((counts - chances.sum(0)).abs() < 4 * deviation).all()


def test_carries_go_on_while_actions_are_random() -> None:
    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
        count = states["count"] + 1
        content = {"action": torch.zeros(len(states), dtype=torch.int64), "next": {"count": count}}
        return TensorDict(content, batch_size=[len(states)])

    task = make_task(
        get_actions=get_actions,
        get_initial_carry=lambda self, model: TensorDict({"count": torch.tensor(0)}),
    )
    rows = collect(task, 40, random_actions=True).to_tensordict()
    assert torch.equal(rows["count"], rows["step"])
    assert set(rows["action"].tolist()) == {0, 1}


def test_other_keys_beside_random_actions_are_refused() -> None:
    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
        zeros = torch.zeros(len(states))
        return TensorDict({"action": zeros.long(), "log_prob": zeros}, batch_size=[len(states)])

    with pytest.raises(HookError, match="actions alone where random ones are taken"):
        collect(make_task(get_actions=get_actions), 4, random_actions=True)


# ---- checkpoints -------------------------------------------------------------------------------


def buffer_of(folder: Path) -> dict[str, Any]:
    buffer = ReplayBuffer.load(folder / "replay-0")
    return buffer.read(buffer.windows(1, 1), 1, 1).to_dict()


def test_a_checkpoint_holds_the_buffer_and_only_the_newest_keeps_it(tmp_path: Path) -> None:
    task = make_off_policy()
    make_trainer(tmp_path).train(task, linear())
    *older, newest = list_checkpoints(tmp_path)
    assert len(older) == 2
    assert not any((folder / "replay-0").exists() for folder in older)
    assert not list(tmp_path.rglob(".tmp-*"))
    assert len(buffer_of(newest)["action"]) == 30


def test_a_resumed_run_has_the_rows_priorities_and_draws_of_the_one_before(tmp_path: Path) -> None:
    class Prioritized(OffPolicy):
        def get_replay_buffer(self) -> ReplayBuffer:
            return ReplayBuffer(25, prioritized=Prioritization(), seed=3)

        def on_update_end(self, model: nn.Module, state: State) -> None:
            assert self.replay_buffer is not None
            numbers = torch.arange(self.replay_buffer.num_added)
            self.replay_buffer.update_priorities(numbers, numbers.double())

    class Look(Prioritized):
        def on_epoch_start(self, model: Any, state: State) -> None:
            assert self.replay_buffer is not None
            self.drawn = self.replay_buffer.sample(64)

    task = make_off_policy(kind=Prioritized, max_epochs=3)
    make_trainer(tmp_path).train(task, linear())
    assert task.replay_buffer is not None
    expected = task.replay_buffer.sample(64)
    again = make_off_policy(kind=Look, max_epochs=4)
    state = make_trainer(None).train(again, linear(5), resume=tmp_path)
    drawn = again.drawn  # type: ignore[attr-defined]
    assert (drawn == expected).all()
    assert drawn["weight"].unique().numel() > 5
    assert state.num_samples == 40


def test_warm_up_is_not_made_again_by_a_resumed_run(tmp_path: Path) -> None:
    make_trainer(tmp_path, num_warmup_samples=15).train(make_off_policy(max_epochs=1), linear())
    task = make_off_policy(max_epochs=2)
    state = make_trainer(None, num_warmup_samples=15).train(task, linear(), resume=tmp_path)
    assert state.num_samples == 35
    assert task.seen[-1] == (35, 35)


def test_a_warm_up_that_was_stopped_is_made_anew(tmp_path: Path) -> None:
    class Slow(OffPolicy):
        env_kwargs = {"lengths": 4, "seconds": 0.004}  # noqa: RUF012

        def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
            return torch.full((len(states),), 1)

    fields: dict[str, Any] = {"num_warmup_samples": 100, "num_epoch_samples": 4}
    task = make_off_policy(200, Slow, max_epochs=1, max_seconds=0.2)
    before = make_trainer(tmp_path, **fields).train(task, linear())
    assert 0 < before.num_samples < 100
    task = make_off_policy(200, Slow, max_epochs=1)
    after = make_trainer(None, **fields).train(task, linear(), resume=tmp_path)
    assert after.num_samples == before.num_samples + 104
    assert task.seen == [(after.num_samples, 104)] * 3
    assert task.replay_buffer is not None
    assert set(task.replay_buffer.sample(300)["action"].flatten().tolist()) == {0, 1}  # random


def test_without_a_saved_buffer_a_resumed_run_fills_it_with_the_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields: dict[str, Any] = {"num_warmup_samples": 15, "checkpoint_replay": False}
    make_trainer(tmp_path, **fields).train(make_off_policy(max_epochs=1), linear())
    assert not list(tmp_path.rglob("replay*"))

    class Look(OffPolicy):
        def get_actions(self, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
            return torch.ones(len(states), dtype=torch.int64)

    task = make_off_policy(kind=Look, max_epochs=2)
    with caplog.at_level(logging.WARNING):
        state = make_trainer(None, **fields).train(task, linear(), resume=tmp_path)
    assert state.num_samples == 50
    assert task.seen[-1] == (50, 25)
    assert "begins empty" in caplog.text
    assert task.replay_buffer is not None
    assert task.replay_buffer.sample(50)["action"].eq(1).all()


def test_a_buffer_of_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    make_trainer(tmp_path).train(make_off_policy(max_epochs=1), linear())
    with pytest.raises(CheckpointError, match=r"`capacity` is 100 in what was saved, got 50"):
        make_trainer(None).train(make_off_policy(50), linear(), resume=tmp_path)


def test_a_damaged_buffer_is_a_checkpoint_error(tmp_path: Path) -> None:
    make_trainer(tmp_path).train(make_off_policy(max_epochs=1), linear())
    records = list_checkpoints(tmp_path)[-1] / "replay-0" / "records.bin"
    records.write_bytes(records.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        make_trainer(None).train(make_off_policy(), linear(), resume=tmp_path)


# ---- bad input ---------------------------------------------------------------------------------


def test_warm_up_without_a_buffer_is_refused(tmp_path: Path) -> None:
    task = ScriptedTask(make_config(max_epochs=1))
    with pytest.raises(
        ConfigurationError, match=r"`sampling.num_warmup_samples` must be 0 without"
    ):
        make_trainer(tmp_path, num_warmup_samples=5).train(task, linear())


def test_a_buffer_smaller_than_a_piece_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"replay_buffer_sample_size` must be at least"):
        make_trainer(tmp_path, 100).train(make_off_policy(capacity=20), linear())


def test_something_else_than_a_buffer_is_refused(tmp_path: Path) -> None:
    class Wrong(OffPolicy):
        def get_replay_buffer(self) -> Any:
            return []

    with pytest.raises(HookError, match=r"`get_replay_buffer` must return a gymtask.ReplayBuffer"):
        make_trainer(tmp_path).train(make_off_policy(kind=Wrong), linear())


def test_no_window_yet_names_the_warm_up(tmp_path: Path) -> None:
    with pytest.raises(WindowError) as caught:
        make_trainer(tmp_path, 2).train(make_off_policy(window=4), linear())
    assert "num_warmup_samples" in "".join(caught.value.__notes__)


def test_off_policy_takes_part_in_the_check_of_configs() -> None:
    config = make_config(max_epochs=1)
    config.dataset.off_policy = 1  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"`dataset.off_policy` must be True or False"):
        ScriptedTask(config)
    with pytest.raises(ConfigurationError, match=r"`sampling.num_warmup_samples` must be"):
        make_trainer(None, num_warmup_samples=-1)
    with pytest.raises(ConfigurationError, match=r"`checkpoint_replay` must be True or False"):
        make_trainer(None, checkpoint_replay=None)


def test_parameters_change_from_update_to_update(tmp_path: Path) -> None:
    model = linear()
    before = parameters(model)
    make_trainer(tmp_path).train(make_off_policy(max_epochs=1), model)
    assert parameters(model) != before


def test_more_warm_up_than_the_buffer_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"`sampling.num_warmup_samples` must be at most"):
        make_trainer(tmp_path, num_warmup_samples=101).train(make_off_policy(), linear())


def test_a_buffer_that_has_no_part_in_training_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgotten(ScriptedTask):
        def get_replay_buffer(self) -> ReplayBuffer:
            return ReplayBuffer(10)

    make_trainer(tmp_path).train(Forgotten(make_config(max_epochs=1)), linear())
    assert "get_replay_buffer() of Forgotten has no part in training" in caplog.text


def test_an_episode_longer_than_the_buffer_leaves_its_last_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = make_off_policy(capacity=3)  # episodes of 4 rows
    make_trainer(tmp_path, whole_episodes=True).train(task, linear())
    assert "an episode of 4 rows is longer than the replay buffer" in caplog.text
    assert task.replay_buffer is not None
    assert task.replay_buffer.sample(50)["step"].unique().tolist() == [1, 2, 3]


def test_a_buffer_with_another_frame_stack_than_the_environment_is_refused(tmp_path: Path) -> None:
    class Stacked(OffPolicy):
        def get_replay_buffer(self) -> ReplayBuffer:
            return ReplayBuffer(50, frame_stack=3)

    with pytest.raises(ConfigurationError, match="`frame_stack` of the replay buffer must be that"):
        make_trainer(tmp_path).train(make_off_policy(kind=Stacked), linear())
