"""Measures candidates in turn, each time in a process of its own: A B C A B C ...

The process is forked from this one, which must not have started a thread, so nothing of another
candidate (an idle worker, one that spins) is alive meanwhile: when it has answered, it and all that
it started are killed and waited for. What candidates print is thrown away, unless the environment
variable BENCHMARK_ERRORS is set.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import math
import multiprocessing
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

Metrics = dict[str, float]
Rollout = Callable[[], int]
Close = Callable[[], None]
Build = Callable[[], tuple[Rollout, Close]]

PR_SET_CHILD_SUBREAPER = 36  # from <sys/prctl.h>
CLOSING_TIME = 5.0  # seconds that a candidate gets to close what it opened
TRACKER_TIME = 2.0  # seconds that resource trackers get to remove semaphores and shared memory


@dataclass(frozen=True)
class Candidate:
    """One way to do the work.

    Attributes:
        name: How tables call it.
        measure: Called in the new process; what it measured, and what closes everything.
        needs: Modules that it imports and that gymtask does not depend on.
    """

    name: str
    measure: Callable[[], tuple[Metrics, Close]]
    needs: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What was measured, None for a round without a figure, and why the last one failed."""

    rounds: list[Metrics | None] = field(default_factory=list)
    error: str | None = None
    slow: bool = False


def rate(build: Build, seconds: float) -> tuple[Metrics, Close]:
    """Steps a second of whole rollouts, after a warm-up of 0.3 s that is not counted."""
    start = time.perf_counter()
    rollout, close = build()
    rollout()
    setup = time.perf_counter() - start
    timed(rollout, min(0.3, seconds))
    gc.collect()
    return {"steps_per_second": timed(rollout, seconds), "setup_seconds": setup}, close


def timed(rollout: Rollout, seconds: float) -> float:
    """Steps a second over at least so many seconds."""
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        count += rollout()
    return count / spent


def choose(candidates: Sequence[Candidate], base: str, only: str | None) -> list[Candidate]:
    """Those whose name contains one of the comma-separated words of `only`, and the base."""
    if not only:
        return list(candidates)
    words = [word.strip().lower() for word in only.split(",")]
    for word in words:
        if not any(word in each.name.lower() for each in candidates):
            names = "; ".join(each.name for each in candidates)
            raise SystemExit(f"--only must name candidates, got {word!r}; there are: {names}")
    return [
        each
        for each in candidates
        if each.name == base or any(word in each.name.lower() for word in words)
    ]


def preload(candidates: Sequence[Candidate]) -> None:
    """Imports once, here, what the processes would each import again, and starts no thread."""
    for name in sorted({name for each in candidates for name in each.needs}):
        # What cannot be imported is the candidate's own failure, and reported as such.
        with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
            import_module(name)
    if "tianshou.data" in sys.modules:  # it compiles for seconds when it is first used
        with contextlib.suppress(Exception):
            import_module("tianshou.algorithm.algorithm_base").Policy._compile()
    # TorchRL sets "spawn" when it is imported.
    multiprocessing.set_start_method("fork", force=True)
    gc.collect()
    gc.freeze()  # collections in the candidates' processes need not look at all these modules
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        print(f"warning: {threads} threads run in the process that is forked", file=sys.stderr)


def alternate(
    candidates: Sequence[Candidate],
    rounds: int,
    limit: float = 120.0,
    patience: float = math.inf,
) -> dict[str, Outcome]:
    """Measures every candidate once a round; one that fails is left out of the rounds after.

    Args:
        candidates: What is measured, in this order.
        rounds: How often.
        limit: Seconds after which a measurement without an answer counts as failed.
        patience: A candidate that needs more seconds than this for a round is left out of the
            rounds after, too.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans are waited for here
    outcomes = {each.name: Outcome(error=_missing(each)) for each in candidates}
    for number in range(rounds):
        for each in candidates:
            outcome = outcomes[each.name]
            if outcome.error is not None or outcome.slow:
                outcome.rounds.append(None)
                continue
            start = time.monotonic()
            answer = _measure(each, limit)
            outcome.slow = time.monotonic() - start > patience
            outcome.rounds.append(None if isinstance(answer, str) else answer)
            if isinstance(answer, str):
                outcome.error = answer
        print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return outcomes


def _missing(candidate: Candidate) -> str | None:
    for name in candidate.needs:
        package = name.partition(".")[0]
        if find_spec(package) is None:
            return f"{package} is not installed"
    return None


def _measure(candidate: Candidate, limit: float) -> Metrics | str:
    """Its metrics, or why there are none."""
    ours, theirs = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _be_measured(candidate, theirs)
    os.close(theirs)
    # Beside the pipe, as workers that it forked may hold the other end when it is dead.
    ended = os.pidfd_open(pid)
    try:
        answered = select.select([ours, ended], [], [], limit)[0]
        data = os.read(ours, 1 << 16) if select.select([ours], [], [], 0)[0] else b""
        if answered:  # or dead: then its end of the pipe may be closed a little earlier
            select.select([ended], [], [], CLOSING_TIME)
        code = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    finally:
        os.close(ours)
        os.close(ended)
        _end_children()
    if not data:
        return f"its process ended ({code.si_status})" if code else f"no answer in {limit:g} s"
    answer: Metrics | str = pickle.loads(data)
    return answer


def _be_measured(candidate: Candidate, pipe: int) -> NoReturn:
    """The life of the new process."""
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        if "BENCHMARK_ERRORS" not in os.environ:
            os.dup2(quiet, 2)
        metrics, close = candidate.measure()
        os.write(pipe, pickle.dumps(metrics))
        close()
    except BaseException as error:  # whatever it is, the other candidates are still measured
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        os.write(pipe, pickle.dumps(text))
        traceback.print_exc()
    finally:
        os._exit(0)


def _end_children() -> None:
    """Kills and reaps the candidate's process, and all that it started.

    What a killed process started becomes a child of this one, and so is found in the next turn.
    """
    deadline = time.monotonic() + TRACKER_TIME
    while True:
        for child in _children():
            if time.monotonic() > deadline or not _is_tracker(child):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _children() -> list[int]:
    """Child processes of this one; it has none but those of the candidate."""
    return [int(word) for word in _read(f"/proc/self/task/{os.getpid()}/children").split()]


def _is_tracker(pid: int) -> bool:
    """Whether it is Python's resource tracker, which removes what killed processes left."""
    return "resource_tracker" in _read(f"/proc/{pid}/cmdline")


def _read(path: str) -> str:
    """The text of a file, if it is there."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""
