"""One training step: loss, backward, clip, step, schedules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import ismethod
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from gymtask.errors import ConfigurationError, HookError
from gymtask.task import ReinforcementLearningTask, State
from gymtask.training.bare import without_wrappers
from gymtask.training.config import TrainerConfig
from gymtask.training.ranks import Ranks

SINGLE = "main"
"""Name of an optimizer that a task did not name."""
FUSED_DEVICES = ("cpu", "cuda")
"""Where torch's fused Adam is known to run."""


class Updater:
    """Trains a model on batches, with the optimizers and schedules of a task.

    With one optimizer a dict of losses is summed. With several, loss `k` is differentiated with
    respect to the parameters of optimizer `k` only, and all of them step after that.

    Args:
        fabric: Does backward and clipping, and knows the device.
        ranks: Those whose gradients are averaged.
        task: Gives `run_model`, `compute_loss`, optimizers and schedules.
        model: Is moved to the device.
        config: Of the trainer.

    Attributes:
        optimizers: By name.
        schedulers: Stepped after each update.
        has_own_adam: Whether the task gave no optimizers.

    Raises:
        ConfigurationError: There is nothing to train.
        HookError: A hook returned something that its contract does not allow.
    """

    def __init__(
        self,
        fabric: Fabric,
        ranks: Ranks,
        task: ReinforcementLearningTask[Any, Any],
        model: nn.Module,
        config: TrainerConfig,
    ) -> None:
        # Methods of a compiled model are compiled through Fabric's wrapper.
        self._fabric: Any = fabric if config.compile else without_wrappers(fabric)
        self._ranks, self._task, self._model = ranks, task, model
        self._clip_grad_norm = config.clip_grad_norm
        compiled: Any = torch.compile(model) if config.compile else model
        self._module: Any = self._fabric.setup_module(compiled)
        ranks.copy_first_(_tensors(task))  # the model's are the same already
        for name in task.forward_methods:
            self._mark(model, name)
        made = task.get_optimizers(model)
        self.has_own_adam = made is None
        self.optimizers = _make_optimizers(task, model, made, config.learning_rate)
        if config.precision == "16-mixed":
            for optimizer in self.optimizers.values():
                # A fused one says that it undoes the scaling of gradients in its step, by itself;
                # Fabric refuses to clip those. So they are unscaled before, like any other's.
                optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        self._steppers: dict[str, Any] = {
            name: self._fabric.setup_optimizers(optimizer)
            for name, optimizer in self.optimizers.items()
        }
        self.schedulers = _make_schedulers(task, self.optimizers)
        self._stepping: set[str] = set()  # optimizers that have a loss in the present update

    def update(self, batches: Sequence[Any], state: State) -> dict[str, Tensor]:
        """Takes one step, in the direction of the mean of the losses of some batches.

        Returns:
            "loss" and "grad_norm" (before clipping), and one of each per name where there are
            several; detached tensors () on the device, which nobody has waited for.

        Raises:
            HookError: `compute_loss` returned no loss that can be minimised.
        """
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        # Gradients are averaged below, not by the wrapper: it takes one backward for each forward,
        # and several losses, or a parameter of the task's, are none of its business.
        self._stepping = set()
        with self._fabric.no_backward_sync(self._module, enabled=self._ranks.size > 1):
            found = [self._differentiate(batch, state, len(batches)) for batch in batches]
        values = found[0] if len(found) == 1 else _means(found)
        self._agree(values)
        self._average_gradients()
        norms = {name: self._clip(name) for name in self.optimizers if name in self._stepping}
        self._require_finite(values["loss"], norms, state)
        for name in norms:
            self._steppers[name].step()
        for scheduler in self.schedulers:
            scheduler.step()
        self._share_buffers()
        values.update(self._named("grad_norm", norms))
        return values

    def _share_buffers(self) -> None:
        """Gives all processes the first one's buffers, as torch's own wrapper does."""
        if self._ranks.size > 1:
            self._ranks.copy_first_(list(self._model.buffers()))

    def _named(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """`kind` for a single optimizer, "kind/name" for each of several."""
        single = len(self.optimizers) == 1
        return {kind if single else f"{kind}/{name}": value for name, value in values.items()}

    def _differentiate(self, batch: Any, state: State, num_batches: int) -> dict[str, Tensor]:
        output = self._task.run_model(self._module, batch, state)
        loss = self._task.compute_loss(self._module, batch, state, output)
        return self._backward(loss, num_batches)

    def _agree(self, values: dict[str, Tensor]) -> None:
        """Has an optimizer step in all processes where it has a loss in one of them."""
        if self._ranks.size == 1 or len(self.optimizers) == 1:
            return
        has_loss = self._ranks.any_each([name in self._stepping for name in self.optimizers])
        self._stepping = {name for name, has in zip(self.optimizers, has_loss, strict=True) if has}
        for name in self._stepping:
            values.setdefault(f"loss/{name}", torch.zeros_like(values["loss"]))

    def _average_gradients(self) -> None:
        if self._ranks.size == 1:
            return
        # Each time anew, as a parameter may be thawed, or added to an optimizer, at any time.
        trained = [each for o in self.optimizers.values() for each in _parameters(o)]
        has_gradient = self._ranks.any_each([parameter.grad is not None for parameter in trained])
        gradients = []
        for parameter, has in zip(trained, has_gradient, strict=True):
            if not has:
                continue
            if parameter.grad is None:  # another process has one
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:  # other rows in each process
                parameter.grad = parameter.grad.to_dense()
            gradients.append(parameter.grad)
        self._ranks.average_(gradients)

    def _require_finite(self, loss: Tensor, norms: Mapping[str, Tensor], state: State) -> None:
        """On the CPU, where it costs nothing: stops before the step that would ruin the model.

        On another device it would wait for it; there, numbers are looked at once an epoch.
        """
        if not loss.is_cpu:
            return
        for name, value in {"loss": loss, **self._named("grad_norm", norms)}.items():
            if not math.isfinite(value):
                raise HookError(
                    f"`{name}` must be finite, got {float(value)} in update {state.num_steps}; the"
                    " model is as it was before this update"
                )

    def learning_rates(self) -> dict[str, float]:
        """The learning rate of each optimizer's first group."""
        rates = {name: float(o.param_groups[0]["lr"]) for name, o in self.optimizers.items()}
        return self._named("learning_rate", rates)

    def _mark(self, model: nn.Module, method: str) -> None:
        if method == "forward" or not ismethod(getattr(model, method, None)):
            raise HookError(
                f"`forward_methods` must name methods of the model beside forward, got {method!r}"
            )
        if isinstance(self._fabric, Fabric):
            self._module.mark_forward_method(method)

    def _backward(
        self, loss: Tensor | Mapping[str, Tensor | None], num_batches: int
    ) -> dict[str, Tensor]:
        """Adds the gradients of one of so many batches."""
        losses = _checked_losses(loss, self.optimizers)
        self._stepping |= losses.keys() if len(self.optimizers) > 1 else self.optimizers.keys()
        total, *others = losses.values()
        for part in others:  # sum() would begin with 0, an operation more to differentiate
            total = total + part
        if len(self.optimizers) == 1:
            self._fabric.backward(total if num_batches == 1 else total / num_batches)
        else:
            for place, (name, part) in enumerate(losses.items(), start=1):
                parameters = _parameters(self.optimizers[name])
                self._fabric.backward(
                    part / num_batches,
                    inputs=[p for p in parameters if p.requires_grad],
                    retain_graph=place < len(losses),  # the losses may share a forward
                )
        values = {"loss": total.detach()}
        if isinstance(loss, Mapping):
            values.update({f"loss/{name}": part.detach() for name, part in losses.items()})
        return values

    def _clip(self, name: str) -> Tensor:
        gradients = [p.grad for p in _parameters(self.optimizers[name]) if p.grad is not None]
        if self._clip_grad_norm is None:
            # Of a sparse one, of an embedding, no norm can be taken.
            dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            return torch.nn.utils.get_total_norm(dense)
        if any(gradient.is_sparse for gradient in gradients):
            raise HookError(
                f"`clip_grad_norm` must be None where gradients are sparse, got"
                f" {self._clip_grad_norm}"
            )
        norm: Tensor | None = self._fabric.clip_gradients(
            self._module,
            self._steppers[name],
            max_norm=self._clip_grad_norm,
            error_if_nonfinite=False,  # would wait for the device; looked at once an epoch instead
        )
        assert norm is not None  # clip_gradients returns none only when it clips by value
        return norm


def _tensors(module: nn.Module) -> list[Tensor]:
    return [value for value in module.state_dict().values() if isinstance(value, Tensor)]


def _parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _means(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Means over batches; as in their gradients, a loss that some of them lack is 0 there."""
    names = dict.fromkeys(name for one in found for name in one)
    listed = {name: [one[name] for one in found if name in one] for name in names}
    return {name: torch.stack(values).sum() / len(found) for name, values in listed.items()}


def _checked_losses(loss: Any, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Tensor]:
    several = len(optimizers) > 1
    if several and (not isinstance(loss, Mapping) or loss.keys() != optimizers.keys()):
        got = sorted(loss) if isinstance(loss, Mapping) else f"a {type(loss).__name__}"
        raise HookError(
            f"`compute_loss` must return one loss for each optimizer, {sorted(optimizers)}, "
            f"got {got}"
        )
    losses: Mapping[str, Any] = loss if isinstance(loss, Mapping) else {"": loss}
    if several:
        losses = {name: value for name, value in losses.items() if value is not None}
    if not losses:
        raise HookError("`compute_loss` must return at least one loss, got none")
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
    task: ReinforcementLearningTask[Any, Any], model: nn.Module, made: Any, learning_rate: float
) -> dict[str, Optimizer]:
    known = dict.fromkeys([*model.parameters(), *task.parameters()])  # each once, in order
    if made is None:
        trained = [parameter for parameter in known if parameter.requires_grad]
        if not trained:
            raise ConfigurationError(
                f"`model` ({type(model).__name__}) or the task ({type(task).__name__}) must have a "
                "parameter that requires a gradient, got none"
            )
        # One kernel in place of a dozen for each parameter. It takes no heed of strides.
        fused = all(
            p.is_floating_point() and p.device.type in FUSED_DEVICES and p.is_contiguous()
            for p in trained
        )
        return {SINGLE: Adam(trained, lr=learning_rate, fused=fused)}
    optimizers = dict(made) if isinstance(made, Mapping) else {SINGLE: made}
    wrong = [value for value in optimizers.values() if not isinstance(value, Optimizer)]
    if wrong or not optimizers:
        raise HookError(
            f"`get_optimizers` must return an Optimizer, a dict of them or None, got {made!r}"
        )
    for optimizer in optimizers.values():
        if isinstance(optimizer, torch.optim.LBFGS):
            raise HookError(
                "`get_optimizers` must return optimizers whose step() needs no closure, got LBFGS"
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
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise HookError(
                "`get_lr_schedulers` must return schedules whose step() needs no metric, got"
                " ReduceLROnPlateau; keep it in the task and step it in on_epoch_end"
            )
        missing = [
            n for n in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, n)
        ]
        if missing:
            raise HookError(
                f"`get_lr_schedulers` must return schedules with {', '.join(missing)}(), "
                f"got {scheduler!r}"
            )
    return schedulers


def check_finite(numbers: Mapping[str, Sequence[float]], first_step: int, num_updates: int) -> None:
    """Looks for the first update that was not finite; the parameters are spoilt from there on.

    Raises:
        HookError: Names the update.
    """
    for place in range(num_updates):
        for name, listed in numbers.items():
            # A task may return some of its losses in some updates only: those are in the sum.
            if len(listed) == num_updates and not math.isfinite(listed[place]):
                raise HookError(
                    f"`{name}` must be finite, got {listed[place]} in update "
                    f"{first_step + place} (counted from 0)"
                )


def endless(dataset: Iterable[Any]) -> Iterator[Any]:
    """Batches of one pass after another.

    Raises:
        HookError: A pass gave none.
    """
    while True:
        batch = None
        for batch in dataset:
            yield batch
        if batch is None:
            raise HookError("`build_rl_dataset` must give at least one batch, got none")
