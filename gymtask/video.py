"""Films: frames as environments render them, made alike, and written to a file one at a time.

    write_video(frames, "clips/best.mp4", fps=render_fps(env))

Frames go to disk as an iterator gives them, so memory does not grow with the clip; as many are
read back as were given. A file gets its name when it is complete; until then it is `.tmp-*`.

A writer is chosen by name, a format by the suffix. Each pair is a context manager in `_WRITERS`
that yields `write(frame)`, completes the file when it is left, and leaves no process or descriptor
open either way.
"""

from __future__ import annotations

import importlib
import math
import numbers
import os
import signal
import struct
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from gymtask.errors import ConfigurationError, VideoError

if TYPE_CHECKING:
    import gymnasium

__all__ = ["render_fps", "standardize_frame", "write_video"]

Frame = npt.NDArray[np.uint8]
Write = Callable[[Frame], None]
Format = Callable[[Path, tuple[int, int], float], AbstractContextManager[Write]]

DEFAULT_FPS = 30.0
MAX_GIF_FPS = 50.0
MAX_GIF_NUMBER = 65535  # rows, columns, and a delay in hundredths of a second have 16 bits


def write_video(
    frames: Iterable[npt.NDArray[Any] | torch.Tensor],
    path: str | Path,
    *,
    fps: float = DEFAULT_FPS,
    writer: str = "moviepy",
) -> None:
    """Write frames to a video file, one at a time.

    MP4 is H.264 in yuv420p, which every player reads and which needs even sides: an odd height or
    width grows by one pixel, a copy of the last row or column. A GIF keeps its size, loops for ever
    and keeps up to 256 colours a frame exactly; its delays are whole hundredths of a second, mixed
    so that the total is right.

    Args:
        frames: Frames [H, W, 3] uint8, or what `standardize_frame` takes, of one size.
            Each is written before the next is asked for, so an iterator may reuse its memory.
        path: The file to write, ending in ".mp4" or ".gif". Its folders are created. A file that
            exists is replaced at the end in one step, and stays as it was when anything fails.
        fps: Frames per second, above 0. Players slow down a GIF of more than 50, so that one is
            written with 50, after a warning.
        writer: The package that encodes: "moviepy".

    Raises:
        ConfigurationError: If an argument breaks its rule, the writer is not installed, there is no
            frame, or one is no image or of another size; its number, from 0, is in the message.
        VideoError: If the encoder fails. What `frames` raises comes through as it is.
    """
    path = Path(path)
    rate = _check_fps("fps", fps)
    open_format = _find_format(writer, path.suffix.lower())
    if path.suffix.lower() == ".gif":
        rate = _gif_rate(rate)
    if path.is_dir():
        raise ConfigurationError(f"`path` must be a file, got the folder {path}")
    clip = _checked(frames)
    first = next(clip, None)
    if first is None:
        raise ConfigurationError("`frames` must hold at least one frame, got none")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.absolute().with_name(f".tmp-{uuid.uuid4().hex}{path.suffix}")
    try:
        with open_format(part, first.shape[:2], rate) as write:
            write(first)
            for frame in clip:
                write(frame)
        if not part.exists() or part.stat().st_size == 0:
            raise VideoError(f"writer {writer!r} reported no failure, but wrote nothing")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def standardize_frame(frame: npt.NDArray[Any] | torch.Tensor) -> Frame:
    """Turn an image into uint8 [H, W, 3].

    Args:
        frame: Grey [H, W] or [H, W, 1], RGB [H, W, 3], or RGBA [H, W, 4], whose alpha is dropped;
            uint8, or floats in [0, 1]; a numpy array, or a tensor on any device.

    Returns:
        uint8 [H, W, 3]. A uint8 RGB array is returned as it is; memory may be shared with `frame`.

    Raises:
        ConfigurationError: If the type, the shape, the dtype or the range is another.
    """
    array = _to_numpy(frame)
    got = f"got shape {array.shape} and dtype {array.dtype}"
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or array.size == 0:
        raise ConfigurationError(f"`frame` must be [H, W] or [H, W, 1, 3 or 4], {got}")
    array = array[..., :3] if array.shape[2] == 4 else array
    if np.issubdtype(array.dtype, np.floating):
        low, high = array.min(), array.max()
        if not (low >= 0 and high <= 1):  # NaN compares false, so it is refused too
            raise ConfigurationError(f"`frame` must hold floats in [0, 1], got {low} to {high}")
        array = np.rint(array * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise ConfigurationError(f"`frame` must be uint8, or floats in [0, 1], {got}")
    return np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array


def render_fps(env: gymnasium.Env[Any, Any]) -> float:
    """Frames per second at which an environment is meant to be seen.

    Args:
        env: Its `metadata["render_fps"]` is read.

    Returns:
        That number; 30.0 where it is missing or None.

    Raises:
        ConfigurationError: If it is there, but no finite number above 0.
    """
    fps = (env.metadata or {}).get("render_fps")
    return DEFAULT_FPS if fps is None else _check_fps('metadata["render_fps"]', fps)


def _check_fps(name: str, fps: Any) -> float:
    number = isinstance(fps, numbers.Real) and not isinstance(fps, bool)
    if not (number and 0 < fps < math.inf):
        raise ConfigurationError(f"`{name}` must be a finite number above 0, got {fps!r}")
    return float(fps)


def _to_numpy(frame: object) -> npt.NDArray[Any]:
    if isinstance(frame, np.ndarray):
        return frame
    if not isinstance(frame, torch.Tensor):
        got = "None" if frame is None else type(frame).__name__
        raise ConfigurationError(f"`frame` must be a numpy array or a torch tensor, got {got}")
    frame = frame.detach().cpu()
    array: npt.NDArray[Any] = (frame.float() if frame.dtype == torch.bfloat16 else frame).numpy()
    return array


def _checked(frames: Iterable[npt.NDArray[Any] | torch.Tensor]) -> Iterator[Frame]:
    """The frames in standard form, as long as they are frames and of one size."""
    shape = None
    for number, given in enumerate(frames):
        try:
            frame = standardize_frame(given)
        except ConfigurationError as error:
            raise ConfigurationError(f"frame {number} of `frames`: {error}") from error
        shape = shape or frame.shape
        if frame.shape != shape:
            got = f"got {frame.shape} at frame {number}"
            raise ConfigurationError(f"`frames` must all be of frame 0's shape {shape}, {got}")
        yield frame


@contextmanager
def _moviepy_mp4(path: Path, size: tuple[int, int], fps: float) -> Iterator[Write]:
    """H.264 by moviepy's `FFMPEG_VideoWriter`, which moviepy 1.0.3 and 2.2.1 share.

    It takes frames as they come; moviepy's clips count by time and lose the last (moviepy#2507).
    """
    from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

    odd = (size[0] % 2, size[1] % 2)
    shape = (size[1] + odd[1], size[0] + odd[0])
    with ExitStack() as stack:
        # No pipe: nobody reads it while frames are written, and a full one would stop ffmpeg.
        log = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        options: dict[str, Any] = {"logfile": log, "ffmpeg_params": _mp4_options(fps)}
        try:
            with _interrupts_blocked():
                video = FFMPEG_VideoWriter(str(path), shape, max(fps, 0.01), "libx264", **options)
                stack.enter_context(_ended(video.proc, log))
        except OSError as error:
            raise VideoError(f"ffmpeg could not be started: {error}") from error

        def write(frame: Frame) -> None:
            if any(odd):
                frame = np.pad(frame, ((0, odd[0]), (0, odd[1]), (0, 0)), mode="edge")
            try:
                video.write_frame(frame)
            except (OSError, TypeError) as error:  # TypeError: moviepy 1.0.3 with a log file
                raise VideoError(_ffmpeg_report(video.proc, log)) from error

        yield write


@contextmanager
def _ended(process: Any, log: IO[str]) -> Iterator[None]:
    """Wait for ffmpeg to complete its file on the way out; after an exception, kill it."""
    try:
        yield
        with suppress(BrokenPipeError):  # it has ended already; its status says how
            process.stdin.close()
        if process.wait() != 0:
            raise VideoError(_ffmpeg_report(process, log))
    finally:
        process.kill()
        process.wait()
        with suppress(OSError):
            process.stdin.close()


def _mp4_options(fps: float) -> list[str]:
    """What ffmpeg is told beyond what moviepy tells it.

    Moviepy gives the frame rate with two decimals; here frame k is shown at k / fps. The file names
    its colours' matrix, so that no player has to guess it from the size.
    """
    period = Fraction(1 / fps).limit_denominator(1_000_000)
    tick = f"{period.numerator}/{period.denominator}"
    timing = ["-vf", f"settb={tick},setpts=N,format=yuv420p", "-enc_time_base", tick]
    colour = ["-colorspace", "smpte170m", "-color_range", "tv"]
    file = ["-movflags", "+faststart", "-f", "mp4"]
    return [*timing, *colour, *file, "-loglevel", "error", "-nostats", "-hide_banner"]


def _ffmpeg_report(process: Any, log: IO[str]) -> str:
    log.seek(0)
    said = log.read().strip()[-2000:] or "it said nothing"
    return f"ffmpeg ended with status {process.poll()}: {said}"


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process started in here gets no SIGINT: whether Ctrl-C ends it is its parent's decision."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _pillow_gif(path: Path, size: tuple[int, int], fps: float) -> Iterator[Write]:
    """GIF of images that Pillow encodes: for each frame what changed, with a palette of its own.

    Pillow's own films wait in memory for the last frame and merge equal ones; ffmpeg's have uneven
    delays, and their last frame does not keep its own.
    """
    from PIL import GifImagePlugin, Image

    if max(size) > MAX_GIF_NUMBER:
        raise ConfigurationError(f"a GIF has at most {MAX_GIF_NUMBER} rows and columns, got {size}")
    count, last = 0, None

    def write(frame: Frame) -> None:
        nonlocal count, last
        top, bottom, left, right = _changed(last, frame)
        image = Image.fromarray(np.ascontiguousarray(frame[top:bottom, left:right]))
        image = image.quantize(256, Image.Quantize.MEDIANCUT)  # exact up to 256 colours
        delay = round(100 * (count + 1) / fps) - round(100 * count / fps)
        options = {"duration": 10 * delay, "include_color_table": True}
        file.writelines(GifImagePlugin.getdata(image, (left, top), **options))
        count, last = count + 1, frame.copy()

    with open(path, "xb") as file:
        file.write(b"GIF89a" + struct.pack("<HHBBB", size[1], size[0], 0, 0, 0))
        file.write(b"!\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")  # repeat for ever
        yield write
        file.write(b";")


def _changed(last: Frame | None, frame: Frame) -> tuple[int, int, int, int]:
    """Top, bottom, left, right of what is not as in the last frame; one pixel if nothing is."""
    if last is None:
        return 0, frame.shape[0], 0, frame.shape[1]
    differs = (last != frame).any(axis=2)
    rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0))
    if rows.size == 0:
        return 0, 1, 0, 1
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def _gif_rate(fps: float) -> float:
    """The frame rate asked for, or the nearest that players keep to."""
    if 100 / fps > MAX_GIF_NUMBER:
        raise ConfigurationError(f"`fps` of a GIF must be at least 1 / 655.35, got {fps}")
    if fps > MAX_GIF_FPS:
        asked = f"not the {fps:g} asked for, so it plays slower; an MP4 has no such limit"
        warnings.warn(f"a GIF has at most {MAX_GIF_FPS:g} frames a second, {asked}", stacklevel=3)
    return min(fps, MAX_GIF_FPS)


