"""Whole programs with process pools: how they start, what they leave behind, how they are killed.

Each runs in a process of its own, whose environment carries a mark; what it started is found by it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pool_envs import is_running, wait_for

ROOT = Path(__file__).parents[2]

OPEN = "from tests.integration.pool_envs import *\n"


def with_pools(body: str) -> str:
    """A program that has the environments of the tests and a way to open pools."""
    return OPEN + textwrap.dedent(body)


class Program:
    """A running program and all that it started."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"POOL_TEST_{uuid.uuid4().hex}"
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def start(self, code: str, *, by: str = "file", **environ: str) -> subprocess.Popen[str]:
        """Starts Python code; `by` is how the interpreter gets it: "file", "stdin" or "-c"."""
        code = textwrap.dedent(code)
        script = self.folder / "script.py"
        script.write_text(code)
        how = {"file": [str(script)], "stdin": ["-"], "-c": ["-c", code]}[by]
        self.process = subprocess.Popen(
            [sys.executable, *how],
            stdin=subprocess.PIPE if by == "stdin" else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, self.mark: "1", "PYTHONPATH": str(ROOT), **environ},
            start_new_session=True,
        )
        if by == "stdin":
            assert self.process.stdin is not None
            self.process.stdin.write(code)
            self.process.stdin.close()
            self.process.stdin = None
        return self.process

    def run(self, code: str, *, by: str = "file", seconds: float = 60.0, **environ: str) -> Any:
        """Runs Python code to its end, and gives (exit status, stdout, stderr)."""
        process = self.start(code, by=by, **environ)
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err

    def living(self) -> list[int]:
        """The processes with the mark, without zombies."""
        mark, found = self.mark.encode(), []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    marked = mark in Path(entry.path, "environ").read_bytes()
                except OSError:
                    continue
                if marked and is_running(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition that the running program brings about."""
        process = self.process
        assert process is not None
        ended = wait_for(lambda: condition() or process.poll() is not None)
        if process.poll() is not None:
            pytest.fail(f"the program ended: {process.communicate()}")
        assert ended, [_describe(pid) for pid in self.living()]

    def assert_gone(self, seconds: float) -> None:
        start = time.monotonic()
        while left := self.living():
            assert time.monotonic() - start < seconds, [_describe(pid) for pid in left]
            time.sleep(0.01)


def _describe(pid: int) -> str:
    try:
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text()!r:.150}"
    except OSError:
        return f"{pid}: just gone"


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    for pid in program.living():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if program.process is not None:
        program.process.communicate()


def opened_under(folder: str, pids: list[int]) -> list[str]:
    """Files under a folder that processes have open or mapped."""
    found = []
    for pid in pids:
        try:
            found += [os.readlink(link.path) for link in os.scandir(f"/proc/{pid}/fd")]
            found += Path(f"/proc/{pid}/maps").read_text().split()
        except OSError:
            continue
    return [name for name in found if name.startswith(folder)]


class TestKilledParent:
    @pytest.mark.parametrize("kill", ["process", "group"])
    def test_no_worker_lives_for_a_second(self, program: Program, kill: str) -> None:
        process = program.start(
            with_pools("""
            pool = open_pool(MoodyEnv, "process", envs=4, daemon=False, folder=Path("."))
            pool.reset()
            pool.send([0] * 3, [1, 2, 3])
            time.sleep(600)
            """)
        )
        names = ("1", "2", "3")
        program.wait_until(lambda: all((program.folder / name).exists() for name in names))
        # The program, its fork server and that one's tracker, four workers, three grandchildren.
        program.wait_until(lambda: len(program.living()) == 10)
        assert not opened_under("/dev/shm/", program.living())
        if kill == "group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        program.assert_gone(1.0)

    def test_a_child_that_it_forked_keeps_no_worker_alive(self, program: Program) -> None:
        process = program.start(
            with_pools("""
            pool = open_pool(MoodyEnv, "process", envs=3, folder=Path("."))
            pool.reset()
            child = os.fork()
            if child == 0:
                time.sleep(600)
            pool.send([0, 0], [1, 2])
            print(child, flush=True)
            time.sleep(600)
            """)
        )
        assert process.stdout is not None
        child = int(process.stdout.readline())
        program.wait_until((program.folder / "2").exists)
        process.kill()
        process.wait()
        assert wait_for(lambda: program.living() == [child], 1.0)

    def test_what_environments_left_in_shared_memory_is_removed(self, program: Program) -> None:
        name = f"pool_test_{uuid.uuid4().hex}"
        process = program.start(
            with_pools(f"""
            pool = open_pool(SharedMemoryEnv, "process", envs=2, name={name!r})
            pool.reset()
            print("ready", flush=True)
            time.sleep(600)
            """)
        )
        assert process.stdout is not None
        process.stdout.readline()
        assert len(list(Path("/dev/shm").glob(f"{name}*"))) == 2
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        program.assert_gone(2.0)
        assert not list(Path("/dev/shm").glob(f"{name}*"))


class TestExit:
    @pytest.mark.parametrize("daemon", [True, False])
    @pytest.mark.parametrize(
        ("end", "status"), [("", 0), ("raise RuntimeError('the end')", 1), ("os._exit(4)", 4)]
    )
    def test_a_pool_that_was_not_closed_keeps_nobody_waiting(
        self, program: Program, daemon: bool, end: str, status: int
    ) -> None:
        start = time.monotonic()
        found, out, err = program.run(
            with_pools(f"""
            pool = open_pool(NumberedEnv, "process", envs=4, daemon={daemon})
            pool.reset()
            step_all(pool)
            {end}
            """),
            seconds=10,
        )
        assert time.monotonic() - start < 10
        assert (found, out) == (status, "")
        assert ("RuntimeError: the end" in err) if "raise" in end else (err == "")
        program.assert_gone(1.0)

    @pytest.mark.parametrize("mode", ["thread", "process"])
    def test_not_even_with_a_worker_inside_a_step(self, program: Program, mode: str) -> None:
        status, _, err = program.run(
            with_pools(f"""
            pool = open_pool(FaultyEnv, {mode!r}, where="step", what="sleep:600", after=1)
            pool.reset()
            pool.send([0, 0])
            pool.recv(1)
            """),
            seconds=10,
        )
        assert (status, err) == (0, "")
        program.assert_gone(1.0)

    def test_ctrl_c_reaches_the_program_alone(self, program: Program) -> None:
        process = program.start(
            with_pools("""
            with open_pool(FaultyEnv, "process", where="step", what="sleep:600", cleanup=0.5) as p:
                p.reset()
                step_all(p)
                p.send([0, 0])
                print("ready", flush=True)
                p.recv(2)
            """)
        )
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert err.count("Traceback") == 1
        assert err.rstrip().endswith("KeyboardInterrupt")
        program.assert_gone(1.0)


class TestClose:
    def test_leaves_no_process_thread_descriptor_or_name(self, program: Program) -> None:
        status, out, err = program.run(
            with_pools("""
            def state():
                fds = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{fd}")}
                children = Path("/proc/thread-self/children").read_text().split()
                return sorted(fds.items()), threading.active_count(), children
            before = state(), dict(os.environ), vars(sys.modules["__main__"]).copy()
            for _ in range(6):
                with open_pool(NumberedEnv, "process", envs=3) as pool:
                    pool.reset()
                    step_all(pool)
            del pool, _
            main = {k: v for k, v in vars(sys.modules["__main__"]).items() if k != "before"}
            assert state() == before[0], (state(), before[0])
            assert dict(os.environ) == before[1]
            assert main == before[2]
            multiprocessing.set_start_method("spawn")  # it was not fixed meanwhile
            print("fine")
            """)
        )
        assert (status, out, err) == (0, "fine\n", "")
        program.assert_gone(1.0)

    def test_ends_even_what_left_its_workers_session(self, program: Program) -> None:
        status, out, err = program.run(
            with_pools("""
            other = open_pool(NumberedEnv, "process", envs=1)
            pool = open_pool(ChildrenEnv, "process", with_multiprocessing=True, daemon=False)
            pool.reset()
            pids = [pid for pids in pool.get_attr("pids") for pid in pids]
            pool.close()
            print([is_running(pid) for pid in pids])
            other.close()
            print([is_running(pid) for pid in pids])
            """)
        )
        # Another pool may be using what has a session of its own.
        assert (status, err) == (0, "")
        assert out.splitlines() == [str([False, True, False] * 2), str([False] * 6)]

    def test_ends_in_time_even_if_the_fork_server_stands_still(self, program: Program) -> None:
        status, out, err = program.run(
            with_pools("""
            from gymtask.workers.launch import server
            pool = open_pool(NumberedEnv, "process", cleanup=0.3)
            pool.reset()
            os.kill(server._process.pid, signal.SIGSTOP)
            start = time.monotonic()
            pool.close()
            print(time.monotonic() - start < 1.3)
            """)
        )
        assert (status, out, err) == (0, "True\n", "")
        program.assert_gone(1.0)

    def test_works_in_a_forked_child_which_starts_pools_of_its_own(self, program: Program) -> None:
        status, out, err = program.run(
            with_pools("""
            pool = open_pool(NumberedEnv, "process")
            pool.reset()
            child = os.fork()
            if child == 0:
                del pool
                with open_pool(NumberedEnv, "process") as own:
                    own.reset()
                    step_all(own)
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            print(step_all(pool).observation[:, 1])
            pool.close()
            """)
        )
        assert (status, out, err) == (0, "[1. 1.]\n", "")
        program.assert_gone(1.0)

    def test_a_fork_server_that_was_killed_is_replaced(self, program: Program) -> None:
        status, out, err = program.run(
            with_pools("""
            from gymtask.errors import WorkerDiedError
            from gymtask.workers.launch import server
            pool = open_pool(NumberedEnv, "process")
            pool.reset()
            pids = [handle.process.pid for handle in pool._handles]
            server._process.kill()
            assert wait_for(lambda: not any(map(is_running, pids)))
            try:
                step_all(pool)
            except WorkerDiedError as error:
                print("died")
            pool.close()
            with open_pool(NumberedEnv, "process") as pool:
                pool.reset()
                server._process.kill()
                server._process.wait()
                with open_pool(NumberedEnv, "process") as other:
                    other.reset()
                    print(step_all(other).observation[:, 1])
            """)
        )
        assert (status, out, err) == (0, "died\n[1. 1.]\n", "")
        program.assert_gone(1.0)


NO_GUARD = """
import gymnasium as gym
import numpy as np
from gymtask.config import EnvironmentConfig
from gymtask.maker import EnvironmentMaker
from gymtask.workers.pool import WorkerPool
from gymtask.workers.worker import make_workers

print("main", flush=True)
SIZE = 3
make = EnvironmentMaker.create

class Mine(gym.Env):
    observation_space = gym.spaces.Box(-99, 99, (SIZE,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, scale=1.0):
        self.scale = scale

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(SIZE, np.float32), {}

    def step(self, action):
        return np.full(SIZE, self.scale, np.float32), float(action), False, False, {}

class Half(gym.ObservationWrapper):
    def observation(self, observation):
        return observation / 2

def local():
    factor = 4.0
    def make(scale):
        return Mine(scale * factor)
    return make

def main():
    global LATE
    LATE = 5.0

gym.register("Mine-v0", Mine)
gym.register("MineByName-v0", "__main__:Mine", kwargs={"scale": 2.0})
main()
MODULE_LEVEL = 6.0

def try_all():
    for maker in [
        make(Mine, kwargs={"scale": 1.0}),
        make("Mine-v0", kwargs={"scale": 1.0}),
        make("MineByName-v0"),
        make(lambda: Mine(3.0)),
        make(local(), kwargs={"scale": 1.0}),
        make(lambda: Mine(LATE)),
        make(lambda: gym.make("Mine-v0", scale=MODULE_LEVEL)),
        make(lambda: gym.make("MineByName-v0", scale=7.0)),
        make("Mine-v0", kwargs={"scale": 16.0}, wrappers=[Half, lambda env: Half(env)]),
    ]:
        config = EnvironmentConfig(num_env_workers=2, env_worker_mode=MODE)
        with WorkerPool.from_workers(make_workers(maker, config)) as pool:
            pool.reset()
            pool.send([0, 1])
            steps = pool.recv(2)
            assert steps.reward.tolist() == [0, 1]
            print(steps.observation[1, 0], flush=True)
"""


class TestStart:
    @pytest.mark.parametrize("by", ["file", "stdin", "-c"])
    def test_no_main_guard_is_needed_and_code_of_main_travels(
        self, program: Program, by: str
    ) -> None:
        for mode in ("process", "sync") if by == "file" else ("process",):
            code = f"MODE = {mode!r}\n{NO_GUARD}\ntry_all()\n"
            status, out, err = program.run(code, by=by)
            assert (status, err) == (0, "")
            assert out.split() == [
                "main",
                *["1.0", "1.0", "2.0", "3.0", "4.0", "5.0", "6.0", "7.0", "4.0"],
            ]
        program.assert_gone(1.0)

    def test_a_recipe_that_reaches_a_model_is_refused_before_anything_starts(
        self, program: Program
    ) -> None:
        status, out, err = program.run(
            NO_GUARD
            + """
import torch
from gymtask.errors import MakerError
model = torch.nn.Linear(2, 2)
config = EnvironmentConfig(num_env_workers=2)

class Task(torch.nn.Module):
    scale = 2.0
    def make(self):
        return make(lambda: Mine(self.scale))

for maker in [make(lambda: Mine(model.in_features)), Task().make()]:
    try:
        WorkerPool.from_workers(make_workers(maker, config))
    except MakerError as error:
        print(error)
print(open("/proc/thread-self/children").read() == "")
"""
        )
        assert (status, err) == (0, "")
        lines = out.splitlines()[1:]
        assert "the recipe of <lambda> must not reach a torch Module, got one of type" in lines[0]
        assert "torch.nn.modules.linear.Linear" in lines[0]
        assert "__main__.Task" in lines[1]
        assert lines[2] == "True"

    def test_is_safe_after_torch_has_started_threads(self, program: Program) -> None:
        status, out, err = program.run(
            textwrap.dedent("""\
            import numpy as np, torch, gymnasium as gym
            from tests.integration.pool_envs import NumberedEnv, open_pool

            class TorchEnv(NumberedEnv):
                def step(self, action):
                    weight = torch.ones(64, 64, requires_grad=True)
                    (weight @ weight).sum().backward()
                    assert torch.get_num_threads() == 1
                    return super().step(action)

            torch.set_num_threads(2)
            for _ in range(3):
                matrix = torch.rand(512, 512, requires_grad=True)
                (matrix @ matrix).sum().backward()
                with open_pool(TorchEnv, "process", envs=2) as pool:
                    pool.reset()
                    for _ in range(2):
                        pool.send([0, 0])
                        pool.recv(2)
            assert torch.get_num_threads() == 2
            print("fine")
            """),
            seconds=120,
        )
        assert (status, out, err) == (0, "fine\n", "")

    def test_an_unknown_id_is_gymnasiums_error_once(self, program: Program) -> None:
        status, out, err = program.run(
            textwrap.dedent("""
            from gymtask.maker import EnvironmentMaker
            EnvironmentMaker.create("Pendulum-v0")
            """)
        )
        assert (status, out) == (1, "")
        assert err.count("Traceback") == 1
        assert err.count("DeprecatedEnv: Environment version v0 for `Pendulum` is") == 1
        assert "Please use `Pendulum-v1` instead." in err

    def test_warnings_as_errors_are_no_obstacle(self, program: Program) -> None:
        status, out, err = program.run(
            with_pools("""
            with open_pool(NumberedEnv, "process") as pool:
                pool.reset()
                print(step_all(pool).observation[:, 1])
            """),
            PYTHONWARNINGS="error",
            PYTHONDEVMODE="1",
        )
        assert (status, out, err) == (0, "[1. 1.]\n", "")
