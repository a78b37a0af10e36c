"""Native mode: any VectorEnv gives the trajectories that sync mode gives, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torch import Tensor

import gymtask
from gymtask.testing import ScriptedEnv
from tests.integration.native_envs import (
    MODE_IDS,
    MODES,
    DriftDisabled,
    DriftEnv,
    DriftSameStep,
    DriftUnmasked,
    DriftVectorEnv,
    SpacesEnv,
    assert_same,
    rows_of,
    vector_of,
)
from tests.tasks import make_task

LENGTHS = (3, 5, 1, 2, 7)
Make = Callable[..., Any]


@pytest.fixture(params=MODES, ids=MODE_IDS)
def autoreset(request: pytest.FixtureRequest) -> AutoresetMode:
    mode: AutoresetMode = request.param
    return mode


def scripted(mode: AutoresetMode | None, **kwargs: Any) -> Make:
    """What makes a ScriptedEnv, or with a mode a VectorEnv of them."""
    options = {"lengths": LENGTHS, "num_actions": 5, **kwargs}
    if mode is None:
        return functools.partial(ScriptedEnv, **options)
    return vector_of(ScriptedEnv, mode, **options)


def choose(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
    """Random, and of the observation as well."""
    logits = torch.zeros(len(states), 5)
    logits[:, 0] = states["observation"][:, 0] % 3
    return gymtask.sampling.categorical(logits, states)


def drift(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
    mean = -states["observation"][:, :1] / 4
    action = gymtask.sampling.gaussian(mean, 0.5, states)
    return TensorDict({"action": action, "mean": mean}, batch_size=[len(states)])


def collected(
    make: Any,
    mode: str = "native",
    *,
    num_envs: int = 5,
    totals: tuple[int, ...] = (40, 33, 7, 61),
    options: dict[str, Any] | None = None,
    info_keys: tuple[str, ...] = ("t",),
    **keywords: Any,
) -> tuple[list[dict[str, bytes]], list[Any]]:
    """Collections one after another, and the episodes that ended in them."""
    hooks = {"get_actions": choose, **(options or {})}
    task = make_task(
        num_envs,
        1,
        mode,
        get_environment=lambda self: gymtask.Environment(make, info_keys=info_keys),
        **hooks,
    )
    with task.get_worker_pool() as pool:
        samples = [
            task.collect_samples(None, pool, total, use_tqdm=False, **keywords) for total in totals
        ]
    return rows_of(samples), [episode for part in samples for episode in part.episodes]


# ---- the same as sync mode -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"max_trajectory_length": 2},
        {"min_trajectory_length": 3},
        {"max_trajectory_length": 4, "min_trajectory_length": 2},
        {"min_batch_size": 1, "max_batch_size": 2},
        {"whole_episodes": True},
        {"whole_episodes": True, "min_trajectory_length": 4},
    ],
    ids=str,
)
def test_collections_are_those_of_sync_mode(
    autoreset: AutoresetMode, keywords: dict[str, Any]
) -> None:
    expected, _ = collected(scripted(None), "sync", **keywords)
    found, _ = collected(scripted(autoreset), **keywords)
    assert_same(found, expected)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_few_environments_too(autoreset: AutoresetMode, num_envs: int) -> None:
    totals = (40, 33, 61)  # none so small that what was left would be more than a share
    expected, _ = collected(scripted(None), "sync", num_envs=num_envs, totals=totals)
    found, _ = collected(scripted(autoreset), num_envs=num_envs, totals=totals)
    assert_same(found, expected)


@pytest.mark.parametrize("end", ["truncated", "both"])
def test_flags_are_kept_apart(autoreset: AutoresetMode, end: str) -> None:
    expected, _ = collected(scripted(None, end=end), "sync")
    assert_same(collected(scripted(autoreset, end=end))[0], expected)


def test_each_episode_is_recorded_once_and_whole(autoreset: AutoresetMode) -> None:
    """O-25, O-29."""
    _, episodes = collected(scripted(autoreset))
    for index, length in enumerate(LENGTHS):
        own = [each for each in episodes if each.env_id == index]
        assert own
        assert [each.trajectory_id for each in own] == [index + 5 * e for e in range(len(own))]
        assert {(each.length, each.episode_return) for each in own} == {
            (length, length * (length + 1) / 2)
        }


KINDS: dict[str, Make] = {
    "of SyncVectorEnv": vector_of(DriftEnv, AutoresetMode.NEXT_STEP),
    "NEXT_STEP in metadata": DriftVectorEnv,
    "SAME_STEP as a string": DriftSameStep,
    "DISABLED, an attribute": DriftDisabled,
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("whole", [False, True])
def test_a_vector_env_in_numpy_gives_what_its_environments_give_alone(
    kind: str, whole: bool
) -> None:
    keywords: dict[str, Any] = {"options": {"get_actions": drift}, "info_keys": ("far",)}
    keywords["whole_episodes"] = whole
    expected, _ = collected(DriftEnv, "sync", **keywords)
    assert_same(collected(KINDS[kind], **keywords)[0], expected)


@pytest.fixture
def drift_id() -> Iterator[str]:
    """An id with an entry point of each kind."""
    gym.register("Drift-v0", DriftEnv, vector_entry_point=DriftVectorEnv)
    yield "Drift-v0"
    del gym.registry["Drift-v0"]


def test_an_id_is_made_by_its_vector_entry_point(drift_id: str) -> None:
    keywords: dict[str, Any] = {"options": {"get_actions": drift}, "info_keys": ("far",)}
    expected, _ = collected(drift_id, "sync", **keywords)
    assert_same(collected(drift_id, **keywords)[0], expected)


# ---- the promises of a row -----------------------------------------------------------------------


def test_no_reset_row_is_stored_and_next_observations_are_true(autoreset: AutoresetMode) -> None:
    """O-01, O-02."""
    task = make_task(2, 1, "native", env=scripted(autoreset, lengths=(3, 5)))
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 14, use_tqdm=False).to_tensordict()
    before, after = samples["observation"][:, 0], samples["next", "observation"][:, 0]
    pairs = list(zip(before.tolist(), after.tolist(), strict=True))
    a = [(0, 1), (1, 2), (2, 3), (100, 101), (101, 102), (102, 103), (200, 201)]
    b = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (100, 101), (101, 102)]
    assert pairs == a + b
    ends = [2, 5, 7 + 4]
    assert samples["next", "terminated"].nonzero().squeeze(-1).tolist() == ends
    assert samples["is_init"].nonzero().squeeze(-1).tolist() == [0, 3, 6, 7, 12]
    assert (samples["next", "reward"] > 0).all()


def test_what_an_action_did_stands_in_its_row(autoreset: AutoresetMode) -> None:
    task = make_task(5, 1, "native", env=scripted(autoreset), get_actions=choose)
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 300, use_tqdm=False).to_tensordict()
    assert torch.equal(samples["next", "observation"][:, 2].long(), samples["action"])
    assert torch.equal(samples["next", "observation"][:, 1].long(), samples["env_id"])
    assert samples["action"].unique().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_an_environment_that_reuses_its_arrays_gives_right_finals(mode: AutoresetMode) -> None:
    """O-17."""
    expected, _ = collected(scripted(None), "sync")
    assert_same(collected(scripted(mode, reuse_arrays=True))[0], expected)


def test_finals_that_the_vector_env_has_lost_are_warned_of() -> None:
    """O-17: Gymnasium keeps no copy of them in SAME_STEP mode."""
    make = scripted(AutoresetMode.SAME_STEP, reuse_arrays=True)
    with pytest.warns(UserWarning, match="reuses its arrays has overwritten them"):
        collected(make)


def test_nested_spaces_and_starts_are_those_of_sync_mode(autoreset: AutoresetMode) -> None:
    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
        logits = torch.zeros(len(states), 3)
        turn = gymtask.sampling.categorical(logits, states)
        push = gymtask.sampling.gaussian(torch.zeros(len(states), 2), 0.3, states).clamp(-1, 1)
        action = TensorDict({"turn": turn, "push": push}, batch_size=[len(states)])
        return TensorDict({"action": action}, batch_size=[len(states)])

    options = {"get_actions": act}
    expected, _ = collected(SpacesEnv, "sync", num_envs=3, options=options, info_keys=())
    found, _ = collected(vector_of(SpacesEnv, autoreset), num_envs=3, options=options, info_keys=())
    assert_same(found, expected)


@pytest.mark.parametrize("num_envs", [1, 4])
def test_numbers_as_observations_are_those_of_sync_mode(
    autoreset: AutoresetMode, num_envs: int
) -> None:
    """O-68."""

    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        assert states["observation"].shape == (len(states),)
        logits = (states["observation"].unsqueeze(-1) * torch.arange(4) % 5).float()
        return gymtask.sampling.categorical(logits, states)

    make = functools.partial(gym.make, "FrozenLake-v1", is_slippery=True)
    # No infos: Gymnasium makes their dtype that of the first value, here an integer.
    options: dict[str, Any] = {"options": {"get_actions": act}, "info_keys": ()}
    options["totals"] = (40, 33, 61)
    expected, _ = collected(make, "sync", num_envs=num_envs, **options)
    assert_same(collected(vector_of(make, autoreset), num_envs=num_envs, **options)[0], expected)


def test_carries_and_values_are_those_of_sync_mode(autoreset: AutoresetMode) -> None:
    def act(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
        assert (states["memory"][states["is_init"]] == 1).all()
        action = (states["memory"] + states["env_id"]).long() % 5
        memory = states["memory"] * 1.5 + action
        return TensorDict({"action": action, "next": {"memory": memory}}, [len(states)])

    def values(self: Any, model: Any, states: TensorDict) -> Tensor:
        return states["memory"] / 8 + states["observation"][:, 0]

    options = {
        "get_actions": act,
        "get_values": values,
        "get_initial_carry": lambda self, model: TensorDict({"memory": torch.ones(())}),
    }
    expected, _ = collected(scripted(None), "sync", options=options)
    assert_same(collected(scripted(autoreset), options=options)[0], expected)


class SometimesEnv(ScriptedEnv):
    """Environment 1 says something in step 2, and at the end of its episodes."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *rest, ended, truncated, _ = super().step(action)
        info: dict[str, Any] = {"always": np.array([self.num_steps, self.number])}
        if self.number == 1 and (self.num_steps == 2 or ended):
            info |= {"x": 1.5 + self.num_steps, "s": f"step {self.num_steps}", "d": {"a": "one"}}
        return (*rest, ended, truncated, info)  # type: ignore[return-value]


