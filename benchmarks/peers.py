"""The collectors of other libraries, each imported only where it is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from alternate import Build, Close, Rollout
from envs import Work
from hand import Trunk
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

MakeEnvs = Sequence[Callable[[], Any]]

SB3 = ("stable_baselines3",)
TORCHRL = ("torchrl.envs", "torchrl.collectors", "torchrl.modules")
TIANSHOU = (
    "tianshou.env",
    "tianshou.data",
    "tianshou.algorithm.modelfree.reinforce",
)
ENVPOOL = ("envpool",)
PUFFERLIB = ("pufferlib.vector", "pufferlib.emulation")


def sb3(kind: str, make_envs: MakeEnvs, num_steps: int) -> Build:
    """PPO's own `collect_rollouts`. Its rollout holds values and advantages too."""

    def build() -> tuple[Rollout, Close]:
        library = import_module("stable_baselines3")
        vec_env = import_module("stable_baselines3.common.vec_env")
        if kind == "DummyVecEnv":
            envs = vec_env.DummyVecEnv(list(make_envs))
        else:
            envs = vec_env.SubprocVecEnv(list(make_envs), start_method="fork")
        model = library.PPO("MlpPolicy", envs, n_steps=num_steps, device="cpu", seed=0)
        _, callback = model._setup_learn(10**9, None)

        def rollout() -> int:
            model.collect_rollouts(model.env, callback, model.rollout_buffer, num_steps)
            return num_steps * len(make_envs)

        return rollout, envs.close

    return build


class DiagonalNormal(Independent):  # type: ignore[type-arg]
    """One log-probability for all dimensions of an action."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale, validate_args=False), 1, validate_args=False)


class Actor(nn.Module):
    """The trunk, as TorchRL and Tianshou call it."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.discrete = hasattr(action_space, "n")
        outputs = int(action_space.n) if self.discrete else int(action_space.shape[0])
        self.trunk = Trunk(observation_space.shape, outputs)
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def forward(self, observation: Tensor) -> Any:
        output = self.trunk(observation)
        return output if self.discrete else (output, self.log_std.exp().expand_as(output))


class TianshouActor(Actor):
    """Takes arrays, and returns a state for the collector that cannot do without."""

    def __init__(self, observation_space: Any, action_space: Any, with_state: bool) -> None:
        super().__init__(observation_space, action_space)
        self.with_state = with_state

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[Any, Any]:
        output = super().forward(torch.as_tensor(np.asarray(obs)))
        return output, torch.zeros(len(obs), 1) if self.with_state else state


def spaces_of(make_envs: MakeEnvs) -> tuple[Any, Any]:
    """Observation space and action space."""
    env = make_envs[0]()
    spaces = env.observation_space, env.action_space
    env.close()
    return spaces


def torchrl_policy(make_envs: MakeEnvs) -> Any:
    """A `ProbabilisticActor`."""
    modules = import_module("torchrl.modules")
    module = import_module("tensordict.nn").TensorDictModule
    actor = Actor(*spaces_of(make_envs))
    # What its wrapper calls the observation depends on the environment.
    found = torchrl_env(make_envs[0]).observation_spec.keys()
    key = "pixels" if "pixels" in found else "observation"
    keys = ["logits"] if actor.discrete else ["loc", "scale"]
    return modules.ProbabilisticActor(
        module(actor, in_keys=[key], out_keys=keys),
        in_keys=keys,
        out_keys=["action"],
        distribution_class=Categorical if actor.discrete else DiagonalNormal,
        return_log_prob=True,
    )


def torchrl_env(make_env: Callable[[], Any]) -> Any:
    """One environment, as TorchRL takes it."""
    return import_module("torchrl.envs").GymWrapper(make_env(), categorical_action_encoding=True)


