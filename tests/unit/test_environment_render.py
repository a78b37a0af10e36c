"""Pictures of an `Environment`, and what cannot give any."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

import gymtask
from gymtask.errors import (
    ConfigurationError,
)
from gymtask.testing import ScriptedEnv
from tests.unit.spy_env import Spy

FRAME = np.full((4, 6, 3), 7, np.uint8)


class TestRender:
    def test_the_present_picture(self) -> None:
        with gymtask.Environment(ScriptedEnv, render_mode="rgb_array") as environment:
            state = environment.reset()
            pictures = [environment.render(state)]
            for _ in range(3):
                pictures.append(environment.render(environment.step(0)))
            assert environment.fps == 20
        assert [picture.dtype for picture in pictures] == [np.uint8] * 4
        assert [picture.shape for picture in pictures] == [(16, 16, 3)] * 4
        assert [picture[0, 0, 0] for picture in pictures] == [0, 10, 20, 30]

    def test_the_state_may_be_left_out(self) -> None:
        with gymtask.Environment("CartPole-v1", render_mode="rgb_array") as environment:
            environment.reset()
            assert environment.render().shape == (400, 600, 3)
            assert environment.fps == 50

    def test_an_environment_that_does_not_say_is_shown_at_30(self) -> None:
        """O-52."""
        with gymtask.Environment(Spy) as environment:
            assert environment.fps == 30

    @pytest.mark.parametrize(
        ("frame", "expected"),
        [
            (FRAME, FRAME),
            (FRAME[..., 0], FRAME),
            (np.dstack([FRAME, FRAME[..., 0]]), FRAME),
            (FRAME / np.float32(255), FRAME),
        ],
        ids=["rgb", "grey", "rgba", "float"],
    )
    def test_every_picture_is_made_uint8_of_three_channels(self, frame: Any, expected: Any) -> None:
        """O-52."""
        with gymtask.Environment(Spy, render_mode="rgb_array", frame=frame) as environment:
            environment.reset()
            picture = environment.render()
        assert picture.dtype == np.uint8
        assert np.array_equal(picture, expected)

    def test_a_picture_does_not_change_when_the_environment_draws_again(self) -> None:
        frame = FRAME.copy()
        with gymtask.Environment(Spy, render_mode="rgb_array", frame=frame) as environment:
            environment.reset()
            picture = environment.render()
            frame[:] = 99
        assert np.array_equal(picture, FRAME)

    @pytest.mark.parametrize("mode", [None, "ansi", "human", "rgb_array_list"])
    def test_another_render_mode_is_refused_with_the_fix(self, mode: str | None) -> None:
        """O-52."""
        text = f"`render_mode` must be 'rgb_array' to get pictures of Spy, got {mode!r}"
        with gymtask.Environment(Spy, render_mode=mode, frame=FRAME) as environment:
            environment.reset()
            with pytest.raises(ConfigurationError, match=re.escape(text)) as caught:
                environment.render()
        assert "pass render_mode='rgb_array' to gymtask.Environment" in str(caught.value)

    @pytest.mark.parametrize("mode", [None, "ansi"])
    def test_so_it_is_for_an_id(self, mode: str | None) -> None:
        with gymtask.Environment("FrozenLake-v1", render_mode=mode) as environment:
            environment.reset()
            with pytest.raises(ConfigurationError, match=rf"of FrozenLake-v1, got {mode!r}"):
                environment.render()

    def test_a_mode_that_the_environment_does_not_know_is_refused(self) -> None:
        class Text(Spy):
            metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012

        text = r"got 'rgb_array' from an environment whose render modes are \['ansi'\]"
        with gymtask.Environment(Text, render_mode="rgb_array", frame=FRAME) as environment:
            environment.reset()
            with pytest.raises(ConfigurationError, match=text):
                environment.render()

    def test_one_that_declares_no_modes_may_still_render(self) -> None:
        class Silent(Spy):
            metadata: dict[str, Any] = {}  # noqa: RUF012

        with gymtask.Environment(Silent, render_mode="rgb_array", frame=FRAME) as environment:
            environment.reset()
            assert np.array_equal(environment.render(), FRAME)

    def test_one_that_cannot_render_is_refused(self) -> None:
        class Blind(Spy):
            metadata: dict[str, Any] = {}  # noqa: RUF012

            def render(self) -> Any:
                raise NotImplementedError

        with gymtask.Environment(Blind, render_mode="rgb_array") as environment:
            environment.reset()
            with pytest.raises(ConfigurationError, match="must be 'rgb_array' to get pictures of"):
                environment.render()

    def test_one_that_does_not_take_a_render_mode_is_refused_with_the_fix(self) -> None:
        def make(**keywords: Any) -> gym.Env[Any, Any]:
            return TimeLimit(FixedMode(**keywords), 3)

        class FixedMode(Spy):
            def __init__(self) -> None:
                super().__init__()

        environment = gymtask.Environment(make, render_mode="rgb_array")
        text = r"`render_mode` must be one that make can be made with, got 'rgb_array'"
        with pytest.raises(ConfigurationError, match=text):
            environment.reset()

    def test_no_picture_is_refused_and_the_step_is_named(self) -> None:
        """O-52."""
        with gymtask.Environment(Spy, render_mode="rgb_array", frame=None) as environment:
            environment.reset()
            environment.step(0)
            with pytest.raises(ConfigurationError, match=r"must return a picture.*None at step 1"):
                environment.render()
