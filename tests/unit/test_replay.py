"""Pieces, their store, and what a batch of windows is; which windows come is in test_windows.py.

Row t of piece p has the observation p * 1000 + t, so any row tells where it comes from.
"""

import re
from dataclasses import FrozenInstanceError

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader

import gymtask.replay
from gymtask.errors import ConfigurationError, WindowError
from gymtask.replay import EpisodeRecord, MultiReplaySamples, ReplayDataset, ReplaySamples
from gymtask.replay.pieces import Key

EPISODE = EpisodeRecord(
    trajectory_id=7, env_id=1, episode_return=2.5, length=4, terminated=True, truncated=False
)
NO_WINDOW = "no trajectory is long enough for a window of 5 rows (clip_size 3, stride 2): "
NO_PIECE = "`samples{}` must have a batch shape [T], T above 0, got {}"


def make_piece(number: int, length: int) -> TensorDict:
    """A piece with keys of several kinds, all of which tell piece and row."""
    row = number * 1000 + torch.arange(length)
    return TensorDict(
        {
            "observation": row,
            "pixels": (row % 251).to(torch.uint8).reshape(-1, 1, 1).repeat(1, 2, 3),
            "is_init": torch.arange(length) == 0,
            "next": {"observation": row + 1, "reward": row / 2},
        },
        batch_size=[length],
    )


def make_samples(*lengths: int) -> MultiReplaySamples:
    return MultiReplaySamples([make_piece(p, length) for p, length in enumerate(lengths)])


def make_named_piece(*names: str) -> TensorDict:
    info = TensorDict({"name": NonTensorStack(*names)}, batch_size=[len(names)])
    return TensorDict({"next": {"info": info}, "x": torch.arange(len(names))}, [len(names)])


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


class TestReplaySamples:
    def test_indexing_and_iteration_give_rows_in_order_of_time(self) -> None:
        rows = make_piece(2, 5)
        piece = ReplaySamples(rows)
        assert piece.samples is rows
        assert len(piece) == 5
        assert piece[3].batch_size == torch.Size([])
        assert [piece[row]["observation"].item() for row in (3, -1)] == [2003, 2004]
        assert piece[1:3]["observation"].tolist() == [2001, 2002]
        assert [row["observation"].item() for row in piece] == [2000, 2001, 2002, 2003, 2004]
        with pytest.raises(IndexError):
            piece[5]

    def test_only_last_ends_at_the_last_row(self) -> None:
        piece = ReplaySamples(make_piece(1, 8))
        for _ in range(20):
            window = piece.sample(3, stride=2, only_last=True)
            assert window["observation"].tolist() == [1003, 1005, 1007]

    def test_sample_is_a_copy_with_all_keys(self) -> None:
        rows = make_piece(1, 4)
        window = ReplaySamples(rows).sample(4)
        assert window.batch_size == torch.Size([4])
        assert (window == rows).all()
        window.apply_(lambda leaf: leaf.zero_())
        assert (rows == make_piece(1, 4)).all()

    @pytest.mark.parametrize("only_last", [False, True])
    def test_too_short_a_piece_names_both_lengths(self, only_last: bool) -> None:
        with pytest.raises(WindowError, match=exactly(NO_WINDOW + "the longest of 1 has 4")):
            ReplaySamples(make_piece(0, 4)).sample(3, stride=2, only_last=only_last)

    @pytest.mark.parametrize(
        ("samples", "text"),
        [
            ([1, 2], "`samples` must be a TensorDict of batch shape [T], got list"),
            (TensorDict({}, batch_size=[]), NO_PIECE.format("", "[]")),
            (TensorDict({}, batch_size=[2, 3]), NO_PIECE.format("", "[2, 3]")),
            (TensorDict({}, batch_size=[0]), NO_PIECE.format("", "[0]")),
        ],
    )
    def test_what_is_no_piece_is_refused(self, samples: object, text: str) -> None:
        with pytest.raises(ConfigurationError, match=exactly(text)):
            ReplaySamples(samples)  # type: ignore[arg-type]


