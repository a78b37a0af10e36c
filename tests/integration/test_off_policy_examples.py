"""The off-policy examples: their arithmetic by hand, what they refuse, and what they learn."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

import gymtask
from gymtask.training.checkpoint import list_checkpoints, load_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    """The script, as a module that pickles and dataclasses find; it is loaded once."""
    if f"example_{name}" in sys.modules:
        return sys.modules[f"example_{name}"]
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dqn, sac = load_example("dqn"), load_example("sac")


def run_main(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, run_dir: Path, *words: str
) -> None:
    arguments = [module.__name__, "--trainer.run-dir", str(run_dir), *words]
    arguments += ["--trainer.accelerator", "cpu"]
    monkeypatch.setattr(sys, "argv", arguments)
    module.main()


def evaluate_fewer(monkeypatch: pytest.MonkeyPatch, num_episodes: int) -> list[list[float]]:
    """Lets the examples' evaluations play fewer episodes; the returns of each join the result."""
    evaluate: Callable[..., Any] = gymtask.evaluate
    returns: list[list[float]] = []

    def spy(*args: Any, **options: Any) -> Any:
        episodes = evaluate(*args, **{**options, "num_episodes": num_episodes})
        returns.append([each.episode_return for each in episodes])
        return episodes

    monkeypatch.setattr(gymtask, "evaluate", spy)
    return returns


class Space(gym.Env[Any, Any]):
    """An environment that has an action space and nothing else."""

    def __init__(self, action_space: gym.Space[Any], observation_space: Any = None) -> None:
        self.action_space = action_space
        self.observation_space = observation_space or gym.spaces.Box(-1.0, 1.0, (3,), np.float32)


def in_space(task: type[Any], *spaces: gym.Space[Any]) -> type[Any]:
    """The example's task, in an environment with these spaces."""

    def get_environment(self: Any) -> gymtask.Environment:
        return gymtask.Environment(lambda: Space(*spaces))

    return type(task.__name__, (task,), {"get_environment": get_environment})


# ---- both run as scripts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (dqn, ["--max-samples", "3000"]),
        (dqn, ["--max-samples", "3000", "--prioritized", "--n-step", "1", "--no-clip"]),
        (sac, ["--max-samples", "1400", "--hidden", "32", "--train-dl.batch-size", "32"]),
    ],
)  # fmt: skip
def test_an_example_trains_evaluates_and_films(
    module: ModuleType,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluate_fewer(monkeypatch, 4)
    run_main(module, monkeypatch, tmp_path, *words)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{words[1]} steps in ")
    assert printed.count("mean return over 100 episodes") == 2
    assert (tmp_path / "clips" / "final.mp4").exists() == ("--no-clip" not in words)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (dqn, ["--prioritized", "--hidden", "16", "--target-interval", "24"]),
        (sac, ["--hidden", "16", "--train-dl.batch-size", "16"]),
    ],
)
def test_a_resumed_example_goes_on_as_the_unbroken_run_does(
    module: ModuleType, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate_fewer(monkeypatch, 1)
    words += ["--no-clip", "--dataset.num-update-steps", "8"]
    words += ["--trainer.sampling.num-epoch-samples", "64"]
    words += ["--trainer.sampling.num-warmup-samples", "100"]
    run_main(module, monkeypatch, tmp_path / "whole", *words, "--max-epochs", "6")
    run_main(module, monkeypatch, tmp_path / "parts", *words, "--max-epochs", "3")
    (middle,) = list_checkpoints(tmp_path / "parts")
    assert load_checkpoint(middle)[0]["task"].keys() >= {
        name for name, _ in module_task(module).named_parameters()
    }
    resume = ["--resume", str(tmp_path / "parts")]
    run_main(module, monkeypatch, tmp_path / "parts", *words, "--max-epochs", "6", *resume)
    whole, parts = (
        load_checkpoint(list_checkpoints(tmp_path / name)[-1])[0] for name in ("whole", "parts")
    )
    assert (parts["state"]["num_steps"], parts["state"]["num_samples"]) == (48, 484)
    for kind in ("model", "task"):  # bit for bit
        assert whole[kind].keys() == parts[kind].keys()
        for name, value in whole[kind].items():
            assert torch.equal(value, parts[kind][name]), (kind, name)
    for name, saved in whole["optimizers"].items():
        steps = [each["state"][0]["step"] for each in (saved, parts["optimizers"][name])]
        assert steps == [48, 48]


def module_task(module: ModuleType) -> Any:
    return module.DQN(module.DQNConfig()) if module is dqn else module.SAC(module.SACConfig())


# ---- what they refuse ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
        gym.spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, np.inf]), dtype=np.float64),
        gym.spaces.Discrete(3),
        gym.spaces.MultiDiscrete([3, 2]),
    ],
    ids=str,
)
def test_sac_refuses_actions_without_bounds_by_name(space: gym.Space[Any]) -> None:
    with pytest.raises(gymtask.ConfigurationError) as caught:
        in_space(sac.SAC, space)(sac.SACConfig())
    assert str(caught.value) == f"actions must be in a Box with bounds, got {space}"


