"""What `get_actions`, `get_values` and `get_initial_carry` see, and what they may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

import gymtask
from gymtask.errors import ActionError, HookError
from gymtask.testing import ScriptedEnv
from tests.tasks import A, B, collect, make_task


def answering(function: Any) -> dict[str, Any]:
    """`get_actions` that returns function(states)."""
    return {"get_actions": lambda self, model, states, optimal: function(states)}


# ---- states --------------------------------------------------------------------------------------


def test_states_tell_where_each_environment_stands(mode: str) -> None:
    seen: list[TensorDict] = []

    def look(states: TensorDict) -> Tensor:
        seen.append(states.clone())
        return torch.zeros(len(states), dtype=torch.int64)

    task = make_task(mode=mode, **answering(look))
    with task.get_worker_pool() as pool:
        for total in (12, 8):
            task.collect_samples(None, pool, total, use_tqdm=False)
    states = torch.cat(seen)
    for env_id, length in enumerate((A, B)):
        mine = states[states["env_id"] == env_id]
        run_step = torch.arange(10)
        assert torch.equal(mine["run_step"], run_step)
        assert torch.equal(mine["step"], run_step % length)
        assert torch.equal(mine["is_init"], run_step % length == 0)
        assert torch.equal(mine["trajectory_id"], env_id + 2 * (run_step // length))
        count = 100 * (run_step // length) + run_step % length
        assert torch.equal(mine["observation"][:, 0], count.float())


def test_returned_tensors_that_share_the_storage_of_states_are_copied() -> None:
    def act(states: TensorDict) -> TensorDict:
        shared = {"action": states["is_init"].long(), "seen": states["observation"]}
        return TensorDict({**shared, "count": states["run_step"]}, batch_size=states.batch_size)

    flat = collect(make_task(**answering(act)), 20).to_tensordict()
    assert torch.equal(flat["seen"], flat["observation"])
    assert torch.equal(flat["count"][:10], torch.arange(10))


def test_debug_mode_makes_a_kept_reference_fail_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[TensorDict] = []

    def act(states: TensorDict) -> Tensor:
        kept.append(states)
        return states["is_init"].long()

    plain = collect(make_task(**answering(act)), 20).to_tensordict()
    assert not kept[0]["observation"].isnan().any()
    kept.clear()
    monkeypatch.setenv("GYMTASK_DEBUG", "1")
    debugged = collect(make_task(**answering(act)), 20).to_tensordict()
    assert kept[0]["observation"].isnan().all()
    assert (kept[0]["step"] == torch.iinfo(torch.int64).max).all()
    assert (plain == debugged).all()  # what is stored is the same


# ---- what it may return --------------------------------------------------------------------------


def test_whatever_else_is_returned_becomes_part_of_the_rows(mode: str) -> None:
    def act(states: TensorDict) -> TensorDict:
        n = len(states)
        extra = {
            "log_prob": -states["run_step"].float(),
            "nested": {"x": states["env_id"][:, None]},
        }
        return TensorDict({"action": torch.zeros(n, dtype=torch.int64), **extra}, batch_size=[n])

    flat = collect(make_task(mode=mode, **answering(act)), 20).to_tensordict()
    assert torch.equal(flat["log_prob"], -torch.arange(10.0).repeat(2))
    assert torch.equal(flat["nested", "x"][:, 0], flat["env_id"])


def test_a_tensordict_module_that_writes_into_states_works_and_leaves_no_key_behind() -> None:
    class Net(nn.Module):
        def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
            return observation[:, 0].long() % 2, observation * 2

    module = TensorDictModule(Net(), in_keys=["observation"], out_keys=["action", "logits"])
    keys: list[set[str]] = []

    def act(states: TensorDict) -> Any:
        keys.append(set(states.keys()))
        return module(states)

    flat = collect(make_task(**answering(act)), 20).to_tensordict()
    assert torch.equal(flat["logits"], flat["observation"] * 2)
    assert torch.equal(flat["action"], flat["observation"][:, 0].long() % 2)
    assert len({frozenset(each) for each in keys}) == 1
    assert "action" not in keys[-1]


def test_a_policy_that_replaces_or_adds_keys_of_states_sees_true_states_in_the_next_call() -> None:
    seen: list[float] = []

    def act(states: TensorDict) -> Tensor:
        seen.append(float(states["observation"][0, 0]))
        states["observation"] = states["observation"] / 10
        states["extra"] = states["observation"] * 2
        states["step"] = torch.full_like(states["step"], 7)
        return torch.zeros(len(states), dtype=torch.int64)

    task = make_task(num_envs=1, workers=1, env=lambda: ScriptedEnv(9), **answering(act))
    flat = collect(task, 6).to_tensordict()
    assert seen == [0, 1, 2, 3, 4, 5]
    assert flat["observation"][:, 0].tolist() == seen
    assert flat["step"].tolist() == seen


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda s: None, HookError, "must return a Tensor or a TensorDict, got NoneType"),
        (
            lambda s: np.zeros(2, int),
            HookError,
            "must return a Tensor or a TensorDict, got ndarray",
        ),
        (lambda s: torch.zeros(2), ActionError, r"dtype that can be cast to torch.int64.*float32"),
        (
            lambda s: torch.zeros(3, dtype=torch.int64),
            ActionError,
            r"`action` must have shape \(2,\) for 2 environments, got \(3,\)",
        ),
        (
            lambda s: torch.zeros(2, 2, dtype=torch.int64),
            ActionError,
            r"`action` must have shape \(2,\) for 2 environments, got \(2, 2\)",
        ),
        (
            lambda s: torch.tensor([0, 2]),
            ActionError,
            r"`action` must lie in 0 to 1.*got \[0, 2\]",
        ),
        (lambda s: torch.tensor([0, -1]), ActionError, r"`action` must lie in 0 to 1"),
        (
            lambda s: TensorDict({"logits": torch.zeros(2, 2)}, batch_size=[2]),
            ActionError,
            r'must return an "action", got only the keys \[.logits.\]',
        ),
        (
            lambda s: TensorDict(
                {"action": torch.zeros(2, dtype=torch.int64), "step": s["step"]}, [2]
            ),
            HookError,
            r"reserved keys \[.step.\]",
        ),
        (
            lambda s: TensorDict({"action": torch.zeros(3, dtype=torch.int64)}, batch_size=[3]),
            ActionError,
            r"batch size \[2\], got \[3\]",
        ),
    ],
)
def test_a_wrong_answer_is_named_before_any_environment_moves(
    mode: str, function: Any, error: type[Exception], message: str
) -> None:
    task = make_task(mode=mode, **answering(function))
    with task.get_worker_pool() as pool:
        with pytest.raises(error, match=message):
            task.collect_samples(None, pool, 10, use_tqdm=False)
        assert pool.get_attr("life") == (0, 0)
        assert pool.num_posted == 0


def test_extras_must_keep_their_keys_shapes_and_dtypes() -> None:
    def act(states: TensorDict) -> TensorDict:
        n, late = len(states), bool(states["run_step"][0] > 2)
        width = 3 if late else 2
        return TensorDict(
            {"action": torch.zeros(n, dtype=torch.int64), "x": torch.zeros(n, width)}, [n]
        )

    with pytest.raises(HookError, match=r"`x` from `get_actions` must keep its shape \(2,\)"):
        collect(make_task(**answering(act)), 20)


# ---- values --------------------------------------------------------------------------------------


def test_values_are_those_of_each_state_and_of_the_true_next_one(mode: str) -> None:
    calls = []

    def get_values(self: Any, model: Any, states: TensorDict) -> Tensor:
        calls.append(states.clone())
        return states["observation"][:, 0] * 2

    task = make_task(mode=mode, get_values=get_values)
    samples = collect(task, 20)
    flat = samples.to_tensordict()
    assert len(calls) == 1  # one pass over the whole collection
    assert len(calls[0]) == 20 + len(samples)
    assert torch.equal(flat["state_value"], flat["observation"][:, 0] * 2)
    assert torch.equal(flat["next", "state_value"], flat["next", "observation"][:, 0] * 2)
    # The state after a piece's last row: one step on, and no beginning.
    last = len(samples[0])
    assert calls[0]["step"][last] == samples[0].samples["step"][-1] + 1
    assert not calls[0]["is_init"][last]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (lambda s: torch.zeros(len(s), 1), r"torch.float32 \(\d+, 1\)"),
        (lambda s: torch.zeros(len(s), dtype=torch.int64), "torch.int64"),
        (lambda s: None, "NoneType"),
    ],
)
def test_values_of_a_wrong_shape_or_type_are_refused(values: Any, found: str) -> None:
    task = make_task(get_values=lambda self, model, states: values(states))
    with pytest.raises(HookError, match=rf"`get_values` must return a float tensor.*got {found}"):
        collect(task, 10)


# ---- recurrent policies --------------------------------------------------------------------------


def counting_carry(**change: Any) -> dict[str, Any]:
    """A policy that counts its own steps in its carry, from 10 on at each episode's start."""

    def get_initial_carry(self: Any, model: Any) -> TensorDict:
        return TensorDict({"memory": {"count": torch.tensor([10.0])}}, batch_size=[])

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
        following = {"memory": {"count": states["memory", "count"] + 1}}
        action = torch.zeros(len(states), dtype=torch.int64)
        return TensorDict({"action": action, "next": following}, batch_size=[len(states)])

    return {"get_initial_carry": get_initial_carry, "get_actions": get_actions, **change}


