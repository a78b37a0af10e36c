"""Open episodes that are saved, and played again in another process.

An episode is known by how it began, as the state of the environment's random generators, and by
what was done in it. Played again it must lead to the same observation and the same return; where
it does not, the environment has randomness or memory of its own, and begins a new episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gymtask.acting import Actor, Answer
from gymtask.collector import Collection, noise_of, rollout_of
from gymtask.options import CollectOptions
from gymtask.plan import EqualShares
from gymtask.rollout import Rollout
from gymtask.task import ReinforcementLearningTask
from gymtask.workers.layout import Array
from gymtask.workers.pool import WorkerPool

Episode = Mapping[str, Any]

PIECE = 64  # steps that are played again at once: their rows lie in memory


def open_episodes(pool: WorkerPool) -> list[Episode] | None:
    """The open episode of each environment of a pool with `records_starts`, N plain values.

    None where they cannot be told: rows of them were not handed out yet, or steps are pending.
    """
    rollout = pool.memory
    if not pool.records_starts or pool.num_pending or not isinstance(rollout, Rollout):
        return None
    if rollout.done_pieces or rollout.length.any():
        return None
    assert rollout.actions is not None
    return [
        {
            "start": start,
            "actions": rollout.actions.of(index),
            "return": float(rollout.returns[index]),
            # As arrays also where they are single numbers, whose dtype would be lost.
            "observation": [leaf[[index]] for leaf in pool.slots.observation],
            "carry": [(list(key), row) for key, row in rollout.carry_of(index).items()],
        }
        for index, start in enumerate(pool.get_starts())
    ]


def take_up_episodes(
    task: ReinforcementLearningTask[Any, Any],
    pool: WorkerPool,
    saved: Sequence[Episode],
    other_seeds: Sequence[int],
) -> list[int]:
    """Plays open episodes again, in a new pool whose counters were loaded and that records starts.

    Args:
        task: Whose actions they were.
        pool: Was never reset.
        saved: What `open_episodes` gave.
        other_seeds: For each environment the seed of the new episode that it begins where its old
            one does not repeat itself.

    Returns:
        The environments that began a new one.
    """
    run_step, episode = pool.run_step.copy(), pool.episode.copy()
    starts = [dict(one["start"]) for one in saved]
    lengths: Array = np.array([_length(one) for one in saved], np.int64)
    others: list[int] = []
    while True:
        pool.run_step[:], pool.episode[:] = run_step - lengths, episode
        pool.restart(starts)
        _play(task, pool, saved, lengths)
        rollout = pool.memory
        differing = [
            index
            for index, one in enumerate(saved)
            if index not in others and not _is_at(pool, rollout, index, one, lengths[index])
        ]
        if not differing:
            rollout.carries = _stacked_carries(saved)
            return sorted(others)
        # All once more: those that repeat themselves do so again.
        others += differing
        for index in differing:
            starts[index], lengths[index] = {"seed": other_seeds[index]}, 0
            episode[index] += 1


def _length(episode: Episode) -> int:
    return len(episode["actions"][0]) if episode["actions"] else 0


def _play(
    task: ReinforcementLearningTask[Any, Any],
    pool: WorkerPool,
    saved: Sequence[Episode],
    lengths: Array,
) -> None:
    """Takes the recorded steps; their rows are given up, as somebody had them before."""
    rollout = rollout_of(pool)
    actor = _RecordedActor.for_pool(task, pool, noise_of(pool))
    actor.give([one["actions"] for one in saved])
    options = CollectOptions(
        total_samples=int(lengths.sum()), max_trajectory_length=PIECE, use_tqdm=False
    )
    plan = EqualShares(lengths.tolist(), whole_episodes=False)
    with Collection(task, None, pool, options, plan, actor) as collection:
        while collection.next_piece() is not None:
            collection.accept()
    rollout.episodes.clear()
    pool.num_posted = rollout.num_posted = 0  # no samples of this run


def _is_at(pool: WorkerPool, rollout: Rollout, index: int, episode: Episode, length: int) -> bool:
    """Whether an environment stands where the saved one stood."""
    observation = zip(pool.slots.observation, episode["observation"], strict=True)
    return bool(
        rollout.step[index] == length
        and np.array_equal(rollout.returns[index], episode["return"], equal_nan=True)
        # Bytes, so that NaN is equal to itself.
        and all(leaf[[index]].tobytes() == np.asarray(was).tobytes() for leaf, was in observation)
    )


def _stacked_carries(saved: Sequence[Episode]) -> dict[tuple[str, ...], Array]:
    by_key = zip(*(one["carry"] for one in saved), strict=True)
    return {tuple(own[0][0]): np.stack([np.asarray(row) for _, row in own]) for own in by_key}


class _RecordedActor(Actor):
    """Answers with what was done before instead of asking a policy."""

    def give(self, actions: Sequence[Sequence[Array]]) -> None:
        """Takes for each environment what was done in its episode, by leaf."""
        self._actions = [[np.asarray(leaf) for leaf in leaves] for leaves in actions]

    def begin(self, model: Any, *, optimal: bool, random_actions: bool = False) -> None:
        """See `Actor`; there is no policy, and no carry."""
        self.debug = False
        self.carry_columns, self.initial_carry = [], {}

    def act(self, env_ids: Array, even_run_step: int = -1, block: slice = slice(None)) -> Answer:
        """See `Actor`."""
        steps = self.states.counters[0, : len(env_ids)].tolist()
        chosen = [
            [leaf[step] for leaf in self._actions[index]]
            for index, step in zip(env_ids.tolist(), steps, strict=True)
        ]
        actions = [np.stack(rows) for rows in zip(*chosen, strict=True)]
        return Answer(actions, self.codec.decode(actions), {}, {})