def test_spaces_of_another_kind_are_refused_by_name() -> None:
    box, discrete = gym.spaces.Box(-1.0, 1.0, (2,), np.float32), gym.spaces.Discrete(3)
    with pytest.raises(gymtask.ConfigurationError, match=r"in a Box, got Discrete\(3\)"):
        in_space(sac.SAC, box, discrete)(sac.SACConfig())
    with pytest.raises(gymtask.ConfigurationError, match=r"and Discrete, got Box.* and Box"):
        in_space(dqn.DQN, box)(dqn.DQNConfig())
    with pytest.raises(gymtask.ConfigurationError, match=r"Discrete\(3\) and Discrete\(3\)"):
        in_space(dqn.DQN, discrete, discrete)(dqn.DQNConfig())


# ---- DQN: targets by hand ------------------------------------------------------------------------


class Table(nn.Module):
    """Values of two actions in states that are numbered by their observation."""

    def __init__(self, values: list[list[float]]) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, observation: Tensor) -> Tensor:
        return self.values[observation[..., 0].long()]


def tabular(**fields: Any) -> tuple[Any, Table]:
    """DQN with tables: of three states, the online one and its target disagree on the best."""
    config = dqn.DQNConfig(**{"gamma": 0.5, "huber_delta": 1.0, **fields})
    task = in_space(dqn.DQN, gym.spaces.Discrete(2))(config)
    model = Table([[1.0, 2.0], [4.0, 3.0], [5.0, 7.0]])
    task.target = Table([[10.0, 20.0], [30.0, 50.0], [70.0, 60.0]]).requires_grad_(False)
    return task, model


def rows(numbers: list[int], actions: list[int], **following: list[Any]) -> TensorDict:
    """A batch [B, 1] as the buffer gives it."""
    batch = [len(numbers), 1]
    after = {
        "observation": torch.tensor(following.pop("states"), dtype=torch.float32)[:, None, None],
        **{key: torch.tensor(value)[:, None] for key, value in following.items()},
    }
    return TensorDict(
        {
            "observation": torch.tensor(numbers, dtype=torch.float32)[:, None, None],
            "action": torch.tensor(actions)[:, None],
            "next": TensorDict(after, batch),
        },
        batch,
    )


ENDS = {"terminated": [False, True, False], "truncated": [False, False, True]}