def test_a_carry_begins_anew_with_each_episode_and_survives_cuts(mode: str) -> None:
    task = make_task(mode=mode, **counting_carry())
    with task.get_worker_pool() as pool:
        parts = [task.collect_samples(None, pool, total, use_tqdm=False) for total in (7, 13)]
    for samples in parts:
        flat = samples.to_tensordict()
        step = flat["step"].float()
        assert torch.equal(flat["memory", "count"][:, 0], 10 + step)
        assert torch.equal(flat["next", "memory", "count"][:, 0], 11 + step)


def test_a_carry_that_is_not_returned_or_of_another_shape_is_refused() -> None:
    missing = counting_carry(**answering(lambda s: s["is_init"].long()))
    with pytest.raises(HookError, match=r'"action" and \("next", key\) for each carry'):
        collect(make_task(**missing), 4)

    def wide(states: TensorDict) -> TensorDict:
        following = {"memory": {"count": torch.zeros(len(states), 2)}}
        action = torch.zeros(len(states), dtype=torch.int64)
        return TensorDict({"action": action, "next": following}, batch_size=[len(states)])

    with pytest.raises(HookError, match=r"memory/count.* must have shape \(2, 1\)"):
        collect(make_task(**counting_carry(**answering(wide))), 4)


def test_a_carry_returned_under_its_own_key_is_refused_and_so_are_taken_names() -> None:
    def own_key(states: TensorDict) -> TensorDict:
        action = torch.zeros(len(states), dtype=torch.int64)
        memory = {"count": states["memory", "count"] + 1}
        content = {"action": action, "memory": memory, "next": {"memory": memory}}
        return TensorDict(content, batch_size=[len(states)])

    with pytest.raises(HookError, match=r"must not return the reserved keys \['memory'\]"):
        collect(make_task(**counting_carry(**answering(own_key))), 4)
    for name in ("reward", "done", "info", "observation"):
        carry = TensorDict({name: torch.zeros(1)}, batch_size=[])
        hooks = {"get_initial_carry": lambda self, model, carry=carry: carry}
        with pytest.raises(HookError, match=f"must not return the reserved key '{name}'"):
            collect(make_task(**hooks), 4)


