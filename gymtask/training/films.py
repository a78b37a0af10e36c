"""Clips of a run: a file for each, and a small moving picture in TensorBoard."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.logger import Logger
from lightning_fabric.loggers.tensorboard import TensorBoardLogger
from torch import nn

from gymtask.errors import VideoError
from gymtask.logged import LoggedNumbers
from gymtask.task import ReinforcementLearningTask, State
from gymtask.training.checkpoint import preserved_rng

FOLDER, TAG = "clips", "clip"
GIF_FPS, GIF_SECONDS, GIF_WIDTH = 10, 20, 320
"""What TensorBoard gets of a clip: events are read as a whole, so a long clip is cut there."""
FFMPEG_TIMEOUT = 120.0  # seconds

logger = logging.getLogger(__name__)


def film(
    task: ReinforcementLearningTask[Any, Any],
    model: nn.Module,
    run_dir: Path,
    state: State,
    loggers: Sequence[Logger],
) -> None:
    """Plays an episode and leaves it in the run directory, and in TensorBoard where there is one.

    Args:
        task: Plays.
        model: Acts.
        run_dir: Gets clips/epoch-*.mp4.
        state: Names the clip.
        loggers: Of which those of TensorBoard are sent the clip.
    """
    path = run_dir / FOLDER / f"epoch-{state.num_epochs:06d}.mp4"
    path.parent.mkdir(exist_ok=True)
    logged, task.logged = task.logged, LoggedNumbers()  # a clip is no training
    try:
        with preserved_rng():
            task.sample_clip(save_path=path, model=model)
    finally:
        task.logged = logged
    boards = [log for log in loggers if isinstance(log, TensorBoardLogger)]
    # What tensorboardX writes has classes of its own.
    if not boards or importlib.util.find_spec("tensorboard") is None:
        return
    try:
        picture = moving_picture(path)
        for board in boards:
            _send(board, picture, state.num_samples)
    except (ImportError, OSError, RuntimeError) as error:  # the film is there, training goes on
        logger.warning("%s is not sent to TensorBoard: %s", path, error)


def moving_picture(path: Path) -> bytes:
    """The beginning of a film as a small GIF, the one moving picture that TensorBoard shows.

    Raises:
        VideoError: It could not be made.
    """
    from moviepy.config import FFMPEG_BINARY  # slow to import; found there when it was written

    # Neighbouring pixels are not mixed, and a film that is small already stays as it is.
    picture = f"fps={GIF_FPS},scale='min({GIF_WIDTH},iw)':-1:flags=neighbor"
    colours = "split[a][b];[a]palettegen[p];[b][p]paletteuse"
    # Before -i, as a palette is made of all that is read.
    what = ["-t", str(GIF_SECONDS), "-i", str(path), "-vf", f"{picture},{colours}"]
    command = [FFMPEG_BINARY, "-loglevel", "error", "-nostdin", *what, "-f", "gif", "-"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=FFMPEG_TIMEOUT,
            start_new_session=True,  # Ctrl-C is for the run alone
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VideoError(f"ffmpeg could not be run: {error}") from error
    if done.returncode != 0 or not done.stdout:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise VideoError(f"ffmpeg ended with status {done.returncode}: {said or 'it said nothing'}")
    return done.stdout


def _send(board: TensorBoardLogger, gif: bytes, step: int) -> None:
    # torch's own add_video asks for a module that moviepy 2 no longer has.
    proto: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    width, height = struct.unpack("<HH", gif[6:10])
    image = proto.Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
    writer: Any = board.experiment._get_file_writer()
    value = proto.Summary.Value(tag=TAG, image=image)
    writer.add_summary(proto.Summary(value=[value]), step)
