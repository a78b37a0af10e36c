"""Environments that the tests of worker pools share, and how those tests open pools.

Workers import this module; it must not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from gymtask.config import EnvironmentConfig
from gymtask.maker import EnvironmentMaker
from gymtask.testing import ScriptedEnv
from gymtask.workers.pool import WorkerPool
from gymtask.workers.worker import Steps, make_workers

MODES = ("sync", "thread", "process")
ASYNC_MODES = ("thread", "process")
WORKERS = (1, 2, 5)


def open_pool(
    env: Any = ScriptedEnv,
    mode: str = "sync",
    *,
    envs: int = 2,
    workers: int | None = None,
    seed: int = 0,
    cleanup: float = 5.0,
    daemon: bool = True,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    info_keys: Sequence[str] = (),
    max_episode_steps: int | None = None,
    **kwargs: Any,
) -> WorkerPool:
    """A started pool; one environment per worker if `workers` is None."""
    maker = EnvironmentMaker.create(
        env,
        wrappers=wrappers,
        info_keys=info_keys,
        max_episode_steps=max_episode_steps,
        kwargs=kwargs,
    )
    config = EnvironmentConfig(
        num_envs=envs,
        num_env_workers=workers or envs,
        env_worker_mode=mode,
        env_seed=seed,
        env_cleanup_time=cleanup,
        daemon=daemon,
    )
    return WorkerPool.from_workers(make_workers(maker, config))


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> bool:
    """Whether the condition became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def step_all(pool: WorkerPool, actions: Any = None) -> Steps:
    """One step of every environment."""
    pool.send([0] * pool.num_envs if actions is None else actions)
    return pool.recv(pool.num_envs)


def pids_of(pool: WorkerPool) -> list[int]:
    """The processes of a pool."""
    return [handle.process.pid for handle in getattr(pool, "_handles", [])]


def worker_threads() -> list[str]:
    """Names of the worker threads of this process."""
    return [t.name for t in threading.enumerate() if t.name.startswith("gymtask-worker")]


def assert_all_gone(pids: Sequence[int]) -> None:
    """Checks that these processes, and all worker threads, end within a second."""
    assert wait_for(lambda: not any(map(is_running, pids)), 1.0)
    assert wait_for(lambda: not worker_threads(), 1.0)


def end(pids: Sequence[int]) -> None:
    """Kills what is left of these processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class NumberedEnv(gym.Env[Any, Any]):
    """Knows its number, the seed of its first reset. Episodes have no end."""

    def __init__(self) -> None:
        self.observation_space: Any = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.action_space: Any = spaces.Discrete(10)
        self.number = -1
        self.life = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.number < 0:
            self.number = seed or 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.life += 1
        return self.observe(), 0.0, False, False, {}

    def observe(self) -> Any:
        return np.array([self.number, self.life], np.float32)


class RandomEnv(NumberedEnv):
    """Its observation is a number drawn by its own generator; an episode has two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 1, (), np.float64)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, self.life % 2 == 0, False, info

    def observe(self) -> Any:
        return self.np_random.random()

    def draw_action(self) -> int:
        return int(self.action_space.sample())


class GatedEnv(NumberedEnv):
    """A step returns when the file "<number>-<step>" is there."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        gate = self._folder / f"{self.number}-{self.life + 1}"
        assert wait_for(gate.exists, 60)
        return super().step(action)


class ActionEnv(NumberedEnv):
    """Tells in the info key "kind" what kind of thing it got as an action, and keeps it."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        self.action_space = space
        self.actions: list[Any] = []

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"kind": kind_of(action)}


