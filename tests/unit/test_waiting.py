"""Waiting for descriptors, and keeping workers on cores of their own."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pytest
from gymnasium import spaces

from gymtask.errors import CollectionInterrupted
from gymtask.workers import spreading, waiting
from gymtask.workers.crew import Crew, is_supported
from gymtask.workers.given_actions import GivenActions
from gymtask.workers.linger import LONGEST_PAUSE, MOST, Linger
from gymtask.workers.queue import LONGEST, SHORTEST, WAIT_SLICE, StepQueue
from gymtask.workers.spreading import LOOK, LOOK_SELDOM, Spreader
from gymtask.workers.waiting import SPIN, Waiter


@pytest.fixture(params=[True, False], ids=["polls", "blocks"])
def waiter(request: pytest.FixtureRequest) -> Iterator[Waiter]:
    made = Waiter(request.param)
    yield made
    made.close()


@pytest.fixture
def event() -> Iterator[int]:
    descriptor = os.eventfd(0)
    yield descriptor
    os.close(descriptor)


class TestWaiter:
    def test_tells_who_has_something_to_say(self, waiter: Waiter, event: int) -> None:
        waiter.watch(event)
        assert waiter.poll(0.0) == []
        os.eventfd_write(event, 1)
        assert [descriptor for descriptor, _ in waiter.poll()] == [event]
        assert waiter.poll(0.0) != []
        os.eventfd_read(event)
        assert waiter.poll(0.0) == []
        os.eventfd_write(event, 1)
        waiter.ignore(event)
        assert waiter.poll(0.0) == []

    @pytest.mark.parametrize("seconds", [SPIN / 4, 0.05])
    def test_waits_as_long_as_it_is_told(self, waiter: Waiter, event: int, seconds: float) -> None:
        waiter.watch(event)
        started = time.monotonic()
        assert waiter.poll(seconds) == []
        assert time.monotonic() - started >= seconds / 2
        timer = threading.Timer(seconds, os.eventfd_write, (event, 1))
        timer.start()
        assert waiter.poll()
        timer.join()

    def test_stops_polling_when_waits_are_long_and_begins_again(
        self, event: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pauses = []
        monkeypatch.setattr(waiting, "num_cores", lambda: 2)
        monkeypatch.setattr(os, "sched_yield", lambda: pauses.append(1))
        waiter = Waiter()
        waiter.watch(event)
        for _ in range(8):
            waiter.poll(2 * waiting.LONGEST)
        pauses.clear()
        waiter.poll(2 * SPIN)
        assert not pauses
        for _ in range(100):
            threading.Timer(SPIN / 10, os.eventfd_write, (event, 1)).start()
            waiter.poll()
            os.eventfd_read(event)
            if pauses:
                break
        assert pauses
        waiter.close()

    def test_never_polls_with_one_core(self, event: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(waiting, "num_cores", lambda: 1)
        monkeypatch.setattr(os, "sched_yield", pytest.fail)
        waiter = Waiter()
        waiter.watch(event)
        assert waiter.poll(SPIN) == []
        waiter.close()


class TestSpreader:
    @pytest.fixture
    def moved(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[int]]]:
        """What affinities were set, on a machine with four cores."""
        calls: list[tuple[int, set[int]]] = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: calls.append((pid, cores)))
        monkeypatch.setattr(spreading, "make_getcpu", lambda: lambda: 3)
        return calls

    def test_moves_who_shares_a_core_and_binds_nobody(
        self, moved: list[tuple[int, set[int]]]
    ) -> None:
        Spreader(may_spin=True).look([(10, 0), (11, 0), (12, 1)])
        assert moved == [(11, {2}), (11, {0, 1, 2, 3})]

    def test_counts_the_waiting_process_where_that_polls_too(
        self, moved: list[tuple[int, set[int]]]
    ) -> None:
        Spreader(may_spin=False).look([(10, 3)])
        assert not moved
        Spreader(may_spin=True).look([(10, 3)])
        assert [pid for pid, _ in moved] == [10, 10]

    def test_looks_less_often_where_it_does_not_last(
        self, moved: list[tuple[int, set[int]]]
    ) -> None:
        spreader = Spreader(may_spin=False)
        assert not spreader.count(LOOK - 1)
        assert spreader.count(1)
        for _ in range(20):
            spreader.look([(10, 0), (11, 0)])
        assert not spreader.count(LOOK_SELDOM - 1)
        spreader.look([(10, 0), (11, 1)])
        assert spreader.count(LOOK)


class TestGivenActions:
    def test_keep_the_dtype_in_which_they_were_given(self) -> None:
        space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})
        memory = memoryview(bytearray(GivenActions.nbytes(space, 2)))
        ours, theirs = (GivenActions(space, 2, memory) for _ in range(2))
        for dtype in (np.float64, np.float32, np.float16):
            given = np.array([[0.1, 0.2], [0.3, 0.4]], dtype)
            assert ours.write({"a": given, "b": [1, 2]})
            for index in range(2):
                read = theirs.reader()(index)
                assert read["a"].dtype == dtype
                assert np.array_equal(read["a"], given[index])
                assert read["b"] == index + 1

    @pytest.mark.parametrize(
        "actions", [3, "ab", [1], [1, 2, 3], [[1], [2]], [None, None], ["a", "b"], [1, [2]]]
    )
    def test_refuse_what_is_no_batch_of_numbers(self, actions: object) -> None:
        space = spaces.Discrete(5)
        memory = memoryview(bytearray(GivenActions.nbytes(space, 2)))
        given = GivenActions(space, 2, memory)
        assert not given.write(actions)
        assert given.write([3, 4])
        assert given.reader()(1) == 4


class FakeHandle:
    """A worker that was last on some core, and notes when it is told to step and waited for."""

    def __init__(self, index: int, core: int, calls: list[tuple[str, int]]) -> None:
        self.env_ids, self.queued, self.core = [index], [index], [core]
        self.running: list[int] = []
        self.calls = calls

    def wait(self, timeout: float) -> list[tuple[int, int]]:
        self.calls.append(("wait", self.env_ids[0]))
        return [(self.env_ids[0], select.POLLIN)]


@pytest.mark.skipif(not is_supported(), reason="worker processes need Linux")
@pytest.mark.parametrize("here", [0, 1])
def test_who_shares_the_callers_core_is_told_last_and_waited_for_first(
    here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymtask.workers.crew.num_cores", lambda: 2)
    monkeypatch.setattr("gymtask.workers.crew.make_getcpu", lambda: lambda: here)
    crew, calls = Crew([[0], [1]], 0), list[tuple[str, int]]()
    handles: Any = [FakeHandle(index, index, calls) for index in (0, 1)]
    crew.handles += handles

    def step(handle: Any) -> None:
        calls.append(("step", handle.env_ids[0]))
        handle.running, handle.queued = handle.queued, []

    monkeypatch.setattr(crew, "step", step)
    crew.begin(handles)
    assert crew.poll(0.1, for_all=True) == [(here, select.POLLIN), (1 - here, select.POLLIN)]
    assert calls == [("step", 1 - here), ("step", here), ("wait", here), ("wait", 1 - here)]
    for handle in handles:  # told one after the other, both are waited for all the same
        handle.running, handle.queued = [], [handle.env_ids[0]]
    crew.begin(handles[:1])
    crew.begin(handles[1:])
    assert len(crew.poll(0.1, for_all=True)) == 2
    crew._waiter.close()
    os.close(crew._descriptor)


class TestLinger:
    def test_waits_as_long_as_it_pays(self) -> None:
        linger = Linger()
        for _ in range(50):
            assert linger.is_wanted()
            linger.learn(True, 0.001)
        assert linger.usual == pytest.approx(0.001, rel=0.01)

    def test_a_hiccup_does_not_end_it(self) -> None:
        linger = Linger()
        for number in range(100):
            assert linger.is_wanted()
            linger.learn(number % 5 != 4, 0.001)

    def test_tries_again_ever_more_seldom_where_it_fails(self) -> None:
        linger, tries = Linger(), 0
        for _ in range(10_000):
            if linger.is_wanted():
                tries += 1
                linger.learn(False, 0.001)
        assert 10 <= tries <= 20

    def test_soon_sees_that_things_have_changed(self) -> None:
        linger = Linger()
        for _ in range(1000):
            if linger.is_wanted():
                linger.learn(True, 0.001)
        tries = 0
        for _ in range(100):
            if linger.is_wanted():
                tries += 1
                linger.learn(False, 0.001)
        assert tries <= MOST + 2


class Slow(StepQueue):
    """Of two environments the first finishes when somebody waits, the other never."""

    def __init__(self) -> None:
        super().__init__([[0], [1]])
        self._linger = Linger()
        self.waits: list[float] = []  # for all

    def _post(self, env_ids: Any) -> None:
        self.quick = 0 in env_ids.tolist()

    def _wait(self, timeout: float, for_all: bool = False) -> None:
        self.waits += [timeout] if for_all else []
        if self.quick:
            self._ready.append(0)
            self.quick = False

    def _give_up(self, error: KeyboardInterrupt) -> NoReturn:
        raise error


class Both(StepQueue):
    """Two environments that finish whenever somebody waits, `apart` seconds one from the other."""

    def __init__(self, apart: float) -> None:
        super().__init__([[0], [1]])
        self._linger = Linger()
        self._linger.learn = self._learn  # type: ignore[method-assign]
        self.learned: list[bool] = []
        self._apart = apart
        self._posted: list[int] = []

    def _learn(self, paid: bool, seconds: float) -> None:
        self.learned.append(paid)

    def _spread(self) -> float:
        return self._apart

    def _post(self, env_ids: Any) -> None:
        self._posted += env_ids.tolist()

    def _wait(self, timeout: float, for_all: bool = False) -> None:
        self._ready, self._posted = [*self._ready, *self._posted], []

    def _give_up(self, error: KeyboardInterrupt) -> NoReturn:
        raise error


class TestLingeringInAQueue:
    @pytest.mark.parametrize("timeout", [0.0, 0.001, 0.05])
    def test_never_takes_longer_than_the_timeout(self, timeout: float) -> None:
        queue = Slow()
        queue.post(queue.all_ids)
        for _ in range(5):
            assert queue.take(2, 2, timeout, spare=30.0).tolist() == [0]
            queue.post(np.array([0]))
        assert all(seconds <= timeout for seconds in queue.waits)
        assert bool(queue.waits) == (timeout > 0.0)

    def test_looks_at_the_interrupt_as_often_as_ever(self) -> None:
        queue = Slow()
        queue.post(np.array([1]))
        queue.interrupt = lambda: True
        with pytest.raises(CollectionInterrupted):
            queue.take(1, 2, None, spare=30.0)
        with pytest.raises(CollectionInterrupted):
            queue.take(1, 2, 30.0, spare=30.0)
        assert queue.waits == [WAIT_SLICE] * 2

    def test_sets_no_alarm_that_comes_before_the_kernels_next_tick(self) -> None:
        queue = Slow()
        queue.post(queue.all_ids)
        queue.take(1, 2, None, spare=1e-5)
        assert queue.waits == [SHORTEST]

    def test_learns_from_steps_alone_that_began_together(self) -> None:
        # One that waits for its fellow finishes far from it, however alike they are.
        queue = Both(apart=0.001)
        for spare, paid in ((0.01, True), (0.0001, False), (0.01, True)):
            queue.post(np.array([0]))
            queue.post(np.array([1]))
            assert queue.take(1, 2, None, spare).tolist() == [0, 1]
            queue.post(queue.all_ids)
            assert queue.take(1, 2, None, spare).tolist() == [0, 1]
            assert queue.learned.pop() is paid
            assert not queue.learned

    def test_one_that_never_comes_counts_against_it_even_if_it_began_elsewhen(self) -> None:
        queue = Slow()
        queue.post(np.array([0]))
        queue.post(np.array([1]))
        queue.quick = True
        for _ in range(LONGEST_PAUSE):
            assert queue.take(1, 2, None, spare=0.01).tolist() == [0]
            queue.post(np.array([0]))
        assert len(queue.waits) <= 2 * LONGEST_PAUSE.bit_length()

    def test_tries_take_no_longer_however_many_fail(self) -> None:
        queue = Slow()
        queue._linger = Linger()
        queue._linger.usual = 1.0
        queue.post(queue.all_ids)
        queue.take(1, 2, None, spare=0.01)
        assert queue.waits == [pytest.approx(LONGEST * 0.01)]

    def test_is_of_use_with_a_timeout_too(self) -> None:
        queue = Slow()
        queue.post(queue.all_ids)
        queue.take(1, 2, 0.1, spare=0.02)
        assert queue.waits == [0.02]
