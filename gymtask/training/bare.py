"""Updates without Fabric's wrappers, where these would have nothing to do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision.precision import Precision
from lightning_fabric.strategies.single_device import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer


class BareFabric:
    """What an update asks of Fabric, for one process and one precision; the results are the same.

    Fabric's wrappers cost about 0.1 ms an update then, as much as a forward pass of a small network
    (`benchmarks/update.py` measures what is left).

    Args:
        device: Of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Moves it to the device."""
        return module.to(self._device)

    def setup_optimizers(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer itself."""
        return optimizer

    def no_backward_sync(self, module: nn.Module, *, enabled: bool) -> AbstractContextManager[None]:
        """Nothing, as there is nobody to wait for."""
        return nullcontext()

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """`loss.backward`."""
        loss.backward(**keywords)  # type: ignore[no-untyped-call]

    def clip_gradients(
        self, module: nn.Module, optimizer: Optimizer, *, max_norm: float, error_if_nonfinite: bool
    ) -> Tensor:
        """Clips those of the optimizer's parameters, and returns their norm before."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        return nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=error_if_nonfinite)


def without_wrappers(fabric: Fabric) -> Fabric | BareFabric:
    """Fabric, or what is as good and cheaper: one device, and numbers as they are."""
    strategy: Any = fabric.strategy
    # Exactly these: those that are derived from them have more to do.
    is_plain = type(strategy) is SingleDeviceStrategy and type(strategy.precision) is Precision
    return BareFabric(fabric.device) if is_plain else fabric
