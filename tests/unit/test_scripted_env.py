"""The environment whose every value can be worked out by hand, worked out by hand."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest

from gymtask.testing import ScriptedEnv


def play(env: Any, seed: int, steps: int) -> list[Any]:
    """Observations (after a reset, the first one), each with reward and flags."""
    rows: list[Any] = [env.reset(seed=seed)[0].tolist()]
    for t in range(steps):
        observation, reward, terminated, truncated, info = env.step(t % 2)
        rows.append((observation.tolist(), reward, terminated, truncated, info["t"]))
        if terminated or truncated:
            rows.append(env.reset()[0].tolist())
    return rows


@pytest.mark.parametrize("reuse_arrays", [False, True])
def test_it_counts_steps_and_episodes_and_echoes_actions(reuse_arrays: bool) -> None:
    assert play(ScriptedEnv(2, reuse_arrays=reuse_arrays), 7, 3) == [
        [0, 7, -1],
        ([1, 7, 0], 1.0, False, False, 1),
        ([2, 7, 1], 2.0, True, False, 2),
        [100, 7, -1],
        ([101, 7, 0], 1.0, False, False, 1),
    ]


@pytest.mark.parametrize(
    ("end", "flags"),
    [("terminated", (True, False)), ("truncated", (False, True)), ("both", (True, True))],
)
def test_an_episode_ends_as_it_is_told_to(end: str, flags: tuple[bool, bool]) -> None:
    assert play(ScriptedEnv(1, end), 0, 1)[1][2:4] == flags


def test_its_number_chooses_its_length_and_its_pace_for_good() -> None:
    env = ScriptedEnv([3, 4], seconds=[0.0, 0.05])
    env.reset(seed=5)
    assert (env.number, env.length) == (5, 4)
    env.reset(seed=2)
    assert env.number == 5
    start = time.monotonic()
    env.step(0)
    assert time.monotonic() - start >= 0.05


def test_reused_arrays_are_one_array() -> None:
    env = ScriptedEnv(reuse_arrays=True)
    first, _ = env.reset(seed=0)
    assert env.step(0)[0] is first
    env = ScriptedEnv()
    first, _ = env.reset(seed=0)
    assert env.step(0)[0] is not first


def test_pictures_show_the_step() -> None:
    env = ScriptedEnv(99, render_mode="rgb_array")
    env.reset(seed=0)
    env.step(0)
    assert env.render().shape == (16, 16, 3)
    assert (env.render() == np.uint8(10)).all()


def test_a_fault_comes_at_its_step_in_its_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    monkeypatch.setattr("os.kill", lambda pid, number: done.append(number))
    monkeypatch.setattr("time.sleep", done.append)
    faults = {1: (2, "raise"), 2: (1, "die"), 3: (3, "sleep")}
    play(ScriptedEnv(9, faults=faults), 0, 4)
    assert done == []
    with pytest.raises(ValueError, match=r"^boom 1$"):
        play(ScriptedEnv(1, faults=faults), 1, 2)
    play(ScriptedEnv(2, faults=faults), 2, 4)
    play(ScriptedEnv(2, faults=faults), 3, 4)
    assert done == [signal.SIGKILL, 3600]


def test_an_unknown_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`end` must be one of \['terminated', .* got 'soon'"):
        ScriptedEnv(end="soon")
