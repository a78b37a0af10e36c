"""Ctrl-C and SIGTERM as a request that a run looks at between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequests:
    """While it is entered, the first signal asks the run to stop; a second one interrupts at once.

    The handlers that were there are put back at the end. Outside the main thread, where Python
    allows no handlers, nothing is changed.

    Attributes:
        signal: Name of the signal that came, "SIGINT" or "SIGTERM"; None before one did.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: a handler that was not installed from Python, and cannot be from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt(f"{signal.Signals(number).name} after {self.signal}")
        self.signal = signal.Signals(number).name
