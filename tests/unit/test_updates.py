"""One training step, on losses that can be worked out by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gymtask.config import DatasetConfig, ReinforcementLearningTaskConfig
from gymtask.environment import Environment
from gymtask.errors import ConfigurationError, HookError
from gymtask.task import ReinforcementLearningTask, State
from gymtask.testing import ScriptedEnv
from gymtask.training.config import TrainerConfig
from gymtask.training.ranks import Ranks
from gymtask.training.updates import Updater


class Two(nn.Module):
    """Two numbers, a = 2 and b = 3, and a third that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(2.0))
        self.b = nn.Parameter(torch.tensor(3.0))
        self.frozen = nn.Parameter(torch.tensor(5.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def halved(self, x: Tensor) -> Tensor:
        return x / 2


class Task(ReinforcementLearningTask):
    """Its hooks are what a test makes them."""

    def __init__(
        self,
        loss: Callable[[Two], Any],
        optimizers: Callable[[Two], Any] = lambda _: None,
        schedulers: Callable[[Any], Any] = lambda _: (),
    ) -> None:
        config = ReinforcementLearningTaskConfig(
            name="task", dataset=DatasetConfig(num_update_steps=1)
        )
        super().__init__(config)
        self.loss, self.optimizers, self.schedulers = loss, optimizers, schedulers

    def get_environment(self) -> Environment:
        return Environment(ScriptedEnv)

    def get_actions(self, model: Two, states: Any, optimal: bool) -> Tensor:
        raise AssertionError("not acting here")

    def run_model(self, model: Two, batch: Any, state: State) -> None:
        return None

    def compute_loss(self, model: Two, batch: Any, state: State, output: None) -> Any:
        return self.loss(model)

    def get_optimizers(self, model: Two) -> Any:
        return self.optimizers(model)

    def get_lr_schedulers(self, optimizers: Any) -> Any:
        return self.schedulers(optimizers)


def make_updater(task: Task, model: Two, clip_grad_norm: float | None = None) -> Updater:
    config = TrainerConfig(learning_rate=0.1, clip_grad_norm=clip_grad_norm)
    return Updater(Fabric(accelerator="cpu", devices=1), Ranks(), task, model, config)


def sgd(model: Two) -> SGD:
    return SGD(model.parameters(), lr=1.0)


def actor_and_critic(model: Two) -> dict[str, Optimizer]:
    return {"actor": SGD([model.a], lr=1.0), "critic": SGD([model.b], lr=0.5)}


def test_one_optimizer_follows_the_gradient_of_the_loss() -> None:
    model = Two()
    values = make_updater(Task(lambda m: m.a * m.b, sgd), model).update([None], State())
    assert (model.a.item(), model.b.item()) == (2.0 - 3.0, 3.0 - 2.0)
    assert values["loss"].item() == 6.0
    assert values["grad_norm"].item() == pytest.approx(13**0.5)
    assert not any(value.requires_grad for value in values.values())


def test_gradients_do_not_pile_up_over_updates() -> None:
    model = Two()
    updater = make_updater(Task(lambda m: m.a + m.b, sgd), model)
    for _ in range(3):
        updater.update([None], State())
    assert (model.a.item(), model.b.item()) == (-1.0, 0.0)


def test_a_dict_of_losses_with_one_optimizer_is_summed() -> None:
    model = Two()
    task = Task(lambda m: {"policy": 1 * m.a, "value": 2 * m.b + m.a}, sgd)
    values = make_updater(task, model).update([None], State())
    assert (model.a.item(), model.b.item()) == (2.0 - 2.0, 3.0 - 2.0)
    assert {name: value.item() for name, value in values.items() if "loss" in name} == {
        "loss": 10.0,
        "loss/policy": 2.0,
        "loss/value": 8.0,
    }


def test_each_of_several_losses_trains_the_parameters_of_its_own_optimizer_only() -> None:
    model = Two()

    def losses(m: Two) -> dict[str, Tensor]:
        shared = m.a * m.b  # one forward for both
        return {"critic": 10 * shared, "actor": shared}

    values = make_updater(Task(losses, actor_and_critic), model).update([None], State())
    assert model.a.item() == 2.0 - 1.0 * 3.0
    assert model.b.item() == 3.0 - 0.5 * 10 * 2.0
    assert values["grad_norm/actor"].item() == 3.0
    assert values["grad_norm/critic"].item() == 20.0
    assert values["loss/actor"].item() == 6.0


def test_several_optimizers_step_after_all_gradients_are_known() -> None:
    model = Two()

    def losses(m: Two) -> dict[str, Tensor]:
        return {"actor": m.a * m.b.detach(), "critic": m.b * m.a.detach()}

    make_updater(Task(losses, actor_and_critic), model).update([None], State())
    assert (model.a.item(), model.b.item()) == (2.0 - 3.0, 3.0 - 0.5 * 2.0)


def test_gradients_are_clipped_by_norm_and_the_norm_before_is_told() -> None:
    model = Two()
    task = Task(lambda m: 30 * m.a + 40 * m.b, sgd)
    values = make_updater(task, model, clip_grad_norm=5.0).update([None], State())
    assert values["grad_norm"].item() == pytest.approx(50.0)
    assert model.a.item() == pytest.approx(2.0 - 3.0, abs=1e-5)
    assert model.b.item() == pytest.approx(3.0 - 4.0, abs=1e-5)


def test_gradients_of_each_optimizer_are_clipped_by_themselves() -> None:
    model = Two()
    task = Task(lambda m: {"actor": 100 * m.a, "critic": 0.5 * m.b}, actor_and_critic)
    make_updater(task, model, clip_grad_norm=1.0).update([None], State())
    assert model.a.item() == pytest.approx(2.0 - 1.0, abs=1e-5)
    assert model.b.item() == pytest.approx(3.0 - 0.5 * 0.5, abs=1e-5)


def test_without_get_optimizers_adam_trains_model_and_task_each_parameter_once() -> None:
    model = Two()
    task = Task(lambda m: m.a)
    task.extra = nn.Parameter(torch.zeros(2))
    task.model = model  # its parameters are the model's
    optimizer = make_updater(task, model).optimizers["main"]
    assert isinstance(optimizer, Adam)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.1
    assert [id(p) for p in group["params"]] == [id(model.a), id(model.b), id(task.extra)]


def test_a_parameter_that_is_a_part_of_a_tensor_is_trained_and_the_rest_left_alone() -> None:
    whole, model = torch.eye(8), Two()
    model.a = nn.Parameter(whole[:, :4])
    make_updater(Task(lambda m: m.a.sum()), model).update([None], State())
    assert torch.equal(whole[:, 4:], torch.eye(8)[:, 4:])
    assert not torch.equal(whole[:, :4], torch.eye(8)[:, :4])


def test_schedules_step_after_each_update_and_rates_are_told() -> None:
    def halve(optimizers: Any) -> list[LambdaLR]:
        return [LambdaLR(optimizer, lambda k: 0.5**k) for optimizer in optimizers.values()]

    task = Task(lambda m: {"actor": m.a, "critic": m.b}, actor_and_critic, halve)
    updater = make_updater(task, Two())
    for _ in range(3):
        updater.update([None], State())
    assert updater.learning_rates() == {
        "learning_rate/actor": 1.0 / 8,
        "learning_rate/critic": 0.5 / 8,
    }


def test_marked_methods_can_be_called_on_the_wrapped_model() -> None:
    task = Task(lambda m: m.halved(m.a), sgd)
    task.forward_methods = ["halved"]  # type: ignore[misc]
    model = Two()
    make_updater(task, model).update([None], State())
    assert model.a.item() == 1.5


def test_a_marked_method_that_does_not_exist_is_refused() -> None:
    task = Task(lambda m: m.a)
    task.forward_methods = ["third"]  # type: ignore[misc]
    with pytest.raises(HookError, match=r"`forward_methods` must name methods of .* got 'third'"):
        make_updater(task, Two())


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = Two().requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"`model` \(Two\) .* requires a gradient, got no"):
        make_updater(Task(lambda m: m.a), model)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m: 1.0, "`compute_loss` must return a tensor (), got a float"),
        (lambda m: None, "`compute_loss` must return a tensor (), got a NoneType"),
        (lambda m: m.a.expand(1), "`compute_loss` must return a tensor (), got one of shape (1,)"),
        (lambda m: m.frozen * 2, "got one that requires no gradient"),
        (lambda m: {}, "`compute_loss` must return at least one loss, got none"),
        (lambda m: {"a": m.a, "b": 1}, "`compute_loss`['b'] must return a tensor (), got a int"),
    ],
)
def test_a_loss_that_cannot_be_minimised_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(HookError, match=re.escape(message)):
        make_updater(Task(loss), Two()).update([None], State())


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda m: 2 * m.a, "a Tensor"),
        (lambda m: {"actor": m.a}, "['actor']"),
        (lambda m: {"actor": m.a, "kritic": m.b}, "['actor', 'kritic']"),
    ],
)
def test_losses_that_do_not_match_several_optimizers_are_refused(loss: Any, got: str) -> None:
    updater = make_updater(Task(loss, actor_and_critic), Two())
    rule = "`compute_loss` must return one loss for each optimizer, ['actor', 'critic'], got "
    with pytest.raises(HookError, match=re.escape(rule + got)):
        updater.update([None], State())


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (lambda m: [sgd(m)], "must return an Optimizer, a dict of them or None"),
        (lambda m: {}, "must return an Optimizer, a dict of them or None, got {}"),
        (lambda m: {"a": sgd(m), "b": 3}, "must return an Optimizer, a dict of them or None"),
        (
            lambda m: {"a": SGD([m.a], lr=1.0), "b": SGD([m.a, m.b], lr=1.0)},
            "must give each parameter to one optimizer, got parameters of shapes [()] in several",
        ),
        (
            lambda m: SGD([m.a, nn.Parameter(torch.zeros(7))], lr=1.0),
            "got others of shapes [(7,)]; make them attributes of the task",
        ),
    ],
)
def test_wrong_optimizers_are_refused(optimizers: Any, message: str) -> None:
    with pytest.raises(HookError, match=re.escape(message)):
        make_updater(Task(lambda m: m.a, optimizers), Two())


