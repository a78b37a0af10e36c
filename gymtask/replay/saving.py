"""Replay buffers on disk: a folder that is whole or not there.

<path>/
buffer.json     what the records hold, counts, settings, and the state of the draws
records.bin     the records of the rows, in order of their places in the ring
side.bin        the states behind the last rows of trajectories, by side slot
links.npz       which row follows which
weights.npy     of the rows, where they are prioritised
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gymtask.errors import ReplayError
from gymtask.replay.priorities import Prioritization
from gymtask.replay.records import Field, RecordLayout
from gymtask.replay.ring import FEWEST_SLOTS
from gymtask.workers.layout import Array

if TYPE_CHECKING:
    from gymtask.replay.buffer import ReplayBuffer

FORMAT = 2
CHUNK = 1 << 24  # bytes that are read at once
TEMPORARY = ".tmp-"


def save(buffer: ReplayBuffer, path: Path) -> None:
    """Writes a buffer; see `ReplayBuffer.save`."""
    ring = buffer._ring
    with _whole_folder(path) as folder:
        size = len(ring.links)
        np.savez(folder / "links.npz", **ring.links.state())
        if buffer._tree is not None:
            np.save(folder / "weights.npy", buffer._tree.weights[:size])
        if ring.layout is not None:
            ring.records.array[:size].tofile(folder / "records.bin")
            ring.side.array[: ring.links.num_chains].tofile(folder / "side.bin")
        description = {
            "format": FORMAT,
            "settings": settings_of(buffer),
            "fields": None if ring.layout is None else _described(ring.layout),
            "size": size,
            "num_chains": ring.links.num_chains,
            "beta": buffer.beta,
            "largest": buffer._largest,
            "random": buffer._random.bit_generator.state,
        }
        (folder / "buffer.json").write_text(json.dumps(description, indent=1))
        for file in folder.iterdir():
            _sync(file)


@contextmanager
def _whole_folder(path: Path) -> Iterator[Path]:
    """A new folder that takes the place of `path` once all in it is written."""
    if path.exists() and not (path / "buffer.json").is_file():
        raise ReplayError(
            f"`path` must be new, or hold a saved ReplayBuffer to be replaced, got {str(path)!r}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{path.name}-", dir=path.parent))
    try:
        yield folder
        if path.exists():
            before = folder.with_name(f"{folder.name}-before")
            path.rename(before)
            folder.rename(path)
            shutil.rmtree(before)
        else:
            folder.rename(path)
        _sync(path.parent)
    except OSError as error:
        raise ReplayError(
            f"cannot save the ReplayBuffer at {path} ({error.strerror or error}); what was saved"
            " there before is as it was"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _described(layout: RecordLayout) -> list[dict[str, Any]]:
    return [
        {
            "path": list(field.path),
            "shape": list(field.shape),
            "dtype": str(field.dtype).removeprefix("torch."),
            "linked": field.linked,
        }
        for field in layout.fields.values()
    ]


# ---- loading -------------------------------------------------------------------------------------


def load(kind: type[ReplayBuffer], path: Path, storage: str | os.PathLike[str]) -> ReplayBuffer:
    """Reads a buffer; see `ReplayBuffer.load`."""
    with _damage_named(path):
        description, links = _read_description(path)
        settings = dict(description["settings"])
        if settings["prioritized"] is not None:
            settings["prioritized"] = Prioritization(**settings["prioritized"])
        buffer = kind(storage=storage, **settings)
        try:
            _fill(buffer, path, description, links)
        except BaseException:
            buffer._ring.discard()
            raise
    return buffer


def load_into(buffer: ReplayBuffer, path: Path) -> None:
    """Reads what was saved of a buffer into another one, which then goes on as that one would.

    Args:
        buffer: Made with the same arguments; may lie elsewhere. What it holds is given up.
        path: The folder.

    Raises:
        ReplayError: Nothing whole is saved there, or it is of a buffer with other arguments.
    """
    with _damage_named(path):
        description, links = _read_description(path)
        saved, own = description["settings"], settings_of(buffer)
        differing = [
            f"`{name}` is {saved.get(name)!r} in what was saved, got {value!r}"
            for name, value in own.items()
            if saved.get(name) != value
        ]
        if differing:
            raise ReplayError(f"the ReplayBuffer saved at {path} is another one: {differing}")
        _fill(buffer, path, description, links)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ReplayError(
            f"no whole ReplayBuffer is saved at {path}: {error.filename} is not there"
        ) from error
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ReplayError(f"the ReplayBuffer saved at {path} is damaged: {error}") from error


def _read_description(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    description = json.loads((path / "buffer.json").read_text())
    if description["format"] != FORMAT:
        raise ReplayError(
            f"{path} must be of format {FORMAT}, got {description['format']}; it was saved by"
            " another version of gymtask"
        )
    with open(path / "links.npz", "rb") as file, np.load(file, allow_pickle=False) as links:
        return description, {name: links[name] for name in links.files}


def _fill(
    buffer: ReplayBuffer, path: Path, description: dict[str, Any], state: dict[str, Array]
) -> None:
    ring, size, tree = buffer._ring, description["size"], buffer._tree
    weights = np.zeros(size)
    if tree is not None:
        weights[:] = np.load(path / "weights.npy", allow_pickle=False)
    if description["fields"] is not None:
        layout = RecordLayout([_field(each) for each in description["fields"]])
        num_chains = description["num_chains"]
        # Before what is there is given up.
        _require_size(path / "records.bin", size * layout.dtype.itemsize)
        _require_size(path / "side.bin", num_chains * RecordLayout(layout.linked).dtype.itemsize)
        ring.begin(layout, max(num_chains, FEWEST_SLOTS))
        _read(path / "records.bin", ring.records.array[:size])
        _read(path / "side.bin", ring.side.array[:num_chains])
    else:
        ring.discard()
    ring.links.load_state(state)
    buffer._starts.forget()
    if tree is not None:
        tree.set(slice(0, buffer.capacity), 0.0)
        tree.set(slice(0, size), weights)
    buffer.beta, buffer._largest = description["beta"], description["largest"]
    buffer._random.bit_generator.state = description["random"]


def _field(described: dict[str, Any]) -> Field:
    dtype = getattr(torch, described["dtype"])
    return Field(
        tuple(described["path"]), tuple(described["shape"]), dtype, bool(described["linked"])
    )


def _require_size(path: Path, nbytes: int) -> None:
    if path.stat().st_size != nbytes:
        raise ReplayError(
            f"{path} must have {nbytes} bytes, got {path.stat().st_size}; it is damaged"
        )


def _read(path: Path, records: Array) -> None:
    """Reads a file, which fills them, into records."""
    step = max(1, CHUNK // records.itemsize)
    with open(path, "rb") as file:
        for start in range(0, len(records), step):
            part = records[start : start + step]
            part[...] = np.fromfile(file, records.dtype, len(part))


def settings_of(buffer: ReplayBuffer) -> dict[str, Any]:
    """The arguments with which a buffer was made, but for where it lies."""
    prioritized = buffer.prioritized
    return {
        "capacity": buffer.capacity,
        "prioritized": None if prioritized is None else dataclasses.asdict(prioritized),
        "n_step": buffer._reading.n_step,
        "gamma": buffer._reading.gamma,
        "frame_stack": buffer._reading.frame_stack,
    }
