"""Starts worker processes from a fork server of their own.

A fork server imports what every worker needs once and forks clean children from it: safe after
torch has started threads, and quick. The standard library's own server would import the user's
`__main__`; this one does not, so that scripts without `if __name__ == "__main__"`, notebooks and
`python -` work. `__main__` itself is never altered.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from multiprocessing import (
    context,
    forkserver,
    popen_forkserver,
    process,
    reduction,
    spawn,
    util,
)
from typing import Any

_server = forkserver.ForkServer()
_server.set_forkserver_preload(["gymtask.workers.preload"])


class _Popen(popen_forkserver.Popen):
    """As the standard one, with our server, and without the order to import `__main__`."""

    _fds: list[int]  # descriptors that the child gets beside its own

    def _launch(self, process_obj: process.BaseProcess) -> None:
        prepared: dict[str, Any] = spawn.get_preparation_data(process_obj.name)
        for name in ("init_main_from_name", "init_main_from_path"):
            prepared.pop(name, None)
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(prepared, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, write_end = _server.connect_to_new_process(self._fds)
        # The child watches the other end of this pipe: it closes when this process ends, however it
        # ends.
        parent_end = os.dup(write_end)
        self.finalizer = util.Finalize(self, _close_all, (parent_end, self.sentinel))
        with open(write_end, "wb", closefd=True) as file:
            file.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class WorkerProcess(process.BaseProcess):
    """A process that is started by the fork server above."""

    _start_method = "forkserver"

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...], name: str, daemon: bool
    ) -> None:
        super().__init__(target=target, args=args, name=name, daemon=daemon)

    # The name is the standard library's.
    @staticmethod
    def _Popen(
        process_obj: process.BaseProcess,
    ) -> _Popen:
        return _Popen(process_obj)