def test_what_is_no_schedule_is_refused() -> None:
    task = Task(lambda m: m.a, sgd, lambda _: [0.1])
    with pytest.raises(HookError, match=r"`get_lr_schedulers` must return .*step.*got 0.1"):
        make_updater(task, Two())


def test_what_takes_more_than_a_call_of_step_is_refused() -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    task = Task(lambda m: m.a, sgd, lambda optimizers: [plateau(optimizers["main"])])
    with pytest.raises(HookError, match=r"step\(\) needs no metric, got ReduceLROnPlateau"):
        make_updater(task, Two())
    task = Task(lambda m: m.a, lambda m: torch.optim.LBFGS([m.a]))
    with pytest.raises(HookError, match=r"step\(\) needs no closure, got LBFGS"):
        make_updater(task, Two())


def test_sparse_gradients_are_followed() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    nn.init.ones_(table.weight)
    task: Any = Task(lambda m: m(torch.tensor([1, 1])).sum(), lambda m: SGD(m.parameters(), 0.5))
    values = make_updater(task, table).update([None], State())  # type: ignore[arg-type]
    assert float(values["grad_norm"]) == pytest.approx(8**0.5)  # two numbers of 2 each
    assert table.weight.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


def test_accumulated_batches_give_the_mean_of_their_gradients() -> None:
    model = Two()
    task = Task(lambda m: m.a * next(factors), sgd)
    factors = iter([2.0, 4.0])
    values = make_updater(task, model).update([None, None], State())
    # d(a · f) / da is f; their mean is 3, and the rate 1.
    assert float(model.a.detach()) == pytest.approx(2.0 - 3.0)
    assert (float(values["loss"]), float(values["grad_norm"])) == pytest.approx((6.0, 3.0))


