"""The fork server: a small process that forks workers, and never lets one outlive the parent.

It imports once what every worker needs (numpy, gymnasium, the code of workers; no torch, not the
user's `__main__`) and forks a clean child for each request, which is quick, and safe whatever
threads the parent has. It has a process group of its own, so that signals to the parent's process
group do not reach it, and it watches the parent: when that ends, however it ends, the process
groups of all workers are killed. What a dead worker's environments left running is killed too.

The protocol, over a socket pair: a request is one byte with descriptors ``[data, status, ...]``.
The child reads what it is to do from `data`; its pid, and later its exit code, are written to
`status`. The socket's end asks the server to stop.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any, NoReturn

MAX_DESCRIPTORS = 16  # of one request
PATIENCE = 0.4  # seconds that killed processes get to disappear
PRELOAD = (
    "gymtask.workers.worker_main",
    "gymtask.workers.vector_stepper",
    "gymtask.workers.launch",
)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from <sys/prctl.h>


def main(control: int, parent: int) -> NoReturn:
    """The main function of the server process.

    Args:
        control: Descriptor of its end of the socket pair.
        parent: The process that started it.
    """
    # Orphans of workers become children of this process, which kills them when it ends.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # One tracker for all workers: it unlinks what environments leave in /dev/shm, however they end.
    resource_tracker.ensure_running()
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in the children do not touch, and so copy, what is shared with them
    server = _Server(socket.socket(fileno=control), parent)
    server.run()
    os._exit(0)


class _Server:
    """Forks on request, passes exit codes on, and ends with the parent."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._status: dict[int, int] = {}  # pid of a worker → descriptor that takes its exit code
        self._woken, self._wake = os.pipe()
        self._parent = _open_pidfd(parent)
        self._tracker: int | None = getattr(resource_tracker._resource_tracker, "_pid", None)

    def run(self) -> None:
        """Serves until the parent closes its end of the socket, or is gone."""
        for descriptor in (self._woken, self._wake):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the descriptor wakes
        signal.set_wakeup_fd(self._wake)
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._woken, self._parent):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        serving = True
        while serving:
            events = {descriptor for descriptor, _ in poll.poll()}
            if self._woken in events:
                os.read(self._woken, 1 << 16)
                self._reap()
            if self._parent in events:
                break
            if self._control.fileno() in events:
                serving = self._answer()
        self._stop()

    def _answer(self) -> bool:
        """Serves one request; False when there will be no more."""
        try:
            message, descriptors, _, _ = socket.recv_fds(
                self._control, 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return False
        if not message:
            return False
        data, status, *rest = descriptors
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # no more processes: that nobody answers tells the parent
            traceback.print_exc()
            os.close(status)
        else:
            if pid == 0:
                self._become_worker(server, data, status, rest)
            self._status[pid] = status
            _tell(status, pid)
        for descriptor in (data, *rest):
            os.close(descriptor)
        return True

    def _become_worker(self, server: int, data: int, status: int, rest: list[int]) -> NoReturn:
        code = 1
        try:
            # A group of its own, which can be killed with all that its environments start; but the
            # session of all, since the kernel lets `sched_yield` give way within a session alone.
            # Should the server die, the kernel kills the worker, whatever it is doing.
            os.setpgid(0, 0)
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for descriptor in (self._woken, self._wake, self._parent, status):
                if descriptor >= 0:
                    os.close(descriptor)
            for descriptor in self._status.values():
                os.close(descriptor)
            standard: Any = forkserver._forkserver
            standard._inherited_fds = rest  # where the standard library looks them up
            run: Any = spawn._main
            code = run(data, os.dup(data))
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Passes on how workers ended, once nothing is left of their process groups."""
        while True:
            try:
                # Not reaped yet: its number cannot have been given to another process.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            status = self._status.pop(found.si_pid, None)
            if status is not None:
                _kill_group(found.si_pid)
            _, code = os.waitpid(found.si_pid, 0)
            if status is not None:
                _wait_for_group(found.si_pid)
                _tell(status, os.waitstatus_to_exitcode(code))
                os.close(status)

    def _stop(self) -> None:
        """Kills all workers and everything that they left behind."""
        for pid in self._status:
            _kill_group(pid)
        deadline = time.monotonic() + PATIENCE
        while self._kill_orphans() and time.monotonic() < deadline:
            time.sleep(0.002)
            self._reap()
        # Closing its pipe asks the tracker to clean up and end.
        tracker: Any = resource_tracker._resource_tracker
        os.close(tracker._fd)
        while time.monotonic() < deadline and self._children():
            time.sleep(0.002)
            self._reap()

    def _kill_orphans(self) -> bool:
        """Kills every child but the tracker; whether there was one."""
        orphans = [pid for pid in self._children() if pid != self._tracker]
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(orphans or self._status)

    def _children(self) -> list[int]:
        try:
            return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
        except OSError:  # a kernel without that file
            return list(self._status)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # it may not have made its group yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _wait_for_group(group: int) -> None:
    """Waits until the killed members of a group are gone; as orphans they are children of ours."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            time.sleep(0.0005)


def _tell(descriptor: int, number: int) -> None:
    write: Any = forkserver.write_signed
    with contextlib.suppress(BrokenPipeError):  # the parent does not want to know any more
        write(descriptor, number)


def _open_pidfd(parent: int) -> int:
    """A descriptor that becomes readable when the parent is gone; -1 where kernels have none.

    The socket's end tells the same, but not while a child that the parent forked lives on.
    """
    try:
        descriptor = os.pidfd_open(parent)
    except OSError:
        return -1
    if os.getppid() != parent:  # it ended before, and its number may belong to another by now
        os._exit(1)
    return descriptor


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