def test_infos_that_are_missing_are_no_zeros(autoreset: AutoresetMode) -> None:
    """O-33."""
    keys = ("always", "x", "s", "d", "never")
    make = functools.partial(SometimesEnv, (3, 4), num_actions=5)
    with pytest.warns(UserWarning, match=r"got \['never'\], which no step has given"):
        expected, _ = collected(make, "sync", num_envs=2, info_keys=keys)
    with pytest.warns(UserWarning, match=r"got \['never'\], which no step has given"):
        found, _ = collected(vector_of(make, autoreset), num_envs=2, info_keys=keys)
    assert_same(found, expected)


def test_infos_without_a_mask_count_for_all() -> None:
    """O-33."""
    keys = ("count", "name", "version", "nested", "objects")
    task = make_task(
        3,
        1,
        "native",
        get_environment=lambda self: gymtask.Environment(DriftUnmasked, info_keys=keys),
        get_actions=drift,
    )
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 60, use_tqdm=False).to_tensordict()
    info, count = samples["next", "info"], samples["next", "observation"][:, 1].long()
    assert torch.equal(info["count"], count)
    assert info["name"] == [f"number {index}" for index in samples["env_id"].tolist()]
    assert info["version"].unique().tolist() == [3]
    assert [each["pair"].tolist() for each in info["nested"]] == [[n, n] for n in count.tolist()]
    assert [each["n"] for each in info["objects"]] == count.tolist()
    assert all(info[f"_{key}"].all() for key in keys)