def torchrl(kind: str, make_envs: MakeEnvs, num_steps: int) -> Build:
    """Its `Collector` over SerialEnv or ParallelEnv, or another collector with an env a process."""

    def build() -> tuple[Rollout, Close]:
        envs, collectors = import_module("torchrl.envs"), import_module("torchrl.collectors")
        makers = [partial(torchrl_env, make_env) for make_env in make_envs]
        rows = num_steps * len(makers)
        policy = torchrl_policy(make_envs)
        options: dict[str, Any] = {"frames_per_batch": rows, "total_frames": -1, "device": "cpu"}
        if kind == "SerialEnv":
            collector = collectors.Collector(envs.SerialEnv(len(makers), makers), policy, **options)
        elif kind == "ParallelEnv":
            parallel = envs.ParallelEnv(len(makers), makers, mp_start_method="fork")
            collector = collectors.Collector(parallel, policy, **options)
        else:
            options |= {"frames_per_batch": num_steps, "total_frames": 10**9}
            collector = collectors.MultiAsyncCollector(makers, policy, **options)
        batches = iter(collector)
        return lambda: int(next(batches).numel()), collector.shutdown

    return build


def tianshou(
    kind: str, make_envs: MakeEnvs, num_steps: int, asynchronous: bool = False, **options: Any
) -> Build:
    """Its `Collector`, or `AsyncCollector`. It keeps no log-probabilities."""

    def build() -> tuple[Rollout, Close]:
        data, modules = import_module("tianshou.data"), import_module(TIANSHOU[2])
        observation_space, action_space = spaces_of(make_envs)
        actor = TianshouActor(observation_space, action_space, with_state=asynchronous)
        policy = modules.ProbabilisticActorPolicy(
            actor=actor,
            dist_fn=_from_logits if actor.discrete else _from_moments,
            action_space=action_space,
            observation_space=observation_space,
            action_scaling=False,
            action_bound_method=None if actor.discrete else "clip",
        )
        envs = getattr(import_module("tianshou.env"), kind)(list(make_envs), **options)
        n = len(make_envs)
        # Rows of environments that are ahead need room beyond their share.
        size = num_steps * n * (4 if asynchronous else 1)
        collector_class = data.AsyncCollector if asynchronous else data.Collector
        collector = collector_class(policy, envs, data.VectorReplayBuffer(size, n))
        collector.reset()

        def rollout() -> int:
            collector.reset_buffer()
            return int(collector.collect(n_step=num_steps * n).n_collected_steps)

        return rollout, collector.close

    return build


def _from_logits(logits: Tensor) -> Categorical:
    return Categorical(logits=logits, validate_args=False)


def _from_moments(moments: tuple[Tensor, Tensor]) -> DiagonalNormal:
    return DiagonalNormal(*moments)


def make_envpool(work: Work, num_threads: int) -> Any:
    """EnvPool's environments, with the preprocessing of `envs.make_atari`."""
    pixels = {
        "stack_num": 4,
        "frame_skip": 4,
        "img_height": 84,
        "img_width": 84,
        "gray_scale": True,
        "noop_max": 30,
        "reward_clip": False,
    }
    return import_module("envpool").make_gymnasium(
        work.env_id.removeprefix("ALE/"),
        num_envs=work.num_envs,
        num_threads=num_threads,
        seed=0,
        **(pixels if work.pixels else {}),
    )


def make_envpool_vector(work: Work, num_threads: int) -> Any:
    """The same under the names that a loop over a `VectorEnv` uses."""
    envs = make_envpool(work, num_threads)
    return SimpleNamespace(
        num_envs=work.num_envs,
        single_observation_space=envs.observation_space,
        single_action_space=envs.action_space,
        reset=lambda seed=None: envs.reset(),
        step=envs.step,
        close=envs.close,
    )


def envpool_action(action: Any) -> Any:
    """EnvPool takes these types only."""
    return action.astype(np.int32 if action.dtype == np.int64 else np.float64)


def make_pufferlib(work: Work, backend: str, **options: Any) -> Any:
    """PufferLib's vector environment under the names that a loop over a `VectorEnv` uses."""
    vector = import_module("pufferlib.vector")
    emulation = import_module("pufferlib.emulation")
    creator = partial(emulation.GymnasiumPufferEnv, env_creator=work.make_env)
    envs = vector.make(creator, num_envs=work.num_envs, backend=getattr(vector, backend), **options)
    return SimpleNamespace(
        num_envs=work.num_envs,
        single_observation_space=envs.single_observation_space,
        single_action_space=envs.single_action_space,
        reset=lambda seed=None: vector.reset(envs),
        step=partial(vector.step, envs),
        close=envs.close,
    )
