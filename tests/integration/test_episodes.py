"""Episodes that a run recorded, and films of them afterwards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import av
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TransformReward
from tensordict import TensorDict
from torch import Tensor, nn

import gymtask
from gymtask.episodes import RecordedEpisode
from gymtask.errors import ConfigurationError, EpisodeError
from gymtask.testing import ScriptedEnv
from gymtask.training.recording import Recorder, load_episodes
from tests.integration.training_tasks import (
    CartPole,
    ScriptedTask,
    linear,
    make_config,
    make_trainer,
    network,
)
from tests.tasks import make_task


class Rendered(gym.Env[Any, Any]):
    """An action of several parts, each of which counts in the reward, and chance in each step."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = gym.spaces.Dict(
            {"gear": gym.spaces.Discrete(3, start=5), "force": gym.spaces.Box(-1, 1, (2,))}
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 9))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        drawn = self.np_random.random()
        reward = float(action["gear"] * 10 + action["force"].sum() + drawn)
        return np.zeros(1, np.float32), reward, self.left == 0, False, {}

    def render(self) -> Any:
        return np.full((16, 16, 3), 10 * self.left, np.uint8)


class Moody(Rendered):
    """Remembers how often it was made."""

    num_made = 0

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        Moody.num_made += 1
        self.mood = Moody.num_made

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward + self.mood, *rest


def several_parts(self: Any, model: Any, states: TensorDict, optimal: bool) -> TensorDict:
    n = len(states)
    action = TensorDict({"gear": torch.randint(3, (n,)), "force": torch.randn(n, 2)}, [n])
    return TensorDict({"action": action}, [n])


def any_action(num_actions: int) -> Any:
    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Tensor:
        return torch.randint(num_actions, (len(states),))

    return get_actions


def pong(render_mode: str | None = None) -> gym.Env[Any, Any]:
    gym.register_envs(ale_py)  # with sticky actions, which the emulator draws
    return gym.make("ALE/Pong-v5", max_episode_steps=40, render_mode=render_mode)


def trained(
    folder: Path, num_samples: int, task: gymtask.ReinforcementLearningTask, **fields: Any
) -> list[RecordedEpisode]:
    """What a run of three epochs recorded."""
    task.config.max_epochs = 3
    task.compute_loss = lambda model, batch, state, output: model(torch.ones(3)).sum()  # type: ignore[method-assign]
    make_trainer(folder, num_samples, record_actions=True, **fields).train(task, linear())
    return gymtask.load_episodes(folder)


