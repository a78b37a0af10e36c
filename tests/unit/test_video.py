"""Films are decoded by PyAV and Pillow, which had no part in writing them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from gymtask import video
from gymtask.errors import ConfigurationError, GymtaskError, VideoError
from gymtask.video import render_fps, standardize_frame, write_video

FORMATS = pytest.mark.parametrize("suffix", [".mp4", ".gif"])
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def plain(colour: tuple[int, int, int], height: int = 64, width: int = 66) -> video.Frame:
    return np.full((height, width, 3), colour, np.uint8)


def counted(n: int, height: int = 64, width: int = 66) -> Iterator[video.Frame]:
    """Frame k is grey of level 8 k, so that a decoded frame tells its number."""
    return (plain((8 * k % 256,) * 3, height, width) for k in range(n))


def decode(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def read_gif(path: Path) -> tuple[list[np.ndarray], list[int], dict[str, Any]]:
    """Frames, delays in ms, and what else Pillow knows about the first frame."""
    frames, delays = [], []
    with Image.open(path) as image:
        info = dict(image.info)
        for k in range(getattr(image, "n_frames", 1)):
            image.seek(k)
            frames.append(np.asarray(image.convert("RGB")))
            delays.append(int(image.info["duration"]))
    return frames, delays, info


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found.update(int(pid) for pid in (task / "children").read_text().split())
    return found


@contextmanager
def nothing_left_open(folder: Path, files: set[str]) -> Iterator[None]:
    """No descriptor and no process more than before, and `folder` holds `files` alone."""
    import moviepy.video.io.ffmpeg_writer  # noqa: F401  its import may open files for good

    descriptors, processes = len(os.listdir("/proc/self/fd")), children()
    yield
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert children() == processes
    assert set(os.listdir(folder)) == files


@pytest.fixture
def fake_ffmpeg(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a shell script in the place of ffmpeg."""

    def install(text: str) -> None:
        script = tmp_path_factory.mktemp("bin") / "ffmpeg"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        monkeypatch.setattr("moviepy.video.io.ffmpeg_writer.FFMPEG_BINARY", str(script))

    return install


# Frames and their timing


@FORMATS
@pytest.mark.parametrize(
    ("n", "fps"), [(30, 30), (12, 50), (13, 50), (14, 50), (31, 30), (1, 30), (1, 50), (2, 29.97)]
)
def test_as_many_frames_are_read_back_as_were_written_and_in_their_order(
    tmp_path: Path, suffix: str, n: int, fps: float
) -> None:
    path = tmp_path / f"clip{suffix}"
    write_video(counted(n), path, fps=fps)
    levels = [frame.mean() for frame in decode(path)]
    assert levels == pytest.approx([8 * k for k in range(n)], abs=3)


@pytest.mark.parametrize("fps", [30, 50, 29.97, 30000 / 1001, 1, 1 / 3, 0.05, 12.345])
def test_frame_k_of_an_mp4_is_shown_at_k_over_fps(tmp_path: Path, fps: float) -> None:
    write_video(counted(5), tmp_path / "clip.mp4", fps=fps)
    with av.open(str(tmp_path / "clip.mp4")) as container:
        times = [frame.time for frame in container.decode(video=0)]
        stream = container.streams.video[0]
        assert stream.duration is not None
        assert stream.time_base is not None
        length = float(stream.duration * stream.time_base)
    assert times == pytest.approx([k / fps for k in range(5)], rel=1e-4)
    assert length == pytest.approx(5 / fps, rel=0.01)


@pytest.mark.parametrize(
    ("fps", "allowed"),
    [(10, {100}), (25, {40}), (30, {30, 40}), (40, {20, 30}), (50, {20}), (0.5, {2000})],
)
def test_gif_delays_are_right_and_add_up(tmp_path: Path, fps: float, allowed: set[int]) -> None:
    write_video(counted(12), tmp_path / "clip.gif", fps=fps)
    _, delays, _ = read_gif(tmp_path / "clip.gif")
    assert len(delays) == 12
    assert set(delays) == allowed
    assert sum(delays) == pytest.approx(12_000 / fps, abs=10)