# ---- totals, leftovers, generators ---------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_first_come_is_exact_and_gives_prefixes_of_the_same_rows(
    autoreset: AutoresetMode, whole: bool
) -> None:
    def run(mode: str, make: Make, **keywords: Any) -> list[TensorDict]:
        task = make_task(5, 1, mode, env=make, get_actions=choose)
        with task.get_worker_pool() as pool:
            return [
                task.collect_samples(None, pool, np.int64(total), use_tqdm=False, **keywords)
                .to_tensordict()
                .exclude(("next", "end"))
                for total in (40, 33, 7, 61, 1)
            ]

    reference = run("sync", scripted(None))
    found = run("native", scripted(autoreset), allocation="first_come", whole_episodes=whole)
    sizes = [len(part) for part in found]
    if whole:
        assert all(size >= total for size, total in zip(sizes, (40, 33, 7, 61, 1), strict=True))
    else:
        assert sizes == [40, 33, 7, 61, 1]
    for index in range(5):
        ours, theirs = (
            torch.cat([part[part["env_id"] == index] for part in parts])
            for parts in (found, reference)
        )
        length = min(len(ours), len(theirs))
        assert length > 10
        assert (ours[:length] == theirs[:length]).all()


def test_a_generator_closed_early_loses_and_repeats_nothing(autoreset: AutoresetMode) -> None:
    task = make_task(5, 1, "native", env=scripted(autoreset), get_actions=choose)
    parts: list[TensorDict] = []
    with task.get_worker_pool() as pool:
        for taken, total in ((3, 30), (0, 10), (1, None), (7, 20), (2, None)):
            generator = task.iter_samples(None, pool, total_samples=total, use_tqdm=False)
            parts += [next(generator) for _ in range(taken)]
            generator.close()
        for total in (1, 13, 40):
            samples = task.collect_samples(None, pool, total, use_tqdm=False)
            assert samples.num_transitions == total
            parts += [piece.samples for piece in samples]
    found = torch.cat(parts)
    reference = _reference()
    for index in range(5):
        own = found[found["env_id"] == index]
        assert (own == reference[reference["env_id"] == index][: len(own)]).all()


