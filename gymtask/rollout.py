"""The open pieces of every environment: rows are added as they come, and leave as whole pieces.

One table per key, [N, capacity, ...]: row t of environment i's open piece lies at [i, t].
Observations and carries have one row more than the rest: number `length[i]` is where the
environment stands now. The tables belong to a pool, and survive from one collection to the next.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from gymtask.acting import Actor, Answer, Column
from gymtask.errors import HookError
from gymtask.replay import EpisodeRecord
from gymtask.trajectory import Key, Piece
from gymtask.workers.layout import Array
from gymtask.workers.pool import WorkerPool
from gymtask.workers.slots import OUTCOME

FIRST_CAPACITY = 64
_ALL = slice(None)
_NOWHERE: tuple[Array | None, Array] = (None, np.empty(0, np.int64))

_OUTCOME: Key = ("next", "outcome")
_OUTCOME_DTYPES = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}


class Rollout:
    """The open piece of each of N environments.

    Attributes:
        length: int64 [N], rows of the open piece.
        step: int64 [N], steps of the open episode.
        done_pieces: Pieces that are whole, in the order in which they became so, not handed out
            yet.
        episodes: Records of episodes that ended and were not handed out yet.
        num_posted: What the pool's `num_posted` was when the collector last stepped it.
        in_use: Whether a collection is running.
    """

    def __init__(self, pool: WorkerPool) -> None:
        n = pool.num_envs
        self._pool = pool
        self._info_keys = pool.workers[0].maker.info_keys
        # One array, so that all four are counted on, and handed to the policy, at once.
        self._counters: Array = np.zeros((4, n), np.int64)
        self.length, self.step, run_step, self._trajectory_id = self._counters
        run_step[:] = pool.run_step
        pool.run_step = run_step  # the pool's own counter lives on in this array
        self._trajectory_id[:] = pool.all_ids + n * pool.episode
        self.returns: Array = np.zeros(n, np.float64)
        self.done_pieces: deque[Piece] = deque()
        self.episodes: list[EpisodeRecord] = []
        self._infos: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        self._capacity = FIRST_CAPACITY
        self._longest = 0  # no piece is longer than this
        self._placed: tuple[Array | None, Array] = _NOWHERE  # what `_places` gave last
        self._states: dict[Key, Array] = {}
        self._rows: dict[Key, Array] = {}
        self._observation_keys: list[Key] = []
        self._action_keys: list[Key] = []
        self._initial_carry: dict[Key, Array] = {}
        self._known_rows: set[Key] = set()
        self.num_posted = pool.num_posted
        self.in_use = False

    # ---- tables ----------------------------------------------------------------------------------

    def open(self, actor: Actor) -> None:
        """Makes the tables that this actor needs.

        Those of open rows are kept, and must be the same.

        Raises:
            HookError: Rows are left from an earlier call, and their carries were others.
        """
        columns = [*actor.observation_columns, *actor.carry_columns]
        fresh = not self._states
        self._observation_keys = [column.key for column in actor.observation_columns]
        self._action_keys = [("action", *leaf.path) for leaf in actor.codec.leaves]
        self._initial_carry = actor.initial_carry
        wanted = {column.key for column in columns}
        if not fresh and wanted != self._states.keys() and self.length.any():
            raise HookError(
                "the carries must stay the same while rows of an earlier collection are open, got"
                f" {sorted(wanted)} after {sorted(self._states)}; call pool.reset() to give those"
                " rows up"
            )
        for column in columns:
            table = self._states.get(column.key)
            if table is not None and (table.shape[2:], table.dtype) != (column.shape, column.dtype):
                raise HookError(
                    f"the carry {'/'.join(column.key)!r} must keep its shape {table.shape[2:]} and"
                    f" dtype {table.dtype}, got {column.shape} and {column.dtype}; call"
                    " pool.reset() to begin anew"
                )
            if table is None:
                self._states[column.key] = self._table(column)
                if column.key in self._initial_carry:
                    self._states[column.key][:, 0] = self._initial_carry[column.key]
        self._states = {column.key: self._states[column.key] for column in columns}
        rows = [
            Column(key, leaf.shape, dtype)
            for key, leaf, dtype in zip(
                self._action_keys, actor.codec.leaves, actor.codec.dtypes, strict=True
            )
        ]
        for column in [*rows, Column(_OUTCOME, (), OUTCOME)]:
            if column.key not in self._rows:
                self._rows[column.key] = self._table(column)
        if fresh:
            for key, leaf_array in zip(
                self._observation_keys, self._pool.slots.observation, strict=True
            ):
                self._states[key][:, 0] = leaf_array

    def _table(self, column: Column) -> Array:
        return np.zeros((self._pool.num_envs, self._capacity, *column.shape), column.dtype)

    def _grow(self) -> None:
        self._capacity *= 2
        self._placed = _NOWHERE
        for tables in (self._states, self._rows):
            for key, old in tables.items():
                new = np.zeros((old.shape[0], self._capacity, *old.shape[2:]), old.dtype)
                new[:, : old.shape[1]] = old
                tables[key] = new

    def _places(self, env_ids: Array) -> Array:
        """Where the open rows lie in a table seen as [N · capacity, ...]."""
        if env_ids is not self._placed[0]:
            # The rows of environment i begin at i · capacity, and length[i] of them are complete.
            places = env_ids * self._capacity + self.length[self._rows_of(env_ids)]
            self._placed = env_ids, places
        return self._placed[1]

    def _rows_of(self, env_ids: Array) -> Any:
        """An index for `env_ids` into arrays [N, ...]: a slice, which copies nothing, for all."""
        return _ALL if env_ids is self._pool.all_ids else env_ids

    # ---- rows ------------------------------------------------------------------------------------

    def write_states(self, env_ids: Array, actor: Actor) -> None:
        """Copies where `env_ids` stand into the first n rows of the actor's arrays."""
        n = len(env_ids)
        places = self._places(env_ids)
        arrays = actor.arrays
        for key, table in self._states.items():
            np.take(_flat(table), places, axis=0, out=arrays[key][:n], mode="clip")
        # Step, run_step and trajectory_id; the length of the piece is not the policy's business.
        actor.counters[:, :n] = self._counters[1:, self._rows_of(env_ids)]
        np.equal(actor.counters[0, :n], 0, out=arrays[("is_init",)][:n])
        arrays[("env_id",)][:n] = env_ids

    def add_answer(self, env_ids: Array, answer: Answer) -> None:
        """Stores what the policy chose for `env_ids`.

        Their rows are complete once their steps arrive.
        """
        self._longest += 1
        if self._longest + 2 > self._capacity:
            self._longest = int(self.length.max())
            if self._longest + 2 > self._capacity:
                self._grow()
        places = self._places(env_ids)
        for key, rows in zip(self._action_keys, answer.actions, strict=True):
            _flat(self._rows[key])[places] = rows
        if answer.extras.keys() != self._known_rows:
            self._learn_extras(answer)
        for key, rows in answer.extras.items():
            table = self._rows[key]
            if table.shape[2:] != rows.shape[1:] or table.dtype != rows.dtype:
                raise HookError(
                    f"`{'/'.join(key)}` from `get_actions` must keep its shape {table.shape[2:]}"
                    f" and dtype {table.dtype}, got {rows.shape[1:]} and {rows.dtype}"
                )
            _flat(table)[places] = rows
        for key, rows in answer.carries.items():
            # The carry that the next row starts from.
            _flat(self._states[key])[1:][places] = rows

    def _learn_extras(self, answer: Answer) -> None:
        if self.length.any():
            raise HookError(
                "`get_actions` must return the same keys for every row of a trajectory, got"
                f" {sorted(answer.extras)} after {sorted(self._known_rows)}"
            )
        for key in self._known_rows:
            del self._rows[key]
        for key, rows in answer.extras.items():
            self._rows[key] = self._table(Column(key, rows.shape[1:], rows.dtype))
        self._known_rows = set(answer.extras)

    def add_steps(self, env_ids: Array) -> list[int]:
        """Completes the rows of `env_ids`, whose steps lie in the slots.

        Returns:
            The environments whose episode ended; each has left a piece and begun its next episode.
        """
        slots = self._pool.slots
        places, rows = self._places(env_ids), self._rows_of(env_ids)
        outcome = slots.outcome[rows]
        _flat(self._rows[_OUTCOME])[places] = outcome
        for key, leaf in zip(self._observation_keys, slots.observation, strict=True):
            # Right for those whose episode goes on; the others' is the next episode's first, and is
            # put right below.
            _flat(self._states[key])[1:][places] = leaf[rows]
        self._counters[:3, rows] += 1  # length, step and run_step
        self._placed = _NOWHERE
        self.returns[rows] += outcome["reward"]
        if self._info_keys:
            for index in env_ids:
                self._infos[index].append(slots.infos[index])
        over = outcome["terminated"] | outcome["truncated"]
        ended: list[int] = env_ids[over].tolist() if over.any() else []
        for index in ended:
            self._end_episode(index)
        return ended

    def _end_episode(self, index: int) -> None:
        slots, length = self._pool.slots, self.length[index]
        for key, leaf in zip(self._observation_keys, slots.final_observation, strict=True):
            self._states[key][index, length] = leaf[index]
        self.episodes.append(
            EpisodeRecord(
                trajectory_id=int(self._trajectory_id[index]),
                env_id=index,
                episode_return=float(self.returns[index]),
                length=int(self.step[index]),
                terminated=bool(slots.terminated[index]),
                truncated=bool(slots.truncated[index]),
            )
        )
        self._hand_out(index)
        self.step[index], self.returns[index] = 0, 0.0
        self._pool.episode[index] += 1
        self._trajectory_id[index] += self._pool.num_envs
        for key, leaf in zip(self._observation_keys, slots.observation, strict=True):
            self._states[key][index, 0] = leaf[index]
        for key, value in self._initial_carry.items():
            self._states[key][index, 0] = value

    def cut(self, index: int) -> None:
        """Ends the open piece of an environment where it stands.

        Its episode goes on in the next one.
        """
        length = int(self.length[index])
        if length:
            self._hand_out(index)
            for table in self._states.values():
                table[index, 0] = table[index, length]

    def _hand_out(self, index: int) -> None:
        length = int(self.length[index])
        infos, self._infos[index] = self._infos[index], []
        self.done_pieces.append(
            Piece(
                env_id=index,
                trajectory_id=int(self._trajectory_id[index]),
                first_step=int(self.step[index]) - length,
                first_run_step=int(self._pool.run_step[index]) - length,
                length=length,
                states={
                    key: table[index, : length + 1].copy() for key, table in self._states.items()
                },
                rows=self._rows_out(index, length),
                infos=infos,
            )
        )
        self.length[index] = 0
        self._placed = _NOWHERE

    def _rows_out(self, index: int, length: int) -> dict[Key, Array]:
        rows = {key: table[index, :length].copy() for key, table in self._rows.items()}
        outcome = rows.pop(_OUTCOME)
        for name, dtype in _OUTCOME_DTYPES.items():
            rows["next", name] = outcome[name].astype(dtype)
        return rows


def _flat(table: Array) -> Array:
    """A table [N, capacity, ...] seen as [N · capacity, ...]."""
    return table.reshape(-1, *table.shape[2:])
