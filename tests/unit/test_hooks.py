"""What the postprocess hooks of a task may do to trajectories."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_leaf_nontensor

import gymtask
from gymtask.errors import HookError
from tests.tasks import collect
from tests.unit.scripted_tasks import informed, scripted, scripted_task


def hooked(
    *,
    one: Callable[[TensorDict], Any] | None = None,
    many: Callable[[list[TensorDict]], Any] | None = None,
    environment: gymtask.Environment | None = None,
) -> gymtask.ReinforcementLearningTask:
    """A task with these hooks."""
    hooks = {}
    if one is not None:
        hooks["postprocess_trajectory"] = lambda self, trajectory: one(trajectory)
    if many is not None:
        hooks["postprocess_trajectories"] = lambda self, trajectories: many(trajectories)
    return scripted_task(environment, **hooks)


ONE = "`postprocess_trajectory` must "
MANY = "`postprocess_trajectories` must "
LIST = MANY + "return a list of TensorDicts, got "


class TestHooks:
    @pytest.mark.parametrize(
        ("hook", "text"),
        [
            (
                lambda rows: None,
                ONE + "return a TensorDict, got NoneType; does it end with `return trajectory`?",
            ),
            (lambda rows: rows["step"], ONE + "return a TensorDict, got Tensor"),
            (lambda rows: dict(rows.items()), ONE + "return a TensorDict, got dict"),
            (
                lambda rows: rows[:-1],
                ONE + "keep the length of a trajectory, 3, got batch size (2,)",
            ),
            (
                lambda rows: torch.cat([rows, rows]),
                ONE + "keep the length of a trajectory, 3, got batch size (6,)",
            ),
            (
                lambda rows: rows.unsqueeze(0),
                ONE + "keep the length of a trajectory, 3, got batch size (1, 3)",
            ),
            (
                lambda rows: rows.unsqueeze(-1),
                ONE + "keep the length of a trajectory, 3, got batch size (3, 1)",
            ),
        ],
        ids=["None", "tensor", "dict", "shorter", "longer", "before time", "after time"],
    )
    def test_a_trajectory_of_another_kind_or_length_is_refused(
        self, hook: Callable[[TensorDict], Any], text: str
    ) -> None:
        task = hooked(one=hook)
        with task.get_worker_pool() as pool:
            with pytest.raises(HookError, match=f"^{re.escape(text)}$"):
                task.collect_samples(None, pool, 16, use_tqdm=False)
            pool.reset()
            with pytest.raises(HookError, match=f"^{re.escape(text)}$"):
                next(task.iter_samples(None, pool, total_samples=16, use_tqdm=False))

    @pytest.mark.parametrize(
        ("hook", "text"),
        [
            (lambda many: None, LIST + "NoneType; does it end with `return trajectories`?"),
            (torch.cat, LIST + "TensorDict"),
            (iter, LIST + "list_iterator"),
            (lambda many: many[:-1], MANY + "keep the number of trajectories, 5, got 4"),
            (lambda many: [*many, many[0]], MANY + "keep the number of trajectories, 5, got 6"),
            (lambda many: [torch.cat(many)], MANY + "keep the number of trajectories, 5, got 1"),
            (lambda many: [None] * 5, MANY + "return a TensorDict, got NoneType"),
            (
                lambda many: [*many[:4], many[4][:2]],
                MANY + "keep the length of a trajectory, 3, got batch size (2,)",
            ),
            (
                lambda many: [many[1], many[0], *many[2:]],
                MANY + "keep the order of trajectories, got one that begins with trajectory_id [2]"
                " at place 0, where [0] stood",
            ),
        ],
        ids=[
            "None",
            "joined",
            "iterator",
            "fewer",
            "more",
            "one",
            "list of None",
            "shorter",
            "order",
        ],
    )
    def test_a_list_of_another_number_order_or_length_is_refused(
        self, hook: Callable[[list[TensorDict]], Any], text: str
    ) -> None:
        with pytest.raises(HookError, match=f"^{re.escape(text)}"):
            collect(hooked(many=hook), 16)

    def test_pieces_of_one_episode_cannot_change_places_either(self) -> None:
        task = hooked(many=lambda many: [many[1], many[0], *many[2:]], environment=scripted(4))
        text = "begins with step [2] at place 0, where [0] stood"
        with pytest.raises(HookError, match=re.escape(text)):
            collect(task, 7, max_trajectory_length=2)

    def test_keys_may_be_added_changed_and_taken_away(self) -> None:
        def one(rows: TensorDict) -> TensorDict:
            rows["twice"] = rows["next", "reward"] * 2
            rows["next", "reward"] = rows["next", "reward"].double()
            del rows["is_init"]
            del rows["trajectory_id"]
            return rows

        def many(pieces: list[TensorDict]) -> tuple[TensorDict, ...]:
            for number, rows in enumerate(pieces):
                rows["number"] = torch.full((len(rows),), number)
                del rows["step"]
            return tuple(pieces)

        samples = collect(hooked(one=one, many=many), 16)
        rows = samples.to_tensordict()
        assert rows["next", "reward"].dtype == torch.float64
        assert torch.equal(rows["twice"].double(), rows["next", "reward"] * 2)
        assert rows["number"].tolist() == [0] * 3 + [1] * 3 + [2] * 2 + [3] * 5 + [4] * 3
        assert not {"is_init", "step", "trajectory_id"} & set(rows.keys())

    def test_one_pass_over_all_and_split_again(self) -> None:
        def many(pieces: list[TensorDict]) -> Any:
            rows = torch.cat(pieces)
            rows["total"] = rows["next", "reward"].cumsum(0)
            return list(rows.split([len(piece) for piece in pieces]))

        rows = collect(hooked(many=many), 16).to_tensordict()
        assert torch.equal(rows["total"], rows["next", "reward"].cumsum(0))

    def test_a_lazy_stack_is_taken(self) -> None:
        def one(rows: TensorDict) -> Any:
            return LazyStackedTensorDict.lazy_stack([row.clone() for row in rows])

        plain = collect(scripted_task(), 16).to_tensordict()
        assert (collect(hooked(one=one), 16).to_tensordict() == plain).all()
        task = hooked(one=one)
        with task.get_worker_pool() as pool:
            samples = next(task.iter_samples(None, pool, total_samples=16, use_tqdm=False))
        assert isinstance(samples, TensorDict)

    def test_rows_are_not_lost_when_a_hook_raises(self) -> None:
        def one(rows: TensorDict) -> TensorDict | None:
            return rows if fixed else None

        fixed = False
        task = hooked(one=one)
        with task.get_worker_pool() as pool:
            with pytest.raises(HookError):
                task.collect_samples(None, pool, 16, use_tqdm=False)
            fixed = True
            rows = task.collect_samples(None, pool, 16, use_tqdm=False).to_tensordict()
        assert (rows == collect(scripted_task(), 16).to_tensordict()).all()

    def test_non_tensor_data_reaches_the_hooks(self) -> None:
        def one(rows: TensorDict) -> TensorDict:
            names = rows["next", "info"].get("s").tolist()
            assert all(name in ("odd", "even") for name in names)
            seen.extend(names)
            return rows

        seen: list[str] = []
        environment = informed(
            lambda number, step: {"s": "odd" if step % 2 else "even"}, info_keys=("s",)
        )
        task = hooked(one=one, environment=environment)
        samples = collect(task, 8)
        assert seen == ["odd", "even"] * 4
        keys = samples.to_tensordict().keys(True, True, is_leaf=is_leaf_nontensor)
        assert ("next", "info", "s") in keys
