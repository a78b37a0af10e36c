"""What a pool's environments have done and was not handed out yet: open pieces, on one tape.

Every environment has a cursor, the row of the tape at which it stands; its open piece is the rows
from `start` to there. As long as the environments of a worker, or all of them, step together, their
cursors are one number, and each write is a part of one row of a table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from gymtask.acting import Actor, Answer
from gymtask.cursors import Cursors
from gymtask.episode_actions import EpisodeActions
from gymtask.joining import copy_above, has_columns, joined_pieces
from gymtask.replay import EpisodeRecord
from gymtask.states import Column, States, check_columns, check_extras, fits, new_extras
from gymtask.tape import FLAGS, REWARD, Key, Piece, Tape, move_rows, pairs, write_stacks
from gymtask.workers.layout import Array
from gymtask.workers.pool import WorkerPool

FIRST_CAPACITY = 64  # rows of a tape
MAX_BYTES = 1 << 28  # a tape that is larger has room for little more than the open pieces


class Rollout:
    """The open piece of each of N environments.

    Attributes:
        cursor: int64 [N], rows of the tape at which they stand.
        start: int64 [N], first rows of the open pieces.
        step: int64 [N], steps of the open episode.
        done_pieces: Pieces that are whole, in the order in which they became so, not handed out
            yet.
        episodes: Records of episodes that ended and were not handed out yet.
        actions: Those of the open episodes, where the pool records how they began.
        played: Where the pool keeps that, the episodes that ended and what was done in them, by
            leaf of the action space [T, *shape], until somebody takes them.
        carries: By key [N, ...], what the open episodes of an earlier process had come to, where
            this one goes on with them.
        num_posted: What the pool's `num_posted` was when the collector last stepped it.
        turn_time: Seconds that the collector's turns took lately, from rows to the next actions.
        in_use: Whether a collection is running.
        actor: What the last collection called the policy with; most of it serves the next one.
    """

    def __init__(self, pool: WorkerPool) -> None:
        n = pool.num_envs
        self._pool, self._num_envs = pool, n
        self._info_keys = pool.workers[0].maker.info_keys
        self._frame_stack = pool.workers[0].maker.frame_stack
        self._num_before = (self._frame_stack or 1) - 1  # earlier frames that an open piece needs
        # One array, so that all are counted on, and handed to the policy, at once.
        self._counters: Array = np.zeros((5, n), np.int64)
        self.cursor, self.step, run_step, self._trajectory_id, env_id = self._counters
        self._advancing = self._counters[:3]  # with each step
        env_id[:] = pool.all_ids
        run_step[:] = pool.run_step
        pool.run_step = run_step  # the pool's own counter lives on in this array
        self._trajectory_id[:] = pool.first_env + pool.all_ids + pool.total_envs * pool.episode
        self.start: Array = np.zeros(n, np.int64)
        self._at = Cursors(self.cursor, pool.all_ids, pool.blocks)
        self.returns: Array = np.zeros(n, np.float64)
        self.done_pieces: deque[Piece] = deque()
        self.episodes: list[EpisodeRecord] = []
        self._infos: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        self._tape = Tape(n, 0)
        self._slot_flags = pairs(pool.slots.flags)
        self._state_columns: list[Column] = []
        self._row_columns: list[Column] = []
        self._observation_keys: list[Key] = []
        self._shown_tables: dict[Key, Array] = {}  # of states that policies see one of at a time
        self._action_keys: list[Key] = []
        self._initial_carry: dict[Key, Array] = {}
        self._extras: dict[Key, Column] = {}
        self.actions = EpisodeActions(n) if pool.records_starts else None
        self.played: list[tuple[EpisodeRecord, list[Array]]] = []
        self.carries: dict[Key, Array] = {}
        self.num_posted = pool.num_posted
        self.turn_time = 0.0
        self.in_use = False
        self.actor: Actor | None = None

    @property
    def length(self) -> Array:
        """Rows of the open pieces, int64 [N]."""
        lengths: Array = self.cursor - self.start
        return lengths

    def num_left(self) -> list[int]:
        """Rows of each environment that were not handed out."""
        left: list[int] = self.length.tolist()
        for piece in self.done_pieces:
            left[piece.env_id] += piece.length
        return left

    def carry_of(self, index: int) -> dict[Key, Array]:
        """The carries with which an environment goes on, copies."""
        row = int(self.cursor[index])
        return {key: self._tape.states[key][row, index].copy() for key in self._initial_carry}

    # ---- the tape --------------------------------------------------------------------------------

    def open(self, actor: Actor, num_rows: int | None) -> None:
        """Makes ready for a collection with this actor.

        Args:
            actor: Tells what is kept of states and actions.
            num_rows: How many rows each environment will give, if that is known.

        Raises:
            HookError: Rows are left from an earlier call, and their carries were others.
        """
        columns = [*actor.observation_columns, *actor.carry_columns]
        check_columns(self._state_columns, columns, any_open=bool(self.length.any()))
        self._state_columns = columns
        self._observation_keys = [column.key for column in actor.observation_columns]
        self._action_keys = [("action", *leaf.path) for leaf in actor.codec.leaves]
        self._initial_carry = actor.initial_carry
        leaves = zip(self._action_keys, actor.codec.leaves, actor.codec.dtypes, strict=True)
        self._row_columns = [Column(key, leaf.shape, dtype) for key, leaf, dtype in leaves]
        self._row_columns += [
            Column(REWARD, (), np.dtype(np.float64)),
            Column(FLAGS, (2,), np.dtype(bool)),
        ]
        earlier = self._rejoin() if self.done_pieces else {}
        room = FIRST_CAPACITY if num_rows is None else num_rows
        self._rewind(room, fresh=bool(self.done_pieces or earlier), earlier=earlier)

    def _rewind(self, room: int, *, fresh: bool, earlier: dict[int, Piece] | None = None) -> None:
        """Moves the open pieces to the top of a tape, so that all end at the same row.

        Earlier frames that belong to stacks go with them.

        Args:
            room: Rows that are to fit below them.
            fresh: Whether there are other pieces on the present tape, which must then be left as
                it is.
            earlier: By environment a piece on another tape whose rows become the first of the open
                one.
        """
        old, here, length, cursors = self._tape, self.length, self.length, self.cursor.tolist()
        earlier = earlier or {}
        for index, piece in earlier.items():
            length[index] += piece.length
        lengths = self._with_frames(here)
        longest = max(self._num_before, *self._with_frames(length))
        row_columns = [*self._row_columns, *self._extras.values()]
        kept = {key for tables in (old.states, old.rows) for key in tables}
        columns = {column.key: column for column in [*self._state_columns, *row_columns]}
        capacity = self._capacity(list(columns.values()), longest, room)
        new = Tape(self._num_envs, capacity)
        if not fresh and old.capacity >= capacity and kept == set(columns):
            new = old
        for tables, old_tables, group, more in (
            # Where they stand, and of a step that is under way the action and the next carry.
            (new.states, old.states, self._state_columns, 2),
            (new.rows, old.rows, row_columns, 1),
        ):
            for column in group:
                table = old_tables.get(column.key)
                if new is not old or table is None or not fits(table, column):
                    tables[column.key] = new.table(column.shape, column.dtype)
                if table is not None and fits(table, column):
                    move_rows(table, tables[column.key], cursors, lengths, longest, more)
                elif group is self._state_columns:
                    self._begin_column(tables[column.key][longest], column)
        for index, piece in earlier.items():
            copy_above(piece, new, index, longest - int(here[index]), self._num_before)
        self._tape = new
        self._reward_table, self._flags_table = new.rows[REWARD], pairs(new.rows[FLAGS])
        self._action_tables = [new.rows[key] for key in self._action_keys]
        self._observation_tables = [new.states[key] for key in self._observation_keys]
        self._shown_tables = new.states
        if self._frame_stack is not None:
            carries = new.states.keys() - set(self._observation_keys)
            self._shown_tables = {key: new.states[key] for key in carries}
        self._at.set_all(longest, self._pool.run_step)
        self.start[:] = longest - length

    def _with_frames(self, lengths: Array) -> list[int]:
        rows: list[int] = (lengths + np.minimum(self.step - lengths, self._num_before)).tolist()
        return rows

    def _begin_column(self, row: Array, column: Column) -> None:
        """Where the environments stand, for a state that was not kept until now."""
        if column.key in self._initial_carry:
            row[:] = self._initial_carry[column.key]
            if column.key in self.carries:
                goes_on = self.step > 0
                row[goes_on] = self.carries.pop(column.key)[goes_on]
        else:
            place = self._observation_keys.index(column.key)
            row[:] = self._pool.slots.observation[place]

    def _capacity(self, columns: Sequence[Column], longest: int, room: int) -> int:
        sizes = [int(np.prod(column.shape)) * column.dtype.itemsize for column in columns]
        most = MAX_BYTES // max(1, sum(sizes) * self._num_envs)
        # Twice the open pieces at least, so that they are moved once for each time they double.
        return max(longest + min(room, most), 2 * longest, 2) + 2

    # ---- rows ------------------------------------------------------------------------------------

    def even_run_step(self, env_ids: Array) -> int:
        """The step of the run at which all of a block stand, -1 where there is none."""
        return self._at.run_step_of(env_ids)

    def make_room(self) -> None:
        """Sees to it that a step of everybody finds room on the tape."""
        # One row more than the cursor must be there: the state that the next row leads to.
        at = self._at
        if at.highest + 2 > self._tape.capacity:
            at.tighten()
            if at.highest + 2 > self._tape.capacity:
                self._rewind(2 * self._tape.capacity, fresh=True)

    def write_states(self, env_ids: Array, states: States) -> None:
        """Copies where `env_ids` stand into the first n rows of `states`."""
        self.make_room()
        at, arrays = self._at, states.arrays
        if self._frame_stack is not None:
            row, columns = at.place(env_ids)
            stacks = [arrays[key][: len(env_ids)] for key in self._observation_keys]
            write_stacks(self._observation_tables, row, columns, self.step[columns], stacks)
        # Step, run_step, trajectory_id and env_id; the cursor is not the policy's business.
        if env_ids is self._pool.all_ids and at.common >= 0:  # as below, for less
            for key, table in self._shown_tables.items():
                arrays[key][...] = table[at.common]
            states.counters[...] = self._counters[1:]
            np.equal(self.step, 0, out=states.is_init)
            return
        place, n = at.place(env_ids), len(env_ids)
        for key, table in self._shown_tables.items():
            arrays[key][:n] = table[place]
        states.counters[:, :n] = self._counters[1:, place[1]]
        np.equal(states.counters[0, :n], 0, out=states.is_init[:n])

    def add_answer(self, env_ids: Array, answer: Answer) -> None:
        """Stores what the policy chose for `env_ids`, whose states were written before.

        Their rows are complete once their steps arrive.
        """
        if answer.extras or self._extras:
            if answer.extras.keys() != self._extras.keys():
                any_open = bool(self.length.any())
                self._extras = new_extras(answer.extras, self._extras, any_open=any_open)
                self._rewind(self._tape.capacity, fresh=True)
            check_extras(answer.extras, self._extras)
        place = self._at.place(env_ids)
        for table, values in zip(self._action_tables, answer.actions, strict=True):
            table[place] = values
        for key, values in answer.extras.items():
            self._tape.rows[key][place] = values
        for key, values in answer.carries.items():
            self._tape.states[key][place[0] + 1, place[1]] = values  # the next row's carry

    def add_steps(self, env_ids: Array) -> None:
        """Completes the rows of `env_ids`, whose steps lie in the slots.

        Those whose episode ended leave a piece, and stand at the beginning of their next episode.
        """
        slots, at, flags = self._pool.slots, self._at, self._pool.slots.flags
        if env_ids is self._pool.all_ids and at.common >= 0:  # as `_add_some` does, for less
            row = at.common
            self._reward_table[row] = slots.reward
            self._flags_table[row] = self._slot_flags
            at.common = at.highest = row = row + 1
            for table, leaf in zip(self._observation_tables, slots.observation, strict=True):
                table[row] = leaf
            self._advancing += 1
            self.returns += slots.reward
        else:
            flags = flags[self._add_some(env_ids)]
        if self._pool.began is not None:
            self._skip(self._pool.began)
        if self._info_keys:
            began = () if self._pool.began is None else self._pool.began.tolist()
            for index in env_ids.tolist():
                if index not in began:
                    self._infos[index].append(slots.infos[index])
                    if self._pool.silent_info_keys:
                        self._pool.silent_info_keys.difference_update(slots.infos[index])
        raised = flags.tobytes()  # two bytes a row; looked through faster than by numpy
        found = raised.find(1)
        while found >= 0:
            number = found // 2
            terminated, truncated = raised[2 * number : 2 * number + 2]
            self._end_episode(int(env_ids[number]), bool(terminated), bool(truncated))
            found = raised.find(1, 2 * number + 2)

    def _add_some(self, env_ids: Array) -> Any:
        """Completes the rows of some; gives which they are, as an index into arrays [N, ...]."""
        slots, (row, columns) = self._pool.slots, self._at.place(env_ids)
        self._reward_table[row, columns] = slots.reward[columns]
        self._flags_table[row, columns] = self._slot_flags[columns]
        for table, leaf in zip(self._observation_tables, slots.observation, strict=True):
            table[row + 1, columns] = leaf[columns]
        self._advancing[:, columns] += 1
        self.returns[columns] += slots.reward[columns]
        self._at.moved(env_ids, row + 1)
        return columns

    def _skip(self, began: Array) -> None:
        """Leaves the rows of the step just taken out of the pieces of `began`, int64 [n]."""
        self.step[began] = 0
        self._pool.run_step[began] -= 1
        self.start[began] = self.cursor[began]
        for key, value in self._initial_carry.items():
            self._tape.states[key][self.cursor[began], began] = value
        self._at.forget_run_steps()

    def _end_episode(self, index: int, terminated: bool, truncated: bool) -> None:
        final: dict[Key, Array] = {}
        leaves = self._pool.slots.final_observation
        for key, table, leaf in zip(
            self._observation_keys, self._observation_tables, leaves, strict=True
        ):
            final[key] = leaf[index].astype(table.dtype)
        for key, value in self._initial_carry.items():
            table = self._tape.states[key]
            final[key] = table[self.cursor[index], index].copy()
            table[self.cursor[index], index] = value
        piece = self._hand_out(index, final, int(self.cursor[index] - self.start[index]))
        length = piece.first_step + piece.length
        place, total = (piece.trajectory_id, index), float(self.returns[index])
        episode = EpisodeRecord(*place, total, length, terminated, truncated)
        self.episodes.append(episode)
        if self.actions is not None:
            if self._pool.keeps_starts:
                self.played.append((episode, self.actions.of(index)))
            self.actions.forget(index)
        self.step[index] = 0
        self.returns[index] = 0.0
        self._pool.episode[index] += 1
        self._trajectory_id[index] += self._pool.total_envs

    def cut(self, index: int, length: int | None = None) -> None:
        """Ends the open piece of an environment where it stands, or hands out its first rows.

        The episode goes on in the next piece.
        """
        open_rows = int(self.cursor[index] - self.start[index])
        if open_rows:
            self._hand_out(index, None, open_rows if length is None else length)

    def _hand_out(self, index: int, final: dict[Key, Array] | None, length: int) -> Piece:
        cursor, step, run_step, trajectory_id, _ = self._counters[:, index].tolist()
        start = int(self.start[index])
        infos = self._infos[index]
        piece = Piece(
            self._tape,
            column=index,
            first_row=start,
            length=length,
            env_id=index,
            trajectory_id=trajectory_id,
            first_step=step - (cursor - start),
            first_run_step=run_step - (cursor - start),
            final=final,
            infos=infos[:length],
        )
        self._infos[index] = infos[length:]
        if self.actions is not None:
            rows = [table[start : start + length, index] for table in self._action_tables]
            self.actions.write(index, piece.first_step, rows)
        self.done_pieces.append(piece)
        self.start[index] = start + length
        return piece

    def _rejoin(self) -> dict[int, Piece]:
        """Makes one piece again of those that an earlier call cut and did not hand out.

        The last of an environment is its open piece, if it was cut where the open rows begin.

        Returns:
            Such a piece by environment, where it lies on another tape than the open rows.
        """
        joined = joined_pieces(self.done_pieces, self._num_before)
        earlier: dict[int, Piece] = {}
        rows = [*self._row_columns, *self._extras.values()]
        first_step = (self.step - self.length).tolist()
        for index, own in joined.items():
            last = own[-1]
            ends = (last.trajectory_id, last.first_step + last.length)
            if last.final is not None or ends != (self._trajectory_id[index], first_step[index]):
                continue
            if last.tape is self._tape:
                self.start[index] = last.first_row
            elif has_columns(last, self._state_columns, rows):
                earlier[index] = last
            else:
                continue
            self._infos[index] = [*last.infos, *self._infos[index]]
            own.pop()
        self.done_pieces = deque(piece for own in joined.values() for piece in own)
        return earlier