def num_pictures(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pictures each film had, none of which is encoded."""
    counts: list[int] = []

    def write(frames: Any, path: Any, **_: Any) -> None:
        counts.append(sum(1 for _ in frames))

    monkeypatch.setattr("gymtask.episodes.write_video", write)
    return counts


@pytest.mark.parametrize(
    ("mode", "env", "hook"),
    [
        ("sync", Rendered, several_parts),
        ("thread", Rendered, several_parts),
        ("process", Rendered, several_parts),
        ("process", "CartPole-v1", any_action(2)),
        ("sync", "LunarLander-v3", any_action(4)),
        ("sync", pong, any_action(6)),
    ],
)
def test_every_episode_that_ended_is_recorded_and_repeats_itself(
    mode: str, env: Any, hook: Any, tmp_path: Path, pictures: list[int]
) -> None:
    task = make_task(3, 2, mode, env, {"action_clip": True}, get_actions=hook)
    ended: list[Any] = []
    collect = task.collect_samples

    def noted(*args: Any, **kwargs: Any) -> Any:
        samples = collect(*args, **kwargs)
        ended.extend(samples.episodes)
        return samples

    task.collect_samples = noted  # type: ignore[method-assign]
    episodes = trained(tmp_path, 300, task)
    fields = ("trajectory_id", "env_id", "episode_return", "length", "terminated", "truncated")
    assert len(episodes) > 3
    found, told = ([[getattr(e, name) for name in fields] for e in es] for es in (episodes, ended))
    assert sorted(found) == sorted(told)
    shown = episodes[:2] + episodes[-2:]
    environment = None if isinstance(env, str) else task.get_environment()
    for episode in shown:
        gymtask.film(episode, "unused.mp4", environment=environment)
    assert pictures == [episode.length + 1 for episode in shown]


def test_a_film_of_an_id_needs_nothing_but_the_recording(tmp_path: Path) -> None:
    env = partial(gymtask.Environment, "CartPole-v1", max_episode_steps=7)
    task = make_task(get_actions=any_action(2), get_environment=lambda self: env())
    (episode, *_) = trained(tmp_path, 50, task)
    assert episode.length == 7
    assert episode.truncated
    gymtask.film(episode, tmp_path / "films" / "first.mp4")
    assert num_pictures(tmp_path / "films" / "first.mp4") == 8


def test_an_episode_that_does_not_repeat_itself_is_not_filmed(tmp_path: Path) -> None:
    task = make_task(env=Moody, get_actions=several_parts)
    (episode, *_) = trained(tmp_path, 50, task)
    with pytest.raises(EpisodeError, match=r"of Moody did not repeat itself: its return was"):
        gymtask.film(episode, tmp_path / "film.mp4", environment=task.get_environment())
    assert not (tmp_path / "film.mp4").exists()
    shorter = gymtask.Environment(partial(ScriptedEnv, 2))
    with pytest.raises(EpisodeError, match="it ended after 2 steps"):
        gymtask.film(scripted(tmp_path / "4"), tmp_path / "film.mp4", environment=shorter)
    longer = gymtask.Environment(partial(ScriptedEnv, 5))
    with pytest.raises(EpisodeError, match=r"\(terminated, truncated\) was \(False, False\)"):
        gymtask.film(scripted(tmp_path / "5"), tmp_path / "film.mp4", environment=longer)


def scripted(folder: Path) -> RecordedEpisode:
    """Of four steps."""
    return trained(folder, 20, ScriptedTask(make_config()))[0]


def test_wrappers_and_callables_are_asked_for(tmp_path: Path) -> None:
    double = gymtask.Environment(
        "CartPole-v1", wrappers=[lambda env: TransformReward(env, lambda reward: 2 * reward)]
    )
    task = make_task(get_actions=any_action(2), get_environment=lambda self: double)
    (episode, *_) = trained(tmp_path / "run", 100, task)
    for one in (episode, scripted(tmp_path / "scripted")):
        with pytest.raises(ConfigurationError, match="`environment` must be given to film"):
            gymtask.film(one, tmp_path / "film.mp4")
    with pytest.raises(EpisodeError, match="its return was"):
        gymtask.film(episode, tmp_path / "f.mp4", environment=gymtask.Environment("CartPole-v1"))
    gymtask.film(episode, tmp_path / "film.mp4", environment=double)
    assert num_pictures(tmp_path / "film.mp4") == episode.length + 1
    with pytest.raises(ConfigurationError, match="`episode` must be a RecordedEpisode"):
        gymtask.film(0, tmp_path / "film.mp4")  # type: ignore[arg-type]


def plain(episodes: list[RecordedEpisode]) -> list[Any]:
    return [
        [repr(each), repr(each.start), [leaf.tolist() for leaf in each.actions]]
        for each in episodes
    ]


def test_a_resumed_run_records_what_the_unbroken_one_does(tmp_path: Path) -> None:
    def run(folder: Path, max_epochs: int, resume: str | None = None) -> None:
        task = CartPole(make_config(max_epochs=max_epochs))
        make_trainer(folder, 75, record_actions=True).train(task, network(), resume=resume)

    run(tmp_path / "unbroken", 6)
    run(tmp_path / "broken", 3)
    folder = tmp_path / "broken" / "episodes"
    (*_, last) = sorted(folder.glob("epoch-*"))
    future = folder / "epoch-000004-samples-000000300.pt"
    future.write_bytes(last.read_bytes())  # of a run that was killed before its checkpoint
    (folder / ".tmp-epoch-000005-samples-000000375.pt").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    run(tmp_path / "broken", 6, "auto")
    assert not list(folder.glob(".tmp-*"))
    assert (folder / "notes.txt").exists()
    names = [path.name for path in (tmp_path / "unbroken" / "episodes").iterdir()]
    assert sorted(names) == sorted(path.name for path in folder.glob("epoch-*"))
    broken, unbroken = (plain(load_episodes(tmp_path / name)) for name in ("broken", "unbroken"))
    assert len(broken) > 10
    assert broken == unbroken


def test_files_are_rarer_where_rows_of_metrics_are(tmp_path: Path) -> None:
    task = ScriptedTask(make_config(max_epochs=5))
    fields: dict[str, Any] = {"log_interval": 2, "checkpoint_interval": None}
    make_trainer(tmp_path, 10, record_actions=True, **fields).train(task, linear())
    names = sorted(path.name for path in (tmp_path / "episodes").iterdir())
    assert [name[:12] for name in names] == ["epoch-000002", "epoch-000004", "epoch-000005"]
    assert len(load_episodes(tmp_path)) == 2 * (25 // 4)
    first = load_episodes(tmp_path / "episodes" / names[0])
    assert len(first) == len(set(first)) == 2 * (10 // 4)
    assert first == load_episodes(tmp_path)[: len(first)]


def test_each_process_of_a_run_has_its_own_files(tmp_path: Path) -> None:
    task = ScriptedTask(make_config())
    with task.get_worker_pool() as pool:
        pool.record_starts(keep=True)
        recorders = [Recorder(tmp_path, pool, rank, action_clip=False) for rank in (0, 1)]
        for recorder in recorders:
            task.collect_samples(linear(), pool, 8, use_tqdm=False)
            recorder.write(task.state)
    names = sorted(path.name for path in (tmp_path / "episodes").iterdir())
    moment = "epoch-000000-samples-000000000"
    assert names == [f"{moment}-rank-1.pt", f"{moment}.pt"]
    assert [each.trajectory_id for each in load_episodes(tmp_path)] == [2, 3, 0, 1]


def test_nothing_is_recorded_unasked(tmp_path: Path) -> None:
    make_trainer(tmp_path).train(ScriptedTask(make_config(max_epochs=2)), linear())
    assert not (tmp_path / "episodes").exists()
    with pytest.raises(EpisodeError, match=r"`path` must be a run directory with episodes, got"):
        load_episodes(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    scripted(tmp_path)
    (*_, last) = sorted((tmp_path / "episodes").iterdir())
    last.write_bytes(last.read_bytes()[:100])
    with pytest.raises(EpisodeError, match=f"cannot read {last}"):
        load_episodes(tmp_path)
    torch.save({"format": 0}, last)
    with pytest.raises(EpisodeError, match="must hold recorded episodes of format 1"):
        load_episodes(tmp_path)


def test_native_mode_is_refused(tmp_path: Path) -> None:
    task = make_task(2, 1, "native", "CartPole-v1", get_actions=any_action(2))
    task.config.max_epochs = 1
    trainer = make_trainer(tmp_path, record_actions=True)
    with pytest.raises(ConfigurationError, match="`record_actions` must be False in native mode"):
        trainer.train(task, nn.Linear(4, 2))
    with pytest.raises(ConfigurationError, match="`record_actions` must be True or False"):
        make_trainer(tmp_path, record_actions=1)
