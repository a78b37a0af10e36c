"""From collected pieces to the trajectories that a task is given: values, then the hooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gymtask.acting import device_of, eval_mode, overrides
from gymtask.collector import Collection, begin
from gymtask.config import raise_if_any
from gymtask.errors import CollectionInterrupted, ConfigurationError, HookError
from gymtask.options import CollectOptions
from gymtask.replay import EpisodeRecord, MultiReplaySamples
from gymtask.replay.frames import FrameHistory, next_of
from gymtask.replay.pieces import join
from gymtask.states import Snapshot
from gymtask.tape import Piece
from gymtask.trajectory import (
    assemble,
    checked_trajectories,
    checked_trajectory,
    frames_before,
    split_values,
    value_states,
)
from gymtask.workers.pool import WorkerPool

if TYPE_CHECKING:
    from gymtask.task import ReinforcementLearningTask


def _require_pool(pool: object) -> None:
    if not isinstance(pool, WorkerPool):
        raise ConfigurationError(
            f"`worker_pool` must be a WorkerPool, as get_worker_pool() gives it, got {pool!r:.80}"
        )


def iter_samples(
    task: ReinforcementLearningTask[Any, Any], model: Any, pool: WorkerPool, options: CollectOptions
) -> Iterator[TensorDict]:
    """Checks the options and returns the generator of `ReinforcementLearningTask.iter_samples`."""
    _require_pool(pool)
    options.check(pool.num_envs)
    return _iterate(task, model, pool, options)


def _iterate(
    task: ReinforcementLearningTask[Any, Any], model: Any, pool: WorkerPool, options: CollectOptions
) -> Iterator[TensorDict]:
    with begin(task, model, pool, options) as collection:
        while True:
            with eval_mode(model, task):
                piece = collection.next_piece()
            if piece is None:
                return
            _warn_of_silent_keys(pool, collection.rollout.episodes, stacklevel=3)
            collection.rollout.episodes.clear()
            trajectory: TensorDictBase = _with_values(task, model, [piece], pool)
            if overrides(task, "postprocess_trajectory"):
                trajectory = checked_trajectory(
                    "postprocess_trajectory",
                    len(trajectory),
                    task.postprocess_trajectory(_owned(trajectory)),
                )
            collection.accept()
            yield _owned(trajectory)


def collect_samples(
    task: ReinforcementLearningTask[Any, Any], model: Any, pool: WorkerPool, options: CollectOptions
) -> MultiReplaySamples:
    """Does the work of `ReinforcementLearningTask.collect_samples`."""
    _require_pool(pool)
    options.check(pool.num_envs)
    if options.total_samples is None:
        raise_if_any(["`total_samples` must be set, got None"])
    collection: Collection | None = None
    pieces: list[Piece] = []
    try:
        with _agreeing(pool):
            collection = begin(task, model, pool, options)
            with collection, eval_mode(model, task):
                while (piece := collection.next_piece()) is not None:
                    collection.accept()
                    pieces.append(piece)
        rollout = collection.rollout
        pieces.sort(key=_place)
        _warn_of_silent_keys(pool, rollout.episodes, stacklevel=4)
        samples = _postprocess(task, model, pieces, pool)
    except BaseException:
        if collection is not None:
            # Rows that nobody was given are the next call's first.
            pieces = sorted([*pieces, *collection.dropped], key=_place)
            collection.rollout.done_pieces.extendleft(reversed(pieces))
        raise
    samples.num_dropped = collection.num_dropped
    samples.episodes = sorted(rollout.episodes, key=lambda each: (each.env_id, each.trajectory_id))
    rollout.episodes = []
    return samples


@contextmanager
def _agreeing(pool: WorkerPool) -> Iterator[None]:
    """Where the collection of one process is interrupted, those of the others are, too."""
    interrupted: CollectionInterrupted | None = None
    try:
        yield
    except CollectionInterrupted as error:
        interrupted = error
    if pool.agree is not None and pool.agree(interrupted is not None) and interrupted is None:
        interrupted = CollectionInterrupted("another process of the run was asked to stop")
    if interrupted is not None:
        try:
            raise interrupted
        finally:
            del interrupted  # its traceback keeps this frame


def _warn_of_silent_keys(
    pool: WorkerPool, ended: Sequence[EpisodeRecord], *, stacklevel: int
) -> None:
    """Warns of info keys that nobody has ever given, once episodes have ended: typos, most likely.

    Before that nothing is known, as some keys are only given at an episode's end.
    """
    if not ended or not pool.silent_info_keys:
        return
    silent = sorted(pool.silent_info_keys)
    pool.silent_info_keys.clear()  # so that each is named once
    warnings.warn(
        f"`info_keys` must be keys of the info dicts that steps of {pool.workers[0].maker.name}"
        f" give, got {silent}, which no step has given although episodes have ended; their columns"
        ' under ("next", "info") hold no values. Environment.info shows what a step gives',
        stacklevel=stacklevel,
    )


def _place(piece: Piece) -> tuple[int, int]:
    return piece.env_id, piece.first_run_step


def _postprocess(
    task: ReinforcementLearningTask[Any, Any], model: Any, pieces: Sequence[Piece], pool: WorkerPool
) -> MultiReplaySamples:
    if not pieces:
        # In its hook each process of a run may wait for the others.
        if pool.agree is not None and overrides(task, "postprocess_trajectories"):
            task.postprocess_trajectories([])
        return MultiReplaySamples([])
    rows, lengths = _with_values(task, model, pieces, pool), [piece.length for piece in pieces]
    each, together = (
        overrides(task, hook) for hook in ("postprocess_trajectory", "postprocess_trajectories")
    )
    history = _history(pieces, pool)
    if not (each or together):
        return MultiReplaySamples.from_rows(rows, lengths, history=history)
    versions = {key: rows[key]._version for key in history.frames} if history else {}
    trajectories: list[TensorDict] = list(rows.split(lengths))
    given = [Snapshot(trajectory) for trajectory in trajectories]
    places = [(one["trajectory_id"], one["step"]) for one in trajectories]
    if each:
        trajectories = [
            checked_trajectory("postprocess_trajectory", length, task.postprocess_trajectory(one))
            for length, one in zip(lengths, trajectories, strict=True)
        ]
    if together:
        returned = task.postprocess_trajectories(trajectories)
        trajectories = checked_trajectories(lengths, places, returned)
    store = _store(rows, given, trajectories)
    if history is not None:
        _check_frames(history, versions, rows, store)
    return MultiReplaySamples.from_rows(store, lengths, history=history)


def _history(pieces: Sequence[Piece], pool: WorkerPool) -> FrameHistory | None:
    """What windows need to show stacks, where they are to."""
    frame_stack = pool.workers[0].maker.frame_stack
    if frame_stack is None:
        return None
    return FrameHistory(frame_stack, *frames_before(pieces, frame_stack - 1))


def _check_frames(
    history: FrameHistory, versions: Mapping[Any, int], rows: TensorDict, store: TensorDict
) -> None:
    """Checks that what hooks left of observations still fits the frames before them.

    Args:
        history: Those frames.
        versions: By key how often observations had been written to before the hooks.
        rows: What the hooks were given.
        store: What they made of it.

    Raises:
        HookError: It does not.
    """
    for key, version in versions.items():
        given, left, following = rows[key], store.get(key), store.get(next_of(key))
        same = given._version == version
        if left is not None and left is not given:
            same &= _is_same(given, left)
        if following is not None:
            kinds = (following.dtype, following.shape[1:]), (given.dtype, given.shape[1:])
            same &= left is not None and kinds[0] == kinds[1]
        if not same:
            raise HookError(
                f"the postprocess hooks must leave {key!r} as it is with"
                f" frame_stack={history.num_frames}, since windows stack it with frames that no"
                f" hook sees, got other values, or {next_of(key)!r} of another kind or alone; put"
                " what you make of observations under a key of its own, or take both away"
            )


def _is_same(before: Tensor, after: Any) -> bool:
    if not isinstance(after, Tensor) or (after.dtype, after.shape) != (before.dtype, before.shape):
        return False
    after = after.to(before.device)
    return bool(((after == before) | ((after != after) & (before != before))).all())


def _store(
    rows: TensorDict, given: Sequence[Snapshot], trajectories: Sequence[TensorDict]
) -> TensorDict:
    """The trajectories end to end; where hooks only added keys, `rows` and what was added.

    Args:
        rows: What the hooks were given, [sum T]; the trajectories were views of it.
        given: What each trajectory held before the hooks.
        trajectories: What the hooks returned.
    """
    added = None
    for before, trajectory in zip(given, trajectories, strict=True):
        names = before.added() if trajectory is before.tensordict else None
        if names is None or (added is not None and names != added):
            return join(trajectories)
        added = names
    for name in added or ():
        parts = [trajectory.get(name) for trajectory in trajectories]
        kinds = {(type(part), getattr(part, "dtype", None), part.shape[1:]) for part in parts}
        if kinds != {(Tensor, parts[0].dtype, parts[0].shape[1:])}:
            return join(trajectories)  # names the one that is unlike the first
        with torch.no_grad():
            rows[name] = torch.cat(parts)
    return rows


def _owned(trajectory: TensorDictBase) -> TensorDict:
    """The same tensors in a TensorDict of its own, to which a hook may add."""
    copy: TensorDict = trajectory.copy()
    return copy


def _with_values(
    task: ReinforcementLearningTask[Any, Any], model: Any, pieces: Sequence[Piece], pool: WorkerPool
) -> TensorDict:
    """All rows of the pieces end to end, with values if the task estimates them."""
    rows = assemble(pieces, pool.workers[0].maker.info_keys)
    if overrides(task, "get_values"):
        states = value_states(pieces, pool.workers[0].maker.frame_stack)
        values = _estimate(task, model, states)
        rows["state_value"], rows["next", "state_value"] = split_values(values, pieces)
    return rows


def _estimate(task: ReinforcementLearningTask[Any, Any], model: Any, states: TensorDict) -> Tensor:
    with eval_mode(model, task), torch.no_grad():
        device = device_of(model)
        values = task.get_values(model, states if device is None else states.to(device))
    if (
        not isinstance(values, Tensor)
        or values.shape != states.batch_size
        or not values.is_floating_point()
    ):
        found = (
            f"{values.dtype} {tuple(values.shape)}"
            if isinstance(values, Tensor)
            else type(values).__name__
        )
        raise HookError(
            f"`get_values` must return a float tensor of shape {tuple(states.batch_size)}, got"
            f" {found}"
        )
    return values.detach().to("cpu", torch.float32)
