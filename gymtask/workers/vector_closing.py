"""How a `VectorEnv` is closed in time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from gymnasium.vector import AsyncVectorEnv, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

AnyVectorEnv = VectorEnv[Any, Any, Any]


def close_vector_env(env: AnyVectorEnv, timeout: float, *, broken_off: bool = False) -> None:
    """Closes a VectorEnv, within `timeout` seconds where processes or threads run it.

    One that runs in the calling thread takes as long as it takes.

    Args:
        env: It, with its wrappers.
        timeout: Seconds after which processes are killed, and threads abandoned.
        broken_off: Whether one of its calls was broken off, anywhere.
    """
    inner: Any = env.unwrapped
    if hasattr(inner, "close_limit"):  # gymtask's own
        inner.close_limit = timeout
    if not isinstance(inner, AsyncVectorEnv):
        env.close()
        return
    late = threading.Event()
    killer = threading.Timer(timeout, _kill, (inner.processes, late))
    killer.daemon = True
    killer.start()
    try:
        if broken_off or inner._state != AsyncState.DEFAULT:
            _terminate(inner)
        env.close()  # its wrappers too
    except (EOFError, OSError):  # a worker is gone
        if not late.is_set():
            raise
    finally:
        if not inner.closed:
            _terminate(inner)
        killer.cancel()
        killer.join()


def _terminate(env: AsyncVectorEnv[Any, Any]) -> None:
    # Of what is pending it would first read the answers. Some may have been read already, or by
    # half, and for those it would wait for ever.
    env._state = AsyncState.DEFAULT
    env.close(terminate=True)


def _kill(processes: Sequence[BaseProcess], late: threading.Event) -> None:
    late.set()
    for process in processes:
        with contextlib.suppress(ValueError, AttributeError):  # it was closed meanwhile
            process.kill()
