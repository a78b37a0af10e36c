"""Films of one episode: what is rendered, what is stored, what is written, and what is refused.

The picture of `ScriptedEnv` is grey, ten times as bright as the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from gymnasium import spaces
from PIL import Image
from tensordict import TensorDict
from torch import Tensor

from gymtask.errors import ActionError, ConfigurationError
from gymtask.testing import ScriptedEnv
from tests.integration.film_tasks import MODEL, film_task, films
from tests.tasks import collect


def brightness(images: Any) -> list[int]:
    """The value of each picture, which is grey."""
    flat = np.asarray(images).reshape(len(images), -1)
    assert (flat == flat[:, :1]).all()
    return [int(value) for value in flat[:, 0]]


def decoded(path: Path) -> list[np.ndarray[Any, Any]]:
    with av.open(path) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


class TestFrames:
    @pytest.mark.parametrize("length", [1, 3, 12])
    @pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
    def test_an_episode_of_l_steps_gives_l_plus_1_pictures(self, length: int, end: str) -> None:
        """O-36: the first observation's and the last's are among them."""
        task = film_task(lengths=length, end=end)
        images = task.sample_clip(model=MODEL)
        assert isinstance(images, Tensor)
        assert images.dtype == torch.uint8
        assert images.shape == (length + 1, 16, 16, 3)
        assert brightness(images) == [10 * step for step in range(length + 1)]

    def test_a_clip_has_at_most_max_steps_steps_and_is_cut_there(self) -> None:
        task = film_task(lengths=5, config={"max_steps": 2})
        images, states = task.sample_clip(model=MODEL, return_states=True)
        assert brightness(images) == [0, 10, 20]
        assert states["next", "done"].tolist() == [False, False]

    def test_pictures_that_an_environment_draws_into_one_array_stay_apart(self) -> None:
        """O-09."""

        class Canvas(ScriptedEnv):
            canvas = np.zeros((2, 2, 3), np.uint8)

            def render(self) -> Any:
                self.canvas[:] = self.num_steps
                return self.canvas

        for standardize in (True, False):
            images = film_task(Canvas).sample_clip(model=MODEL, standardize_images=standardize)
            assert brightness(images) == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("frame", "shape"),
        [
            (np.full((4, 5), 0.2), (4, 5)),
            (np.full((4, 5), 51, np.uint8), (4, 5)),
            (np.full((4, 5, 4), 51, np.uint8), (4, 5, 4)),
            (np.full((4, 5, 3), 0.2, np.float32), (4, 5, 3)),
        ],
        ids=["grey floats", "grey", "rgba", "floats"],
    )
    def test_pictures_are_made_alike_or_left_as_rendered(
        self, frame: np.ndarray[Any, Any], shape: tuple[int, ...], tmp_path: Path
    ) -> None:
        class Drawn(ScriptedEnv):
            def render(self) -> Any:
                return frame

        task = film_task(Drawn)
        images = task.sample_clip(model=MODEL)
        assert (images.dtype, images.shape) == (torch.uint8, (4, 4, 5, 3))
        assert (images == 51).all()
        images = task.sample_clip(model=MODEL, standardize_images=False)
        assert images.shape == (4, *shape)
        assert images.numpy().dtype == frame.dtype
        assert (images.numpy() == frame).all()
        task.sample_clip(model=MODEL, save_path=tmp_path / "a.gif", standardize_images=False)
        with Image.open(tmp_path / "a.gif") as image:
            assert image.size == (5, 4)

    @pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Pendulum-v1"])
    def test_environments_of_gymnasium(self, env_id: str) -> None:
        task = film_task(env_id, max_episode_steps=4)
        images, states = task.sample_clip(return_states=True)
        assert images.shape[0] == len(states) + 1
        assert images.shape[-1] == 3
        assert images.float().std() > 1


class TestStates:
    def test_are_the_rows_of_the_pictures(self) -> None:
        task = film_task(lengths=3)
        images, states = task.sample_clip(model=MODEL, return_states=True)
        assert isinstance(states, TensorDict)
        assert states.batch_size == torch.Size([3])
        assert [10 * step for step in states["observation"][:, 0]] == brightness(images[:-1])
        assert [10 * s for s in states["next", "observation"][:, 0]] == brightness(images[1:])
        assert states["action"].tolist() == states["next", "observation"][:, 2].tolist()
        assert states["next", "reward"].tolist() == [1, 2, 3]
        assert states["next", "terminated"].tolist() == [False, False, True]
        assert states["next", "truncated"].tolist() == [False] * 3
        assert states["step"].tolist() == [0, 1, 2]
        assert states["is_init"].tolist() == [True, False, False]

    def test_have_the_keys_and_dtypes_of_a_trajectory(self) -> None:
        task = film_task(lengths=[3], info_keys=("t",))
        states = task.sample_clip(model=MODEL, return_images=False, return_states=True)
        (piece,) = collect(task, 3, MODEL)
        kinds = [
            {key: value.dtype for key, value in rows.flatten_keys("/").items()}
            for rows in (states, piece.samples)
        ]
        assert kinds[0] == kinds[1]
        assert states["next", "info", "t"].tolist() == [1, 2, 3]

    def test_without_pictures_nothing_is_rendered(self) -> None:
        class Blind(ScriptedEnv):
            def render(self) -> Any:
                raise AssertionError("rendered")

        task = film_task(lambda: Blind())
        states = task.sample_clip(model=MODEL, return_images=False, return_states=True)
        assert states["observation"][:, 0].tolist() == [0, 1, 2]

    def test_hold_what_else_the_policy_returned(self) -> None:
        def act(states: TensorDict) -> TensorDict:
            content = {"action": states["step"] % 2, "log_prob": -states["step"].float()}
            return TensorDict(content, batch_size=states.batch_size)

        states = film_task(act=act).sample_clip(
            model=MODEL, return_images=False, return_states=True
        )
        assert states["log_prob"].tolist() == [0, -1, -2]
        assert states["action"].tolist() == [0, 1, 0]

    def test_a_carry_is_handed_on_from_step_to_step(self) -> None:
        def act(states: TensorDict) -> TensorDict:
            following = {"memory": states["memory"] + 2}
            content = {"action": states["step"] % 2, "next": following}
            return TensorDict(content, batch_size=states.batch_size)

        first = TensorDict({"memory": torch.tensor([5.0])}, batch_size=[])
        task = film_task(act=act, hooks={"get_initial_carry": lambda self, model: first})
        for _ in range(2):  # the second clip starts from the first value again
            states = task.sample_clip(model=MODEL, return_images=False, return_states=True)
            assert states["memory"].tolist() == [[5], [7], [9]]
            assert states["next", "memory"].tolist() == [[7], [9], [11]]

    def test_float64_is_kept_on_request(self) -> None:
        class Fine(ScriptedEnv):
            def __init__(self, **keywords: Any) -> None:
                super().__init__(**keywords)
                self.observation_space = spaces.Box(-1e6, 1e6, (3,), np.float64)

        seen = set()

        def act(states: TensorDict) -> Tensor:
            seen.add(states["observation"].dtype)
            return torch.ones(1, dtype=torch.int64)

        for keep, kind in [(False, torch.float32), (True, torch.float64)]:
            task = film_task(Fine, act, keep_float64=keep)
            states = task.sample_clip(model=MODEL, return_images=False, return_states=True)
            assert states["observation"].dtype == states["next", "observation"].dtype == kind
            assert seen == {kind}
            seen.clear()

    def test_hold_infos_as_they_were(self) -> None:
        class Refilling(ScriptedEnv):
            array = np.zeros(1)

            def step(self, action: Any) -> Any:
                *rest, _ = super().step(action)
                self.array[:] = self.num_steps
                return (*rest, {"x": self.array})

        task = film_task(Refilling, info_keys=("x",))
        states = task.sample_clip(model=MODEL, return_images=False, return_states=True)
        assert states["next", "info", "x"].tolist() == [[1], [2], [3]]

    def test_do_not_change_with_the_states_that_the_policy_saw(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GYMTASK_DEBUG", "1")
        kept = []

        def act(states: TensorDict) -> TensorDict:
            kept.append(states["observation"])
            content = {"action": states["step"] % 2, "seen": states["observation"]}
            return TensorDict(content, batch_size=states.batch_size)

        states = film_task(act=act).sample_clip(
            model=MODEL, return_images=False, return_states=True
        )
        assert torch.equal(states["seen"], states["observation"])
        assert states["next", "observation"][:, 2].tolist() == [0, 1, 0]
        assert all(observation.isnan().all() for observation in kept)


class TestFiles:
    @pytest.mark.parametrize("length", [3, 12])
    def test_an_mp4_has_every_frame(self, length: int, tmp_path: Path) -> None:
        """O-34, O-36."""
        path = tmp_path / "clips" / "a.mp4"
        assert film_task(lengths=length).sample_clip(model=MODEL, save_path=path) is None
        frames = decoded(path)
        assert len(frames) == length + 1
        levels = [float(frame.mean()) for frame in frames]
        assert np.allclose(levels, [10 * step for step in range(length + 1)], atol=4)
        with av.open(path) as container:
            assert container.streams.video[0].average_rate == 20  # as the environment says
        assert films(path.parent) == ["a.mp4"]

    def test_a_gif_has_every_frame_exactly(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gif"
        film_task(lengths=3).sample_clip(model=MODEL, save_path=str(path))
        with Image.open(path) as image:
            frames = []
            for number in range(image.n_frames):
                image.seek(number)
                frames.append(np.asarray(image.convert("RGB")))
        assert brightness(frames) == [0, 10, 20, 30]

    def test_an_existing_file_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "a.mp4"
        path.write_text("old")
        film_task().sample_clip(model=MODEL, save_path=path)
        assert len(decoded(path)) == 4
        assert films(tmp_path) == ["a.mp4"]

    @pytest.mark.parametrize("fault", ["step", "policy", "picture"])
    def test_an_existing_file_stays_when_the_episode_fails(
        self, fault: str, tmp_path: Path
    ) -> None:
        closed = []

        class Failing(ScriptedEnv):
            def reset(self, **keywords: Any) -> Any:
                self.number = 1  # whatever the seed
                return super().reset(**keywords)

            def render(self) -> Any:
                return None if fault == "picture" and self.num_steps == 2 else super().render()

            def close(self) -> None:
                closed.append(True)

        def act(states: TensorDict) -> Tensor:
            bad = fault == "policy" and states["step"].item() == 2
            return torch.tensor([7 if bad else 1])

        path = tmp_path / "a.mp4"
        path.write_text("old")
        faults = {1: (3, "raise")} if fault == "step" else {}
        task = film_task(Failing, act, lengths=9, faults=faults)
        expected = {
            "step": (ValueError, "boom 1"),
            "policy": (ActionError, "`action` must lie in 0 to 1"),
            "picture": (ConfigurationError, "must return a picture.*None at step 2"),
        }[fault]
        with pytest.raises(expected[0], match=expected[1]):
            task.sample_clip(model=MODEL, save_path=path)
        assert path.read_text() == "old"
        assert films(tmp_path) == ["a.mp4"]
        assert closed == [True]
        assert task.num_clips == 0

    def test_clips_of_one_run_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        """O-37."""
        task = film_task(lengths=3)
        for number in range(3):
            task.sample_clip(model=MODEL, save_path=tmp_path / f"{number}.mp4")
        assert films(tmp_path) == ["0.mp4", "1.mp4", "2.mp4"]
        assert task.num_clips == 3
