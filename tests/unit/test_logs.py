"""Rows of metrics: their numbers, the file, the curve and the bar."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest

from gymtask.config import DatasetConfig, ReinforcementLearningTaskConfig
from gymtask.replay import EpisodeRecord
from gymtask.task import State
from gymtask.training.curve import LearningCurve
from gymtask.training.logs import MetricsFile, Progress, Statistics, make_loggers, read_rows


def episode(episode_return: float, length: int) -> EpisodeRecord:
    return EpisodeRecord(0, 0, episode_return, length, terminated=True, truncated=False)


# ---- numbers -------------------------------------------------------------------------------------


def test_a_row_tells_of_everything_since_the_last_one() -> None:
    statistics = Statistics()
    statistics.add_collection([episode(1.0, 2), episode(5.0, 4)], num_samples=8, num_dropped=1)
    statistics.add_collection([episode(0.0, 9)], num_samples=4, num_dropped=2)
    statistics.add_updates({"loss": [1.0, 2.0], "loss/value": [4.0]})
    statistics.add_updates({"loss": [6.0]})
    statistics.add_evaluation([episode(7.0, 1), episode(9.0, 3)])
    row = statistics.take_row(
        State(num_epochs=2, num_samples=12), {"learning_rate": 0.5}, {"kl": 0.25}
    )
    times = {name: row.pop(name) for name in list(row) if "second" in name or "time_" in name}
    assert list(times) == [
        "samples_per_second",
        *(f"seconds/{what}" for what in ("collect", "train", "eval")),
        *(f"time_share/{what}" for what in ("collect", "train", "eval")),
    ]
    assert row == {
        "num_epochs": 2,
        "num_steps": 0,
        "num_epoch_steps": 0,
        "num_samples": 12,
        "num_epoch_samples": 0,
        "elapsed_time": 0.0,
        "num_dropped": 3,
        "episode/count": 3,
        "episode/return_mean": 2.0,
        "episode/return_min": 0.0,
        "episode/return_max": 5.0,
        "episode/length_mean": 5.0,
        "episode/length_min": 2,
        "episode/length_max": 9,
        "episode/return_mean_100": 2.0,
        "eval/count": 2,
        "eval/return_mean": 8.0,
        "eval/return_min": 7.0,
        "eval/return_max": 9.0,
        "eval/length_mean": 2.0,
        "eval/length_min": 1,
        "eval/length_max": 3,
        "loss": 3.0,
        "loss/value": 4.0,
        "learning_rate": 0.5,
        "kl": 0.25,
    }


def test_a_row_starts_anew_but_for_the_last_hundred_episodes() -> None:
    statistics = Statistics()
    statistics.add_collection([episode(float(k), 1) for k in range(150)], 150, 0)
    statistics.take_row(State(), {}, {})
    row = statistics.take_row(State(), {}, {})
    assert row["episode/count"] == 0
    assert "episode/return_mean" not in row
    assert "eval/count" not in row
    assert row["episode/return_mean_100"] == sum(range(50, 150)) / 100


def test_shares_are_of_all_time_since_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    statistics = Statistics()
    now[0] = 200.0
    statistics.begin()
    for what, seconds in (("collect", 2.0), ("train", 5.0), ("eval", 1.0)):
        with statistics.timed(what):
            now[0] += seconds
    now[0] += 2.0  # of logs and checkpoints
    for _ in range(2):
        row = statistics.take_row(State(), {}, {})
        found = [row[f"time_share/{what}"] for what in ("collect", "train", "eval")]
        assert found == ([0.2, 0.5, 0.1] if now[0] == 210.0 else [0.0, 0.0, 0.0])
        now[0] += 1.0


# ---- the file ------------------------------------------------------------------------------------


def test_rows_are_in_the_file_as_soon_as_they_are_logged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(path, num_epochs=0)
    file.log_metrics({"num_epochs": 1, "loss": 0.1})
    assert path.read_text() == "num_epochs,loss\n1,0.1\n"
    file.log_metrics({"num_epochs": 2, "loss": 1e-300})
    assert read_rows(path) == [{"num_epochs": 1, "loss": 0.1}, {"num_epochs": 2, "loss": 1e-300}]


def test_a_new_column_is_empty_in_earlier_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(path, num_epochs=0)
    file.log_metrics({"num_epochs": 1, "loss": 0.5})
    file.log_metrics({"num_epochs": 2, "eval": 3.0})
    file.log_metrics({"num_epochs": 3, "loss": 0.25, "eval": 4.0})
    assert path.read_text().split() == ["num_epochs,loss,eval", "1,0.5,", "2,,3.0", "3,0.25,4.0"]


def test_a_file_goes_on_behind_the_resumed_epoch(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    first = MetricsFile(path, num_epochs=0)
    for number in (1, 2, 3):
        first.log_metrics({"num_epochs": number, "loss": number / 2})
    second = MetricsFile(path, num_epochs=2)
    second.log_metrics({"num_epochs": 3, "loss": 9.0})
    assert read_rows(path) == [
        {"num_epochs": 1, "loss": 0.5},
        {"num_epochs": 2, "loss": 1.0},
        {"num_epochs": 3, "loss": 9.0},
    ]


def test_a_row_that_was_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"num_epochs,loss\r\n1,0.5\r\n1")  # the second row was to begin with 12
    MetricsFile(path, num_epochs=11).log_metrics({"num_epochs": 12, "loss": 1.5})
    assert read_rows(path) == [{"num_epochs": 1, "loss": 0.5}, {"num_epochs": 12, "loss": 1.5}]


def test_without_tensorboard_metrics_are_still_written_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, logger="gymtask"):
        loggers = make_loggers(tmp_path, State())
    assert [type(log) for log in loggers] == [MetricsFile]
    assert [record.message for record in caplog.records] == [
        "no TensorBoard events are written: pip install tensorboard"
    ]


# ---- the curve -----------------------------------------------------------------------------------


def log_two_rows(run_dir: Path) -> None:
    file = MetricsFile(run_dir / "metrics.csv", num_epochs=0)
    for number in (1, 2):
        returns = {f"episode/return_{what}": 1.0 * number for what in ("mean", "min", "max")}
        file.log_metrics(
            {
                "num_samples": 10 * number,
                **returns,
                "episode/return_mean_100": 1.0,
                "eval/return_mean": 2.0,
            }
        )


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    log_two_rows(tmp_path)
    LearningCurve(tmp_path, interval=0.0).draw()
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".tmp-*"))


def test_the_curve_is_drawn_from_time_to_time_and_whenever_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_two_rows(tmp_path)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    curve = LearningCurve(tmp_path, interval=30.0)
    for now[0], drawn in ((29.0, False), (31.0, True), (60.0, False), (62.0, True)):
        curve.draw()
        assert (tmp_path / "learning_curve.png").exists() == drawn
        (tmp_path / "learning_curve.png").unlink(missing_ok=True)
    curve.draw()
    assert not (tmp_path / "learning_curve.png").exists()
    curve.draw(force=True)
    assert (tmp_path / "learning_curve.png").exists()


def test_no_curve_is_drawn_without_metrics(tmp_path: Path) -> None:
    curve = LearningCurve(tmp_path)
    curve.draw(force=True)
    assert list(tmp_path.iterdir()) == []
    assert not curve.drawn


def test_without_matplotlib_no_curve_is_drawn_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_two_rows(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, logger="gymtask"):
        LearningCurve(tmp_path).draw(force=True)
    assert not (tmp_path / "learning_curve.png").exists()
    assert [record.message for record in caplog.records] == [
        "no learning_curve.png is drawn: pip install matplotlib"
    ]


# ---- the bar -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ({"max_samples": 40, "max_steps": 8}, "10/40"),
        ({"max_steps": 8, "max_epochs": 3}, "4/8"),
        ({"max_epochs": 3}, "2/3"),
        ({}, "10 samples"),
    ],
)
def test_the_bar_shows_the_first_limit_and_the_mean_return_on_stderr(
    limits: dict[str, Any], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ReinforcementLearningTaskConfig(
        name="cart", dataset=DatasetConfig(num_update_steps=1), **limits
    )
    progress = Progress(config, State())
    progress.show(State(num_epochs=2, num_steps=4, num_samples=10), [3.0, 4.0])
    progress.close()
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert "cart" in last
    assert shown in last
    assert "return 3.5" in last
    assert err.endswith("\n")
