"""Running statistics of several processes are those of all their rows, in each of them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import distributed, multiprocessing

from gymtask import ObservationNormalizer, RewardNormalizer
from tests.unit.trajectories import piece, running_returns

NUM_RANKS, NUM_UPDATES = 2, 4
SPACE = gym.spaces.Dict(
    {"position": gym.spaces.Box(-1e9, 1e9, (2, 3)), "speed": gym.spaces.Box(-1e9, 1e9, ())}
)


def trajectories(rank: int, number: int) -> list[TensorDict]:
    """What a process collects for one update: unequal numbers of rows, of unequal sizes."""
    if (rank, number) == (1, 2):
        return []  # a collection whose pieces were all too short
    random = np.random.default_rng([rank, number])
    length = 5 + 3 * rank + number
    nested = TensorDict(
        {
            "position": torch.from_numpy(1000 * rank + random.normal(size=(length, 2, 3))),
            "speed": torch.from_numpy(random.normal(size=length)),
        },
        [length],
    )
    rewards = random.normal(10 * rank, 1, length)
    place = {"env_id": 0, "trajectory_id": rank, "step": number * length}
    return [piece(*rewards, observation=nested, **place)]


def count(rank: int, folder: str) -> None:
    """What each process does."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        timeout=timedelta(seconds=120),  # where the other process fails
        rank=rank,
        world_size=NUM_RANKS,
    )
    try:
        observation, reward = ObservationNormalizer(SPACE), RewardNormalizer(1, gamma=0.9)
        for number in range(NUM_UPDATES):
            observation.update(trajectories(rank, number))
            reward.update(trajectories(rank, number))
    finally:
        distributed.destroy_process_group()
    both = {"observation": observation.state_dict(), "reward": reward.state_dict()}
    torch.save(both, f"{folder}/rank-{rank}.pt")


def test_statistics_are_those_of_all_rows_on_every_rank(tmp_path: Path) -> None:
    other = multiprocessing.get_context("spawn").Process(target=count, args=(1, str(tmp_path)))
    other.start()
    try:
        count(0, str(tmp_path))  # a process less to start
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()
    found = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(NUM_RANKS)]
    collected = [
        [each for number in range(NUM_UPDATES) for each in trajectories(rank, number)]
        for rank in range(NUM_RANKS)
    ]
    rows = torch.cat([each for of_rank in collected for each in of_rank])["observation"]
    returns = [r for of_rank in collected for r in running_returns(*of_rank, gamma=0.9)]
    expected = {
        ("observation", "statistics.0"): rows["position"].numpy(),
        ("observation", "statistics.1"): rows["speed"].numpy(),
        ("reward", "statistics"): np.array(returns),
    }
    for (kind, prefix), values in expected.items():
        statistics = {k: found[0][kind][f"{prefix}.{k}"] for k in ("count", "mean", "m2")}
        for name, value in statistics.items():
            assert torch.equal(value, found[1][kind][f"{prefix}.{name}"])
        assert statistics["count"] == len(values)
        np.testing.assert_allclose(statistics["mean"], values.mean(0), rtol=1e-12)
        np.testing.assert_allclose(statistics["m2"] / len(values), values.var(0), rtol=1e-12)
    # Open returns are each process's own.
    assert not torch.equal(*(each["reward"]["running_returns.value"] for each in found))
