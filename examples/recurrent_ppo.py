"""PPO with a recurrent network, on a task that cannot be solved without memory.

    python examples/recurrent_ppo.py
    python examples/recurrent_ppo.py --no-recurrent

In the T-maze of Bakker, "Reinforcement learning with long short-term memory" (NIPS 2001), a sign at
the start of a corridor tells which way to turn at its end. The first command trains an LSTM that
remembers it (mean return 4), the second the same network with its memory cut, which has to guess
(1.95). It takes about a minute; --help lists all settings. ppo.py explains PPO itself.

[c] marks details of CleanRL's ppo_atari_lstm.py (SB3-contrib's RecurrentPPO is built alike). [k] is
Kapturowski et al., "Recurrent experience replay in distributed reinforcement learning" (ICLR 2019).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
import tyro
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import gymtask
from gymtask.config import DataLoaderConfig, DatasetConfig, EnvironmentConfig
from gymtask.recurrent import after_burn_in, unroll

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Memory: TypeAlias = "tuple[Tensor, Tensor]"

NORTH, EAST, SOUTH, WEST = range(4)
SIGNS = {NORTH: (0, 1, 1), SOUTH: (1, 1, 0)}  # seen at an episode's first step alone
CORRIDOR, JUNCTION = (1, 0, 1), (0, 1, 0)


class TMaze(gym.Env[Array, Any]):
    """A corridor from west to east that ends at a T-junction; codes and rewards are Bakker's.

    Turning the way that the sign told pays 4, the other way -0.1; both end the episode. Bumping
    into a wall costs 0.1, and so does a step back, which Bakker's has free.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, length: int = 10, render_mode: str | None = None) -> None:
        self.observation_space = gym.spaces.Box(0, 1, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(4)
        self.length, self.render_mode = length, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.right_way = (NORTH, SOUTH)[int(self.np_random.integers(2))]
        self.position = 0
        return np.array(SIGNS[self.right_way], np.float32), {}

    def step(self, action: Any) -> Any:
        before = self.position
        turns = before == self.length and action in (NORTH, SOUTH)
        if action in (EAST, WEST):
            self.position = min(max(before + (1 if action == EAST else -1), 0), self.length)
        is_right = turns and action == self.right_way
        pays = 4.0 if is_right else 0.0 if self.position > before else -0.1
        code = JUNCTION if self.position == self.length else CORRIDOR
        return np.array(code, np.float32), pays, turns, False, {}

    def render(self) -> Array:
        """White floor, green where it pays, red where the agent stands, uint8 [H, W, 3]."""
        picture = np.zeros((3, self.length + 1, 3), np.uint8)
        picture[1] = picture[:, -1] = 255
        picture[0 if self.right_way == NORTH else 2, -1] = (0, 255, 0)
        picture[1, self.position] = (255, 0, 0)
        return picture.repeat(16, 0).repeat(16, 1)


@dataclass
class Config(gymtask.ReinforcementLearningTaskConfig):
    """The settings of recurrent PPO beside those of every task."""

    name: str = "recurrent_ppo"
    max_samples: int | None = 200_000
    length: int = 10  # Length of the corridor.
    recurrent: bool = True  # Whether the network remembers; False cuts its memory.
    burn_in: int = 0  # Rows of a window that only warm its state up [k].
    gamma: float = 0.99  # Discount of rewards.
    gae_lambda: float = 0.95  # λ of generalized advantage estimation.
    clip_coef: float = 0.2  # How far the ratio of new to old probabilities may leave 1.
    value_coef: float = 0.5  # Weight of the value loss.
    entropy_coef: float = 0.01  # Weight of the entropy bonus [c]; less leaves off trying both ways.
    learning_rate: float = 3e-3  # Of Adam, at the start [c]; the trainer's has no part here.
    hidden: int = 64  # Units of the LSTM.
    environment: EnvironmentConfig = field(
        default_factory=lambda: EnvironmentConfig(num_envs=8, env_worker_mode="sync", env_seed=1)
    )
    # Windows of 11 rows, as many as the shortest way takes: they lie within an episode, and those
    # that are shorter than a window have none.
    dataset: DatasetConfig = field(
        default_factory=lambda: DatasetConfig(11, num_update_steps=32, replacement=False)
    )
    train_dl: DataLoaderConfig = field(default_factory=lambda: DataLoaderConfig(batch_size=32))


@dataclass
class Arguments:
    """The command line."""

    task: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    trainer: gymtask.TrainerConfig = field(
        default_factory=lambda: gymtask.TrainerConfig(clip_grad_norm=0.5, checkpoint_interval=20)
    )
    resume: str | None = None  # A checkpoint, a run directory, or "auto", to go on with.
    clip: bool = True  # Whether to film the trained policy.


class ActorCritic(nn.Module):
    """Policy and value on one LSTM [c]."""

    def __init__(self, inputs: int, actions: int, hidden: int, recurrent: bool) -> None:
        super().__init__()
        self.lstm, self.recurrent = nn.LSTMCell(inputs, hidden), recurrent
        self.actor, self.critic = nn.Linear(hidden, actions), nn.Linear(hidden, 1)
        for name, parameter in self.named_parameters():  # [c]
            initialise = nn.init.zeros_ if "bias" in name else nn.init.orthogonal_
            initialise(parameter)
        nn.init.orthogonal_(self.actor.weight, 0.01)  # [c]
        nn.init.ones_(self.lstm.bias_ih[hidden : 2 * hidden])  # Jozefowicz et al. 2015, section 3

    def remember(self, observation: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """One step of n environments: the LSTM's output, and what it remembers at the next step."""
        hidden, cell = self.lstm(observation, memory)
        if self.recurrent:
            return hidden, (hidden, cell)
        return hidden, (torch.zeros_like(hidden), torch.zeros_like(cell))

    def forward(self, batch: TensorDict, burn_in: int) -> tuple[Tensor, Tensor]:
        # From the memory at the window's start, as it was stored [c, k].
        memories, is_init = (batch["hidden"], batch["cell"]), batch["is_init"]
        output = unroll(self.remember, batch["observation"], memories, is_init, burn_in=burn_in)
        return self.actor(output), self.critic(output).squeeze(-1)


class RecurrentPPO(gymtask.ReinforcementLearningTask[Config, ActorCritic]):
    """The task."""

    batch_keys = ("observation", "is_init", "hidden", "cell", "action", "log_prob", "advantage",
                  "value_target")  # fmt: skip

    def get_environment(self) -> gymtask.Environment:
        return gymtask.Environment(TMaze, max_episode_steps=100, length=self.config.length)

    def get_model(self) -> ActorCritic:
        return ActorCritic(3, 4, self.config.hidden, self.config.recurrent)

    def get_optimizers(self, model: ActorCritic) -> Optimizer:
        return Adam(model.parameters(), lr=self.config.learning_rate, eps=1e-5)

    def get_lr_schedulers(self, optimizers: Mapping[str, Optimizer]) -> Sequence[LambdaLR]:
        return [LambdaLR(optimizer, self._rate) for optimizer in optimizers.values()]

    def _rate(self, _: int) -> float:
        """Falls linearly to 0 over `max_samples` [c]."""
        before = self.state.num_samples - self.state.num_epoch_samples
        return 1.0 - before / self.config.max_samples if self.config.max_samples else 1.0

    def get_initial_carry(self, model: ActorCritic) -> TensorDict:
        return TensorDict({key: torch.zeros(self.config.hidden) for key in ("hidden", "cell")})

    def get_actions(self, model: ActorCritic, states: TensorDict, optimal: bool) -> TensorDict:
        output, memory = model.remember(states["observation"], (states["hidden"], states["cell"]))
        logits = model.actor(output)
        action = logits.argmax(-1) if optimal else gymtask.sampling.categorical(logits, states)
        following = {"hidden": memory[0], "cell": memory[1]}
        content = {"action": action, "logits": logits, "next": following}
        return TensorDict(content, batch_size=[len(states)])

    def get_values(self, model: ActorCritic, states: TensorDict) -> Tensor:
        # Each row brings its memory along, so that one step of all at once does.
        output, _ = model.remember(states["observation"], (states["hidden"], states["cell"]))
        return model.critic(output).squeeze(-1)

    def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
        """Log-probabilities, advantages and value targets, once for the collection."""
        lengths = [len(trajectory) for trajectory in trajectories]
        rows, end = torch.cat(trajectories), torch.zeros(sum(lengths), dtype=torch.bool)
        end[torch.tensor(lengths).cumsum(0) - 1] = True
        rows["log_prob"] = Categorical(logits=rows["logits"]).log_prob(rows["action"])
        rows["advantage"], rows["value_target"] = gymtask.generalized_advantage_estimate(
            rows["next", "reward"],
            value=rows["state_value"],
            next_value=rows["next", "state_value"],
            terminated=rows["next", "terminated"],
            truncated=rows["next", "truncated"],
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
            end=end,
        )
        return list(rows.split(lengths))

    def run_model(self, model: ActorCritic, batch: TensorDict, state: gymtask.State) -> Any:
        return model(batch, self.config.burn_in)

    def compute_loss(
        self, model: ActorCritic, batch: TensorDict, state: gymtask.State, output: Any
    ) -> dict[str, Tensor]:
        counts = after_burn_in(batch["is_init"], self.config.burn_in)
        rows, clip = batch[counts], self.config.clip_coef
        policy, value = Categorical(logits=output[0][counts]), output[1][counts]
        ratio = (policy.log_prob(rows["action"]) - rows["log_prob"]).exp()
        advantage = rows["advantage"]
        if advantage.numel() > 1:  # one row alone has no deviation
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        surrogate = torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip))
        return {
            "policy": -surrogate.mean(),
            "value": self.config.value_coef * 0.5 * (value - rows["value_target"]).square().mean(),
            "entropy": -self.config.entropy_coef * policy.entropy().mean(),
        }