def test_the_double_dqn_target_by_hand() -> None:
    task, model = tabular(n_step=1)
    batch = rows([0, 1, 2], [1, 0, 1], states=[1, 2, 2], reward=[1.0, 2.0, 3.0], **ENDS)
    q, target = task.run_model(model, batch, task.state)
    assert q.squeeze(-1).tolist() == [2.0, 4.0, 7.0]
    # The online table prefers action 0 in state 1 and action 1 in state 2; the target's own best
    # would be worth 50 and 70. Only the terminated row does without: a time limit is no end.
    assert target.squeeze(-1).tolist() == [1.0 + 0.5 * 30.0, 2.0, 3.0 + 0.5 * 60.0]
    assert (q.requires_grad, target.requires_grad) == (True, False)
    loss = task.compute_loss(model, batch, task.state, (q, target))
    assert loss.item() == pytest.approx(((14.0 - 0.5) + (2.0 - 0.5) + (26.0 - 0.5)) / 3)
    loss.backward()  # the gradient of an error is clipped to 1
    assert model.values.grad is not None
    assert model.values.grad.tolist() == [
        [0.0, pytest.approx(-1 / 3)],
        [pytest.approx(1 / 3), 0.0],
        [0.0, pytest.approx(-1 / 3)],
    ]


def test_the_loss_grows_linearly_beyond_its_delta() -> None:
    task, model = tabular(huber_delta=10.0)
    output = torch.zeros(3, 1), torch.tensor([[14.0], [-2.0], [-26.0]])
    loss = task.compute_loss(model, TensorDict({}, [3, 1]), task.state, output)
    assert loss.item() == pytest.approx((10 * (14 - 5) + 0.5 * 2**2 + 10 * (26 - 5)) / 3)


def test_n_step_targets_count_with_the_discount_of_the_batch() -> None:
    task, model = tabular(n_step=3)
    batch = rows(
        [0, 1, 2], [1, 0, 1], states=[1, 2, 2], reward=[1.75, 2.0, 3.5],
        discount=[0.125, 0.5, 0.25], **ENDS,
    )  # fmt: skip
    _, target = task.run_model(model, batch, task.state)
    assert target.squeeze(-1).tolist() == [1.75 + 0.125 * 30.0, 2.0, 3.5 + 0.25 * 60.0]


def episode(length: int) -> TensorDict:
    """Rewards 1, 2, … and a terminated end; the state is the number of the row modulo 3."""
    state = torch.arange(length + 1, dtype=torch.float32).remainder(3)[:, None]
    ends = torch.arange(length) == length - 1
    after = TensorDict(
        {
            "observation": state[1:],
            "reward": torch.arange(length) + 1.0,
            "terminated": ends,
            "truncated": torch.zeros(length, dtype=torch.bool),
        },
        [length],
    )
    action = torch.arange(length).remainder(2)
    return TensorDict({"observation": state[:-1], "action": action, "next": after}, [length])


def test_targets_of_the_tasks_own_buffer_by_hand() -> None:
    task, model = tabular(n_step=2)
    buffer = task.get_replay_buffer()
    buffer.extend(episode(4))
    batch = buffer.sample(64)
    _, target = task.run_model(model, batch, task.state)
    # From states 0, 1, 2, 0 two steps lead to 2, 0 and, twice, the end. The online table prefers
    # action 1 in both states.
    wanted = {0: 1 + 0.5 * 2 + 0.25 * 60, 1: 2 + 0.5 * 3 + 0.25 * 20, 2: 3 + 0.5 * 4, 3: 4.0}
    number = {(0.0, 0): 0, (1.0, 1): 1, (2.0, 0): 2, (0.0, 1): 3}  # state and action tell the row
    drawn = zip(batch["observation"][:, 0, 0].tolist(), batch["action"][:, 0].tolist(), strict=True)
    numbers = [number[each] for each in drawn]
    assert target.squeeze(-1).tolist() == [wanted[each] for each in numbers]
    assert set(numbers) == {0, 1, 2, 3}


