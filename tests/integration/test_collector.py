"""What `iter_samples` and `collect_samples` promise about rows, pieces and episodes."""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import gymtask
from gymtask.errors import ConfigurationError, PoolStateError
from gymtask.testing import ScriptedEnv
from tests.tasks import A, B, make_task


def rows(samples: gymtask.MultiReplaySamples) -> list[tuple[int, int, int]]:
    """(environment, count before, count after) of every row."""
    flat = samples.to_tensordict()
    before, after = flat["observation"][:, 0], flat["next", "observation"][:, 0]
    return [(int(i), int(a), int(b)) for i, a, b in zip(flat["env_id"], before, after, strict=True)]


def expected_rows(env_id: int, count: int, first: int = 0) -> list[tuple[int, int, int]]:
    """The same, worked out: episodes of A or B steps, counted in hundreds."""
    length = (A, B)[env_id % 2]
    places = [divmod(number, length) for number in range(first, first + count)]
    return [(env_id, 100 * e + t, 100 * e + t + 1) for e, t in places]


# ---- boundaries ----------------------------------------------------------------------------------


def test_every_row_is_a_real_transition_once(mode: str) -> None:
    task = make_task(mode=mode)
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 13, use_tqdm=False)
    # 13 rows over two environments: seven of the first, six of the second.
    assert rows(samples) == expected_rows(0, 7) + expected_rows(1, 6)
    assert samples.num_transitions == 13
    assert (samples.to_tensordict()["next", "reward"] > 0).all()


def test_two_collections_lose_repeat_and_reset_nothing(mode: str) -> None:
    task = make_task(mode=mode)
    with task.get_worker_pool() as pool:
        first = task.collect_samples(None, pool, 13, use_tqdm=False)
        second = task.collect_samples(None, pool, 8, use_tqdm=False)
    assert rows(first) + rows(second) == [
        *expected_rows(0, 7),
        *expected_rows(1, 6),
        *expected_rows(0, 4, first=7),
        *expected_rows(1, 4, first=6),
    ]
    steps = [piece.samples["step"][0].item() for piece in second.samples]
    assert steps[0] == 7 % A  # the first piece goes on where the first call left its episode
    ids = [int(piece.samples["trajectory_id"][0]) for piece in [*first, *second]]
    assert ids[3 - 1] == 0 + 2 * 2  # environment 0's third episode: 0 + num_envs · 2


@pytest.mark.parametrize("num_envs", [1, 2, 7])
@pytest.mark.parametrize("total", [1, 10, 145])
@pytest.mark.parametrize("allocation", ["equal", "first_come"])
def test_total_samples_is_exact(mode: str, num_envs: int, total: int, allocation: str) -> None:
    task = make_task(num_envs, min(num_envs, 2), mode)
    with task.get_worker_pool() as pool:
        for _ in range(2):
            samples = task.collect_samples(None, pool, total, use_tqdm=False, allocation=allocation)
            assert samples.num_transitions == total
        assert pool.num_posted == 2 * total


def test_the_remainder_goes_round_the_environments() -> None:
    task = make_task(num_envs=3, workers=1)
    with task.get_worker_pool() as pool:
        counts = [
            torch.bincount(
                task.collect_samples(None, pool, 4, use_tqdm=False).to_tensordict()["env_id"],
                minlength=3,
            ).tolist()
            for _ in range(4)
        ]
    assert counts == [[2, 1, 1], [1, 2, 1], [1, 1, 2], [2, 1, 1]]


def test_flags_and_final_observations_stand_on_the_last_row_alone(mode: str) -> None:
    task = make_task(mode=mode, env=lambda: ScriptedEnv((A, B), "truncated", reuse_arrays=True))
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 40, use_tqdm=False)
    for piece in samples:
        td, length = piece.samples, (A, B)[int(piece.samples["env_id"][0])]
        at_end = td["step"] == length - 1
        assert torch.equal(td["next", "truncated"], at_end)
        assert torch.equal(td["next", "done"], at_end)
        assert not td["next", "terminated"].any()
        assert (td["next", "observation"][at_end, 0] % 100 == length).all()
        assert torch.equal(td["is_init"], td["step"] == 0)


def test_both_flags_at_once_are_kept() -> None:
    task = make_task(env=lambda: ScriptedEnv(3, "both"))
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 12, use_tqdm=False)
    last = samples[0].samples[-1]
    assert last["next", "terminated"]
    assert last["next", "truncated"]
    assert len(samples.episodes) == 4