def test_gif_of_more_than_50_fps_warns_its_caller_and_uses_20_ms(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="at most 50 frames a second, not the 60") as caught:
        write_video(counted(12), tmp_path / "clip.gif", fps=60)
    assert [warning.filename for warning in caught] == [__file__]
    assert read_gif(tmp_path / "clip.gif")[1] == [20] * 12


def test_mp4_of_60_fps_does_not_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_video(counted(6), tmp_path / "clip.mp4", fps=60)
    assert len(decode(tmp_path / "clip.mp4")) == 6


@FORMATS
def test_equal_frames_are_all_kept(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"clip{suffix}"
    write_video([plain(RED)] * 10, path, fps=10)
    assert len(decode(path)) == 10
    if suffix == ".gif":
        frames, delays, _ = read_gif(path)
        assert delays == [100] * 10
        assert all((frame == RED).all() for frame in frames)


def test_gif_loops_for_ever(tmp_path: Path) -> None:
    write_video(counted(3), tmp_path / "clip.gif")
    assert read_gif(tmp_path / "clip.gif")[2]["loop"] == 0


# Pictures


@FORMATS
def test_red_is_red_and_blue_is_blue(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"clip{suffix}"
    write_video([plain(RED), plain(GREEN), plain(BLUE)], path)
    for channel, frame in enumerate(decode(path)):
        others = np.delete(frame, channel, axis=2)
        assert frame[..., channel].min() > 200
        assert others.max() < 60


@FORMATS
@pytest.mark.parametrize(("height", "width"), [(63, 65), (63, 64), (64, 65), (1, 1), (2, 2)])
def test_odd_sizes_play(tmp_path: Path, suffix: str, height: int, width: int) -> None:
    """An MP4 grows to even sides by a copy of its edge; a GIF keeps its size."""
    frame = plain(RED, height, width)
    path = tmp_path / f"clip{suffix}"
    write_video([frame] * 3, path)
    even = suffix == ".mp4"
    size = (height + height % 2, width + width % 2) if even else (height, width)
    decoded = decode(path)
    assert [image.shape for image in decoded] == [(*size, 3)] * 3
    assert all(image[-1, -1, 0] > 200 and image[-1, -1, 1] < 60 for image in decoded)


@pytest.mark.parametrize(("height", "width"), [(64, 66), (63, 65)])
def test_mp4_is_h264_in_yuv420p_with_named_colours_and_its_index_in_front(
    tmp_path: Path, height: int, width: int
) -> None:
    path = tmp_path / "clip.mp4"
    write_video(counted(5, height, width), path)
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        assert (context.colorspace, context.color_range) == (6, 1)  # BT.601, limited
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    height=st.integers(1, 16),
    width=st.integers(1, 16),
    edits=st.lists(st.integers(0, 5), max_size=6),
)
def test_gif_keeps_up_to_256_colours_exactly(
    tmp_path_factory: pytest.TempPathFactory, seed: int, height: int, width: int, edits: list[int]
) -> None:
    """Each next frame changes some pixels of the last, perhaps none, in the same memory."""
    rng = np.random.default_rng(seed)
    frame = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    sent: list[np.ndarray] = []

    def play() -> Iterator[video.Frame]:
        for count in [0, *edits]:
            rows, columns = rng.integers(0, height, count), rng.integers(0, width, count)
            frame[rows, columns] = rng.integers(0, 256, (count, 3))
            sent.append(frame.copy())
            yield frame

    path = tmp_path_factory.mktemp("gif") / "clip.gif"
    write_video(play(), path)
    decoded, _, _ = read_gif(path)
    assert len(decoded) == len(sent)
    for got, want in zip(decoded, sent, strict=True):
        np.testing.assert_array_equal(got, want)


def test_gif_of_many_colours_comes_close(tmp_path: Path) -> None:
    rows, columns = np.mgrid[:64, :66]
    image = np.stack([columns * 3, rows * 3, columns + rows], axis=-1).astype(np.uint8)
    write_video([image], tmp_path / "clip.gif")
    decoded = read_gif(tmp_path / "clip.gif")[0][0]
    assert np.abs(decoded.astype(int) - image).mean() < 8


@FORMATS
def test_an_iterator_may_reuse_its_memory_and_flip_its_rows(tmp_path: Path, suffix: str) -> None:
    frame = np.zeros((64, 66, 3), np.uint8)

    def play() -> Iterator[video.Frame]:
        for k in range(6):
            frame[:] = 8 * k
            frame[:8] = 255
            yield frame[::-1]

    path = tmp_path / f"clip{suffix}"
    write_video(play(), path)
    decoded = decode(path)
    assert [image[4].mean() for image in decoded] == pytest.approx([0, 8, 16, 24, 32, 40], abs=4)
    assert all(image[-4].mean() > 245 for image in decoded)


@FORMATS
def test_tensors_grey_rgba_and_floats_are_taken(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"clip{suffix}"
    rgba = np.full((64, 66, 4), 255, np.uint8)
    white = torch.full((64, 66, 3), 255, dtype=torch.uint8)
    frames: list[np.ndarray | torch.Tensor] = [white, torch.ones(64, 66, 1), rgba]
    write_video(frames, path)
    decoded = decode(path)
    assert len(decoded) == 3
    assert all(frame.min() > 245 for frame in decoded)


# Where the file goes


@FORMATS
@pytest.mark.parametrize("kind", [str, Path])
def test_path_is_a_string_or_a_path_and_its_folders_are_made(
    tmp_path: Path, suffix: str, kind: Callable[[Path], str | Path]
) -> None:
    path = tmp_path / "not" / "yet" / f"clip{suffix}"
    with nothing_left_open(tmp_path, {"not"}):
        write_video(counted(2), kind(path))
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("name", ["-y.mp4", "a:b %d.MP4", "ünïcode.mp4", "one.two.mp4", "x.GIF"])
def test_odd_names_and_relative_paths_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_video(counted(2), name)
    assert os.listdir(tmp_path) == [name]
    assert len(decode(tmp_path / name)) == 2


@FORMATS
def test_a_file_that_exists_is_replaced_at_the_end_in_one_step(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"clip{suffix}"
    path.write_bytes(b"old")

    def watch() -> Iterator[video.Frame]:
        for frame in counted(5):
            assert path.read_bytes() == b"old"
            yield frame
        parts = set(os.listdir(tmp_path)) - {path.name}
        assert suffix == ".mp4" or parts  # ffmpeg makes its file when it likes
        assert all(part.startswith(".tmp-") and part.endswith(suffix) for part in parts)

    with nothing_left_open(tmp_path, {path.name}):
        write_video(watch(), path)
    assert len(decode(path)) == 5


def test_a_file_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        assert source.stat().st_size > 0
        raise PermissionError(target)

    path = tmp_path / "clip.mp4"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.replace", refuse)
    with nothing_left_open(tmp_path, {"clip.mp4"}), pytest.raises(PermissionError):
        write_video(counted(3), path)
    assert path.read_bytes() == b"old"


def test_the_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_video(counted(2), tmp_path / "clip.mp4")
    assert (tmp_path / "clip.mp4").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_two_films_written_at_once_do_not_mix(tmp_path: Path) -> None:
    def film(name: str, colour: tuple[int, int, int]) -> None:
        write_video([plain(colour)] * 20, tmp_path / name)

    with nothing_left_open(tmp_path, {"red.mp4", "blue.mp4"}):
        threads = [
            threading.Thread(target=film, args=("red.mp4", RED)),
            threading.Thread(target=film, args=("blue.mp4", BLUE)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert decode(tmp_path / "red.mp4")[-1][..., 0].min() > 200
    assert decode(tmp_path / "blue.mp4")[-1][..., 2].min() > 200


# Failure


class BrokenEnvError(Exception):
    """What an environment raises."""


def raises(error: BaseException) -> Iterator[video.Frame]:
    yield from counted(5)
    raise error


def another_shape() -> Iterator[video.Frame]:
    yield from counted(3)
    yield plain(RED, 64, 68)


def none() -> Iterator[Any]:
    yield from counted(4)
    yield None


@FORMATS
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    "error",
    [BrokenEnvError("env"), KeyboardInterrupt(), RuntimeError("a"), OSError("b"), TypeError("c")],
)
def test_what_the_iterator_raises_comes_through_and_leaves_all_as_it_was(
    tmp_path: Path, suffix: str, exists: bool, error: BaseException
) -> None:
    path = tmp_path / f"clip{suffix}"
    if exists:
        path.write_bytes(b"old")
    with nothing_left_open(tmp_path, {path.name} if exists else set()):
        with pytest.raises(type(error)) as caught:
            write_video(raises(error), path)
        assert caught.value is error
        assert error.__cause__ is None
        caught.value.__traceback__ = None
    assert not exists or path.read_bytes() == b"old"


@FORMATS
def test_frames_of_two_shapes_are_refused_by_number(tmp_path: Path, suffix: str) -> None:
    message = r"shape \(64, 66, 3\), got \(64, 68, 3\) at frame 3"
    with (
        nothing_left_open(tmp_path, set()),
        pytest.raises(ConfigurationError, match=message),
    ):
        write_video(another_shape(), tmp_path / f"clip{suffix}")


@FORMATS
def test_a_frame_that_is_none_is_refused_by_number(tmp_path: Path, suffix: str) -> None:
    with (
        nothing_left_open(tmp_path, set()),
        pytest.raises(ConfigurationError, match=r"frame 4 .*None"),
    ):
        write_video(none(), tmp_path / f"clip{suffix}")


@FORMATS
def test_no_frames_are_refused_and_nothing_is_made(tmp_path: Path, suffix: str) -> None:
    with (
        nothing_left_open(tmp_path, set()),
        pytest.raises(ConfigurationError, match="at least one frame, got none"),
    ):
        write_video(iter(()), tmp_path / "folder" / f"clip{suffix}")


def test_a_killed_ffmpeg_is_a_video_error(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"old")
    before = children()

    def play() -> Iterator[video.Frame]:
        yield from counted(3)
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        yield from counted(100, 256, 256)

    def same_size() -> Iterator[video.Frame]:
        return (np.resize(frame, (256, 256, 3)) for frame in play())

    with (
        nothing_left_open(tmp_path, {"clip.mp4"}),
        pytest.raises(VideoError, match="status -9: it said nothing"),
    ):
        write_video(same_size(), path)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("n", [1, 500])
def test_what_ffmpeg_said_is_in_the_error(tmp_path: Path, fake_ffmpeg: Any, n: int) -> None:
    """It fails while frames are written, or after the last, when a pipe holds them all."""
    fake_ffmpeg("echo 'no such encoder' >&2; exit 3")
    with (
        nothing_left_open(tmp_path, set()),
        pytest.raises(VideoError, match="status 3: no such encoder") as caught,
    ):
        write_video(counted(n), tmp_path / "clip.mp4")
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, GymtaskError)


def test_an_ffmpeg_that_says_too_much_does_not_block(tmp_path: Path, fake_ffmpeg: Any) -> None:
    fake_ffmpeg("head -c 1000000 /dev/zero | tr '\\0' x >&2; echo ' the end' >&2; cat; exit 1")
    with nothing_left_open(tmp_path, set()), pytest.raises(VideoError, match=r"the end$") as caught:
        write_video(counted(50), tmp_path / "clip.mp4")
    assert len(str(caught.value)) < 2100


def test_an_ffmpeg_that_writes_nothing_is_a_video_error(tmp_path: Path, fake_ffmpeg: Any) -> None:
    fake_ffmpeg("cat > /dev/null; exit 0")
    with nothing_left_open(tmp_path, set()), pytest.raises(VideoError, match="wrote nothing"):
        write_video(counted(3), tmp_path / "clip.mp4")


def test_an_ffmpeg_that_is_not_there_is_a_video_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_left_open(tmp_path, set()):
        monkeypatch.setattr("moviepy.video.io.ffmpeg_writer.FFMPEG_BINARY", "/not/there")
        with pytest.raises(VideoError, match="could not be started"):
            write_video(counted(3), tmp_path / "clip.mp4")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        write_video(counted(3), tmp_path / "clip.gif")


def test_a_file_in_the_place_of_a_folder_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with nothing_left_open(tmp_path, {"file"}), pytest.raises(OSError, match="file"):
        write_video(counted(3), tmp_path / "file" / "clip.mp4")


INTERRUPTED = """
import json, signal, sys, time
import numpy as np
from gymtask.video import write_video
stop = False
if sys.argv[2] == "finish":
    def handler(*_):
        global stop
        stop = True
    signal.signal(signal.SIGINT, handler)
def play():
    for k in range(100_000):
        if k == 20:
            print("filming", flush=True)
        if stop:
            print(json.dumps(k), flush=True)
            return
        time.sleep(0.005)
        yield np.full((64, 66, 3), k % 256, np.uint8)
write_video(play(), sys.argv[1])
"""


@pytest.mark.parametrize("then", ["stop", "finish"])
def test_ctrl_c_ends_the_film_only_as_python_decides(tmp_path: Path, then: str) -> None:
    """Ctrl-C reaches the whole process group; a program that handles it still gets its film."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "clip.mp4"), then]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "filming\n"
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    if then == "finish":
        assert process.returncode == 0, errors
        assert len(decode(tmp_path / "clip.mp4")) == json.loads(output)
    else:
        assert "KeyboardInterrupt" in errors
        assert os.listdir(tmp_path) == []


# Resources


def resident(pid: int | str = "self") -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@FORMATS
def test_memory_does_not_grow_with_the_film(tmp_path: Path, suffix: str) -> None:
    """Between frames 500 and 1500, 180 MB of pixels go by."""
    base, before = np.zeros((200, 300, 3), np.uint8), children()
    held: list[int] = []

    def play() -> Iterator[video.Frame]:
        for k in range(1501):
            frame = base.copy()
            frame[k % 180 : k % 180 + 20, k % 280 : k % 280 + 20] = (k % 256, 200, 100)
            if k in (500, 1500):
                held.append(resident("self") + sum(resident(pid) for pid in children() - before))
            yield frame

    write_video(play(), tmp_path / f"clip{suffix}")
    assert held[1] - held[0] < 40e6


def test_many_films_leave_memory_descriptors_and_processes_as_they_were(tmp_path: Path) -> None:
    names = {f"{k}.mp4" for k in range(10)}
    write_video(counted(30, 200, 300), tmp_path / "0.mp4")
    held = resident()
    with nothing_left_open(tmp_path, names):
        for name in names:
            write_video(counted(30, 200, 300), tmp_path / name)
    assert resident() - held < 20e6


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_video(counted(3), tmp_path / "clip.mp4")
    write_video(counted(3), tmp_path / "clip.gif")
    assert capfd.readouterr() == ("", "")


def test_import_of_the_module_does_not_import_a_writer() -> None:
    program = "import sys, gymtask.video; print({'moviepy', 'PIL', 'imageio'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("set()\n", "")


# Arguments


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), "30", None, True])
def test_fps_that_is_no_finite_number_above_0_is_refused(tmp_path: Path, fps: Any) -> None:
    with pytest.raises(ConfigurationError, match="`fps` must be a finite number above 0, got"):
        write_video(counted(3), tmp_path / "clip.mp4", fps=fps)


def test_fps_may_be_a_numpy_number(tmp_path: Path) -> None:
    write_video(counted(3), tmp_path / "clip.gif", fps=np.float32(10))  # type: ignore[arg-type]
    assert read_gif(tmp_path / "clip.gif")[1] == [100] * 3


def test_a_gif_with_delays_it_cannot_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"at least 1 / 655\.35"):
        write_video(counted(3), tmp_path / "clip.gif", fps=0.001)


def test_a_gif_with_sides_it_cannot_store_is_refused(tmp_path: Path) -> None:
    with (
        nothing_left_open(tmp_path, set()),
        pytest.raises(ConfigurationError, match="at most 65535 rows and columns"),
    ):
        write_video([plain(RED, 1, 65536)], tmp_path / "clip.gif")


@pytest.mark.parametrize("name", ["clip.avi", "clip", "clip.mp4.txt"])
def test_an_unknown_suffix_is_refused_with_those_that_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"must end in \.mp4 or \.gif, got"):
        write_video(counted(3), tmp_path / name)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").mkdir()
    with pytest.raises(ConfigurationError, match="must be a file"):
        write_video(counted(3), tmp_path / "clip.mp4")


def test_an_unknown_writer_is_refused_with_those_that_work(tmp_path: Path) -> None:
    message = r"work here, \['moviepy'\], got 'nonsense': there is no writer of that name"
    with pytest.raises(ConfigurationError, match=message):
        write_video(counted(3), tmp_path / "clip.mp4", writer="nonsense")


@FORMATS
@pytest.mark.parametrize("module", ["moviepy", "moviepy.video.io.ffmpeg_writer"])
def test_a_writer_that_is_not_installed_is_refused_with_those_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, module: str
) -> None:
    other = video._Writer(modules=("json",), formats={})
    monkeypatch.setitem(video._WRITERS, "other", other)
    monkeypatch.setitem(sys.modules, module, None)
    message = r"work here, \['other'\], got 'moviepy': `pip install moviepy` may help"
    with pytest.raises(ConfigurationError, match=message):
        write_video(counted(3), tmp_path / f"clip{suffix}")


def test_arguments_are_checked_before_the_first_frame_is_asked_for(tmp_path: Path) -> None:
    def never() -> Iterator[video.Frame]:
        pytest.fail("a frame was asked for")
        yield plain(RED)

    wrong: list[dict[str, Any]] = [{"fps": 0}, {"writer": "nonsense"}]
    for arguments in wrong:
        with pytest.raises(ConfigurationError):
            write_video(never(), tmp_path / "clip.mp4", **arguments)
    for path in (tmp_path / "clip.txt", tmp_path):
        with pytest.raises(ConfigurationError):
            write_video(never(), path)


def test_another_writer_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def raw(path: Path, size: tuple[int, int], fps: float) -> Iterator[video.Write]:
        with open(path, "wb") as file:
            file.write(f"{size} {fps}".encode())
            yield lambda frame: file.writelines([frame.tobytes()])

    monkeypatch.setitem(video._WRITERS, "raw", video._Writer((), {".raw": raw}))
    write_video(counted(2, 2, 1), tmp_path / "clip.raw", fps=5, writer="raw")
    assert (tmp_path / "clip.raw").read_bytes() == b"(2, 1) 5.0" + bytes(6) + bytes([8] * 6)


# standardize_frame


def test_standardize_returns_a_uint8_rgb_array_as_it_is() -> None:
    frame = plain(RED)
    assert standardize_frame(frame) is frame


def test_standardize_shares_memory_with_a_uint8_tensor() -> None:
    tensor = torch.zeros(4, 5, 3, dtype=torch.uint8)
    assert np.shares_memory(standardize_frame(tensor), tensor.numpy())


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1)])
def test_standardize_repeats_grey(shape: tuple[int, ...]) -> None:
    grey = np.arange(20, dtype=np.uint8).reshape(shape)
    frame = standardize_frame(grey)
    assert frame.shape == (4, 5, 3)
    assert frame.dtype == np.uint8
    for channel in range(3):
        np.testing.assert_array_equal(frame[..., channel], grey.reshape(4, 5))


def test_standardize_drops_alpha() -> None:
    rgba = np.arange(80, dtype=np.uint8).reshape(4, 5, 4)
    np.testing.assert_array_equal(standardize_frame(rgba), rgba[..., :3])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_standardize_brings_back_every_byte_that_was_divided_by_255(dtype: Any, kind: Any) -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    floats = (levels / 255).astype(dtype)
    np.testing.assert_array_equal(standardize_frame(kind(floats))[..., 1], levels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_standardize_takes_tensors_of_any_float_type_with_a_gradient(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0]], dtype=dtype, requires_grad=True)
    np.testing.assert_array_equal(standardize_frame(tensor)[..., 0], [[0, 255]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_standardize_takes_tensors_of_a_gpu() -> None:
    tensor = torch.ones(4, 5, 3, device="cuda")
    np.testing.assert_array_equal(standardize_frame(tensor), 255)


@pytest.mark.parametrize("value", [-0.01, 1.01, 255.0, float("nan"), float("inf")])
def test_standardize_refuses_floats_outside_0_to_1(value: float) -> None:
    frame = np.zeros((4, 5, 3))
    frame[1, 2, 0] = value
    with pytest.raises(ConfigurationError, match=r"floats in \[0, 1\], got"):
        standardize_frame(frame)


@pytest.mark.parametrize(
    "shape", [(), (5,), (4, 5, 2), (4, 5, 5), (3, 4, 5), (1, 4, 5, 3), (0, 5, 3), (4, 0)]
)
def test_standardize_refuses_other_shapes_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        standardize_frame(np.zeros(shape, np.uint8))
    assert f"got shape {shape}" in str(caught.value)


@pytest.mark.parametrize("dtype", [np.int64, np.int8, bool, complex, object, "U1"])
def test_standardize_refuses_other_dtypes_by_name(dtype: Any) -> None:
    frame = np.zeros((4, 5, 3), dtype)
    with pytest.raises(ConfigurationError, match="must be uint8, or floats") as caught:
        standardize_frame(frame)
    assert f"shape (4, 5, 3) and dtype {frame.dtype}" in str(caught.value)


@pytest.mark.parametrize(("frame", "name"), [(None, "None"), ([[1]], "list"), ("text", "str")])
def test_standardize_refuses_other_types_by_name(frame: Any, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"numpy array or a torch tensor, got {name}"):
        standardize_frame(frame)


# render_fps


class Env(gymnasium.Env[Any, Any]):
    def __init__(self, metadata: Any) -> None:
        self.metadata = metadata


@pytest.mark.parametrize(
    ("metadata", "fps"),
    [({"render_fps": 50}, 50), ({"render_fps": 12.5}, 12.5), ({"render_fps": None}, 30), ({}, 30)],
)
def test_render_fps_is_that_of_the_metadata_or_30(metadata: Any, fps: float) -> None:
    assert render_fps(Env(metadata)) == fps
    assert isinstance(render_fps(Env(metadata)), float)


def test_render_fps_sees_through_wrappers() -> None:
    env = gymnasium.make("CartPole-v1")
    assert render_fps(env) == 50
    env.close()


@pytest.mark.parametrize("fps", [0, -5, float("nan"), "fast"])
def test_render_fps_refuses_what_is_no_rate(fps: Any) -> None:
    with pytest.raises(ConfigurationError, match="render_fps"):
        render_fps(Env({"render_fps": fps}))
