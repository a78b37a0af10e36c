"""The processes of a run, and what they tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model together; where there is one, nothing is sent.

    Each method is called by all of them, in the same order.

    Attributes:
        rank: Which of them this is.
        size: How many there are.
        device: Of this process's model.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, fabric: Fabric) -> Ranks:
        """Those that Fabric has started."""
        return cls(fabric.global_rank, fabric.world_size, fabric.device)

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes logs and checkpoints."""
        return self.rank == 0

    def share(self, total: int) -> int:
        """How many of `total` things are this process's; shares differ by at most one."""
        return total // self.size + (self.rank < total % self.size)

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            dist.barrier()

    def largest(self, number: int) -> int:
        """The largest of all numbers."""
        return self._reduced(number, dist.ReduceOp.MAX)

    def total(self, number: int) -> int:
        """The sum of all numbers."""
        return self._reduced(number, dist.ReduceOp.SUM)

    def any(self, flag: bool) -> bool:
        """Whether one of them says so."""
        return bool(self.largest(int(flag)))

    def any_each(self, flags: Sequence[bool]) -> list[bool]:
        """For each place whether one of them says so."""
        tensor = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [bool(flag) for flag in tensor.tolist()]

    def _reduced(self, number: int, operation: Any) -> int:
        if self.size == 1:
            return number
        tensor = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, operation)
        return int(tensor)

    def first(self, value: T) -> T:
        """What the first one has."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, device=self.device)
        return box[0]

    def joined(self, values: Sequence[T]) -> list[T]:
        """What all of them have, one after the other."""
        if self.size == 1:
            return list(values)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, list(values))
        return [value for own in found for value in own]

    def mean(self, numbers: Mapping[str, list[float]]) -> dict[str, list[float]]:
        """Means over all of them, for each place in the lists.

        Where some have no number under a name they are those of the others; where some have fewer
        there is one mean of all.
        """
        if self.size == 1:
            return dict(numbers)
        own = self.joined([numbers])
        means: dict[str, list[float]] = {}
        for name in dict.fromkeys(name for each in own for name in each):
            listed = [each[name] for each in own if name in each]
            if len({len(each) for each in listed}) == 1:
                means[name] = [sum(each) / len(each) for each in zip(*listed, strict=True)]
            else:
                every = [number for each in listed for number in each]
                means[name] = [sum(every) / len(every)]
        return means

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Puts into each tensor the mean of all of them, in one message."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """Puts into each tensor what the first one has in its own."""
        if self.size == 1:
            return
        with torch.no_grad():
            for tensor in tensors:
                for dim, stride in enumerate(tensor.stride()):
                    if stride == 0:  # expanded: one number for all
                        tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
                whole = tensor.contiguous()  # itself, mostly; of a slice, memory of its own
                dist.broadcast(whole, 0)
                tensor.copy_(whole)
