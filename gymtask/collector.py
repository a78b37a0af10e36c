"""The loop that drives a pool with a policy, and the only caller of the pools.

Each turn takes environments that are ready, completes their rows, asks the policy for their next
actions and sends them on. How many rows each environment owes is the `Plan`'s business; what
becomes of rows is the `Rollout`'s.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from tqdm import tqdm

from gymtask.acting import Actor, eval_mode
from gymtask.errors import CollectionInterrupted, PoolStateError
from gymtask.options import CollectOptions
from gymtask.plan import Endless, EpisodeShares, EqualShares, FirstCome, Plan, equal_shares
from gymtask.replay import EpisodeRecord
from gymtask.rollout import Rollout
from gymtask.sampling import NoiseStreams
from gymtask.tape import Piece
from gymtask.together import EpisodesTogether, RowsTogether, shares_with_left
from gymtask.workers.layout import Array
from gymtask.workers.pool import WorkerPool

if TYPE_CHECKING:
    from gymtask.task import ReinforcementLearningTask

logger = logging.getLogger(__name__)


class Collection:
    """One call of `iter_samples`: turns of the loop until every environment gave what it owes.

    A context manager: when it is left, outstanding steps are waited for. Whoever asks for pieces
    puts model and task into eval mode.

    Attributes:
        rollout: The pool's open pieces.
        dropped: Pieces shorter than `min_trajectory_length` so far.
    """

    def __init__(
        self,
        task: ReinforcementLearningTask[Any, Any],
        model: Any,
        pool: WorkerPool,
        options: CollectOptions,
        plan: Plan,
        actor: Actor | None = None,
    ) -> None:
        self._pool, self._options, self._plan = pool, options, plan
        self.rollout = rollout_of(pool)
        self.dropped: list[Piece] = []
        self._actor = actor_of(task, pool, self.rollout) if actor is None else actor
        self._actor.begin(model, optimal=options.optimal, random_actions=options.random_actions)
        self.rollout.open(self._actor, self._num_rows())
        self.later: list[Piece] = []
        self._started = False
        self._bar: Any = None
        self._limit = options.max_batch_size or pool.num_envs
        self.drain()
        if pool.num_pending:  # its rows are not complete, and must not be cut
            raise CollectionInterrupted("asked to stop while steps of an earlier call are pending")
        self._take_leftovers()

    def _num_rows(self) -> int | None:
        """About how many rows each environment will give, if that is known."""
        if self._options.total_samples is None:
            return None
        rows = -(-self._options.total_samples // self._pool.num_envs)
        # Who is reset takes a row of the tape, too, and the last to give their share more of them.
        return rows + rows // 4 + 8 if self._pool.steps_together else rows

    # ---- rows left from an earlier call ----------------------------------------------------------

    def _take_leftovers(self) -> None:
        """Counts rows that an earlier call left.

        What is more than this call may hand out waits for the next one.
        """
        rollout, plan = self.rollout, self._plan
        waiting, rollout.done_pieces = list(rollout.done_pieces), type(rollout.done_pieces)()
        for piece in waiting:
            self._take_piece(piece)
        full = {piece.env_id for piece in self.later}
        longest = self._options.max_trajectory_length
        for index in np.flatnonzero(rollout.length).tolist():
            length, room = int(rollout.length[index]), plan.room(index)
            if room is not None and (length > room or index in full):
                rollout.cut(index)
                self._take_piece(rollout.done_pieces.pop())
                continue
            plan.credit(index, length)  # it stays open, and goes on in this call
            while longest is not None and rollout.length[index] >= longest:
                rollout.cut(index, longest)

    def _take_piece(self, piece: Piece) -> None:
        room = self._plan.room(piece.env_id)
        if room is not None and piece.length > room:
            if room <= 0:
                self.later.append(piece)
                return
            piece, rest = piece.split(room)
            self.later.append(rest)
        self._plan.credit(piece.env_id, piece.length)
        longest = self._options.max_trajectory_length
        while longest is not None and piece.length > longest:
            head, piece = piece.split(longest)
            self.rollout.done_pieces.append(head)
        self.rollout.done_pieces.append(piece)

    # ---- the loop --------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Takes who is ready, completes their rows and sends their next actions.

        False when nobody goes on.
        """
        pool, options = self._pool, self._options
        if pool.interrupt is not None and pool.interrupt():
            raise CollectionInterrupted("asked to stop between two steps")
        if pool.memory is not self.rollout and not pool.closed:
            raise PoolStateError(
                "cannot go on collecting, as the pool was reset meanwhile; begin a new collection"
            )
        began = 0.0
        if not self._started:
            self._started = True
            idle = pool.all_ids
        elif pool.num_pending:
            # To take others too saves a turn.
            spare = self.rollout.turn_time
            idle = pool.take(options.min_batch_size, self._limit, options.max_wait_time, spare)
            began = time.perf_counter()
            self._complete(idle)
        else:
            return False
        admitted = self._plan.admit(idle, self.rollout.step)
        if admitted is not idle and not options.whole_episodes:
            for index in np.setdiff1d(idle, admitted).tolist():
                self.rollout.cut(index)
        self._send(admitted)
        if began:
            self.rollout.turn_time += (time.perf_counter() - began - self.rollout.turn_time) / 8
        return True

    def _complete(self, env_ids: Array) -> None:
        rollout, longest = self.rollout, self._options.max_trajectory_length
        rollout.add_steps(env_ids)
        self._plan.complete(env_ids, rollout.step, self._pool.began)
        if longest is not None:
            for index in env_ids[(rollout.length >= longest)[env_ids]].tolist():
                rollout.cut(index)

    def _send(self, env_ids: Array) -> None:
        if len(self._pool.held) and len(env_ids):  # all, since they step together
            acts = np.ones(len(env_ids), bool)
            acts[self._pool.held] = False
            env_ids = env_ids[acts]
            self._reset(self._pool.held)
        if 0 < len(env_ids) <= self._limit:
            self._act(env_ids)
        else:
            for start in range(0, len(env_ids), self._limit):
                self._act(env_ids[start : start + self._limit])

    def _act(self, env_ids: Array) -> None:
        rollout, actor, pool = self.rollout, self._actor, self._pool
        rollout.write_states(env_ids, actor.states)
        block: Any = pool.blocks.get(id(env_ids), env_ids)
        answer = actor.act(env_ids, rollout.even_run_step(env_ids), block)
        rollout.add_answer(env_ids, answer)
        for target, values in zip(pool.slots.action, answer.decoded, strict=True):
            target[block] = values
        if actor.debug:  # only now: the answer may share memory with the states
            actor.release(len(env_ids))
        pool.post(env_ids)
        rollout.num_posted = pool.num_posted

    def _reset(self, env_ids: Array) -> None:
        """Starts steps that only begin episodes; no policy is asked what to do in an ended one.

        The environments get the actions that lie in the slots: their last ones.
        """
        self.rollout.make_room()
        self._pool.post(env_ids)
        self.rollout.num_posted = self._pool.num_posted

    def drain(self) -> None:
        """Waits for outstanding steps and keeps their rows; every environment is idle then."""
        pool = self._pool
        if self.later:  # those of one environment lie before or after its others
            pieces = sorted([*self.rollout.done_pieces, *self.later], key=_time_of)
            self.rollout.done_pieces, self.later = deque(pieces), []
        try:
            while pool.num_pending and not pool.closed:
                self._complete(pool.take(pool.num_envs, pool.num_envs))
        except CollectionInterrupted:
            return  # a step takes long: the next call takes it first

    # ---- pieces ----------------------------------------------------------------------------------

    def next_piece(self) -> Piece | None:
        """Goes on until a piece is whole, and gives it; None when there will be no more.

        A piece that is not accepted stays with the rollout, for the next call.
        """
        ready, shortest = self.rollout.done_pieces, self._options.min_trajectory_length
        while True:
            while not ready:
                before = self._pool.num_posted
                if not self.turn():
                    return None
                if self._bar is not None:
                    self._bar.update(self._pool.num_posted - before)
            if self._pool.steps_together and not self._divide(ready):
                continue
            if ready[0].length >= shortest:
                return ready[0]
            self.dropped.append(ready.popleft())

    def _divide(self, ready: deque[Piece]) -> bool:
        """Leaves of the first piece what this call hands out; False if that is nothing."""
        piece = ready.popleft()
        share = self._plan.share_of(piece.env_id, piece.length, piece.first_step)
        self._pool.num_handed_out += share
        if share == piece.length:
            ready.appendleft(piece)
        elif share:
            head, rest = piece.split(share)
            ready.appendleft(head)
            self.later.append(rest)
        else:
            self.later.append(piece)
        return share > 0

    @property
    def num_dropped(self) -> int:
        """Rows of the dropped pieces."""
        return sum(piece.length for piece in self.dropped)

    def accept(self) -> None:
        """Takes the piece that `next_piece` has just given."""
        self.rollout.done_pieces.popleft()

    def __enter__(self) -> Self:
        self.rollout.in_use = True
        if self._options.use_tqdm:
            total = self._options.total_samples
            self._bar = tqdm(total=total, unit="step", desc="collect", leave=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        self.rollout.in_use = False
        if kind is not None and not issubclass(kind, (Exception, GeneratorExit)):
            # Ctrl-C may have struck between any two lines: which steps are pending is not sure any
            # more, and waiting for one that nobody makes would never end.
            self._pool.close()
            return
        self.drain()
        if self.dropped:
            logger.info(
                "left out %d rows of pieces shorter than min_trajectory_length=%d",
                self.num_dropped,
                self._options.min_trajectory_length,
            )


def rollout_of(pool: WorkerPool) -> Rollout:
    """The open pieces of a pool; a pool that was never reset is reset first.

    Raises:
        PoolStateError: Somebody else stepped the pool since, so that the open rows do not tell
            where it stands.
    """
    if not pool.was_reset:
        pool.reset()
    rollout = pool.memory
    if rollout is None:
        rollout = pool.memory = Rollout(pool)
    if not isinstance(rollout, Rollout) or rollout.num_posted != pool.num_posted:
        raise PoolStateError(
            "cannot collect, as the pool was stepped by hand since its last reset or collection;"
            " call pool.reset() first"
        )
    if rollout.in_use:
        raise PoolStateError(
            "cannot collect, as another collection is running on the pool; close its generator"
            " first"
        )
    return rollout


def _time_of(piece: Piece) -> int:
    return piece.first_run_step


def actor_of(
    task: ReinforcementLearningTask[Any, Any], pool: WorkerPool, rollout: Rollout
) -> Actor:
    """What calls the task's policy; that of the last collection if it was of the same task."""
    noise, actor = noise_of(pool), rollout.actor
    if actor is None or actor.task is not task or actor.noise is not noise:
        actor = rollout.actor = Actor.for_pool(task, pool, noise)
    return actor


def noise_of(pool: WorkerPool) -> NoiseStreams:
    """The action noise of a pool."""
    key = pool.noise_key
    if pool.noise is None or pool.noise.key != key:
        pool.noise = NoiseStreams(key, pool.num_envs, pool.first_env)
    noise: NoiseStreams = pool.noise
    return noise


def begin(
    task: ReinforcementLearningTask[Any, Any], model: Any, pool: WorkerPool, options: CollectOptions
) -> Collection:
    """Opens a collection with these options, which are checked already.

    Raises:
        PoolStateError: Another collection is running on the pool, or it was stepped by hand.
    """
    total = options.total_samples
    plan = _plan(pool, options, rollout_of(pool))
    collection = Collection(task, model, pool, options, plan)
    if total is not None and options.allocation == "equal":
        pool.cursor = (pool.cursor + total) % pool.num_envs
    return collection


def _plan(pool: WorkerPool, options: CollectOptions, rollout: Rollout) -> Plan:
    total, whole = options.total_samples, options.whole_episodes
    if total is None:
        return Endless()
    together = pool.steps_together
    if options.allocation == "first_come":
        return RowsTogether(total, pool.num_envs, whole) if together else FirstCome(total, whole)
    shares = equal_shares(total, pool.num_envs, pool.cursor)
    if not together:
        return EqualShares(shares, whole)
    return RowsTogether(shares_with_left(shares, rollout.num_left()), pool.num_envs, whole)


def run_episodes(
    task: ReinforcementLearningTask[Any, Any],
    model: Any,
    pool: WorkerPool,
    shares: Sequence[int],
    *,
    optimal: bool,
) -> list[EpisodeRecord]:
    """Plays shares[i] whole episodes in environment i of a pool, from a fresh reset.

    No rows are kept.

    Returns:
        The records of the episodes, ordered by environment and time.
    """
    pool.reset()
    options = CollectOptions(optimal=optimal, use_tqdm=False)
    plan = EpisodesTogether(shares) if pool.steps_together else EpisodeShares(shares)
    collection = Collection(task, model, pool, options, plan)
    with collection, eval_mode(model, task):
        while collection.next_piece() is not None:
            collection.accept()
    episodes, collection.rollout.episodes = collection.rollout.episodes, []
    episodes.sort(key=lambda episode: (episode.env_id, episode.trajectory_id))
    played = [[each for each in episodes if each.env_id == index] for index in range(len(shares))]
    # Environments that step together play on until the last one is done.
    return [each for own, share in zip(played, shares, strict=True) for each in own[:share]]