def test_a_carry_must_keep_its_shape_from_one_collection_to_the_next() -> None:
    task = make_task(**counting_carry())
    with task.get_worker_pool() as pool:
        task.collect_samples(None, pool, 4, use_tqdm=False)
        wide = TensorDict({"memory": {"count": torch.zeros(3)}}, batch_size=[])
        type(task).get_initial_carry = lambda self, model: wide  # type: ignore[method-assign]
        with pytest.raises(HookError, match=r"must keep its shape \(1,\).*call pool.reset"):
            task.collect_samples(None, pool, 4, use_tqdm=False)


# ---- batches and partial batches ----------------------------------------------------------------


@pytest.mark.parametrize("max_batch_size", [1, 2, 3])
def test_no_batch_is_larger_than_max_batch_size(mode: str, max_batch_size: int) -> None:
    sizes: list[int] = []

    def act(states: TensorDict) -> Tensor:
        sizes.append(len(states))
        return torch.zeros(len(states), dtype=torch.int64)

    task = make_task(num_envs=5, workers=3, mode=mode, **answering(act))
    assert collect(task, 45, max_batch_size=max_batch_size).num_transitions == 45
    assert max(sizes) <= max_batch_size


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_slow_environments_do_not_hold_up_the_rest_with_first_come(mode: str) -> None:
    env = lambda: ScriptedEnv(50, seconds=(0.0, 0.2))  # noqa: E731
    task = make_task(num_envs=2, workers=2, mode=mode, env=env)
    counts = torch.bincount(collect(task, 60, allocation="first_come").to_tensordict()["env_id"])
    assert counts[0] > 3 * counts[1]