def main() -> None:
    """Trains, evaluates and films."""
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(1)  # networks as small as these are fastest so
    task = RecurrentPPO(arguments.task)
    torch.manual_seed(arguments.task.environment.env_seed)
    model = task.get_model()
    trainer = gymtask.Trainer(arguments.trainer)
    state = trainer.train(task, model, resume=arguments.resume)
    if trainer.rank or trainer.stopped_by in ("SIGINT", "SIGTERM"):
        return  # of several processes the first one tells; what was stopped, --resume goes on with
    print(f"{state.num_samples} steps in {state.elapsed_time:.0f} s, until {trainer.stopped_by}")
    print(f"run directory: {trainer.run_dir}")
    for optimal in (True, False):  # in fresh environments, with seeds that were not trained on
        episodes = gymtask.evaluate(task, model, num_episodes=100, optimal=optimal)
        mean = statistics.fmean(each.episode_return for each in episodes)
        print(f"mean return over 100 episodes, {'greedy' if optimal else 'sampled'}: {mean:.2f}")
    if arguments.clip and trainer.run_dir is not None:
        task.sample_clip(save_path=trainer.run_dir / "clips" / "final.mp4", model=model)
        print(f"clip: {trainer.run_dir / 'clips' / 'final.mp4'}")


if __name__ == "__main__":
    main()