def test_priorities_are_errors_and_weights_scale_the_loss() -> None:
    task, model = tabular(n_step=1, prioritized=True, max_samples=100)
    buffer = task.replay_buffer = task.get_replay_buffer()
    buffer.extend(episode(3))
    task.state.num_samples = 50
    task.state.num_steps = 1  # not the first epoch: the target stays
    task.on_epoch_start(model, task.state)
    assert buffer.beta == pytest.approx(0.7)  # half way from 0.4 to 1
    batch = rows([0, 1, 2], [1, 0, 1], states=[1, 2, 2], reward=[1.0, 2.0, 3.0], **ENDS)
    batch["index"] = torch.tensor([[0], [1], [2]])
    batch["weight"] = torch.tensor([[1.0], [0.5], [0.25]])
    loss = task.compute_loss(model, batch, task.state, task.run_model(model, batch, task.state))
    assert loss.item() == pytest.approx((13.5 + 0.5 * 1.5 + 0.25 * 25.5) / 3)
    task.on_update_end(model, task.state)
    priority = np.array([14.0, 2.0, 26.0]) ** 0.6
    drawn = buffer.sample(20_000)["index"][:, 0].bincount(minlength=3) / 20_000
    np.testing.assert_allclose(drawn, priority / priority.sum(), atol=0.015)


def test_the_target_network_is_copied_at_the_start_and_every_so_many_updates() -> None:
    task, model = tabular(target_interval=3)
    task.on_epoch_start(model, task.state)
    assert task.target.values.tolist() == model.values.tolist()
    with torch.no_grad():
        model.values += 1.0
    seen = []
    for task.state.num_steps in range(1, 4):
        task.on_update_end(model, task.state)
        seen.append(task.target.values.tolist() == model.values.tolist())
    assert seen == [False, False, True]
    task.on_epoch_start(model, task.state)  # a later epoch copies nothing
    assert not any(parameter.requires_grad for parameter in task.target.parameters())


def test_epsilon_falls_linearly_and_greedy_actions_have_none() -> None:
    task, model = tabular(exploration_samples=100, final_epsilon=0.2)
    for num_samples, epsilon in ((0, 1.0), (50, 0.6), (100, 0.2), (1000, 0.2)):
        task.state.num_samples = num_samples
        assert task.epsilon() == pytest.approx(epsilon)
    states = TensorDict({"observation": torch.ones(20_000, 1)}, [20_000])
    assert task.get_actions(model, states, True).tolist() == [0] * 20_000
    chosen = task.get_actions(model, states, False).float().mean()
    assert float(chosen) == pytest.approx(0.1, abs=0.01)  # half of the random ones


# ---- SAC: densities and losses by hand -----------------------------------------------------------


def reference(mean: Tensor, std: Tensor, low: Tensor, high: Tensor) -> TransformedDistribution:
    """The same distribution of torch's own parts; their caches keep u where tanh is flat."""
    spread = AffineTransform((low + high) / 2, (high - low) / 2, cache_size=1)
    return TransformedDistribution(Normal(mean, std), [TanhTransform(cache_size=1), spread])


@pytest.mark.parametrize("shift", [0.0, 8.0, -8.0])  # at the bounds, but for the first
def test_log_probabilities_are_those_of_a_transformed_distribution(shift: float) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(3, 500, 3, dtype=torch.float64, generator=generator)
    mean, std = 2.0 * draws[0] + shift, (draws[1] - 1.0).exp()
    low = torch.tensor([-2.0, 0.0, -0.1], dtype=torch.float64)
    high = torch.tensor([2.0, 255.0, 0.3], dtype=torch.float64)
    unsquashed = mean + std * draws[2]
    distribution = reference(mean, std, low, high)
    action = unsquashed
    for transform in distribution.transforms:
        action = transform(action)
    got = sac.squashed_log_prob(unsquashed, mean, std, (high - low) / 2)
    wanted = distribution.log_prob(action).sum(-1)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-10)
    at_bounds = torch.isclose(action, high) | torch.isclose(action, low)
    assert not shift or at_bounds.any()


