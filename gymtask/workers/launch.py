"""Starts worker processes, through a fork server that lives as long as some pool needs it.

The standard library's own fork server would import the user's `__main__`; this one does not, so
that scripts without `if __name__ == "__main__"`, notebooks and `python -` work. `__main__` itself
is never altered, and neither are the environment variables and the start method of this process.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import context, forkserver, popen_forkserver, process, reduction, spawn, util
from typing import Any

from gymtask.errors import WorkerDiedError
from gymtask.workers.fork_server import PATIENCE

# One compute thread for each worker, unless the user's environment variables say otherwise; that is
# what OpenBLAS and MKL go by too, where theirs is not set. It must be set before numpy loads its
# linear algebra library, so the server is started with it.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class ForkServer:
    """This process's end of its fork server; the server runs while somebody holds it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.forget()

    def acquire(self) -> None:
        """Keeps the server running until `release` was called as often."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """Lets go; when nobody holds the server any more, it is stopped and waited for."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._stop()

    def fork(self, descriptors: list[int]) -> tuple[int, int]:
        """Asks for a new process that inherits these descriptors.

        Returns:
            What tells its pid and then its exit code, and what it reads what it is to do from.

        Raises:
            WorkerDiedError: The server ended.
        """
        status, theirs = os.pipe()
        data, ours = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._running(), [b"+"], [data, theirs, *descriptors])
        except OSError as error:
            os.close(status)
            os.close(ours)
            raise WorkerDiedError(
                f"the fork server ended while a worker was started: {error}"
            ) from error
        finally:
            os.close(data)
            os.close(theirs)
        return status, ours

    def _running(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._stop()  # somebody killed it
        if self._control is None:
            self._start()
        assert self._control is not None
        return self._control

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = (
            f"import sys; sys.path[:] = {_sys_path()!r};"
            " from gymtask.workers.fork_server import main;"
            f" main({theirs.fileno()}, {os.getpid()})"
        )
        flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            self._process = subprocess.Popen(
                [os.fsdecode(spawn.get_executable()), *flags, "-c", command],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**ONE_THREAD, **os.environ},
                process_group=0,
            )
        self._control = ours

    def _stop(self) -> None:
        if self._control is None or self._process is None:
            return
        self._control.close()
        try:
            self._process.wait(PATIENCE + 0.1)
        except subprocess.TimeoutExpired:  # somebody stopped it, or the machine stands still
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def forget(self) -> None:
        """Begins anew, in a process that was forked from the one whose server it is."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.returncode = 0  # it is no child of this process, to be waited for
        # Nor are the workers, which the standard library would end when this process exits.
        children: set[process.BaseProcess] = getattr(process, "_children", set())
        for child in list(children):
            if isinstance(child, WorkerProcess):
                children.discard(child)
        self._control = self._process = None
        self._holders = 0
        # Reentrant: a pool that is collected as garbage releases the server, at any moment.
        self._lock = threading.RLock()


class _Popen(popen_forkserver.Popen):
    """As the standard one, with our server, and without the order to import `__main__`."""

    _fds: list[int]  # descriptors that the child gets beside its own

    def _launch(self, process_obj: process.BaseProcess) -> None:
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(_preparation(process_obj.name), buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, data = server.fork(self._fds)
        # The other end of this pipe is the child's sentinel of this process.
        kept = os.dup(data)
        self.finalizer = util.Finalize(self, _close_all, (kept, self.sentinel))
        try:
            with open(data, "wb", closefd=True) as file:
                file.write(buffer.getbuffer())
            self.pid = forkserver.read_signed(self.sentinel)
        except (OSError, EOFError) as error:
            self.finalizer()
            raise WorkerDiedError(f"a worker ended while it was started: {error!r}") from error


def _preparation(name: str) -> dict[str, Any]:
    """What the child takes over from this process before it does anything else."""
    prepared = {
        "name": name,
        "authkey": process.current_process().authkey,
        "sys_path": _sys_path(),
        "sys_argv": sys.argv,
    }
    start_method = context._default_context.get_start_method(allow_none=True)  # does not fix it
    if start_method is not None:
        prepared["start_method"] = start_method
    try:
        prepared["dir"] = os.getcwd()
    except FileNotFoundError:  # it was deleted
        return prepared
    return prepared


def _sys_path() -> list[str]:
    original = getattr(process, "ORIGINAL_DIR", None)
    return [original if entry == "" and original else str(entry) for entry in sys.path]


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class WorkerProcess(process.BaseProcess):
    """A process that is forked by the server above."""

    _start_method = None  # what its own children are started with: whatever is the default

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


server = ForkServer()
os.register_at_fork(after_in_child=server.forget)
