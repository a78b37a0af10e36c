"""Checkpoints: plain values, whole folders, and the one to go on from."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gymtask.errors import CheckpointError, ConfigurationError
from gymtask.training import checkpoint
from gymtask.training.checkpoint import (
    FOLDER,
    checkpoint_name,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    module_problems,
    preserved_rng,
    rng_state,
    save_checkpoint,
    seed_generators,
    set_rng_state,
    tidy,
    to_plain,
)
from gymtask.training.run_dir import find_start, make_run_dir, run_dir_of


class Colour(IntEnum):
    RED = 1


def make_checkpoint(run_dir: Path, num_epochs: int, num_samples: int = 0) -> Path:
    folder = run_dir / FOLDER / checkpoint_name(num_epochs, num_samples)
    save_checkpoint(folder, {"state.pt": {"format": 1, "at": num_epochs}, "rank-0.pt": {}})
    return folder


# ---- plain values --------------------------------------------------------------------------------


def test_numbers_of_numpy_become_numbers() -> None:
    plain = to_plain({"mean": np.float64(1.5), "count": np.int32(3), "done": np.bool_(True)}, "x")
    assert plain == {"mean": 1.5, "count": 3, "done": True}
    assert [type(value) for value in plain.values()] == [float, int, bool]


def test_containers_keep_their_kind_and_mappings_become_dicts() -> None:
    plain = to_plain(OrderedDict(a=[1, (2, None)], b=OrderedDict({0: "c"})), "x")
    assert plain == {"a": [1, (2, None)], "b": {0: "c"}}
    assert type(plain) is dict
    assert type(plain["b"]) is dict


def test_arrays_and_parameters_become_detached_tensors() -> None:
    plain = to_plain([np.arange(3), nn.Parameter(torch.ones(2))], "x")
    assert plain[0].tolist() == [0, 1, 2]
    assert type(plain[1]) is torch.Tensor
    assert not plain[1].requires_grad


def test_a_path_becomes_a_string() -> None:
    assert to_plain(Path("a/b"), "x") == "a/b"


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    view = torch.zeros(1_000_000)[:3]
    torch.save(to_plain(view, "x"), tmp_path / "view.pt")
    assert (tmp_path / "view.pt").stat().st_size < 10_000


@pytest.mark.parametrize("value", [Colour.RED, object(), {1, 2}, torch.float32, print])
def test_what_torch_would_refuse_to_load_is_refused_by_name(value: Any) -> None:
    name = re.escape(type(value).__qualname__)
    with pytest.raises(CheckpointError, match=rf"`optimizers.main.0` must be made of.*{name}"):
        to_plain({"main": [value]}, "optimizers")


def test_a_key_that_is_no_string_or_number_is_refused() -> None:
    with pytest.raises(CheckpointError, match=re.escape("`x` must have keys that are strings")):
        to_plain({("a", "b"): 1}, "x")


def test_configs_are_written_as_text_where_they_are_not_plain() -> None:
    assert to_plain([torch.float32, 1], "x", as_text=True) == ["torch.float32", 1]


# ---- random generators ---------------------------------------------------------------------------


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(())), random.gauss(0, 1)]


def test_generators_go_on_where_their_state_was_taken() -> None:
    draw()
    state = rng_state()
    expected = [draw(), draw()]
    set_rng_state(state)
    assert [draw(), draw()] == expected


def test_the_state_of_the_generators_survives_a_file(tmp_path: Path) -> None:
    np.random.normal()  # leaves a second normal number waiting, which is part of the state
    state = rng_state()
    expected = [np.random.normal(), *draw()]
    torch.save(to_plain(state, "rng"), tmp_path / "rng.pt")
    set_rng_state(torch.load(tmp_path / "rng.pt"))
    assert [np.random.normal(), *draw()] == expected


def test_preserved_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    seed_generators(3)
    expected = draw()
    seed_generators(3)
    with preserved_rng():
        draw()
        torch.manual_seed(0)
    assert draw() == expected


def test_generators_are_preserved_through_an_exception() -> None:
    seed_generators(3)
    expected = draw()
    seed_generators(3)

    def draw_and_fail() -> None:
        with preserved_rng():
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert draw() == expected


def test_seeds_larger_than_numpy_takes_are_accepted() -> None:
    seed_generators(2**40 + 1)


# ---- writing and reading -------------------------------------------------------------------------


def test_a_process_that_imported_only_torch_reads_a_checkpoint(tmp_path: Path) -> None:
    content = to_plain({"score": np.float64(2.5), "rng": rng_state(), "w": torch.ones(2)}, "x")
    save_checkpoint(tmp_path / "c", {"state.pt": content})
    code = (
        "import sys, torch\n"
        f"state = torch.load({str(tmp_path / 'c' / 'state.pt')!r})\n"
        "assert not any(name.split('.')[0] == 'gymtask' for name in sys.modules)\n"
        "print(state['score'], state['w'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2.5 [1.0, 1.0]"


def test_a_checkpoint_that_fails_to_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / FOLDER / "epoch-1", {"state.pt": {}})
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_checkpoint_is_invisible_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Path]] = []
    save = torch.save

    def spy(*args: Any) -> None:
        save(*args)
        seen.append(list_checkpoints(tmp_path))

    monkeypatch.setattr(checkpoint.torch, "save", spy)
    folder = make_checkpoint(tmp_path, 1)
    assert seen == [[], []]
    assert list_checkpoints(tmp_path) == [folder]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut short"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    folder = make_checkpoint(tmp_path, 1)
    (folder / "state.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(f"cannot read {folder / 'state.pt'}")):
        load_checkpoint(folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 1)
    (folder / "rank-0.pt").unlink()
    with pytest.raises(CheckpointError, match=re.escape(f"cannot read {folder / 'rank-0.pt'}")):
        load_checkpoint(folder)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", {"state.pt": {"format": 99}, "rank-0.pt": {}})
    with pytest.raises(CheckpointError, match="must be a checkpoint of format 1, got 99"):
        load_checkpoint(tmp_path / "c")


def test_a_file_that_holds_no_dict_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", {"state.pt": [], "rank-0.pt": {}})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="must hold a dict, got a list"):
        load_checkpoint(tmp_path / "c")


# ---- finding -------------------------------------------------------------------------------------


def test_checkpoints_are_listed_oldest_first_whatever_the_length_of_their_numbers(
    tmp_path: Path,
) -> None:
    later = make_checkpoint(tmp_path, 1_000_000, 5)
    middle = make_checkpoint(tmp_path, 9, 70)
    first = make_checkpoint(tmp_path, 9, 60)
    (tmp_path / FOLDER / ".tmp-epoch-9").mkdir()
    (tmp_path / FOLDER / "epoch-000099-samples-000000001").mkdir()  # without a state
    assert list_checkpoints(tmp_path) == [first, middle, later]


def test_a_run_directory_means_its_newest_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    newest = make_checkpoint(tmp_path, 2)
    assert find_checkpoint(tmp_path, Path("none"), None) == newest
    assert find_checkpoint(str(newest), Path("none"), None) == newest


def test_a_place_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"got {str(tmp_path / 'x')!r}")):
        find_checkpoint(tmp_path / "x", Path("none"), None)


def test_auto_finds_the_newest_run_that_has_a_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "20250101-000000", 9)
    wanted = make_checkpoint(tmp_path / "20250101-000000-02", 1)
    (tmp_path / "20250102-000000").mkdir()  # ended before its first checkpoint
    assert find_checkpoint("auto", tmp_path, None) == wanted


def test_auto_looks_in_the_chosen_run_directory_only(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "runs" / "20250101-000000", 9)
    assert find_checkpoint("auto", tmp_path / "runs", tmp_path / "mine") is None
    wanted = make_checkpoint(tmp_path / "mine", 1)
    assert find_checkpoint("auto", tmp_path / "runs", tmp_path / "mine") == wanted


def test_auto_finds_nothing_where_there_is_no_run(tmp_path: Path) -> None:
    assert find_checkpoint("auto", tmp_path / "runs", None) is None


def test_left_over_temporary_folders_are_deleted(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 1)
    leftover = tmp_path / FOLDER / ".tmp-epoch-000002-samples-0-77"
    leftover.mkdir()
    (leftover / "state.pt").write_bytes(b"half")
    tidy(tmp_path, folder)
    assert list((tmp_path / FOLDER).iterdir()) == [folder]


def test_checkpoints_newer_than_the_resumed_one_are_set_aside(tmp_path: Path) -> None:
    first, second, third = (make_checkpoint(tmp_path, number) for number in (1, 2, 3))
    tidy(tmp_path, second)
    assert list_checkpoints(tmp_path) == [first, second]
    aside = third.with_name(f"superseded-{third.name}")
    assert load_checkpoint(aside)[0]["at"] == 3
    # It can be taken up again, and then nothing that came before it is newer.
    assert find_checkpoint(aside, tmp_path, None) == aside
    tidy(tmp_path, aside)
    assert list_checkpoints(tmp_path) == [first, second]


def test_a_checkpoint_outside_a_run_directory_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "run", 1)
    assert run_dir_of(folder) == tmp_path / "run"
    with pytest.raises(CheckpointError, match="must be a checkpoint in <run directory>/checkpoi"):
        run_dir_of(folder.rename(tmp_path / folder.name))


def test_a_resumed_run_is_not_written_elsewhere(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "run", 1)
    assert find_start(folder, "task", tmp_path / "run") == folder
    with pytest.raises(ConfigurationError, match="`run_dir` must be None or the run directory of"):
        find_start(folder, "task", tmp_path / "other")


def test_a_new_run_does_not_mix_with_another_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    with pytest.raises(ConfigurationError, match="`run_dir` must be without a run for a new one"):
        find_start(None, "task", tmp_path)


def test_run_directories_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [make_run_dir(None, "task") for _ in range(12)]
    assert len(set(made)) == 12
    assert sorted(made) == made  # so that the newest is the last by name
    assert all(path.parent == tmp_path / "runs" / "task" for path in made)


# ---- comparing -----------------------------------------------------------------------------------


def test_every_difference_between_modules_is_named() -> None:
    saved = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).state_dict()
    problems = list(module_problems("model", nn.Sequential(nn.Linear(4, 2)), saved))
    assert problems == [
        "model['0.weight'] is of shape (2, 3) in the checkpoint, got of shape (2, 4)",
        "model['1.bias'] is of shape (2,) in the checkpoint, got absent",
        "model['1.weight'] is of shape (2, 2) in the checkpoint, got absent",
    ]


def test_equal_modules_have_no_differences() -> None:
    module = nn.BatchNorm1d(3)
    assert list(module_problems("model", module, to_plain(module.state_dict(), "x"))) == []