class TestMultiReplaySamples:
    def test_pieces_keep_order_and_rows(self) -> None:
        middle = ReplaySamples(make_piece(1, 1))
        samples = MultiReplaySamples([make_piece(0, 3), middle, make_piece(2, 4)])
        assert (len(samples), samples.num_transitions) == (3, 8)
        for number, (piece, length) in enumerate(zip(samples, (3, 1, 4), strict=True)):
            assert isinstance(piece, ReplaySamples)
            assert (piece.samples == make_piece(number, length)).all()
            assert samples[number] is samples.samples[number] is piece
        assert samples[-1] is samples.samples[2]

    def test_dropped_rows_and_episodes_are_kept(self) -> None:
        samples = MultiReplaySamples([make_piece(0, 3)], num_dropped=5, episodes=(EPISODE,))
        assert (samples.num_dropped, samples.episodes) == (5, [EPISODE])
        assert (make_samples(3).num_dropped, make_samples(3).episodes) == (0, [])
        text = "`num_dropped` must be an integer of at least 0, got -1"
        with pytest.raises(ConfigurationError, match=exactly(text)):
            MultiReplaySamples([], num_dropped=-1)
        with pytest.raises(FrozenInstanceError):
            EPISODE.length = 5  # type: ignore[misc]

    @pytest.mark.parametrize("lengths", [(3,), (3, 2)])
    def test_store_does_not_change_with_what_was_given(self, lengths: tuple[int, ...]) -> None:
        given = [make_piece(p, length) for p, length in enumerate(lengths)]
        samples = MultiReplaySamples(given)
        for piece in given:
            piece.apply_(lambda leaf: leaf.zero_())
        for number, length in enumerate(lengths):
            assert (samples[number].samples == make_piece(number, length)).all()

    def test_pieces_are_views_of_one_store(self) -> None:
        samples = make_samples(3, 2)
        samples[1].samples["next", "reward"].fill_(-1)
        assert samples.to_tensordict()["next", "reward"].tolist() == [0, 0.5, 1, -1, -1]
        batch = next(iter(ReplayDataset(samples, 2, 1, 3, replacement=False, shuffle=False)))
        assert batch["next", "reward"].tolist() == [[0, 0.5], [0.5, 1], [-1, -1]]

    @pytest.mark.parametrize("key", ["return", ("next", "return")])
    def test_a_key_that_would_not_reach_the_store_is_refused(self, key: str) -> None:
        with pytest.raises(RuntimeError, match="locked"):
            make_samples(3, 2)[0].samples[key] = torch.zeros(3)

    def test_store_holds_values_without_gradients(self) -> None:
        weight = torch.ones((), requires_grad=True)
        samples = MultiReplaySamples([TensorDict({"value": weight * torch.ones(3)}, [3])])
        assert not samples[0].samples["value"].requires_grad
        assert not samples.sample(2)[0]["value"].requires_grad

    def test_device_of_the_pieces_is_kept(self) -> None:
        samples = MultiReplaySamples([make_piece(0, 3).to("cpu"), make_piece(1, 3).to("cpu")])
        batch = next(iter(ReplayDataset(samples, 2, 1, 2)))
        for rows in (samples.to_tensordict(), samples.sample(2)[0], batch):
            assert rows.device == torch.device("cpu")

    def test_lazy_stacks_are_stored_like_any_other_piece(self) -> None:
        lazy = TensorDict.lazy_stack(list(make_piece(1, 3)))
        samples = MultiReplaySamples([lazy, make_piece(0, 2)])
        assert type(samples[0].samples) is TensorDict
        assert (samples[0].samples == make_piece(1, 3)).all()

    def test_slice_is_a_copy_of_its_pieces(self) -> None:
        samples = MultiReplaySamples(list(make_samples(3, 2, 4)), num_dropped=5, episodes=[EPISODE])
        part = samples[1:]
        assert isinstance(part, MultiReplaySamples)
        assert [piece[0]["observation"].item() for piece in part] == [1000, 2000]
        assert (part.num_dropped, part.episodes) == (0, [])
        part[0].samples["observation"].zero_()
        assert samples[1].samples["observation"].tolist() == [1000, 1001]

    def test_to_tensordict_marks_the_last_row_of_each_piece(self) -> None:
        flat = make_samples(3, 1, 2).to_tensordict()
        assert flat.batch_size == torch.Size([6])
        assert flat["observation"].tolist() == [0, 1, 2, 1000, 2000, 2001]
        assert flat["next", "end"].tolist() == [False, False, True, True, False, True]
        assert flat["next", "end"].dtype == torch.bool
        again = MultiReplaySamples(flat.split([2, 4])).to_tensordict()
        assert again["next", "end"].tolist() == [False, True, False, False, False, True]

    def test_to_tensordict_is_an_independent_copy(self) -> None:
        samples = make_samples(3, 2)
        flat = samples.to_tensordict()
        flat.apply_(lambda leaf: leaf.zero_())
        flat["return"] = torch.zeros(5)
        assert (samples[1].samples == make_piece(1, 2)).all()

    def test_no_pieces_are_allowed_but_hold_no_window(self) -> None:
        empty = MultiReplaySamples([], num_dropped=3)
        assert (len(empty), empty.num_transitions, empty.samples) == (0, 0, [])
        assert empty.to_tensordict()["next", "end"].shape == (0,)
        text = exactly("no trajectory to take a window from: there is no piece")
        for draw in (lambda: empty.sample(1), lambda: ReplayDataset(empty, 1, 1, 1)):
            with pytest.raises(WindowError, match=text):
                draw()

    INT, REWARD, FLAG = "torch.int64 [T] on cpu", "torch.float32 [T] on cpu", "torch.bool [T] on"

    @pytest.mark.parametrize(
        ("key", "value", "rule", "got"),
        [
            ("observation", torch.arange(6).reshape(2, 3), INT, "torch.int64 [T, 3] on cpu"),
            (("next", "reward"), torch.zeros(2).double(), REWARD, "torch.float64 [T] on cpu"),
            ("is_init", torch.ones(2, device="meta").bool(), f"{FLAG} cpu", f"{FLAG} meta"),
            ("is_init", NonTensorStack("a", "b"), f"{FLAG} cpu", "non-tensor data"),
            (("next", "extra"), torch.zeros(2), "absent", REWARD),
            ("is_init", None, f"{FLAG} cpu", "absent"),
        ],
    )
    def test_pieces_that_differ_are_refused(
        self, key: str, value: torch.Tensor | None, rule: str, got: str
    ) -> None:
        other = make_piece(1, 2)
        other = other.exclude(key) if value is None else other.set(key, value)
        text = f"`samples[1].get({key!r})` must be {rule} as in samples[0], got {got}"
        with pytest.raises(ConfigurationError, match=exactly(text)):
            MultiReplaySamples([make_piece(0, 3), other, make_piece(2, 3)])

    def test_keys_of_pieces_must_match_whatever_their_order(self) -> None:
        a, b = (TensorDict({key: torch.zeros(2)}, [2]) for key in "ab")
        b_too_many = "`samples[1].get('b')` must be absent as in samples[0], got torch.float32 [T]"
        for first in (a, TensorDict({}, [2])):
            with pytest.raises(ConfigurationError, match=re.escape(b_too_many)):
                MultiReplaySamples([first, b])
        ab = TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2])
        ba = TensorDict({"b": torch.ones(2), "a": torch.zeros(2)}, [2])
        assert MultiReplaySamples([ab, ba]).to_tensordict()["b"].tolist() == [1, 1, 1, 1]

    @pytest.mark.parametrize(
        ("samples", "text"),
        [
            ([[1, 2]], "`samples[0]` must be a TensorDict of batch shape [T], got list"),
            ([make_piece(0, 3), make_piece(1, 3)[:0]], NO_PIECE.format("[1]", "[0]")),
            (make_piece(0, 3), NO_PIECE.format("[0]", "[]")),
        ],
    )
    def test_what_is_no_list_of_pieces_is_refused(self, samples: object, text: str) -> None:
        with pytest.raises(ConfigurationError, match=exactly(text)):
            MultiReplaySamples(samples)  # type: ignore[arg-type]


