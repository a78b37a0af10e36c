"""What an action must be, what is stored of it, and what environments get for it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from gymtask.errors import ActionError
from gymtask.spaces import ActionCodec, to_numpy
from tests.unit.space_envs import acting, collect, recorder

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")
FLOATS = ("float16", "bfloat16", "float32", "float64")


def encode(space: gym.Space[Any], action: Any, num_rows: int = 2, **keywords: Any) -> Any:
    codec = ActionCodec(space, **keywords)
    rows = codec.encode(action, num_rows)
    return rows[0], codec.decode(rows)[0]


class TestDtypesOfActions:
    @pytest.mark.parametrize("name", INTEGERS)
    @pytest.mark.parametrize(
        "space",
        [spaces.Discrete(2), spaces.MultiDiscrete([2]), spaces.MultiBinary(1)],
        ids=["Discrete", "MultiDiscrete", "MultiBinary"],
    )
    def test_every_integer_and_bool_is_taken_for_discrete_spaces(
        self, space: gym.Space[Any], name: str
    ) -> None:
        shape = (2, *(space.shape or ()))
        given = torch.tensor([0, 1]).reshape(shape).to(getattr(torch, name))
        row, sent = encode(space, given)
        assert row.dtype == space.dtype
        assert row.ravel().tolist() == sent.ravel().tolist() == [0, 1]

    @pytest.mark.parametrize("name", [*FLOATS, "complex64"])
    @pytest.mark.parametrize(
        "space",
        [
            spaces.Discrete(2),
            spaces.MultiDiscrete([2]),
            spaces.MultiBinary(1),
            spaces.Box(0, 5, (1,), np.int32),
            spaces.Box(0, 1, (1,), np.bool_),
        ],
        ids=["Discrete", "MultiDiscrete", "MultiBinary", "integer Box", "bool Box"],
    )
    def test_floats_are_refused_for_discrete_spaces(self, space: gym.Space[Any], name: str) -> None:
        given = torch.zeros(2, *(space.shape or ())).to(getattr(torch, name))
        with pytest.raises(ActionError, match=rf"`action` must be of a dtype.*torch\.{name}$"):
            encode(space, given)

    def test_integers_are_refused_for_a_bool_box(self) -> None:
        space = spaces.Box(0, 1, (1,), np.bool_)
        with pytest.raises(ActionError, match=r"cast to torch\.bool.*got torch\.int64"):
            encode(space, torch.zeros(2, 1, dtype=torch.int64))
        row, _ = encode(space, torch.tensor([[True], [False]]))
        assert row.tolist() == [[True], [False]]

    @pytest.mark.parametrize("name", [*INTEGERS, *FLOATS, "float8_e4m3fn"])
    @pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
    def test_everything_real_is_taken_for_a_float_box(self, kind: Any, name: str) -> None:
        given = torch.tensor([[1.0], [0.0]]).to(getattr(torch, name))
        row, _ = encode(spaces.Box(-2, 2, (1,), kind), given)
        assert row.dtype == np.float32
        assert row.tolist() == [[1.0], [0.0]]

    def test_bfloat16_is_taken_without_loss(self) -> None:
        given = torch.tensor([[0.1], [-1.7]], dtype=torch.bfloat16)
        row, _ = encode(spaces.Box(-2, 2, (1,)), given)
        assert row.tolist() == given.tolist()
        assert to_numpy(given).dtype == np.float32

    @pytest.mark.parametrize("value", [2**24 + 1, 2**53 + 1, 2**63 - 1, -(2**24) - 1])
    def test_an_integer_that_float32_cannot_hold_is_refused(self, value: int) -> None:
        space = spaces.Box(-np.inf, np.inf, ())
        with pytest.raises(ActionError, match=rf"stay exact as float32, got \[0, {value}\]"):
            encode(space, torch.tensor([0, value]))

    @pytest.mark.parametrize("value", [2**24, 2**53, -(2**63)])
    def test_an_integer_that_float32_holds_is_taken(self, value: int) -> None:
        row, _ = encode(spaces.Box(-np.inf, np.inf, ()), torch.tensor([0, value]))
        assert row.tolist() == [0, value]

    def test_a_tensor_that_needs_a_gradient_is_taken(self) -> None:
        row, _ = encode(spaces.Box(-1, 1, (1,)), torch.ones(2, 1, requires_grad=True))
        assert row.tolist() == [[1.0], [1.0]]


class TestShapesOfActions:
    @pytest.mark.parametrize("n", [1, 4])
    @pytest.mark.parametrize(
        "space", [spaces.Discrete(3), spaces.Box(-1, 1, ())], ids=["Discrete", "Box"]
    )
    def test_a_column_is_read_as_scalars(self, space: gym.Space[Any], n: int) -> None:
        kind = torch.int64 if isinstance(space, spaces.Discrete) else torch.float32
        row, sent = encode(space, torch.ones(n, 1, dtype=kind), n)
        assert row.shape == sent.shape == (n,)

    @pytest.mark.parametrize(
        ("shape", "given"),
        [
            ((), (2, 2)),
            ((), (1, 2)),
            ((), (2, 1, 1)),
            ((), ()),
            ((), (3,)),
            ((), (3, 1)),
            ((1,), (2,)),
            ((1,), (2, 1, 1)),
            ((3,), (2, 1)),
            ((3,), (3,)),
            ((3,), (3, 2)),
            ((2, 3), (2, 6)),
            ((2, 3), (2, 3, 2)),
        ],
    )
    def test_any_other_shape_is_refused_and_both_are_named(
        self, shape: tuple[int, ...], given: tuple[int, ...]
    ) -> None:
        text = f"`action` must have shape {(2, *shape)} for 2 environments, got {given}"
        with pytest.raises(ActionError, match=f"^{re.escape(text)}$"):
            encode(spaces.Box(-1, 1, shape), torch.zeros(given))

    def test_no_shape_is_right_for_another_number_of_environments(self) -> None:
        with pytest.raises(ActionError, match=re.escape("(1,) for 1 environments, got (2,)")):
            encode(spaces.Discrete(3), torch.zeros(2, dtype=torch.int64), 1)

    @pytest.mark.parametrize("num_envs", [1, 4])
    def test_environments_get_scalars_from_a_column(self, num_envs: int) -> None:
        """O-31."""
        task = acting(
            recorder(),
            lambda states: torch.ones(len(states), 1, dtype=torch.int64),
            num_envs=num_envs,
        )
        rows, received = collect(task, 3 * num_envs)
        assert rows["action"].shape == (3 * num_envs,)
        assert all(np.shape(action) == () for part in received for action in part)


class TestValuesOfActions:
    @pytest.mark.parametrize("bad", [-1, 3, 2**62])
    def test_an_index_outside_a_discrete_space_is_refused(self, bad: int) -> None:
        text = "`action` must lie in 0 to 2, counted from 0, for the space Discrete(3, start=5)"
        with pytest.raises(ActionError, match=re.escape(f"{text}, got [0, {bad}]")):
            encode(spaces.Discrete(3, start=5), torch.tensor([0, bad]))

    @pytest.mark.parametrize("bad", [[0, 0], [4, 2], [3, -1], [3, 3]])
    def test_multi_discrete_bounds_hold_for_each_element(self, bad: list[int]) -> None:
        space = spaces.MultiDiscrete([2, 3], start=[2, 0])
        with pytest.raises(ActionError, match=re.escape("lie in [2, 0] to [3, 2] for the space")):
            encode(space, torch.tensor([[2, 0], bad]))
        row, sent = encode(space, torch.tensor([[2, 0], [3, 2]]))
        assert row.tolist() == sent.tolist() == [[2, 0], [3, 2]]

    def test_multi_discrete_bounds_may_reach_the_end_of_the_dtype(self) -> None:
        space = spaces.MultiDiscrete([255], dtype=np.uint8, start=[1])
        row, _ = encode(space, torch.tensor([[255], [1]]))
        assert row.dtype == np.uint8
        assert row.tolist() == [[255], [1]]

    def test_multi_binary_and_integer_boxes_have_bounds(self) -> None:
        with pytest.raises(ActionError, match="lie in 0 to 1 for the space"):
            encode(spaces.MultiBinary(2), torch.tensor([[0, 1], [2, 0]]))
        with pytest.raises(ActionError, match=re.escape("lie in [-3] to [4] for the space")):
            encode(spaces.Box(-3, 4, (1,), np.int8), torch.tensor([[-4], [0]]))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("clip", [False, True])
    def test_a_float_that_is_not_finite_is_refused(self, bad: float, clip: bool) -> None:
        space = spaces.Box(-np.inf, np.inf, (2,))
        with pytest.raises(ActionError, match="`action` must be finite as float32"):
            encode(space, torch.tensor([[0.0, 1.0], [0.0, bad]]), clip=clip)

    def test_a_float64_that_is_infinite_as_float32_is_refused(self) -> None:
        space = spaces.Box(-np.inf, np.inf, (), np.float64)
        with pytest.raises(ActionError, match="finite"):
            encode(space, torch.tensor([1e39, 0.0], dtype=torch.float64))
        largest = float(np.finfo(np.float32).max)
        row, _ = encode(space, torch.tensor([largest, 0.0], dtype=torch.float64))
        assert row[0] == np.finfo(np.float32).max

    def test_a_float_that_is_infinite_in_the_dtype_of_the_space_is_refused(self) -> None:
        space = spaces.Box(-1, 1, (), np.float16)
        with pytest.raises(ActionError, match="finite as float32 and as float16"):
            encode(space, torch.tensor([70000.0, 0.0]))
        row, sent = encode(space, torch.tensor([70000.0, 0.0]), clip=True)
        assert row.tolist() == [70000.0, 0.0]
        assert sent.tolist() == [1.0, 0.0]
        assert sent.dtype == np.float16

    @pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
    def test_finite_floats_outside_a_box_pass_unless_clipped(self, kind: Any) -> None:
        """O-11: clipping changes what the environment gets, never the row."""
        space = spaces.Box(-2, 2, (1,), kind)
        given = torch.tensor([[5.0], [0.1]], dtype=torch.float64)
        row, sent = encode(space, given)
        assert row.dtype == np.float32
        assert row.tolist() == sent.tolist() == given.float().tolist()
        row, sent = encode(space, given, clip=True)
        assert row.tolist() == given.float().tolist()
        assert sent.dtype == kind
        assert sent.tolist() == [[2.0], [float(kind(np.float32(0.1)))]]

    def test_a_message_stays_short_for_large_actions(self) -> None:
        with pytest.raises(ActionError) as caught:
            encode(spaces.Box(-1, 1, (64, 64)), torch.full((2, 64, 64), math.nan))
        assert len(str(caught.value)) < 400


class TestNestedActions:
    space = spaces.Dict(
        {
            "turn": spaces.Discrete(3, start=-1),
            "pair": spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-1, 1, ())]),
        }
    )

    def action(self, **changes: Any) -> TensorDict:
        content = {
            "turn": torch.tensor([0, 2]),
            "pair": {"0": torch.ones(2, 2, dtype=torch.int8), "1": torch.tensor([0.5, 0.25])},
        }
        return TensorDict({**content, **changes}, batch_size=[2])

    def test_leaves_come_in_the_order_of_the_space(self) -> None:
        codec = ActionCodec(self.space)
        rows = codec.encode(self.action(), 2)
        by_path = {leaf.path: row for leaf, row in zip(codec.leaves, rows, strict=True)}
        assert by_path["turn",].tolist() == [0, 2]
        assert by_path["pair", "0"].tolist() == [[1, 1], [1, 1]]
        assert by_path["pair", "1"].tolist() == [0.5, 0.25]
        sent = dict(zip(by_path, codec.decode(rows), strict=True))
        assert sent["turn",].tolist() == [-1, 1]

    @pytest.mark.parametrize(
        ("action", "text"),
        [
            (lambda self: torch.zeros(2), "`action` must be a TensorDict with the keys"),
            (lambda self: self.action().exclude("turn"), r"['pair', 'turn'], got"),
            (lambda self: self.action(jump=torch.zeros(2)), "['jump', 'pair', 'turn']"),
            (lambda self: self.action(pair=torch.zeros(2)), "`action/pair` must be a TensorDict"),
            (
                lambda self: self.action(turn=TensorDict({}, batch_size=[2])),
                "`action/turn` must be a tensor, got a TensorDict with the keys []",
            ),
            (
                lambda self: self.action(
                    pair={"0": torch.ones(2, 2, dtype=torch.int8), "1": torch.zeros(2, 3)}
                ),
                "`action/pair/1` must have shape (2,) for 2 environments, got (2, 3)",
            ),
        ],
        ids=["tensor", "missing", "extra", "leaf for branch", "branch for leaf", "shape"],
    )
    def test_another_structure_is_refused_by_name(
        self, action: Callable[[Any], Any], text: str
    ) -> None:
        with pytest.raises(ActionError, match=re.escape(text)):
            ActionCodec(self.space).encode(action(self), 2)

    def test_a_row_of_a_sample_is_what_its_action_encodes_to(self) -> None:
        codec = ActionCodec(self.space)
        self.space.seed(3)
        for _ in range(10):
            sample = self.space.sample()
            row = codec.rows_of(sample)
            rows = codec.encode(TensorDict(row, batch_size=[]).unsqueeze(0), 1)
            sent = codec.decode(rows)
            assert row["turn"].dtype == torch.int64
            assert sent[[leaf.path for leaf in codec.leaves].index(("turn",))] == sample["turn"]
