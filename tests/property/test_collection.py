"""Whole collections against a plain model of what the environments do.

The model is the list of all rows that an environment will ever give, worked out from the lengths of
its episodes. Whatever calls are made, in whatever order, and however they fail: each row is handed
out once, in order, as the model says, or counted as dropped.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

import gymtask
from gymtask import rollout
from gymtask.plan import equal_shares
from tests.integration.native_envs import MODE_IDS, vector_of
from tests.tasks import make_task

NUM_ACTIONS = 5
Lengths = tuple[tuple[int, ...], ...]


class EpisodesEnv(gym.Env[Any, Any]):
    """Episode e of environment i has lengths[i][e] steps, round and round.

    The observation is (100 · episode + step, environment, last action). Episodes with odd numbers
    are truncated, the others terminate.
    """

    def __init__(self, lengths: Lengths, reuses: bool = True) -> None:
        self.observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(NUM_ACTIONS)
        self._lengths, self._reuses = lengths, reuses
        self._number = self._episode = -1
        self._count = 0
        self._array = np.zeros(3, np.float32)  # filled again and again

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self._number < 0:
            self._number = seed or 0
        self._episode += 1
        self._count = 0
        return self._observe(-1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        own = self._lengths[self._number]
        ended = self._count == own[self._episode % len(own)]
        odd = self._episode % 2 == 1
        info = {"t": self._count} if self._count % 2 else {}
        return self._observe(action), self._count / 4, ended and not odd, ended and odd, info

    def _observe(self, action: Any) -> Any:
        self._array[:] = 100 * self._episode + self._count, self._number, action
        # Gymnasium's SAME_STEP mode cannot cope with an array that is filled again and again.
        return self._array if self._reuses else self._array.copy()


def chosen(env_id: Any, run_step: Any) -> Any:
    """The action of the policy of these tests."""
    return (3 * env_id + 7 * run_step + run_step // 5) % NUM_ACTIONS


@dataclass
class Call:
    """One call of a collection, and how it ends."""

    total: int | None
    keywords: dict[str, Any]
    takes: int | None  # pieces that are taken from `iter_samples`; None: collect_samples
    fails_in: str = ""  # a hook
    fails_at: int = 0  # its call number in which it fails


@dataclass
class Model:
    """What was handed out, and what is to come.

    Attributes:
        lengths: Of the episodes of each environment.
        place: For each environment the number of the next row to be handed out.
        num_unseen: Rows that were dropped, it is not known from where; None if any number may be.
        cursor: The environment that gives a row more than others.
    """

    lengths: Lengths
    place: list[int] = field(default_factory=list)
    num_unseen: int | None = 0
    cursor: int = 0

    def __post_init__(self) -> None:
        self.place = [0] * len(self.lengths)

    def number_of(self, env_id: int, episode: int, step: int) -> int:
        """Which of all rows of an environment this one is."""
        own = self.lengths[env_id]
        return sum(own[e % len(own)] for e in range(episode)) + step

    def pass_to(self, place: Sequence[int]) -> None:
        """Passes over rows that were dropped."""
        passed = [new - old for new, old in zip(place, self.place, strict=True)]
        assert min(passed) >= 0, "a row came twice, or too late"
        self.place = list(place)
        if self.num_unseen is not None:
            self.num_unseen -= sum(passed)
            assert self.num_unseen >= 0, "a row was left out"

    def check_piece(self, piece: TensorDict) -> None:
        """Compares every value of a piece."""
        n, env_id = len(self.lengths), int(piece["env_id"][0])
        trajectory, first = int(piece["trajectory_id"][0]), int(piece["step"][0])
        episode, own = trajectory // n, self.lengths[env_id]
        assert trajectory % n == env_id
        start = self.number_of(env_id, episode, first)
        self.pass_to([*self.place[:env_id], start, *self.place[env_id + 1 :]])
        self.place[env_id] += len(piece)
        actions = [int(chosen(env_id, start - first + t)) for t in range(first + len(piece))]
        memory = [0.0]
        for action in actions:
            memory.append(memory[-1] * 0.5 + action)
        rows = [
            _row(env_id, episode, t, own[episode % len(own)], actions, memory)
            for t in range(first, first + len(piece))
        ]
        flat = piece.flatten_keys("/")
        assert set(flat.keys()) == {*rows[0], "env_id", "trajectory_id"}
        assert (flat["env_id"] == env_id).all()
        assert (flat["trajectory_id"] == trajectory).all()
        for key in rows[0]:
            wanted = torch.tensor([row[key] for row in rows])
            found = flat[key]
            if key == "next/info/t":  # without a value in the whole piece they are NaN
                found, wanted = found[flat["next/info/_t"]], wanted[flat["next/info/_t"]]
            assert torch.equal(found.double(), wanted.double()), key


def _row(
    env_id: int, episode: int, t: int, length: int, actions: Sequence[int], memory: Sequence[float]
) -> dict[str, Any]:
    """Row t of an episode."""
    ends, odd = t + 1 == length, episode % 2 == 1
    before, after = 100 * episode + t, 100 * episode + t + 1
    return {
        "observation": [before, env_id, actions[t - 1] if t else -1],
        "action": actions[t],
        "noted": [actions[t] / 2, before],
        "memory": memory[t],
        "state_value": before / 8,
        "is_init": t == 0,
        "step": t,
        "next/observation": [after, env_id, actions[t]],
        "next/reward": (t + 1) / 4,
        "next/terminated": ends and not odd,
        "next/truncated": ends and odd,
        "next/done": ends,
        "next/memory": memory[t + 1],
        "next/state_value": after / 8,
        "next/info/t": t + 1 if t % 2 == 0 else 0,
        "next/info/_t": t % 2 == 0,
    }


class Boom(Exception):
    """What a hook raises here."""


def make(lengths: Lengths, mode: str, workers: int) -> Any:
    env: Any = functools.partial(EpisodesEnv, lengths)
    if mode in MODE_IDS:
        mode, env = (
            "native",
            vector_of(functools.partial(env, mode != "SAME_STEP"), AutoresetMode[mode]),
        )

    def fail(task: Any, hook: str) -> None:
        task.calls[hook] = task.calls.get(hook, 0) + 1
        if task.call.fails_in == hook and task.calls[hook] == task.call.fails_at:
            raise Boom(hook)

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
        fail(self, "get_actions")
        action = chosen(states["env_id"], states["run_step"])
        shown = torch.stack([action / 2, states["observation"][:, 0]], -1)
        memory = states["memory"] * 0.5 + action
        content = {"action": action, "noted": shown, "next": {"memory": memory}}
        return TensorDict(content, batch_size=[len(states)])

    def get_values(self: Any, model: Any, states: TensorDict) -> Tensor:
        fail(self, "get_values")
        return states["observation"][:, 0] / 8

    def each(self: Any, trajectory: TensorDict) -> TensorDict:
        fail(self, "postprocess_trajectory")
        return trajectory

    def together(self: Any, trajectories: list[TensorDict]) -> list[TensorDict]:
        fail(self, "postprocess_trajectories")
        return trajectories

    task: Any = make_task(
        len(lengths),
        workers,
        mode,
        get_environment=lambda self: gymtask.Environment(env, info_keys=["t"]),
        get_actions=get_actions,
        get_values=get_values,
        get_initial_carry=lambda self, model: TensorDict({"memory": torch.zeros(())}),
        postprocess_trajectory=each,
        postprocess_trajectories=together,
    )
    return task


def run(task: Any, pool: Any, model: Model, call: Call) -> None:
    """Makes a call, and checks what came of it."""
    task.__dict__["call"], task.__dict__["calls"] = call, {}
    whole = call.keywords.get("whole_episodes", False)
    equal = call.total is not None and call.keywords.get("allocation", "equal") == "equal"
    shares = equal_shares(call.total or 0, pool.num_envs, model.cursor)
    if equal and call.takes != 0:  # a generator that is never asked begins nothing
        model.cursor = (model.cursor + (call.total or 0)) % pool.num_envs
    before, start, exact = pool.run_step.copy(), list(model.place), model.num_unseen == 0
    pieces, num_dropped = _make(task, pool, call)
    assert pool.num_pending == 0
    shortest = call.keywords.get("min_trajectory_length", 1)
    if call.takes and shortest > 1:
        model.num_unseen = None
    elif model.num_unseen is not None:
        model.num_unseen += num_dropped or 0
    for piece in pieces:
        assert shortest <= len(piece) <= (call.keywords.get("max_trajectory_length") or 10**9)
        model.check_piece(piece)
    if num_dropped is None:  # it failed, or was closed early
        return
    given = sum(map(len, pieces)) + num_dropped
    assert given == call.total or (whole and given > (call.total or 0))
    last = {int(piece["env_id"][0]): piece for piece in pieces}
    assert list(last) == sorted(last)
    if whole and num_dropped == 0:
        assert all(bool(piece["next", "done"][-1]) for piece in last.values())
    # Where all step together, rows that were left come first, whatever the shares.
    if equal and not whole and exact and not pool.steps_together:
        model.pass_to([first + share for first, share in zip(start, shares, strict=True)])
        assert model.num_unseen == 0
        there = (before - start).tolist()  # rows that an earlier call had left
        stepped = [max(0, share - old) for share, old in zip(shares, there, strict=True)]
        assert (pool.run_step - before).tolist() == stepped


def _make(task: Any, pool: Any, call: Call) -> tuple[list[TensorDict], int | None]:
    """The pieces that a call gave, and how many rows it left out, if it is known."""
    given = call_once(task, pool, call)
    if isinstance(given, list):
        return given, None
    return [piece.samples for piece in given], given.num_dropped


def call_once(task: Any, pool: Any, call: Call) -> gymtask.MultiReplaySamples | list[TensorDict]:
    """What `collect_samples` gave; or the pieces of `iter_samples`, or none where a hook failed."""
    keywords = {"total_samples": call.total, "use_tqdm": False, **call.keywords}
    if call.takes is None:
        try:
            samples: gymtask.MultiReplaySamples = task.collect_samples(None, pool, **keywords)
        except Boom:
            return []
        return samples
    generator = task.iter_samples(None, pool, **keywords)
    pieces: list[TensorDict] = []
    with contextlib.suppress(Boom), contextlib.closing(generator):
        pieces += itertools.islice(generator, call.takes)
    return pieces


# ---- what is drawn -------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn, num_envs: int) -> Call:
    takes = draw(st.none() | st.integers(0, 6))
    endless = takes is not None and draw(st.booleans())
    keywords: dict[str, Any] = {}
    if not endless and draw(st.booleans()):
        keywords["allocation"] = draw(st.sampled_from(["equal", "first_come"]))
    if not endless and draw(st.integers(0, 3)) == 0:
        keywords["whole_episodes"] = True
    elif draw(st.booleans()):
        keywords["max_trajectory_length"] = draw(st.integers(1, 6))
    if draw(st.integers(0, 3)) == 0:
        most = min(3, keywords.get("max_trajectory_length", 3))
        keywords["min_trajectory_length"] = draw(st.integers(1, most))
        if endless and keywords["min_trajectory_length"] > 1:
            endless = False  # it might go on for ever, and never find one that is long enough
    if draw(st.booleans()):
        keywords["max_batch_size"] = draw(st.integers(1, num_envs))
        keywords["min_batch_size"] = draw(st.integers(1, keywords["max_batch_size"]))
    total = None if endless else draw(st.integers(1, 30))
    if draw(st.integers(0, 2)):
        return Call(total, keywords, takes)
    return Call(total, keywords, takes, draw(st.sampled_from(HOOKS)), draw(st.integers(1, 9)))


HOOKS = ["get_actions", "get_values", "postprocess_trajectory", "postprocess_trajectories"]


@st.composite
def runs(draw: st.DrawFn) -> tuple[Lengths, list[Call]]:
    own = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
    lengths = tuple(draw(st.lists(own, min_size=1, max_size=4)))
    return lengths, draw(st.lists(calls(len(lengths)), min_size=1, max_size=6))


def check_run(lengths: Lengths, drawn: Sequence[Call], mode: str, workers: int) -> None:
    task, model = make(lengths, mode, workers), Model(lengths)
    with task.get_worker_pool() as pool:
        for call in drawn:
            run(task, pool, model, call)
        # At last all that is left, and something new of everyone.
        left = int(pool.run_step.sum()) - sum(model.place)
        run(task, pool, model, Call(len(lengths) * (left + 10), {}, None))
        assert pool.steps_together or model.place == pool.run_step.tolist()


@pytest.fixture(params=[None, (1, 1), (3, 1 << 28)], ids=["usual tape", "tiny tape", "small tape"])
def _tape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tapes so small that they are renewed all the time."""
    if request.param:
        monkeypatch.setattr(rollout, "FIRST_CAPACITY", request.param[0])
        monkeypatch.setattr(rollout, "MAX_BYTES", request.param[1])


QUIET = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80
)


@pytest.mark.usefixtures("_tape")
@QUIET
@given(runs())
def test_each_row_is_handed_out_once_in_order_and_right(drawn: tuple[Lengths, list[Call]]) -> None:
    check_run(*drawn, mode="sync", workers=1)


@pytest.mark.usefixtures("_tape")
@settings(QUIET, max_examples=60)
@given(runs())
def test_it_is_also_while_others_are_stepping(drawn: tuple[Lengths, list[Call]]) -> None:
    check_run(*drawn, mode="thread", workers=len(drawn[0]))


@pytest.mark.parametrize("autoreset", MODE_IDS)
@settings(QUIET, max_examples=50)
@given(runs())
def test_it_is_also_when_all_step_together(
    autoreset: str, drawn: tuple[Lengths, list[Call]]
) -> None:
    check_run(*drawn, mode=autoreset, workers=1)