def _reference() -> TensorDict:
    task = make_task(5, 1, "sync", env=scripted(None), get_actions=choose)
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 400, use_tqdm=False)
    return samples.to_tensordict().exclude(("next", "end"))


def test_nothing_yielded_changes_later(autoreset: AutoresetMode) -> None:
    """O-18."""
    task = make_task(5, 1, "native", env=scripted(autoreset), get_actions=choose)
    with task.get_worker_pool() as pool:
        kept = [task.collect_samples(None, pool, 23, use_tqdm=False) for _ in range(2)]
        copies = [part.to_tensordict().clone() for part in kept]
        task.collect_samples(None, pool, 200, use_tqdm=False)
    for part, copy in zip(kept, copies, strict=True):
        assert (part.to_tensordict() == copy).all()


def test_a_policy_that_keeps_its_states_shows_with_debugging(
    autoreset: AutoresetMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYMTASK_DEBUG", "1")
    kept: list[Any] = []

    def act(self: Any, model: Any, states: Any, optimal: bool) -> Any:
        kept.append(states["observation"])
        return torch.zeros(len(states), dtype=torch.int64)

    task = make_task(2, 1, "native", env=scripted(autoreset), get_actions=act)
    with task.get_worker_pool() as pool:
        samples = task.collect_samples(None, pool, 20, use_tqdm=False).to_tensordict()
    assert not samples["observation"].isnan().any()
    assert all(observation.isnan().all() for observation in kept)
