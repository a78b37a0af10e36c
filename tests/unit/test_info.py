"""The columns of a trajectory that hold what environments put into their info dicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack

import gymtask
from gymtask.tape import Piece
from gymtask.testing import ScriptedEnv
from gymtask.trajectory import assemble
from tests.tasks import collect
from tests.unit.scripted_tasks import informed, scripted_task


def piece_of(infos: Sequence[dict[str, Any]]) -> Piece:
    length = len(infos)
    rows = {("next", name): np.zeros(length, bool) for name in ("terminated", "truncated")}
    states = {("observation",): np.zeros((length + 1, 1), np.float32)}
    rows["next", "reward"] = np.zeros(length)
    return Piece.from_arrays(states, rows, infos=infos)


def column(values: Sequence[Any]) -> tuple[Any, list[bool]]:
    """The column of a key whose values are these; `...` stands for a step without the key."""
    infos = [{} if value is ... else {"x": value} for value in values]
    info = assemble([piece_of(infos)], ["x"])["next", "info"]
    return info.get("x"), info["_x"].tolist()


class TestInfoColumns:
    def test_a_missing_float_is_nan_and_masked(self) -> None:
        """O-33."""
        found, mask = column([..., 1.5, np.float64(0.0), ...])
        assert found.dtype == torch.float32
        assert mask == [False, True, True, False]
        assert found.isnan().tolist() == [True, False, False, True]
        assert found[mask].tolist() == [1.5, 0.0]

    def test_a_missing_integer_or_bool_is_masked(self) -> None:
        found, mask = column([2**62 + 1, ..., np.int8(-3)])
        assert (found.dtype, found.tolist()) == (torch.int64, [2**62 + 1, 0, -3])
        assert mask == [True, False, True]
        found, mask = column([True, ..., np.bool_(False)])
        assert (found.dtype, found.tolist()) == (torch.bool, [True, False, False])
        assert mask == [True, False, True]

    def test_integers_among_floats_become_floats(self) -> None:
        found, _ = column([1, 2.5, ...])
        assert found.dtype == torch.float32
        assert found[:2].tolist() == [1.0, 2.5]

    def test_arrays_and_lists_of_one_shape_become_a_tensor(self) -> None:
        found, mask = column([np.array([1.0, 2.0]), ..., [3, 4]])
        assert (found.dtype, found.shape) == (torch.float32, (3, 2))
        assert found[[0, 2]].tolist() == [[1, 2], [3, 4]]
        assert found[1].isnan().all()
        assert mask == [True, False, True]
        found, _ = column([torch.tensor([1, 2], dtype=torch.int32), ...])
        assert (found.dtype, found.tolist()) == (torch.int64, [[1, 2], [0, 0]])

    @pytest.mark.parametrize(
        "values",
        [
            ["hi", ..., "hello"],
            ["hi", "hi"],
            [{"a": 1}, ..., {"a": 2}],
            [[1], [1, 2], ...],
            [[[1], [1, 2]]],
            ["hi", 1],
            [2**64 - 1, 1],
            [2**70, 1],
            [None, "hi"],
        ],
        ids=str,
    )
    def test_anything_else_is_kept_as_it_is_with_none_where_it_is_missing(
        self, values: list[Any]
    ) -> None:
        found, mask = column(values)
        assert isinstance(found, NonTensorStack)
        assert found.batch_size == torch.Size([len(values)])
        assert found.tolist() == [None if value is ... else value for value in values]
        assert mask == [value not in (..., None) for value in values]

    def test_a_key_that_never_appears_is_nan(self) -> None:
        found, mask = column([..., ...])
        assert found.isnan().tolist() == [True, True]
        assert mask == [False, False]

    def test_keys_that_were_not_asked_for_are_left_out(self) -> None:
        assert "info" not in assemble([piece_of([{"x": 1}])], [])["next"].keys()  # noqa: SIM118

    def test_all_pieces_of_one_collection_have_columns_of_one_kind(self) -> None:
        pieces = [piece_of(infos) for infos in ([{}, {}], [{"x": 1}], [{}, {"x": 2}])]
        found = assemble(pieces, ["x"])["next", "info"]
        assert found["x"].tolist() == [0, 0, 1, 0, 2]
        assert found["_x"].tolist() == [False, False, True, False, True]


class TestInfosOfEnvironments:
    def test_one_gives_a_key_and_the_other_none(self, mode: str) -> None:
        """O-33."""
        environment = informed(
            lambda number, step: {"x": 1.5, "s": "hi"} if (number, step) == (0, 2) else {},
            info_keys=("x", "s"),
        )
        samples = collect(scripted_task(environment, mode), 12)
        info = samples.to_tensordict()["next", "info"]
        given = [k == 1 for k in range(12)]
        assert info["_x"].tolist() == info["_s"].tolist() == given
        assert info["x"][given].tolist() == [1.5]
        assert info["x"].isnan().tolist() == [not flag for flag in given]
        assert info.get("s").tolist() == ["hi" if flag else None for flag in given]
        joined = torch.cat([piece.samples for piece in samples])
        assert joined["next", "info"].get("s").tolist() == info.get("s").tolist()

    def test_a_key_that_first_appears_late(self, mode: str) -> None:
        """O-33: no value leaks into rows before it, and later calls go on."""
        environment = informed(
            lambda number, step: {"late": number * 1000 + step} if step > 9 else {},
            info_keys=("late",),
        )
        task = scripted_task(environment, mode)
        with task.get_worker_pool() as pool:
            with pytest.warns(UserWarning, match=r"got \['late'\], which no step has given"):
                first = task.collect_samples(None, pool, 16, use_tqdm=False).to_tensordict()
            second = task.collect_samples(None, pool, 16, use_tqdm=False).to_tensordict()
        assert not first["next", "info", "_late"].any()
        assert first["next", "info", "late"].isnan().all()
        info = second["next", "info"]
        assert info["_late"].tolist() == ([False] + [True] * 7) * 2
        assert info["late"][1:8].tolist() == list(range(10, 17))
        assert info["late"][9:].tolist() == list(range(1010, 1017))

    def test_a_key_that_no_step_gives_is_warned_of_once_when_an_episode_has_ended(
        self, mode: str
    ) -> None:
        environment = informed(lambda number, step: {"lives": 3}, info_keys=("live", "lives"))
        task = scripted_task(environment, mode)
        with task.get_worker_pool() as pool:
            task.collect_samples(None, pool, 6, use_tqdm=False)  # no episode has ended: who knows
            with pytest.warns(UserWarning, match="live") as caught:
                samples = task.collect_samples(None, pool, 6, use_tqdm=False)
            assert not samples.to_tensordict()["next", "info", "_live"].any()
            pool.reset()
            task.collect_samples(None, pool, 12, use_tqdm=False)
        (warning,) = caught
        assert str(warning.message).startswith(
            "`info_keys` must be keys of the info dicts that steps of Informed give, got ['live'],"
        )
        assert warning.filename == __file__

    def test_a_key_that_no_step_gives_is_warned_of_by_the_generator_too(self, mode: str) -> None:
        task = scripted_task(informed(lambda number, step: {}, info_keys=("lives",)), mode)
        with task.get_worker_pool() as pool, pytest.warns(UserWarning, match="lives") as caught:
            for _ in task.iter_samples(None, pool, total_samples=20, use_tqdm=False):
                pass
        assert [warning.filename for warning in caught] == [__file__]

    def test_a_key_of_episode_ends_is_not_warned_of_before_or_after_one(self, mode: str) -> None:
        environment = informed(
            lambda number, step: {"episode": step} if step % 4 == 0 else {}, info_keys=("episode",)
        )
        task = scripted_task(environment, mode)
        with task.get_worker_pool() as pool:
            for _ in range(8):  # in none of them more than one end
                task.collect_samples(None, pool, 2, use_tqdm=False)

    def test_an_array_that_the_environment_fills_again_is_kept_as_it_was(self, mode: str) -> None:
        """O-17."""

        class Refilling(ScriptedEnv):
            array = np.zeros(2)

            def reset(self, **keywords: Any) -> Any:
                self.array[:] = -1
                return super().reset(**keywords)

            def step(self, action: Any) -> Any:
                *rest, _ = super().step(action)
                self.array[:] = self.life
                return (*rest, {"x": self.array})

        environment = gymtask.Environment(Refilling, lengths=4, info_keys=("x",))
        rows = collect(scripted_task(environment, mode, num_envs=1), 6).to_tensordict()
        assert rows["next", "info", "x"][:, 0].tolist() == [1, 2, 3, 4, 5, 6]

    def test_infos_stay_with_their_rows_when_pieces_are_cut(self, mode: str) -> None:
        environment = informed(lambda number, step: {"x": step}, info_keys=("x",))
        task = scripted_task(environment, mode)
        with task.get_worker_pool() as pool:
            pieces = [
                piece.samples
                for options in ({"max_trajectory_length": 3}, {}, {"max_batch_size": 1})
                for piece in task.collect_samples(None, pool, 9, use_tqdm=False, **options)
            ]
        for number in range(2):
            found = [piece for piece in pieces if piece["env_id"][0] == number]
            steps = [value for piece in found for value in piece["next", "info", "x"].tolist()]
            assert steps == list(range(1, len(steps) + 1))