def test_a_cut_by_max_trajectory_length_has_no_flag_and_its_episode_goes_on(mode: str) -> None:
    task = make_task(num_envs=1, workers=1, mode=mode)
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 6, max_trajectory_length=2, use_tqdm=False)
    assert [len(piece) for piece in samples] == [2, 1, 2, 1]
    ends = [bool(piece.samples["next", "terminated"][-1]) for piece in samples]
    assert ends == [False, True, False, True]
    assert rows(samples) == expected_rows(0, 6)
    assert [int(piece.samples["trajectory_id"][0]) for piece in samples] == [0, 0, 1, 1]


def test_the_environments_own_end_survives_a_cut_at_the_same_row() -> None:
    task = make_task(num_envs=1, workers=1)
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 6, max_trajectory_length=3, use_tqdm=False)
    assert all(bool(piece.samples["next", "terminated"][-1]) for piece in samples)


def test_short_pieces_are_left_out_and_counted() -> None:
    task = make_task()
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 14, min_trajectory_length=3, use_tqdm=False)
    # Environment 0: 3 + 3 + 1 (left out); environment 1: 5 + 2 (left out).
    assert [len(piece) for piece in samples] == [3, 3, 5]
    assert samples.num_dropped == 3
    assert samples.num_transitions + samples.num_dropped == 14


# ---- whole episodes ------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ["equal", "first_come"])
def test_whole_episodes_cut_nothing_and_begin_none_beyond_the_share(
    mode: str, allocation: str
) -> None:
    task = make_task(mode=mode)
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(
            None, pool, 8, whole_episodes=True, allocation=allocation, use_tqdm=False
        )
        assert all(bool(piece.samples["next", "done"][-1]) for piece in samples)
        assert samples.num_transitions >= 8
        if allocation == "equal":  # four rows each: two episodes of three, one of five
            assert [len(piece) for piece in samples] == [3, 3, 5]
        again = task.collect_samples(None, pool, 1, whole_episodes=True, use_tqdm=False)
    assert all(bool(piece.samples["is_init"][0]) for piece in again)


def test_whole_episodes_finish_one_that_was_open_and_count_it() -> None:
    task = make_task(num_envs=1, workers=1, env=lambda: ScriptedEnv(5))
    with task.get_worker_pool() as pool:
        task.collect_samples(None, pool, 2, use_tqdm=False)
        samples = task.collect_samples(None, pool, 3, whole_episodes=True, use_tqdm=False)
    assert [len(piece) for piece in samples] == [3]
    assert samples.episodes[0].length == 5


# ---- the generator -------------------------------------------------------------------------------


def test_closing_the_generator_loses_no_row(mode: str) -> None:
    task = make_task(mode=mode)
    with task.get_worker_pool() as pool:
        generator = task.iter_samples(None, pool, use_tqdm=False)
        first = [next(generator) for _ in range(3)]
        generator.close()
        assert pool.num_pending == 0
        rest = task.collect_samples(None, pool, 40, use_tqdm=False)
    everything = gymtask.MultiReplaySamples([*first, *rest])
    found = sorted(rows(everything))
    for env_id in (0, 1):
        mine = [row for row in found if row[0] == env_id]
        assert mine == expected_rows(env_id, len(mine))


def test_left_over_rows_beyond_the_total_wait_for_the_next_call() -> None:
    task = make_task(num_envs=1, workers=1, env=lambda: ScriptedEnv(10))
    with task.get_worker_pool() as pool:
        generator = task.iter_samples(None, pool, total_samples=30, use_tqdm=False)
        next(generator)
        generator.close()
        pool.memory.done_pieces  # noqa: B018 (the rows so far belong to the pool)
        posted = pool.num_posted
        sizes = [
            task.collect_samples(None, pool, 4, use_tqdm=False).num_transitions for _ in range(5)
        ]
    assert sizes == [4] * 5
    assert pool.num_posted - posted <= 20


def test_an_error_in_a_hook_loses_no_row() -> None:
    def postprocess(self: Any, trajectories: list[TensorDict]) -> list[TensorDict]:
        if self.fails:
            raise RuntimeError("boom")
        return trajectories

    task = make_task(postprocess_trajectories=postprocess)
    task.fails = True  # type: ignore[assignment]
    with task.get_worker_pool() as pool:
        with pytest.raises(RuntimeError, match="boom"):
            task.collect_samples(None, pool, 13, use_tqdm=False)
        task.fails = False  # type: ignore[assignment]
        samples = task.collect_samples(None, pool, 13, use_tqdm=False)
        assert pool.num_posted <= 14
    assert rows(samples)[:7] == expected_rows(0, 7) or len(rows(samples)) == 13


