"""Which windows are drawn: checked against a plain Python list of them, over random pieces.

Row t of piece p has the observation p * 1000 + t, so any row tells where it comes from.
"""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from gymtask.errors import ConfigurationError, WindowError
from gymtask.replay import MultiReplaySamples, ReplayDataset
from gymtask.windows import window_rows, window_span, window_starts

Window = tuple[int, ...]

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8)
CLIP_SIZES = st.integers(1, 6)
STRIDES = st.integers(1, 4)
BATCH_SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 2**32)

both_ways = pytest.mark.parametrize("replacement", [True, False])
thorough = settings(deadline=None, max_examples=60)


def make_samples(lengths: Iterable[int]) -> MultiReplaySamples:
    return MultiReplaySamples(
        [
            TensorDict({"observation": p * 1000 + torch.arange(length)}, batch_size=[length])
            for p, length in enumerate(lengths)
        ]
    )


def all_windows(lengths: Iterable[int], clip_size: int, stride: int) -> list[Window]:
    """Every window, found by trying every row of every piece as the start of one."""
    windows = []
    for p, length in enumerate(lengths):
        for start in range(length):
            rows = [start + k * stride for k in range(clip_size)]
            if all(row < length for row in rows):
                windows.append(tuple(p * 1000 + row for row in rows))
    return windows


def batches_of(dataset: ReplayDataset, num_batches: int | None = None) -> list[list[Window]]:
    batches = islice(dataset, num_batches)
    return [[tuple(window) for window in batch["observation"].tolist()] for batch in batches]


def windows_of(dataset: ReplayDataset, num_batches: int | None = None) -> list[Window]:
    return [window for batch in batches_of(dataset, num_batches) for window in batch]


def rows_of(samples: MultiReplaySamples) -> list[list[int]]:
    return [piece.samples["observation"].tolist() for piece in samples]


# Arithmetic


@pytest.mark.parametrize(("clip_size", "stride", "span"), [(1, 1, 1), (1, 9, 1), (3, 2, 5)])
def test_span_counts_first_and_last_row(clip_size: int, stride: int, span: int) -> None:
    assert window_span(clip_size, stride) == span


@pytest.mark.parametrize(
    ("lengths", "clip_size", "stride", "starts"),
    [
        ([4, 4, 4], 3, 1, [0, 1, 4, 5, 8, 9]),
        ([4, 4, 4], 2, 2, [0, 1, 4, 5, 8, 9]),
        ([4, 4, 4], 2, 3, [0, 4, 8]),
        ([4, 4, 4], 1, 5, list(range(12))),
        ([4, 4, 4], 5, 1, []),
        ([1, 5, 2, 1, 4, 2], 3, 1, [1, 2, 3, 9, 10]),
        ([], 1, 1, []),
    ],
)
def test_starts_known_by_hand(
    lengths: list[int], clip_size: int, stride: int, starts: list[int]
) -> None:
    found = window_starts(torch.tensor(lengths, dtype=torch.int64), clip_size, stride)
    assert found.tolist() == starts
    assert found.dtype == torch.int64


def test_rows_of_a_window_are_stride_apart() -> None:
    assert window_rows(torch.tensor([0, 7]), 3, 2).tolist() == [[0, 2, 4], [7, 9, 11]]
    assert window_rows(torch.tensor(7), 3, 2).tolist() == [7, 9, 11]


@given(LENGTHS, CLIP_SIZES, STRIDES)
@settings(deadline=None, max_examples=200)
def test_starts_are_those_of_all_windows_in_order(
    lengths: list[int], clip_size: int, stride: int
) -> None:
    starts = window_starts(torch.tensor(lengths), clip_size, stride)
    store = [p * 1000 + t for p, length in enumerate(lengths) for t in range(length)]
    windows = window_rows(starts, clip_size, stride).tolist()
    found = [tuple(store[row] for row in rows) for rows in windows]
    assert found == all_windows(lengths, clip_size, stride)