@dataclass(frozen=True)
class _Writer:
    modules: tuple[str, ...]  # all that its formats import
    formats: Mapping[str, Format]  # by suffix


_WRITERS = {
    "moviepy": _Writer(
        modules=("moviepy", "moviepy.video.io.ffmpeg_writer", "PIL.GifImagePlugin"),
        formats={".mp4": _moviepy_mp4, ".gif": _pillow_gif},
    ),
}


def _find_format(writer: str, suffix: str) -> Format:
    """What writes files of this suffix, with all that it imports already imported."""
    problem = _import_problem(writer)
    if problem:
        works = [name for name in _WRITERS if not _import_problem(name)]
        rule = f"`writer` must be one of those that work here, {works}"
        raise ConfigurationError(f"{rule}, got {writer!r}: {problem}")
    formats = _WRITERS[writer].formats
    if suffix not in formats:
        raise ConfigurationError(f"`path` must end in {' or '.join(formats)}, got {suffix!r}")
    return formats[suffix]


def _import_problem(writer: str) -> str:
    """Why a writer cannot be used; empty if it can."""
    if writer not in _WRITERS:
        return "there is no writer of that name"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for module in _WRITERS[writer].modules:
                importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:  # the last two: no ffmpeg for moviepy
            return f"`pip install {writer}` may help ({error})"
    return ""
