"""Ctrl-C ends a run within 5 seconds, plus the time of writing the replay, which it tells."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gymtask.training.checkpoint import list_checkpoints

PREPARE = """
import sys, time
import gymnasium as gym, numpy as np, torch
from torch import nn
import gymtask
from tests.integration.training_tasks import make_config, make_trainer

torch.set_num_threads(1)

class Wide(gym.Env):
    '''Observations of 20 kB; the second of two is slow, from its 20th step on.'''
    observation_space = gym.spaces.Box(-1, 1, (5000,), np.float32)
    action_space = gym.spaces.Discrete(2)
    num_steps, seconds = 0, SECONDS

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.waits = getattr(self, "waits", seed == 1338)
        return np.zeros(5000, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        if self.waits and self.num_steps >= 20 and self.seconds:
            open(MARK, "w").close()
            time.sleep(self.seconds)
        return np.full(5000, 0.5, np.float32), 1.0, self.num_steps % 50 == 0, False, {}

class Task(gymtask.ReinforcementLearningTask):
    def get_environment(self):
        return gymtask.Environment(Wide)

    def get_actions(self, model, states, optimal):
        return torch.zeros(len(states), dtype=torch.int64)

    def run_model(self, model, batch, state):
        return model(batch["observation"])

    def compute_loss(self, model, batch, state, output):
        return output.square().mean()

    def on_update_end(self, model, state):
        if state.num_steps == 3:
            open(MARK, "w").close()
"""
TRAIN = """
config = make_config(2, updates=1_000_000)
config.environment.num_env_workers = WORKERS
config.environment.env_worker_mode = "process" if WORKERS else "sync"
config.dataset.off_policy, config.dataset.replay_buffer_sample_size = OFF_POLICY, 20_000
warm_up = {"num_warmup_samples": 10_000} if OFF_POLICY else {}
trainer = make_trainer(RUN_DIR, 100, **warm_up)
trainer.train(Task(config), nn.Linear(5000, 1))
print(trainer.stopped_by)
"""


def stop(tmp_path: Path, **settings: object) -> tuple[float, str]:
    """Seconds from Ctrl-C to the end of the run's process, and what it printed."""
    mark = tmp_path / "mark"
    settings |= {"MARK": str(mark), "RUN_DIR": str(tmp_path / "run")}
    values = "".join(f"{name} = {value!r}\n" for name, value in settings.items())
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", values + PREPARE + TRAIN],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
        took = time.monotonic() - sent
    assert process.returncode == 0, printed
    assert "Traceback" not in printed
    assert printed.endswith("SIGINT\n")
    return took, printed


def test_the_time_of_writing_the_replay_is_told(tmp_path: Path) -> None:
    took, printed = stop(tmp_path, SECONDS=0.0, WORKERS=0, OFF_POLICY=True)
    assert "stopped by SIGINT; everything is in" in printed
    assert "writing 10100 transitions of replay" in printed
    told = re.search(r"wrote 10100 transitions of replay \((\d+\.\d) MB\) in (\d+\.\d) s", printed)
    assert told is not None, printed
    megabytes, seconds = map(float, told.groups())
    (folder,) = list_checkpoints(tmp_path / "run")
    there = sum(path.stat().st_size for path in (folder / "replay-0").rglob("*"))
    assert megabytes == pytest.approx(there / 1e6, rel=0.01)
    assert megabytes > 200  # 10,100 observations of 20 kB
    assert took < 5 + seconds


@pytest.mark.parametrize("seconds", [0.4, 1000.0])
def test_an_environment_in_another_process_is_not_waited_for(
    tmp_path: Path, seconds: float
) -> None:
    took, _ = stop(tmp_path, SECONDS=seconds, WORKERS=2, OFF_POLICY=False)
    assert took < 5
    assert len(list_checkpoints(tmp_path / "run")) == 1