def test_reset_gives_open_rows_up_and_ids_go_on() -> None:
    task = make_task(num_envs=1, workers=1, env=lambda: ScriptedEnv(10))
    with task.get_worker_pool() as pool:
        generator = task.iter_samples(None, pool, max_trajectory_length=2, use_tqdm=False)
        next(generator)
        generator.close()
        pool.reset()
        samples = task.collect_samples(None, pool, 10, use_tqdm=False)
    assert samples[0].samples["trajectory_id"].unique().tolist() == [1]
    assert bool(samples[0].samples["is_init"][0])


def test_a_pool_stepped_by_hand_must_be_reset_first() -> None:
    task = make_task(num_envs=1, workers=1)
    with task.get_worker_pool() as pool:
        task.collect_samples(None, pool, 2, use_tqdm=False)
        pool.send([0])
        pool.recv()
        with pytest.raises(PoolStateError, match=r"stepped by hand.*pool.reset"):
            task.collect_samples(None, pool, 2, use_tqdm=False)


def test_two_collections_at_once_on_one_pool_are_refused() -> None:
    task = make_task(num_envs=1, workers=1)
    with task.get_worker_pool() as pool:
        generator = task.iter_samples(None, pool, use_tqdm=False)
        next(generator)
        with pytest.raises(PoolStateError, match="another collection is running"):
            task.collect_samples(None, pool, 2, use_tqdm=False)
        generator.close()
        task.collect_samples(None, pool, 2, use_tqdm=False)


def test_nothing_yielded_changes_later(mode: str) -> None:
    task = make_task(mode=mode)
    with task.get_worker_pool() as pool:
        generator = task.iter_samples(None, pool, use_tqdm=False)
        kept = [next(generator) for _ in range(4)]
        copies = [trajectory.clone() for trajectory in kept]
        for _ in range(6):
            next(generator)
        generator.close()
    for trajectory, copy in zip(kept, copies, strict=True):
        assert (trajectory == copy).all()
        assert not trajectory["next", "reward"].requires_grad


# ---- episodes ------------------------------------------------------------------------------------


def test_every_episode_is_recorded_whole_and_once(mode: str) -> None:
    task = make_task(mode=mode)
    with task.get_worker_pool() as pool:
        records = [
            episode
            for total in (7, 13, 40)
            for episode in task.collect_samples(None, pool, total, use_tqdm=False).episodes
        ]
    for env_id, length in enumerate((A, B)):
        mine = [record for record in records if record.env_id == env_id]
        assert len(mine) == 30 // length
        assert {record.length for record in mine} == {length}
        assert {record.episode_return for record in mine} == {length * (length + 1) / 2}
        assert [record.trajectory_id for record in mine] == [
            env_id + 2 * e for e in range(len(mine))
        ]
        assert all(record.terminated and not record.truncated for record in mine)


def test_trajectory_ids_are_never_reused(mode: str) -> None:
    task = make_task(num_envs=4, workers=2, mode=mode)
    with task.get_worker_pool() as pool:
        flat = torch.cat(
            [task.collect_samples(None, pool, 37, use_tqdm=False).to_tensordict() for _ in range(3)]
        )
    for number in flat["trajectory_id"].unique():
        mine = flat[flat["trajectory_id"] == number]
        assert mine["env_id"].unique().numel() == 1
        assert torch.equal(mine["step"], torch.arange(len(mine)))
        assert (mine["observation"][1:, 0] - mine["observation"][:-1, 0] == 1).all()


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"total_samples": 0}, r"`total_samples` must be an integer of at least 1, got 0"),
        (
            {"min_batch_size": 3},
            r"`min_batch_size` must be at most the number of environments \(2\), got 3",
        ),
        (
            {"min_batch_size": 2, "max_batch_size": 1},
            r"`min_batch_size` must be at most max_batch_size \(1\), got 2",
        ),
        ({"max_wait_time": -1.0}, r"`max_wait_time` must be a number of at least 0, got -1.0"),
        (
            {"min_trajectory_length": 5, "max_trajectory_length": 2},
            r"`min_trajectory_length` must be at most max_trajectory_length \(2\), got 5",
        ),
        ({"allocation": "fair"}, r"`allocation` must be one of 'equal', 'first_come', got 'fair'"),
        (
            {"whole_episodes": True},
            r"`total_samples` must be set with whole_episodes=True, got None",
        ),
        (
            {"whole_episodes": True, "total_samples": 5, "max_trajectory_length": 2},
            r"`max_trajectory_length` must be None with whole_episodes=True",
        ),
    ],
)
def test_a_bad_argument_is_named_when_iter_samples_is_called(
    keywords: dict[str, Any], message: str
) -> None:
    task = make_task()
    with task.get_worker_pool() as pool:
        with pytest.raises(ConfigurationError, match=message):
            task.iter_samples(None, pool, **keywords)
        assert not pool.was_reset  # nothing has moved


