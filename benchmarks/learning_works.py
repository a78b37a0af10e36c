"""What `learning.py` trains: algorithm, environment, steps, and what others have published of it.

The hyperparameters of PPO are those that CleanRL published its figures with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import gymnasium as gym
import hand_ppo

CLEANRL = "https://docs.cleanrl.dev/rl-algorithms/ppo/"
ZOO = "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md"
CLASSIC = hand_ppo.Settings()
CONTINUOUS = hand_ppo.Settings(
    num_envs=1,
    num_steps=2048,
    learning_rate=3e-4,
    num_minibatches=32,
    num_passes=10,
    entropy_coef=0.0,
)


@dataclass(frozen=True)
class Published:
    """A figure of others.

    Attributes:
        mean: The mean return.
        deviation: What they give behind ±: CleanRL the deviation over 3 seeds, the zoo that of the
            episodes of one run.
        note: Which environment or how many steps, where they are others than ours.
    """

    mean: float
    deviation: float
    note: str = ""

    def __str__(self) -> str:
        return f"{self.mean:g} ± {self.deviation:g}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Work:
    """One thing to learn.

    Attributes:
        algorithm: "ppo", "dqn" or "sac", gymtask's example of that name; "hand" is PPO by hand.
        env_id: The environment.
        steps: Environment steps of a run.
        cleanrl: What CleanRL has published, the mean of training episodes at the end.
        zoo: What RL Baselines3 Zoo has published, of greedy episodes.
    """

    algorithm: str
    env_id: str
    steps: int
    cleanrl: Published | None = None
    zoo: Published | None = None

    @property
    def name(self) -> str:
        """How --only finds it, and how its files are called."""
        return f"{self.algorithm}_{self.env_id}"

    @property
    def stem(self) -> str:
        """The name of its file; figures of different budgets are no rows of one table."""
        return f"learning_{self.name}_{self.steps}"

    @property
    def title(self) -> str:
        """How tables call who learns."""
        return "PPO by hand" if self.algorithm == "hand" else f"gymtask {self.algorithm.upper()}"


_PPO = (
    Work(
        "ppo", "CartPole-v1", 500_000, Published(490.04, 6.12), Published(500.0, 0.0, "100k steps")
    ),
    Work(
        "ppo", "Acrobot-v1", 500_000, Published(-86.36, 1.32), Published(-73.5, 18.2, "1M steps")
    ),
    Work(
        "ppo", "MountainCar-v0", 500_000, Published(-200, 0), Published(-110.4, 19.5, "1M steps")
    ),
    Work(
        "ppo", "HalfCheetah-v5", 1_000_000, Published(1442.64, 46.03, "v4"),
        Published(5819, 664, "v3"),
    ),
    Work(
        "ppo", "Hopper-v5", 1_000_000, Published(2382.86, 271.74, "v4"), Published(2410, 10, "v3")
    ),
)  # fmt: skip
WORKS = (
    *_PPO,
    *(replace(work, algorithm="hand") for work in _PPO),
    Work("dqn", "CartPole-v1", 100_000, zoo=Published(500, 0, "50k steps")),
    Work("sac", "Pendulum-v1", 20_000, zoo=Published(-157, 89)),
    Work("sac", "HalfCheetah-v5", 1_000_000, zoo=Published(9535, 100, "v3")),
)
DEFAULT = tuple(work for work in WORKS if work.name != "sac_HalfCheetah-v5")
"""All but what takes hours."""


def ppo_settings(env_id: str, steps: int) -> hand_ppo.Settings:
    """CleanRL's hyperparameters for environments of this kind."""
    spec = gym.spec(env_id)
    env = spec.make(disable_env_checker=True)
    base = CONTINUOUS if isinstance(env.action_space, gym.spaces.Box) else CLASSIC
    env.close()
    return replace(base, env_id=env_id, total_steps=steps)