class TestNonTensorData:
    KEY = ("next", "info", "name")

    def test_strings_follow_their_rows_into_windows(self) -> None:
        samples = MultiReplaySamples([make_named_piece("a", "b", "c"), make_named_piece("d", "e")])
        assert samples[1].samples[self.KEY] == ["d", "e"]
        assert samples.sample(2)[1][self.KEY] == ["d", "e"]
        assert samples.to_tensordict()[self.KEY] == ["a", "b", "c", "d", "e"]
        batch = next(iter(ReplayDataset(samples, 2, 1, 3, replacement=False, shuffle=False)))
        assert batch[self.KEY] == [["a", "b"], ["b", "c"], ["d", "e"]]
        assert batch["x"].tolist() == [[0, 1], [1, 2], [0, 1]]

    def test_batch_keys_may_name_non_tensor_data(self) -> None:
        samples = MultiReplaySamples([make_named_piece("a", "b")])
        batch = next(iter(ReplayDataset(samples, 2, 1, 1, batch_keys=[self.KEY])))
        assert batch[self.KEY] == [["a", "b"]]
        assert set(batch.keys()) == {"next"}

    def test_a_value_that_all_rows_share_joins_with_one_of_each_row(self) -> None:
        same = TensorDict({"name": NonTensorData("s", batch_size=[2])}, [2])
        each = TensorDict({"name": NonTensorStack("a", "b")}, [2])
        assert MultiReplaySamples([same, each]).to_tensordict()["name"] == ["s", "s", "a", "b"]
        assert MultiReplaySamples([same, same]).sample(2)[0]["name"] == "s"