def test_the_bar_is_shown_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    task = make_task()
    with task.get_worker_pool() as pool:
        task.collect_samples(None, pool, 10, use_tqdm=False)
        assert capsys.readouterr().err == ""
        task.collect_samples(None, pool, 10)
        assert "collect" in capsys.readouterr().err


class Mlp(nn.Sequential):
    """A model with parts in both modes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))


def test_the_policy_runs_in_eval_mode_without_gradients_and_modes_are_put_back() -> None:
    seen = []

    def get_actions(self: Any, model: nn.Module, states: TensorDict, optimal: bool) -> Tensor:
        seen.append((model.training, torch.is_grad_enabled(), optimal))
        return model(states["observation"]).argmax(-1)

    task, model = make_task(get_actions=get_actions), Mlp()
    model[2].eval()
    with task.get_worker_pool() as pool:
        generator = task.iter_samples(model, pool, use_tqdm=False)
        next(generator)
        assert [part.training for part in model] == [True, True, False]  # also while it yields
        assert torch.is_grad_enabled()
        generator.close()
        task.collect_samples(model, pool, 10, optimal=True, use_tqdm=False)
    assert [part.training for part in model] == [True, True, False]
    assert {entry[:2] for entry in seen} == {(False, False)}
    assert [seen[0][2], seen[-1][2]] == [False, True]


def collect_for_ever(task: gymtask.ReinforcementLearningTask, pool: gymtask.WorkerPool) -> None:
    while True:
        task.collect_samples(None, pool, 500, use_tqdm=False)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_ctrl_c_at_any_moment_ends_a_loop_of_ones_own_and_leaves_no_step_waited_for(
    mode: str,
) -> None:
    rounds = 0

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        return torch.zeros(len(states), dtype=torch.int64)

    for delay in (0.003, 0.0071, 0.011, 0.0173):
        task = make_task(num_envs=4, workers=4, mode=mode, get_actions=get_actions)
        pool = task.get_worker_pool()
        timer = threading.Timer(0.05 + delay, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            collect_for_ever(task, pool)
        timer.join()
        rounds += pool.closed or pool.num_pending == 0
        pool.close()
    assert rounds == 4


def test_first_come_begins_no_more_episodes_than_the_sum_needs() -> None:
    task = make_task(num_envs=5, workers=1, env=lambda: ScriptedEnv(10))
    keywords = {"whole_episodes": True, "allocation": "first_come", "use_tqdm": False}
    with task.get_worker_pool() as pool:
        assert task.collect_samples(None, pool, 1, **keywords).num_transitions == 10


def test_a_reset_in_the_middle_of_a_collection_is_an_error_and_no_wrong_row() -> None:
    task = make_task(num_envs=1, workers=1, env=lambda: ScriptedEnv(4))
    with task.get_worker_pool() as pool:
        generator = task.iter_samples(None, pool, use_tqdm=False)
        next(generator)
        while pool.num_pending:
            pool.take(1, 1)
        pool.reset()
        with pytest.raises(PoolStateError, match="the pool was reset meanwhile"):
            next(generator)


def test_episodes_are_ordered_by_environment_and_time_whatever_the_timing() -> None:
    env = lambda: ScriptedEnv(2, seconds=(0.02, 0.0))  # noqa: E731
    task = make_task(num_envs=2, workers=2, mode="thread", env=env)
    with task.get_worker_pool() as pool:
        episodes = task.collect_samples(None, pool, 8, use_tqdm=False).episodes
    assert [episode.env_id for episode in episodes] == [0, 0, 1, 1]


def test_rows_dropped_by_a_collection_that_fails_are_not_lost() -> None:
    calls = 0

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise RuntimeError("boom")
        return torch.zeros(len(states), dtype=torch.int64)

    task = make_task(env=lambda: ScriptedEnv((2, 50)), get_actions=get_actions)
    with task.get_worker_pool() as pool:
        with pytest.raises(RuntimeError, match="boom"):
            task.collect_samples(None, pool, 20, min_trajectory_length=3, use_tqdm=False)
        samples = task.collect_samples(None, pool, 20, use_tqdm=False)
    assert samples[0].samples["observation"][0, 0] == 0
    assert samples.num_transitions == 20


def test_counts_may_be_numpy_integers() -> None:
    task = make_task()
    with task.get_worker_pool() as pool:
        total = np.int64(6)
        assert task.collect_samples(None, pool, total, use_tqdm=False).num_transitions == 6