def test_log_probabilities_near_the_bounds_are_finite_in_float32() -> None:
    mean = torch.tensor([[-60.0], [-12.0], [0.0], [12.0], [60.0]], requires_grad=True)
    std = torch.ones(5, 1)
    log_prob = sac.squashed_log_prob(mean * 1.0, mean, std, torch.ones(1))
    (gradient,) = torch.autograd.grad(log_prob.sum(), mean)
    # Far out log(1 − tanh²(u)) is 2 log 2 − 2|u|, whose slope by u is −2 or 2.
    assert log_prob[-1].item() == pytest.approx(-0.9189385 - 1.3862944 + 120.0)
    torch.testing.assert_close(gradient.squeeze(), torch.tensor([-2.0, -2.0, 0.0, 2.0, 2.0]))


def test_densities_integrate_to_one_in_units_of_the_action() -> None:
    low, high = 1.0, 5.0
    action = torch.linspace(low + 1e-4, high - 1e-4, 200_001, dtype=torch.float64)[:, None]
    unsquashed = ((action - 3.0) / 2.0).atanh()
    mean, std = torch.tensor([[0.4]], dtype=torch.float64), torch.tensor([[0.6]]).double()
    density = sac.squashed_log_prob(unsquashed, mean, std, torch.tensor([2.0]).double()).exp()
    assert float(torch.trapezoid(density, action[:, 0])) == pytest.approx(1.0, abs=1e-4)


ACTIONS = gym.spaces.Box(
    np.array([[0.0], [-3.0]], np.float32), np.array([[4.0], [-1.0]], np.float32), dtype=np.float32
)


def in_boxes(**fields: Any) -> tuple[Any, Any]:
    """SAC in a space of actions [2, 1] whose parts have other bounds."""
    config = sac.SACConfig(hidden=8, gamma=0.5, tau=0.25, **fields)
    torch.manual_seed(0)
    task = in_space(sac.SAC, ACTIONS)(config)
    return task, task.get_model()


def test_actions_fill_the_bounds_and_greedy_ones_are_the_squashed_mean() -> None:
    task, model = in_boxes()
    states = TensorDict({"observation": 100.0 * torch.randn(2000, 3)}, [2000])
    with torch.no_grad():
        greedy = task.get_actions(model, states, True)
        sampled = task.get_actions(model, states, False)
        again = task.get_actions(model, states, True)
        mean, _ = model.policy(states["observation"])
    assert greedy.shape == sampled.shape == (2000, 2, 1)
    assert torch.equal(greedy, again)
    torch.testing.assert_close(greedy[:, 0, 0], 2.0 + 2.0 * mean[:, 0].tanh())
    torch.testing.assert_close(greedy[:, 1, 0], -2.0 + mean[:, 1].tanh())
    for place, (low, high) in enumerate(((0.0, 4.0), (-3.0, -1.0))):
        part = sampled[:, place]
        assert low <= part.min() <= low + 0.1
        assert high - 0.1 <= part.max() <= high


def batch_of_boxes() -> TensorDict:
    torch.manual_seed(1)
    after = {
        "observation": torch.randn(2, 1, 3),
        "reward": torch.tensor([[1.0], [2.0]]),
        "terminated": torch.tensor([[False], [True]]),
        "truncated": torch.tensor([[True], [False]]),
    }
    return TensorDict(
        {
            "observation": torch.randn(2, 1, 3),
            "action": torch.tensor([[[[1.0], [-2.0]]], [[[3.0], [-1.5]]]]),
            "next": TensorDict(after, [2, 1]),
        },
        [2, 1],
    )