def test_accumulated_batches_train_several_optimizers_too() -> None:
    model = Two()
    factors = iter([2.0, 4.0])

    def losses(m: Any) -> dict[str, Tensor]:
        factor = next(factors)
        return {"actor": m.a * factor, "critic": m.b * m.a * factor}

    values = make_updater(Task(losses, actor_and_critic), model).update([None, None], State())
    assert set(values) >= {"loss/actor", "loss/critic", "grad_norm/actor", "grad_norm/critic"}
    assert float(values["grad_norm/actor"]) == pytest.approx(3.0)  # of the actor's loss alone
    assert float(values["grad_norm/critic"]) == pytest.approx(6.0)


def test_an_optimizer_without_a_loss_rests() -> None:  # as TD3's actor in every other update
    model = Two()
    resting = iter([False, True])

    def losses(m: Any) -> dict[str, Tensor | None]:
        return {"actor": None if next(resting) else m.a * 3.0, "critic": m.b * 2.0}

    updater = make_updater(Task(losses, actor_and_critic), model)
    updater.update([None], State())
    before = float(model.a.detach()), float(model.b.detach())
    values = updater.update([None], State())
    assert float(model.a.detach()) == before[0]
    assert float(model.b.detach()) != before[1]
    assert "loss/actor" not in values
    # The one that steps keeps its name.
    assert [name for name in values if "grad_norm" in name] == ["grad_norm/critic"]


@pytest.mark.parametrize("resting", [[False, True], [True, False], [True, True]])
def test_an_optimizer_rests_only_where_no_accumulated_batch_has_a_loss_for_it(
    resting: list[bool],
) -> None:
    model, rests = Two(), iter(resting)

    def losses(m: Any) -> dict[str, Tensor | None]:
        return {"actor": None if next(rests) else m.a * 3.0, "critic": m.b * 2.0}

    values = make_updater(Task(losses, actor_and_critic), model).update([None, None], State())
    num_losses = resting.count(False)  # a loss that is not there is 0 in the mean
    assert float(model.a.detach()) == 2.0 - 3.0 * num_losses / 2
    assert float(model.b.detach()) == 3.0 - 0.5 * 2.0
    assert ("grad_norm/actor" in values) == ("loss/actor" in values) == (num_losses > 0)
    if num_losses:
        assert float(values["loss/actor"]) == 2.0 * 3.0 * num_losses / 2
        assert float(values["grad_norm/actor"]) == pytest.approx(3.0 * num_losses / 2)
    assert float(values["loss"]) == pytest.approx(6.0 + 6.0 * num_losses / 2)
