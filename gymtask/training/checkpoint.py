"""Checkpoints: folders that are whole or not there, and that `torch.load(path)` reads as they are.

    <run directory>/checkpoints/
        epoch-000011-samples-000022528/
        epoch-000012-samples-000024576/
            state.pt    model, task, optimizers, schedules, counters, config, environment
            rank-0.pt   what each process has of its own: random generators, place in the episodes
            replay-0/   the replay buffer of off-policy training, as `ReplayBuffer.load` reads it
        .tmp-...        one that is being written, or was when the process ended

The files hold tensors (on the CPU), numbers, strings, None, lists, tuples and dicts, nothing else:
`weights_only=True`, torch's default, refuses the rest, numpy's numbers and TensorDicts included.
"""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gymtask.errors import CheckpointError
from gymtask.training.curve import CURVE_FILE
from gymtask.training.logs import METRICS_FILE
from gymtask.training.ranks import Ranks

FORMAT = 1
FOLDER = "checkpoints"
STATE_FILE = "state.pt"
TEMPORARY = ".tmp-"
SUPERSEDED = "superseded-"

_NAME = re.compile(r"epoch-(\d+)-samples-(\d+)")
PLAIN = (str, int, float, bool, type(None))

logger = logging.getLogger(__name__)


# ---- plain values --------------------------------------------------------------------------------