def kind_of(value: Any) -> Any:
    """The types, dtypes and shapes of a possibly nested value."""
    if isinstance(value, Mapping):
        return type(value).__name__, {key: kind_of(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return type(value).__name__, [kind_of(part) for part in value]
    return type(value).__name__, str(getattr(value, "dtype", "")), np.shape(value)


class InfoEnv(NumberedEnv):
    """Gives a list that grows, an array that it writes again, many bytes, and other things."""

    def __init__(self, num_bytes: int = 10) -> None:
        super().__init__()
        self._history: list[int] = []
        self._array = np.zeros(2)
        self._num_bytes = num_bytes

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, _ = super().step(action)
        self._history.append(self.life)
        self._array[:] = self.number, self.life
        info = {"history": self._history, "array": self._array, "other": object()}
        if self.life % 2 == 0:
            info["even"] = self.life
        info["bytes"] = bytes([self.life % 256]) * self._num_bytes
        return observation, reward, self.life % 3 == 0, False, info


class GravityEnv(NumberedEnv):
    """Its reward is `g`, plus `extra` where somebody set that."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "tags": ["mine"]}  # noqa: RUF012

    def __init__(self, g: float = 0.5, render_mode: str | None = None) -> None:
        super().__init__()
        self.g = g
        self.render_mode = render_mode
        self.num_sums = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, _, _, _ = super().step(action)
        return observation, self.g + getattr(self, "extra", 0.0), False, False, {}

    def add(self, first: float, second: float = 0.0) -> float:
        self.num_sums += 1
        return self.number + first + second

    def give_back(self, value: Any) -> Any:
        return value

    def give_unreadable(self) -> Any:
        return Unreadable()

    def render(self) -> Any:
        return np.full((2, 2, 3), self.number, np.uint8)


class PlainWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """A user's own wrapper, which has an attribute of its own."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.scale = 1.0

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(reward) * self.scale, terminated, truncated, info


class CodeError(Exception):
    """Its constructor takes something else than its `args` say."""

    def __init__(self, code: int, *, name: str) -> None:
        super().__init__(f"code {code} of {name}")
        self.code = code
        self.name = name


class HandleError(Exception):
    """Holds something that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class UnspeakableError(Exception):
    """Cannot be pickled in any way."""

    def __init__(self) -> None:
        super().__init__("unspeakable", threading.Lock())


class FaultyEnv(NumberedEnv):
    """Does something bad in one of its methods.

    Args:
        where: "make", "reset", "step", "call" or "close".
        what: A name of a method below, or "raise:<name of an exception>".
        number: The environment that does it; "make" goes by a count in `counter`.
        after: Steps before it does it in step().
        counter: A file with one line for each environment made.
    """

    def __init__(
        self, where: str, what: str, number: int = 1, after: int = 2, counter: Path | None = None
    ) -> None:
        super().__init__()
        self._fault = (where, what)
        self._bad_number, self._after = number, after
        self.closed_file: Path | None = None
        if where == "make" and counter is not None:
            with counter.open("a") as file:
                file.write("made\n")
            # The first is made to learn the spaces, before there are workers.
            if len(counter.read_text().splitlines()) > 1:
                self._do(what)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None and seed >= 0 and self.number < 0:
            self.number = seed
        self._maybe("reset")
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        if self.life == self._after:
            self._maybe("step")
        return result

    def act_up(self) -> None:
        self._maybe("call")

    def close(self) -> None:
        if self.number >= 0:
            self._maybe("close")
            if self.closed_file is not None:
                self.closed_file.with_suffix(f".{self.number}").touch()

    def _maybe(self, where: str) -> None:
        if self._fault[0] == where and self.number == self._bad_number:
            self._do(self._fault[1])

    def _do(self, what: str) -> None:
        kind, _, name = what.partition(":")
        if kind == "raise":
            raise_named(name)
        getattr(sys.modules[__name__], kind)(*([int(name)] if name else []))


def raise_named(name: str) -> None:
    """Raises one of many exceptions."""
    if name == "value":
        try:
            raise KeyError("the root of it")
        except KeyError as error:
            raise ValueError("boom 1") from error
    if name == "code":
        raise CodeError(3, name="left")
    if name == "handle":
        raise HandleError("boom 1")
    if name == "unspeakable":
        raise UnspeakableError
    if name == "stranger":
        raise stranger()("boom 1")
    if name == "unicode":
        b"\xff".decode("utf8")
    if name == "os":
        os.stat("/nowhere/at/all")
    raise RuntimeError(name)


def stranger() -> type[Exception]:
    """An exception class of a module that only this process has."""
    module: Any = types.ModuleType("only_in_this_process")
    module.Stranger = type("Stranger", (Exception,), {"__module__": module.__name__})
    sys.modules[module.__name__] = module
    kind: type[Exception] = module.Stranger
    return kind


class Unreadable:
    """Can be pickled, and raises when it is read."""

    def __reduce__(self) -> Any:
        return raise_named, ("value",)


def kill(number: int) -> None:
    """Sends a signal to this very process."""
    os.kill(os.getpid(), number)


def leave(code: int) -> None:
    """Ends the process without a word."""
    os._exit(code)


def ask_to_exit(code: int) -> None:
    """What a program's window does when it is closed."""
    sys.exit(code)


def segfault() -> None:
    """What a bad extension module does."""
    ctypes.string_at(0)


def sleep(seconds: int) -> None:
    """A step that takes long."""
    time.sleep(seconds)


def spin() -> None:
    """A step that never lets go of the interpreter's lock."""
    sum(range(10**12))


def nothing(_: Any = None) -> None:
    """Does nothing."""


class ChildrenEnv(NumberedEnv):
    """Starts processes in its first reset, and never ends them."""

    def __init__(self, with_multiprocessing: bool) -> None:
        super().__init__()
        self._with_multiprocessing = with_multiprocessing
        self.pids: list[int] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        if not self.pids:
            self.pids.append(subprocess.Popen(command).pid)
            self.pids.append(subprocess.Popen(command, start_new_session=True).pid)
            if self._with_multiprocessing:
                child = multiprocessing.Process(target=time.sleep, args=(600,))
                child.start()
                assert child.pid is not None
                self.pids.append(child.pid)
        return super().reset(seed=seed)


class MoodyEnv(ChildrenEnv):
    """Environment 1 sleeps in its step, 2 holds the interpreter's lock, 3 has children.

    Each leaves a file once it is at it.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(with_multiprocessing=True)
        self._folder = folder

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed == 3:
            return super().reset(seed=seed)
        return NumberedEnv.reset(self, seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        (self._folder / str(self.number)).touch()
        if self.number == 1:
            time.sleep(600)
        if self.number == 2:
            spin()
        return super().step(action)


class SharedMemoryEnv(NumberedEnv):
    """Makes a named block of shared memory in each reset, and never removes it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._blocks: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        result = super().reset(seed=seed)
        name = f"{self._name}_{self.number}_{len(self._blocks)}"
        self._blocks.append(shared_memory.SharedMemory(name, create=True, size=64))
        return result


class ProbeEnv(NumberedEnv):
    """Tells about the process that it lives in."""

    def modules(self) -> list[str]:
        return sorted(sys.modules)

    def main_names(self) -> list[str]:
        return sorted(vars(sys.modules["__main__"]))

    def environment_variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def pid(self) -> int:
        return os.getpid()

    def num_threads(self) -> int:
        return len(os.listdir("/proc/self/task"))

    def torch_threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def folder(self) -> str:
        return os.getcwd()

    def search_path(self) -> list[str]:
        return sys.path

    def global_noise(self) -> float:
        return float(np.random.random())

    def start_method(self) -> str:
        return multiprocessing.get_start_method()

    def makes(self, env_id: str) -> str:
        env = gym.make(env_id)
        env.close()
        return type(env.unwrapped).__name__