def test_replies_out_of_order_are_matched_to_their_environment(mode: str) -> None:
    seconds = (0.0, 0.001, 0.003, 0.006)

    def act(states: TensorDict) -> Tensor:
        return (states["env_id"] * 7 + states["run_step"]) % 5

    env = lambda: ScriptedEnv(9, num_actions=5, seconds=seconds)  # noqa: E731
    task = make_task(num_envs=4, workers=4, mode=mode, env=env, **answering(act))
    flat = collect(
        task, 400, min_batch_size=1, max_batch_size=3, allocation="first_come"
    ).to_tensordict()
    assert torch.equal(flat["next", "observation"][:, 1], flat["env_id"].float())
    assert torch.equal(flat["next", "observation"][:, 2], flat["action"].float())


def test_max_wait_time_flushes_a_batch_that_does_not_fill() -> None:
    sizes: list[int] = []

    def act(states: TensorDict) -> Tensor:
        sizes.append(len(states))
        return torch.zeros(len(states), dtype=torch.int64)

    env = lambda: ScriptedEnv(50, seconds=(0.0, 0.5))  # noqa: E731
    task = make_task(num_envs=2, workers=2, mode="thread", env=env, **answering(act))
    collect(task, 8, min_batch_size=2, max_wait_time=0.05, allocation="first_come")
    assert 1 in sizes[1:]


def test_the_last_batches_of_a_call_come_although_min_batch_size_cannot_fill(mode: str) -> None:
    task = make_task(num_envs=3, workers=3, mode=mode)
    assert collect(task, 10, min_batch_size=3).num_transitions == 10


# ---- hooks ---------------------------------------------------------------------------------------


def test_hooks_that_are_not_overridden_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("called")

    base = gymtask.ReinforcementLearningTask
    task = make_task()
    for hook in ("get_values", "get_initial_carry", "postprocess_trajectory"):
        monkeypatch.setattr(base, hook, fail)
    assert collect(task, 10).num_transitions == 10


def test_postprocessing_sees_pieces_in_order_and_its_keys_are_kept(mode: str) -> None:
    seen: list[list[int]] = []

    def one(self: Any, trajectory: TensorDict) -> TensorDict:
        trajectory["count"] = torch.arange(len(trajectory))
        return trajectory

    def everything(self: Any, trajectories: list[TensorDict]) -> list[TensorDict]:
        seen.append([int(each["trajectory_id"][0]) for each in trajectories])
        rows = torch.cat(trajectories)
        rows["double"] = rows["count"] * 2
        return list(rows.split([len(each) for each in trajectories]))

    hooks = {"postprocess_trajectory": one, "postprocess_trajectories": everything}
    samples = collect(make_task(mode=mode, **hooks), 20)
    assert seen == [[0, 2, 4, 6, 1, 3]]
    for piece in samples:
        assert torch.equal(piece.samples["double"], 2 * torch.arange(len(piece)))


@pytest.mark.parametrize(
    ("hook", "function", "message"),
    [
        ("postprocess_trajectory", lambda self, t: None, "must return a TensorDict, got NoneType"),
        ("postprocess_trajectory", lambda self, t: t[:-1], "must keep the length of a trajectory"),
        ("postprocess_trajectories", lambda self, ts: None, "must return a list of TensorDicts"),
        ("postprocess_trajectories", lambda self, ts: ts[1:], "must keep the number"),
        (
            "postprocess_trajectories",
            lambda self, ts: [ts[1], ts[0], *ts[2:]],
            "must keep the order",
        ),
    ],
)
def test_a_hook_that_breaks_its_contract_is_named(hook: str, function: Any, message: str) -> None:
    with pytest.raises(HookError, match=rf"`{hook}` {message}"):
        collect(make_task(**{hook: function}), 20)


def test_an_environment_in_this_process_may_use_gradients(mode: str) -> None:
    class Differentiable(ScriptedEnv):
        def step(self, action: Any) -> Any:
            x = torch.ones(1, requires_grad=True)
            (x * 3).sum().backward()
            observation, _, *rest = super().step(action)
            return observation, float(x.grad), *rest

    flat = collect(make_task(mode=mode, env=Differentiable), 8).to_tensordict()
    assert (flat["next", "reward"] == 3).all()
