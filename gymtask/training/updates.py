"""One training step: loss, backward, clip, step, schedules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from gymtask.errors import ConfigurationError, HookError
from gymtask.task import ReinforcementLearningTask, State

SINGLE = "main"
"""Name of an optimizer that a task did not name."""


class Updater:
    """Trains a model on batches, with the optimizers and schedules of a task.

    With one optimizer a dict of losses is summed. With several, loss `k` is differentiated with
    respect to the parameters of optimizer `k` only, and all of them step after that.

    Args:
        fabric: Does backward and clipping, and knows the device.
        task: Gives `run_model`, `compute_loss`, optimizers and schedules.
        model: Is moved to the device.
        learning_rate: Of Adam, where the task makes no optimizer.
        clip_grad_norm: Largest norm of the gradients of an optimizer; None: any.

    Attributes:
        optimizers: By name.
        schedulers: Stepped after each update.

    Raises:
        ConfigurationError: There is nothing to train.
        HookError: A hook returned something that its contract does not allow.
    """

    def __init__(
        self,
        fabric: Fabric,
        task: ReinforcementLearningTask[Any, Any],
        model: nn.Module,
        learning_rate: float,
        clip_grad_norm: float | None,
    ) -> None:
        self._fabric = fabric
        self._task = task
        self._clip_grad_norm = clip_grad_norm
        self._module = fabric.setup_module(model)
        for name in task.forward_methods:
            self._mark(name)
        self.optimizers = _make_optimizers(task, model, learning_rate)
        self._steppers: dict[str, Any] = {
            name: fabric.setup_optimizers(optimizer) for name, optimizer in self.optimizers.items()
        }
        self.schedulers = _make_schedulers(task, self.optimizers)

    def update(self, batch: Any, state: State) -> dict[str, Tensor]:
        """Takes one step.

        Returns:
            "loss" and "grad_norm" (before clipping), and one of each per name where there are
            several; detached tensors () on the device, which nobody has waited for.

        Raises:
            HookError: `compute_loss` returned no loss that can be minimised.
        """
        output = self._task.run_model(self._module, batch, state)
        loss = self._task.compute_loss(self._module, batch, state, output)
        values = self._backward(loss)
        norms = {name: self._clip(name) for name in self.optimizers}
        self._require_finite(values["loss"], norms, state)
        for stepper in self._steppers.values():
            stepper.step()
        for scheduler in self.schedulers:
            scheduler.step()
        values.update(_named("grad_norm", norms))
        return values

    def _require_finite(self, loss: Tensor, norms: Mapping[str, Tensor], state: State) -> None:
        """On the CPU, where it costs nothing: stops before the step that would ruin the model.

        On another device it would wait for it; there, numbers are looked at once an epoch.
        """
        if not loss.is_cpu:
            return
        for name, value in {"loss": loss, **_named("grad_norm", dict(norms))}.items():
            if not math.isfinite(value):
                raise HookError(
                    f"`{name}` must be finite, got {float(value)} in update {state.num_steps}; the"
                    " model is as it was before this update"
                )

    def learning_rates(self) -> dict[str, float]:
        """The learning rate of each optimizer's first group."""
        rates = {name: float(o.param_groups[0]["lr"]) for name, o in self.optimizers.items()}
        return _named("learning_rate", rates)

    def _mark(self, method: str) -> None:
        try:
            self._module.mark_forward_method(method)
        except (AttributeError, ValueError) as error:
            raise HookError(
                f"`forward_methods` must name methods of the model beside forward, got {method!r}"
            ) from error

    def _backward(self, loss: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        losses = _checked_losses(loss, self.optimizers)
        total: Tensor = sum(losses.values())  # type: ignore[assignment]
        if len(self.optimizers) == 1:
            self._fabric.backward(total)
        else:
            for place, (name, optimizer) in enumerate(self.optimizers.items(), start=1):
                self._fabric.backward(
                    losses[name],
                    inputs=[p for p in _parameters(optimizer) if p.requires_grad],
                    retain_graph=place < len(self.optimizers),  # the losses may share a forward
                )
        values = {"loss": total.detach()}
        if isinstance(loss, Mapping):
            values.update({f"loss/{name}": part.detach() for name, part in losses.items()})
        return values

    def _clip(self, name: str) -> Tensor:
        if self._clip_grad_norm is None:
            gradients = [p.grad for p in _parameters(self.optimizers[name]) if p.grad is not None]
            return torch.nn.utils.get_total_norm(gradients)
        norm = self._fabric.clip_gradients(
            self._module,
            self._steppers[name],
            max_norm=self._clip_grad_norm,
            error_if_nonfinite=False,  # would wait for the device; looked at once an epoch instead
        )
        assert norm is not None  # clip_gradients returns none only when it clips by value
        return norm


def _parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _named(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`kind` for a single value, "kind/name" for each of several."""
    if len(values) == 1:
        return {kind: next(iter(values.values()))}
    return {f"{kind}/{name}": value for name, value in values.items()}


def _checked_losses(loss: Any, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Tensor]:
    several = len(optimizers) > 1
    if several and (not isinstance(loss, Mapping) or loss.keys() != optimizers.keys()):
        got = sorted(loss) if isinstance(loss, Mapping) else f"a {type(loss).__name__}"
        raise HookError(
            f"`compute_loss` must return one loss for each optimizer, {sorted(optimizers)}, "
            f"got {got}"
        )
    losses: Mapping[str, Any] = loss if isinstance(loss, Mapping) else {"": loss}
    if not losses:
        raise HookError("`compute_loss` must return at least one loss, got an empty dict")
    for name, value in losses.items():
        _check_loss(f"`compute_loss`[{name!r}]" if name else "`compute_loss`", value)
    return losses


def _check_loss(name: str, loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise HookError(f"{name} must return a tensor (), got a {type(loss).__name__}")
    if loss.shape != ():
        raise HookError(f"{name} must return a tensor (), got one of shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise HookError(
            f"{name} must return a tensor that depends on trainable parameters, "
            "got one that requires no gradient"
        )


def _make_optimizers(
    task: ReinforcementLearningTask[Any, Any], model: nn.Module, learning_rate: float
) -> dict[str, Optimizer]:
    known = dict.fromkeys([*model.parameters(), *task.parameters()])  # each once, in order
    made = task.get_optimizers(model)
    if made is None:
        trained = [parameter for parameter in known if parameter.requires_grad]
        if not trained:
            raise ConfigurationError(
                f"`model` ({type(model).__name__}) or the task ({type(task).__name__}) must have a "
                "parameter that requires a gradient, got none"
            )
        return {SINGLE: Adam(trained, lr=learning_rate)}
    optimizers = dict(made) if isinstance(made, Mapping) else {SINGLE: made}
    wrong = [value for value in optimizers.values() if not isinstance(value, Optimizer)]
    if wrong or not optimizers:
        raise HookError(
            f"`get_optimizers` must return an Optimizer, a dict of them or None, got {made!r}"
        )
    _check_parameters(optimizers, known)
    return optimizers


def _check_parameters(
    optimizers: Mapping[str, Optimizer], known: Mapping[nn.Parameter, None]
) -> None:
    held = Counter(p for optimizer in optimizers.values() for p in _parameters(optimizer))
    shared = [tuple(parameter.shape) for parameter, count in held.items() if count > 1]
    if shared:
        raise HookError(
            "`get_optimizers` must give each parameter to one optimizer, "
            f"got parameters of shapes {shared} in several"
        )
    strange = [tuple(parameter.shape) for parameter in held if parameter not in known]
    if strange:
        raise HookError(
            "`get_optimizers` must train parameters of the model or of the task, which checkpoints "
            f"hold, got others of shapes {strange}; make them attributes of the task"
        )


def _make_schedulers(
    task: ReinforcementLearningTask[Any, Any], optimizers: Mapping[str, Optimizer]
) -> list[Any]:
    made = task.get_lr_schedulers(optimizers)
    schedulers = list(made) if isinstance(made, Iterable) else [made]
    for scheduler in schedulers:
        missing = [
            n for n in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, n)
        ]
        if missing:
            raise HookError(
                f"`get_lr_schedulers` must return schedules with {', '.join(missing)}(), "
                f"got {scheduler!r}"
            )
    return schedulers