class TestReplayDataset:
    def test_batch_has_shapes_dtypes_and_rows_of_the_store(self) -> None:
        (batch,) = ReplayDataset(make_samples(5, 4), 3, 1, 6, num_batches=1)
        assert (batch.batch_size, batch["pixels"].shape) == ((6, 3), (6, 3, 2, 3))
        dtypes = [batch[key].dtype for key in ("observation", "pixels", "is_init")]
        assert dtypes == [torch.int64, torch.uint8, torch.bool]
        assert batch["next", "reward"].dtype == torch.float32
        row = batch["observation"]
        assert (batch["pixels"] == (row % 251).reshape(6, 3, 1, 1)).all()
        assert (batch["is_init"] == (row % 1000 == 0)).all()
        assert (batch["next", "observation"] == row + 1).all()
        assert (batch["next", "reward"] == row / 2).all()

    @pytest.mark.parametrize("dtype", [torch.uint16, torch.float16, torch.float64, torch.complex64])
    def test_less_common_dtypes_are_kept(self, dtype: torch.dtype) -> None:
        samples = MultiReplaySamples([TensorDict({"x": torch.ones(4, 2).to(dtype)}, [4])])
        assert next(iter(ReplayDataset(samples, 2, 1, 3)))["x"].dtype == dtype

    def test_window_of_one_row_keeps_its_dimension(self) -> None:
        (batch,) = ReplayDataset(make_samples(5), 1, 1, 4, num_batches=1)
        assert (batch.batch_size, batch["pixels"].shape) == ((4, 1), (4, 1, 2, 3))

    @pytest.mark.parametrize("replacement", [True, False])
    def test_batches_own_their_memory(self, replacement: bool) -> None:
        samples = make_samples(4, 4)
        before = samples.to_tensordict()
        dataset = ReplayDataset(samples, 4, 1, 2, replacement=replacement, num_batches=3)
        kept = [(batch, batch.clone()) for batch in dataset]
        assert all((batch == copy).all() for batch, copy in kept)
        for batch, _ in kept:
            batch.apply_(lambda leaf: leaf.zero_())
            batch["advantage"] = torch.zeros(2, 4)
        assert (samples.to_tensordict() == before).all()

    def test_batch_keys_gather_only_what_they_name(self) -> None:
        keys: list[Key] = ["observation", ("next", "reward")]
        (batch,) = ReplayDataset(make_samples(5), 2, 1, 3, num_batches=1, batch_keys=keys)
        assert set(batch.keys(include_nested=True, leaves_only=True)) == set(keys)
        assert (batch["next", "reward"] == batch["observation"] / 2).all()

    @pytest.mark.parametrize("keys", [["next"], [("next", "reward"), "next"]])
    def test_key_of_a_nested_tensordict_takes_all_below_it(self, keys: list[str]) -> None:
        (batch,) = ReplayDataset(make_samples(5), 2, 1, 3, num_batches=1, batch_keys=keys)
        assert {*batch.keys(True)} == {"next", ("next", "observation"), ("next", "reward")}

    BAD_KEYS = ("reward", ("next", "no"), ("observation", "x"), 5, ("next", 5), (), ["next"])

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_unknown_batch_key_names_those_there_are(self, key: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            ReplayDataset(make_samples(5), 2, 1, 3, batch_keys=["observation", key])
        text = str(caught.value)
        assert text.startswith("`batch_keys` must be among ['observation', ")
        assert text.endswith(f"], got {key!r}")
        assert "('next', 'reward')" in text

    @pytest.mark.parametrize("keys", ["observation", []])
    def test_batch_keys_must_be_a_list_of_keys(self, keys: list[str]) -> None:
        text = f"`batch_keys` must be a list of keys, got {keys!r}"
        with pytest.raises(ConfigurationError, match=exactly(text)):
            ReplayDataset(make_samples(5), 2, 1, 3, batch_keys=keys)

    def test_too_long_a_window_names_all_four_numbers(self) -> None:
        text = exactly(NO_WINDOW + "the longest of 3 has 4")
        with pytest.raises(WindowError, match=text):
            ReplayDataset(make_samples(2, 4, 3), 3, 2, 1)
        with pytest.raises(WindowError, match=text):
            make_samples(2, 4, 3).sample(3, 2)

    @pytest.mark.parametrize(
        ("name", "value", "rule"),
        [
            ("clip_size", 0, "an integer of at least 1"),
            ("stride", -1, "an integer of at least 1"),
            ("stride", 1.5, "an integer of at least 1"),
            ("batch_size", 0, "an integer of at least 1"),
            ("num_batches", 0, "an integer of at least 1"),
            ("seed", -1, "an integer of at least 0"),
            ("replacement", 1, "True or False"),
            ("shuffle", None, "True or False"),
            ("drop_last", "yes", "True or False"),
            ("pin_memory", 0, "True or False"),
        ],
    )
    def test_bad_argument_is_named_with_its_rule(self, name: str, value: int, rule: str) -> None:
        arguments = {"clip_size": 2, "stride": 1, "batch_size": 2, name: value}
        text = f"`{name}` must be {rule}, got {value!r}"
        with pytest.raises(ConfigurationError, match=exactly(text)):
            ReplayDataset(make_samples(4), **arguments)  # type: ignore[arg-type]

    def test_all_bad_arguments_are_named_at_once(self) -> None:
        sizes = "`clip_size` must be an integer of at least 1, got 0\n"
        stride = "`stride` must be an integer of at least 1, got -1\n"
        flag = "`only_last` must be True or False, got 0"
        buffer = "`buffer` must be MultiReplaySamples or a ReplayBuffer, got list"
        for owner in (make_samples(4), make_samples(4)[0]):
            with pytest.raises(ConfigurationError, match=exactly(sizes + stride + flag)):
                owner.sample(0, -1, only_last=0)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=exactly(sizes + stride + buffer)):
            ReplayDataset([], 0, -1, 2)  # type: ignore[arg-type]

    def test_batches_pass_through_a_dataloader_as_they_are(self) -> None:
        def make() -> ReplayDataset:
            return ReplayDataset(make_samples(4, 5), 3, 1, 2, replacement=False, seed=0)

        loader = DataLoader(make(), batch_size=None, collate_fn=ReplayDataset.collate)
        batches = list(loader)
        assert [batch.batch_size for batch in batches] == [(2, 3), (2, 3), (1, 3)]
        assert all((one == two).all() for one, two in zip(batches, make(), strict=True))
        assert len(loader) == 3

    def test_pin_memory_needs_an_accelerator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        text = "`pin_memory` must be False without an accelerator, got True"
        with pytest.raises(ConfigurationError, match=exactly(text)):
            ReplayDataset(make_samples(4), 3, 1, 2, pin_memory=True)

    def test_pin_memory_pins_every_tensor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def pin(leaf: torch.Tensor) -> torch.Tensor:
            pinned.append(leaf)
            return leaf

        pinned: list[torch.Tensor] = []
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        samples = MultiReplaySamples([make_named_piece("a", "b", "c")])
        (batch,) = ReplayDataset(samples, 2, 1, 4, num_batches=1, pin_memory=True)
        assert [id(leaf) for leaf in pinned] == [id(batch["x"])]


def test_module_exports_what_the_design_names() -> None:
    assert gymtask.replay.__all__ == [
        "EpisodeRecord",
        "MultiReplaySamples",
        "Prioritization",
        "ReplayBuffer",
        "ReplayDataset",
        "ReplaySamples",
    ]
