"""Clips that cannot be made, refused before the first step wherever it can be known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from gymtask.errors import ConfigurationError, HookError
from gymtask.testing import ScriptedEnv
from tests.integration.film_tasks import MODEL, film_task, films
from tests.tasks import make_task


class Unmoved(ScriptedEnv):
    """Fails as soon as it is reset."""

    def reset(self, **keywords: Any) -> Any:
        raise AssertionError("reset")


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"save_path": "a.mp4", "return_states": True}, "`save_path` must be None to return"),
            ({"save_path": "a.mp4", "return_images": False}, "`save_path` must be None to return"),
            ({"return_images": False}, "`return_images` or `return_states` must be True"),
            ({"save_path": "a.mp4", "writer": "chalk"}, r"`writer` must be one of .*got 'chalk'"),
            ({"save_path": "a.txt"}, r"`path` must end in .mp4 or .gif, got '.txt'"),
            ({"save_path": "a"}, r"`path` must end in .mp4 or .gif, got ''"),
            ({"save_path": "folder.mp4"}, "`path` must be a file, got the folder"),
        ],
        ids=[
            "states",
            "no images",
            "neither",
            "writer",
            "suffix",
            "no suffix",
            "folder",
        ],
    )
    def test_a_bad_one_is_refused_before_anything_moves(
        self, arguments: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("folder.mp4").mkdir()
        task = film_task(Unmoved)
        with pytest.raises(ConfigurationError, match=text) as caught:
            task.sample_clip(model=MODEL, **arguments)
        assert isinstance(caught.value, ValueError)
        assert films(tmp_path) == ["folder.mp4"]
        assert task.num_clips == 0

    def test_the_environment_is_closed_when_no_file_can_be_written(self, tmp_path: Path) -> None:
        closed = []

        class Closing(Unmoved):
            def close(self) -> None:
                closed.append(True)

        with pytest.raises(ConfigurationError):
            film_task(Closing).sample_clip(model=MODEL, save_path=tmp_path / "a.txt")
        assert closed == [True]

    def test_get_environment_must_return_an_environment(self) -> None:
        task = make_task(get_environment=lambda self: gym.make("CartPole-v1"))
        with pytest.raises(HookError, match=r"must return a gymtask\.Environment, got <"):
            task.sample_clip(model=MODEL)


class TestRenderModes:
    def test_a_callable_that_takes_render_mode_is_given_it_for_the_clip_alone(
        self, tmp_path: Path
    ) -> None:
        seen = []

        def make(render_mode: str | None = None) -> gym.Env[Any, Any]:
            seen.append(render_mode)
            return ScriptedEnv(render_mode=render_mode)

        task = film_task(make)
        with task.get_worker_pool() as pool:
            task.collect_samples(MODEL, pool, 2, use_tqdm=False)
            assert set(seen) == {None}
            task.sample_clip(model=MODEL)
            assert pool.get_attr("render_mode") == (None,)
        assert seen.count("rgb_array") == 1
        task.sample_clip(model=MODEL, return_images=False, return_states=True)
        assert seen[-1] is None

    @pytest.mark.parametrize("mode", ["human", "ansi", None])
    def test_the_mode_of_training_does_not_matter(self, mode: str | None) -> None:
        """O-52."""
        task = film_task("FrozenLake-v1", render_mode=mode)
        images = task.sample_clip()
        assert images.shape[0] > 1

    @pytest.mark.parametrize("mode", [None, "human", "ansi", "rgb_array_list"])
    def test_a_callable_that_fixes_another_mode_is_refused_before_the_first_step(
        self, mode: str | None
    ) -> None:
        """O-52."""

        class Fixed(Unmoved):
            def __init__(self) -> None:
                super().__init__(render_mode=mode)

        task = film_task(lambda: Fixed())
        text = f"`render_mode` must be 'rgb_array' to get pictures of <lambda>, got {mode!r}"
        with pytest.raises(ConfigurationError, match=re.escape(text)) as caught:
            task.sample_clip(model=MODEL)
        assert "let the callable that makes the environment take `render_mode`" in str(caught.value)
        assert task.num_clips == 0

    def test_an_id_without_rgb_array_is_refused_before_the_first_step(self) -> None:
        class Text(Unmoved):
            metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012

        spec = gym.envs.registration.EnvSpec("TextOnly-v0", entry_point=Text)
        task = film_task(spec)
        with (
            pytest.warns(UserWarning, match="not in the possible render_modes"),
            pytest.raises(ConfigurationError, match=r"of TextOnly-v0, got 'rgb_array'.*\['ansi'\]"),
        ):
            task.sample_clip(model=MODEL)

    def test_an_id_whose_environment_takes_no_render_mode_is_refused(self) -> None:
        class Modeless(Unmoved):
            def __init__(self) -> None:
                super().__init__()

        spec = gym.envs.registration.EnvSpec("Modeless-v0", entry_point=Modeless)
        text = "`render_mode` must be one that Modeless-v0 can be made with, got 'rgb_array'"
        with pytest.raises(ConfigurationError, match=text):
            film_task(spec).sample_clip(model=MODEL)

    def test_one_that_cannot_render_is_refused_before_the_first_step(self) -> None:
        class Blind(ScriptedEnv):
            def render(self) -> Any:
                raise NotImplementedError

            def step(self, action: Any) -> Any:
                raise AssertionError("stepped")

        with pytest.raises(ConfigurationError, match="`render_mode` must be 'rgb_array'"):
            film_task(Blind).sample_clip(model=MODEL)

    def test_pictures_of_changing_sizes_are_refused(self) -> None:
        class Growing(ScriptedEnv):
            def render(self) -> Any:
                return np.zeros((2 + self.num_steps, 2, 3), np.uint8)

        with pytest.raises(ConfigurationError, match=r"got uint8 \(3, 2, 3\) at picture 1"):
            film_task(Growing).sample_clip(model=MODEL)