def to_plain(value: Any, name: str, *, as_text: bool = False) -> Any:
    """Turns a value into what a checkpoint may hold.

    Args:
        value: Tensors, numbers (numpy's too), strings, None, arrays, paths, and mappings and
            sequences of them.
        name: What the error calls it.
        as_text: Whether anything else becomes its `repr` instead of an error.

    Raises:
        CheckpointError: A value of another type, named by its place.
    """
    if isinstance(value, (Tensor, np.ndarray)) and not as_text:
        return _plain_tensor(torch.as_tensor(value))
    if isinstance(value, np.generic) and type(value.item()) in PLAIN:
        return value.item()
    if isinstance(value, Mapping):
        return {
            _plain_key(key, name, as_text): to_plain(item, f"{name}.{key}", as_text=as_text)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [to_plain(v, f"{name}.{i}", as_text=as_text) for i, v in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if type(value) in PLAIN:  # not isinstance: an Enum may be an int or a str
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if as_text:
        return repr(value)
    raise CheckpointError(
        f"`{name}` must be made of tensors, numbers, strings, lists and dicts to be saved, "
        f"got a {type(value).__module__}.{type(value).__qualname__}"
    )


def _plain_key(key: Any, name: str, as_text: bool) -> Any:
    if type(key) not in PLAIN:
        if as_text:
            return repr(key)
        raise CheckpointError(f"`{name}` must have keys that are strings or numbers, got {key!r}")
    return key


def _plain_tensor(value: Tensor) -> Tensor:
    tensor = value.detach().cpu()
    whole = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    # torch.save writes the storage: of a view that would be all that it is a view of.
    return tensor if whole else tensor.clone()


def to_arrays(value: Any) -> Any:
    """The same with an array for each tensor."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, Mapping):
        return {key: to_arrays(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_arrays, value))
    return value


# ---- random generators ---------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """The states of torch's (CUDA's too), numpy's and Python's generators, as plain values."""
    kind, words, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.tensor(np.asarray(words, np.int64)), place, has_gauss, gauss],
        "python": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts the generators where `rng_state` found them; CUDA's where there are as many devices."""
    torch.set_rng_state(state["torch"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    devices = state.get("cuda", [])
    if devices and torch.cuda.is_available() and torch.cuda.device_count() == len(devices):
        torch.cuda.set_rng_state_all(devices)


def seed_generators(seed: int) -> None:
    """Seeds torch's, numpy's and Python's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Whatever is drawn inside, the global generators go on outside as if nothing had been."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


# ---- writing and reading -------------------------------------------------------------------------


def rank_file(rank: int) -> str:
    """What a process of a run has of its own."""
    return f"rank-{rank}.pt"


def checkpoint_name(num_epochs: int, num_samples: int) -> str:
    """The folder of a checkpoint; one for each moment at which a run can stop."""
    return f"epoch-{num_epochs:06d}-samples-{num_samples:09d}"


def save_checkpoint(
    folder: Path,
    files: Mapping[str, Mapping[str, Any]],
    save_more: Callable[[Path], None] | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Writes a checkpoint that is whole or not there, whatever ends the processes meanwhile.

    Args:
        folder: Where; must not exist.
        files: What each file of this process holds, plain values only.
        save_more: Writes something else into a folder.
        ranks: The processes that write it together; None: this one alone.
    """
    ranks = ranks or Ranks()
    temporary = folder.parent / f"{TEMPORARY}{folder.name}"
    if ranks.is_first:
        temporary.mkdir(parents=True)
    ranks.wait()
    try:
        for name, content in files.items():
            with open(temporary / name, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())  # or a power cut could leave the name without the content
        if save_more is not None:
            save_more(temporary)
        ranks.wait()
        if ranks.is_first:
            os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def load_checkpoint(folder: Path, rank: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads state.pt and what is this process's own, onto the CPU.

    Raises:
        CheckpointError: A file is missing or damaged, or of a format that is not known here.
    """
    state, own = _load(folder / STATE_FILE), _load(folder / rank_file(rank))
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} must be a checkpoint of format {FORMAT}, got {state.get('format')!r}"
        )
    return state, own


def _load(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu")
    except Exception as error:  # what torch makes of a damaged file can be anything
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a dict, got a {type(content).__name__}")
    return content


# ---- finding -------------------------------------------------------------------------------------


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = (run_dir / FOLDER).glob("epoch-*")
    return sorted((path for path in found if (path / STATE_FILE).is_file()), key=moment_of)


def moment_of(path: Path) -> tuple[int, ...]:
    """Epochs and samples by which something of a run was named; (-1,) for other names."""
    match = _NAME.search(path.name)
    return tuple(map(int, match.groups())) if match else (-1,)


def find_checkpoint(
    resume: str | Path, runs: Path, run_dir: Path | None, name: str = "resume"
) -> Path | None:
    """Finds the checkpoint to go on from.

    Args:
        resume: A checkpoint, a run directory (its newest good checkpoint), or "auto".
        runs: For "auto": the directory of this task's runs, of which the newest that has a
            checkpoint is taken.
        run_dir: For "auto": the run directory, where it was chosen by the user.
        name: What an error calls `resume`.

    Returns:
        The folder, or None when "auto" finds nothing to go on from.

    Raises:
        CheckpointError: There is no checkpoint at `resume`.
    """
    if resume == "auto":
        candidates = [run_dir] if run_dir else sorted(runs.glob("*"), reverse=True)
        return next(filter(None, map(_newest_good, candidates)), None)
    path = Path(resume)
    if (path / STATE_FILE).is_file():
        return path.resolve()  # "best" is a link
    newest = _newest_good(path)
    if newest is None:
        raise CheckpointError(
            f"`{name}` must be a checkpoint folder or a run directory with a checkpoint, got"
            f" {str(resume)!r}, which {'has none' if path.exists() else 'does not exist'}"
        )
    return newest


def _newest_good(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run that can be read, None where there is none."""
    for folder in reversed(list_checkpoints(run_dir)):
        files = [folder / STATE_FILE, folder / rank_file(0), *folder.glob("rank-*.pt")]
        damaged = [file for file in files if not zipfile.is_zipfile(file)]
        if not damaged:
            return folder
        logger.warning("%s is damaged; taking the checkpoint before", damaged[0])
    return None


def tidy(run_dir: Path, resumed: Path | None) -> None:
    """Deletes what was half-written, and sets aside what is newer than the resumed checkpoint.

    Such checkpoints belong to a future that this run will not have; they are renamed to
    "superseded-...".
    """
    # Curves and clips, by the names that they have, as the directory may hold what is the user's.
    for name in (METRICS_FILE, CURVE_FILE):
        (run_dir / f"{TEMPORARY}{name}").unlink(missing_ok=True)
    for clip in run_dir.glob(f"clips/{TEMPORARY}*.mp4"):
        clip.unlink()
    # Checkpoints; then, in whole ones, a replay that was being deleted. It is to be found once: not
    # within what is deleted before, nor through the link to the best one.
    for place in (f"{FOLDER}/", f"{FOLDER}/epoch-*/"):
        for leftover in list(run_dir.glob(f"{place}{TEMPORARY}*")):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
    if resumed is None:
        return
    for newer in list_checkpoints(run_dir):
        if newer.resolve() != resumed.resolve() and moment_of(newer) > moment_of(resumed):
            aside = newer.with_name(f"{SUPERSEDED}{newer.name}")
            if aside.exists():
                shutil.rmtree(aside)
            newer.rename(aside)
            logger.warning("%s is newer than the resumed checkpoint; renamed to %s", newer, aside)


# ---- comparing -----------------------------------------------------------------------------------


def module_problems(name: str, module: nn.Module, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yields every difference in keys and shapes between a module and what was saved of it."""
    present = module.state_dict()
    for key in sorted({*present, *saved}):
        rule, got = _shape(saved.get(key)), _shape(present.get(key))
        if rule != got:
            yield f"{name}[{key!r}] is {rule} in the checkpoint, got {got}"


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"of shape {tuple(value.shape)}"
    return "absent" if value is None else "no tensor"
