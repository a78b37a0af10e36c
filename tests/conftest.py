"""Fixtures that all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws without a display

import pytest
import torch
from hypothesis import settings

from gymtask.workers.launch import server

torch.set_num_threads(1)

# How long an example takes depends on what else the machine does.
settings.register_profile("gymtask", deadline=None)
settings.load_profile("gymtask")

# A shell starts background jobs with Ctrl-C ignored, and programs started from here would inherit
# that; with a handler set, they start with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["sync", "thread", "process"])
def mode(request: pytest.FixtureRequest) -> str:
    """A worker mode; tests that take it run once in each."""
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """Keeps the fork server between pools, so that not every test starts one."""
    server.acquire()
    yield
    server.release()