# With replacement


@given(LENGTHS, CLIP_SIZES, STRIDES, BATCH_SIZES, SEEDS)
@thorough
def test_every_window_is_drawn_and_no_other(
    lengths: list[int], clip_size: int, stride: int, batch_size: int, seed: int
) -> None:
    expected = all_windows(lengths, clip_size, stride)
    samples = make_samples(lengths)
    if not expected:
        with pytest.raises(WindowError, match=f"longest of {len(lengths)} has {max(lengths)}$"):
            ReplayDataset(samples, clip_size, stride, batch_size)
        return
    dataset = ReplayDataset(samples, clip_size, stride, batch_size, seed=seed)
    assert dataset.num_windows == len(expected)
    # 40 n draws miss one of n windows with a probability below n * exp(-40), about 1e-16.
    drawn = windows_of(dataset, -(-40 * len(expected) // batch_size))
    assert set(drawn) == set(expected)


def test_windows_of_three_episodes_of_four_have_a_sixth_each() -> None:
    dataset = ReplayDataset(make_samples([4, 4, 4]), 3, 1, 6000, num_batches=10, seed=0)
    counts = Counter(windows_of(dataset))
    starts = [0, 1, 1000, 1001, 2000, 2001]
    assert sorted(counts) == [(start, start + 1, start + 2) for start in starts]
    assert all(abs(count - 10_000) <= 460 for count in counts.values())


# The seeds are fixed: 4 sigma would fail by chance once in 16,000 windows.
@pytest.mark.parametrize(
    ("lengths", "clip_size", "stride"),
    [([1, 9, 3, 5], 2, 2), ([3, 20], 3, 1), ([2, 2, 7], 1, 4), ([6], 6, 1)],
)
def test_uniform_over_windows_not_over_pieces(
    lengths: list[int], clip_size: int, stride: int
) -> None:
    expected = all_windows(lengths, clip_size, stride)
    draws, share = 2000 * len(expected), 1 / len(expected)
    dataset = ReplayDataset(
        make_samples(lengths), clip_size, stride, draws // 4, num_batches=4, seed=11
    )
    counts = Counter(windows_of(dataset))
    assert set(counts) == set(expected)
    bound = 4 * (draws * share * (1 - share)) ** 0.5
    assert all(abs(count - draws * share) <= bound for count in counts.values())


def test_windows_of_a_batch_are_drawn_independently() -> None:
    dataset = ReplayDataset(make_samples([2]), 1, 1, 3, num_batches=4000, seed=0)
    counts = Counter(tuple(batch) for batch in batches_of(dataset))
    assert len(counts) == 8
    assert all(abs(n - 500) <= 4 * (4000 * 1 / 8 * 7 / 8) ** 0.5 for n in counts.values())


def test_endless_unless_num_batches_ends_it() -> None:
    dataset = ReplayDataset(make_samples([4]), 3, 1, 2)
    assert len(batches_of(dataset, 100)) == 100
    with pytest.raises(TypeError, match="an endless ReplayDataset has no length"):
        len(dataset)
    dataset = ReplayDataset(make_samples([4]), 3, 1, 2, num_batches=7)
    assert [len(batch) for batch in batches_of(dataset)] == [2] * 7
    assert len(dataset) == 7


def test_a_batch_may_exceed_the_number_of_windows() -> None:
    dataset = ReplayDataset(make_samples([5]), 3, 1, 256, num_batches=1, drop_last=True)
    assert [len(batch) for batch in batches_of(dataset)] == [256]


def test_shuffle_and_drop_last_have_no_part_with_replacement() -> None:
    def draws(flag: bool) -> list[Window]:
        dataset = ReplayDataset(
            make_samples([9]), 2, 1, 5, num_batches=4, shuffle=not flag, drop_last=flag, seed=1
        )
        return windows_of(dataset)

    assert draws(False) == draws(True)


# Without replacement


@given(LENGTHS, CLIP_SIZES, STRIDES, BATCH_SIZES, st.booleans(), SEEDS)
@thorough
def test_a_pass_visits_every_window_once(
    lengths: list[int], clip_size: int, stride: int, batch_size: int, shuffle: bool, seed: int
) -> None:
    expected = all_windows(lengths, clip_size, stride)
    assume(expected)
    dataset = ReplayDataset(
        make_samples(lengths), clip_size, stride, batch_size, False, shuffle=shuffle, seed=seed
    )
    visited = windows_of(dataset)
    assert (sorted(visited) if shuffle else visited) == expected
    assert len(dataset) == -(-len(expected) // batch_size)


@given(st.integers(1, 30), BATCH_SIZES, st.none() | st.integers(1, 25), st.booleans(), SEEDS)
@thorough
def test_num_batches_goes_pass_after_pass(
    rows: int, batch_size: int, num_batches: int | None, drop_last: bool, seed: int
) -> None:
    assume(rows >= batch_size or not drop_last)
    dataset = ReplayDataset(
        make_samples([rows]),
        1,
        1,
        batch_size,
        replacement=False,
        num_batches=num_batches,
        drop_last=drop_last,
        seed=seed,
    )
    full, rest = divmod(rows, batch_size)
    sizes = [batch_size] * full + ([rest] if rest and not drop_last else [])
    batches = batches_of(dataset)
    assert len(batches) == len(dataset) == (num_batches or len(sizes))
    for first in range(0, len(batches), len(sizes)):
        one_pass = batches[first : first + len(sizes)]
        assert [len(batch) for batch in one_pass] == sizes[: len(one_pass)]
        visited = [window for batch in one_pass for window in batch]
        assert len(set(visited)) == len(visited)


def test_without_shuffle_every_pass_is_in_stored_order() -> None:
    samples = make_samples([4, 4])
    dataset = ReplayDataset(samples, 3, 1, 3, False, num_batches=4, shuffle=False)
    assert [window[0] for window in windows_of(dataset)] == [0, 1, 1000, 1001] * 2


def test_every_order_of_a_pass_is_equally_likely() -> None:
    dataset = ReplayDataset(make_samples([4]), 1, 1, 4, False, num_batches=4800, seed=0)
    counts = Counter(tuple(order) for order in batches_of(dataset))
    assert len(counts) == 24
    assert all(abs(n - 200) <= 4 * (4800 * 1 / 24 * 23 / 24) ** 0.5 for n in counts.values())


def test_drop_last_with_too_few_windows_is_refused() -> None:
    text = "`batch_size` must be at most the number of windows (3) with drop_last, got 4"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(text)}$"):
        ReplayDataset(make_samples([5]), 3, 1, 4, replacement=False, drop_last=True)


# Random numbers


def make_dataset(replacement: bool, seed: int | None) -> ReplayDataset:
    return ReplayDataset(make_samples([50]), 2, 1, 10, replacement, num_batches=7, seed=seed)


@both_ways
def test_same_seed_same_windows(replacement: bool) -> None:
    first = windows_of(make_dataset(replacement, 5))
    assert windows_of(make_dataset(replacement, 5)) == first
    assert windows_of(make_dataset(replacement, 6)) != first


@pytest.mark.parametrize("seed", [0, 2**64 - 1, 2**70])
def test_any_seed_that_a_config_allows_is_taken(seed: int) -> None:
    assert windows_of(make_dataset(True, seed)) == windows_of(make_dataset(True, seed))


@both_ways
def test_without_a_seed_torchs_global_one_decides(replacement: bool) -> None:
    def draw(seed: int) -> list[list[Window]]:
        torch.manual_seed(seed)
        return [windows_of(make_dataset(replacement, None)) for _ in range(2)]

    first, second = draw(5)
    assert draw(5) == [first, second]
    assert first != second
    assert draw(6)[0] != first


@both_ways
def test_with_a_seed_torchs_global_generator_is_left_alone(replacement: bool) -> None:
    before = torch.get_rng_state()
    windows_of(make_dataset(replacement, 5))
    assert torch.equal(torch.get_rng_state(), before)


@both_ways
def test_each_iteration_goes_on_with_new_numbers(replacement: bool) -> None:
    dataset = make_dataset(replacement, 5)
    first, second = windows_of(dataset), windows_of(dataset)
    assert first != second
    again = make_dataset(replacement, 5)
    next(iter(again))  # an iteration that is left early counts like one read to its end
    assert windows_of(again) == second


@both_ways
def test_iterators_read_in_turn_do_not_disturb_each_other(replacement: bool) -> None:
    dataset, alone = make_dataset(replacement, 5), make_dataset(replacement, 5)
    pairs = list(zip(dataset, dataset, strict=True))
    for side in range(2):
        in_turn = torch.cat([pair[side]["observation"] for pair in pairs])
        assert [tuple(window) for window in in_turn.tolist()] == windows_of(alone)


# One window of each piece, and shares of the pieces


@given(LENGTHS, CLIP_SIZES, STRIDES, st.booleans())
@thorough
def test_sample_gives_a_window_of_each_piece_that_has_one(
    lengths: list[int], clip_size: int, stride: int, only_last: bool
) -> None:
    samples = make_samples(lengths)
    of_piece: dict[int, list[Window]] = {}
    for window in all_windows(lengths, clip_size, stride):
        of_piece.setdefault(window[0] // 1000, []).append(window)
    if not of_piece:
        with pytest.raises(WindowError, match=f"longest of {len(lengths)} has {max(lengths)}$"):
            samples.sample(clip_size, stride, only_last)
        return
    for window, valid in zip(
        samples.sample(clip_size, stride, only_last), of_piece.values(), strict=True
    ):
        assert tuple(window["observation"].tolist()) in (valid[-1:] if only_last else valid)


def test_sample_is_uniform_over_the_windows_of_its_piece_and_follows_the_global_seed() -> None:
    def draw() -> list[Window]:
        torch.manual_seed(0)
        return [tuple(w["observation"].tolist()) for _ in range(2000) for w in samples.sample(3, 2)]

    samples = make_samples([2, 7, 6])
    counts = Counter(draw())
    for window in all_windows([2, 7, 6], 3, 2):
        share = 1 / 3 if window[0] < 2000 else 1 / 2  # the pieces have 3 and 2 windows
        assert abs(counts.pop(window) - 2000 * share) <= 4 * (2000 * share * (1 - share)) ** 0.5
    assert not counts
    assert draw() == draw()


@given(LENGTHS, st.integers(1, 10))
@thorough
def test_partition_gives_every_piece_to_one_rank(lengths: list[int], world_size: int) -> None:
    pieces = rows_of(make_samples(lengths))
    for rank in range(world_size):
        share = make_samples(lengths).partition(rank, world_size)
        assert rows_of(share) == [p for i, p in enumerate(pieces) if i % world_size == rank]


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [
        (-1, 2, "`rank` must be an integer of at least 0, got -1"),
        (2, 2, "`rank` must be below world_size (2), got 2"),
        (0, 0, "`world_size` must be an integer of at least 1, got 0"),
    ],
)
def test_bad_partition_is_refused(rank: int, world_size: int, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(text)}$"):
        make_samples([3, 2]).partition(rank, world_size)


@given(LENGTHS)
@thorough
def test_end_splits_the_flat_rows_into_the_pieces_again(lengths: list[int]) -> None:
    flat = make_samples(lengths).to_tensordict()
    pieces: list[list[int]] = [[]]
    for row, end in zip(flat["observation"].tolist(), flat["next", "end"].tolist(), strict=True):
        pieces[-1].append(row)
        if end:
            pieces.append([])
    assert pieces.pop() == []
    assert pieces == rows_of(make_samples(lengths))
