"""Numbers that a task logs, until a row of metrics tells their means."""

from __future__ import annotations

from torch import Tensor

from gymtask.errors import HookError


class LoggedNumbers:
    """What was logged since the last row, by column."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[Tensor | float]] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        """Adds a number; a tensor is read when somebody asks for the means.

        Raises:
            HookError: It is a tensor of several numbers.
        """
        if not isinstance(value, Tensor):
            value = float(value)
        elif value.numel() != 1:
            raise HookError(
                f"`value` of log({name!r}) must be one number, got a tensor of shape"
                f" {tuple(value.shape)}"
            )
        else:
            value = value.detach().clone()  # a parameter changes in place
        self._numbers.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        """The means, which begin anew."""
        numbers = self.state_dict()
        self._numbers = {}
        return {name: sum(listed) / len(listed) for name, listed in numbers.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """All numbers."""
        return {name: list(map(float, listed)) for name, listed in self._numbers.items()}

    def load_state_dict(self, saved: dict[str, list[float]]) -> None:
        """Takes over what `state_dict` gave."""
        self._numbers = {name: list(listed) for name, listed in saved.items()}
