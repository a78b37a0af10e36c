"""Clips that a run makes, in its directory and in TensorBoard."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gymtask.errors import VideoError
from gymtask.training import films
from gymtask.video import write_video
from tests.integration.training_tasks import ScriptedTask, make_config, run


def pictures_of(folder: Path) -> list[Any]:
    """The images that TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    return [each for tag in events.Tags()["images"] for each in events.Images(tag)]


def test_clips_are_sent_to_tensorboard_as_moving_pictures(tmp_path: Path) -> None:
    run(tmp_path, ScriptedTask(make_config(max_epochs=4)), clip_interval=2)
    found = pictures_of(tmp_path / "run")
    assert [each.step for each in found] == [20, 40]  # in samples, as every metric
    assert len(list((tmp_path / "run" / "clips").glob("*.mp4"))) == 2
    for each in found:
        with Image.open(io.BytesIO(each.encoded_image_string)) as picture:
            assert picture.format == "GIF"
            assert picture.size == (each.width, each.height)


def test_long_and_large_films_are_cut_and_made_smaller(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    shades = range(0, 250, 2)
    write_video((np.full((40, 900, 3), shade, np.uint8) for shade in shades), path, fps=5)
    with Image.open(io.BytesIO(films.moving_picture(path))) as picture:
        assert picture.size == (320, 14)
        number: int = picture.n_frames
        assert number == films.GIF_FPS * films.GIF_SECONDS  # of 25 s
        seen = []
        for place in (0, 60, 199):
            picture.seek(place)
            seen.append(picture.convert("L").getpixel((100, 7)))
    assert seen == pytest.approx([0, 60, 198], abs=6)


def test_a_film_that_cannot_be_sent_is_told_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path) -> bytes:
        raise VideoError("ffmpeg ended with status 1: on purpose")

    monkeypatch.setattr(films, "moving_picture", fail)
    with caplog.at_level(logging.WARNING, logger="gymtask"):
        state, _ = run(tmp_path, ScriptedTask(make_config(max_epochs=2)), clip_interval=1)
    assert state.num_epochs == 2
    assert caplog.text.count("is not sent to TensorBoard: ffmpeg ended with status 1") == 2


def test_what_is_no_film_is_an_error_with_what_ffmpeg_said(tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_bytes(b"no film")
    with pytest.raises(VideoError, match=r"ffmpeg ended with status \d+: .*moov atom"):
        films.moving_picture(tmp_path / "film.mp4")