def test_the_losses_of_sac_by_hand() -> None:
    task, model = in_boxes()
    with torch.no_grad():
        model.log_alpha.fill_(-0.5)
        for parameter in task.target.parameters():  # another network than the critics, with a rest
            parameter.add_(0.1)
    batch, alpha = batch_of_boxes(), float(np.exp(-0.5))
    torch.manual_seed(2)
    output = task.run_model(model, batch, task.state)
    losses = task.compute_loss(model, batch, task.state, output)

    torch.manual_seed(2)  # the same noise once more: for new actions first, for the next ones then
    action, log_prob = model.sample(batch["observation"])
    next_action, next_log_prob = model.sample(batch["next", "observation"])
    assert action.shape == (2, 1, 2, 1)
    both = torch.cat([batch["observation"], action.flatten(-2)], -1)
    new_q = torch.min(*(each(both)[..., 0] for each in model.critics.networks))
    taken = torch.cat([batch["observation"], batch["action"].flatten(-2)], -1)
    following = torch.cat([batch["next", "observation"], next_action.flatten(-2)], -1)
    next_q = torch.min(*(each(following)[..., 0] for each in task.target.networks))
    value = next_q - alpha * next_log_prob
    target = torch.stack([1.0 + 0.5 * value[0], torch.tensor([2.0])]).detach()
    critic = sum(((each(taken)[..., 0] - target) ** 2).mean() for each in model.critics.networks)
    entropy = (np.log(2.0) - 1.0) + (np.log(1.0) - 1.0)
    wanted = {
        "actor": (alpha * log_prob - new_q).mean(),
        "critic": critic,
        "alpha": -(alpha * (log_prob + entropy)).mean(),
    }
    assert losses.keys() == wanted.keys() == task.get_optimizers(model).keys()
    for name, loss in losses.items():
        assert loss.item() == pytest.approx(wanted[name].item(), rel=1e-5), name


def test_each_loss_moves_its_own_part_alone(tmp_path: Path) -> None:
    task, model = in_boxes()
    losses = task.compute_loss(
        model, batch_of_boxes(), task.state, task.run_model(model, batch_of_boxes(), task.state)
    )
    for name, optimizer in task.get_optimizers(model).items():
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = torch.autograd.grad(losses[name], own, retain_graph=True)
        assert all(bool(gradient.abs().sum() > 0) for gradient in gradients[-1:])
    (found,) = torch.autograd.grad(losses["alpha"], [model.log_alpha], retain_graph=True)
    for name in ("critic", "alpha"):
        actor = list(model.actor.parameters())
        rest = torch.autograd.grad(losses[name], actor, retain_graph=True, allow_unused=True)
        assert rest == (None,) * len(actor)
    assert float(found) == pytest.approx(
        float(losses["alpha"].detach()), rel=1e-5
    )  # dα = α d log α


def test_target_critics_follow_by_tau() -> None:
    task, model = in_boxes()
    task.on_epoch_start(model, task.state)
    before = [parameter.clone() for parameter in task.target.parameters()]
    for mine, theirs in zip(before, model.critics.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with torch.no_grad():
        for parameter in model.critics.parameters():
            parameter += 1.0
    task.on_update_end(model, task.state)
    for old, new in zip(before, task.target.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.25)


# ---- what they learn -----------------------------------------------------------------------------


def learn(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    run_dir: Path,
    *words: str,
    num_episodes: int = 100,
) -> float:
    """The mean return of the greedy evaluation at the end of a run."""
    returns = evaluate_fewer(monkeypatch, num_episodes)
    run_main(module, monkeypatch, run_dir, "--no-clip", *words)
    return statistics.fmean(returns[0])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_dqn_balances_the_pole_within_100000_steps(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--max-samples", "100000", "--environment.env-seed", str(seed)]
    assert learn(dqn, monkeypatch, tmp_path, *words) >= 475


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sac_swings_the_pendulum_up_within_20000_steps(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--max-samples", "20000", "--environment.env-seed", str(seed)]
    assert learn(sac, monkeypatch, tmp_path, *words) >= -200


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_sac_makes_the_cheetah_run_within_100000_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--env-id", "HalfCheetah-v5", "--max-samples", "100000", "--hidden", "256"]
    assert learn(sac, monkeypatch, tmp_path, *words, num_episodes=10) >= 2000
