"""Environments of one class that share what they give, or are given the same thing."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv

import gymtask
from gymtask.vector.thread import ThreadVectorEnv
from gymtask.workers.copies import copied, copied_numbers
from tests.integration.pool_envs import MODES, NumberedEnv, open_pool
from tests.integration.vector_envs import AUTORESET, same

SPACES: dict[str, Any] = {
    "Box": spaces.Box(-1, 1000, (2,), np.float32),
    "Text": spaces.Text(8),
    "Sequence": spaces.Sequence(spaces.Discrete(1000)),
    "Graph": spaces.Graph(spaces.Box(-1, 1000, (2,)), None),
}


class SharingEnv(NumberedEnv):
    """All of a process give one dict, with one array in it that is their observation, too."""

    info: dict[str, Any] = {}  # noqa: RUF012
    array = np.zeros(2, np.float32)
    listed: list[Any] = []  # noqa: RUF012

    def __init__(self, space: str = "Box") -> None:
        super().__init__()
        self.kind = space
        self.observation_space = SPACES[space]
        self.given: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.life = 0
        given = (options or {}).pop("given", None)  # gone, for whoever has the same dict
        return self.look(given=given), self.info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.life += 1
        return self.look(), 0.0, self.life == 2 + self.number, False, self.info

    def look(self, **more: Any) -> Any:
        self.info.clear()
        self.array[:] = self.number, self.life
        if self.number % 2:  # the others' is empty, until the next is stepped
            deep = {"array": self.array, "listed": self.listed}
            self.info.update({"number": self.number, "array": self.array, "deep": deep, **more})
        self.listed[:] = [self.number, self.life]
        observations = {
            "Box": self.array,
            "Text": f"{self.number} {self.life}".replace(" ", "x"),
            "Sequence": tuple(self.listed),
            "Graph": spaces.GraphInstance(self.array[None], None, None),
        }
        return observations[self.kind]

    def show(self, values: list[int]) -> Any:
        values.append(self.number)
        self.listed[:] = values
        return self.listed

    def render(self) -> Any:
        self.array[:] = self.number
        return self.array

    def keep(self) -> Any:
        self.given["number"] = self.number
        return self.given


class TestVectorEnvironments:
    @pytest.mark.parametrize("autoreset", AUTORESET)
    @pytest.mark.parametrize(
        ("space", "shared"), [*((name, None) for name in SPACES), ("Box", False)]
    )
    def test_give_each_environment_its_own(self, space: str, shared: Any, autoreset: str) -> None:
        """Whatever the number of workers, as where each has a process of its own."""
        kwargs: dict[str, Any] = {"autoreset_mode": autoreset}
        env_fns = [partial(SharingEnv, space)] * 4
        every: list[Any] = [
            gymtask.ProcessVectorEnv(env_fns, num_workers=count, shared_memory=shared, **kwargs)
            for count in (4, 2, 1)
        ]
        if autoreset != "SameStep":  # where AsyncVectorEnv gives as the end what the reset made
            every.append(AsyncVectorEnv(env_fns, shared_memory=space == "Box", **kwargs))
        expected, *found = [envs.reset(seed=0, options={"given": 3}) for envs in every]
        assert same(expected[1]["_number"], np.array([False, True, False, True]))
        for one in found:
            assert same(one, expected), (one, expected)
        for _ in range(4):
            actions = [0] * 4
            expected, *found = [envs.step(actions) for envs in every]
            for one in found:
                assert same(one, expected), (one, expected)
            ended = expected[2]
            if autoreset == "Disabled" and ended.any():
                for envs in every:
                    envs.reset(options={"reset_mask": ended})
        for envs in every:
            envs.close()

    @pytest.mark.parametrize("space", ["Box", "Text", "Graph"])
    def test_in_one_thread_too(self, space: str) -> None:
        envs = ThreadVectorEnv([partial(SharingEnv, space)] * 4, num_workers=1)
        for life, (observation, *_, infos) in enumerate([envs.reset(seed=0), envs.step([0] * 4)]):
            expected = np.array([[number, life] for number in range(4)], np.float32)
            if space == "Text":
                assert observation == tuple(f"{number}x{life}" for number in range(4))
            elif space == "Graph":
                observation = [graph.nodes[0] for graph in observation]
            if space != "Text":
                assert np.array_equal(observation, expected)
            assert infos["number"].tolist() == [0, 1, 0, 3]
            assert infos["_number"].tolist() == [False, True, False, True]
            for found in (infos["array"], infos["deep"]["array"]):
                assert np.array_equal(found[1::2], expected[1::2])
        envs.close()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["pool", "vector"])
def test_calls_into_processes_share_neither_arguments_nor_results(kind: str, workers: int) -> None:
    opened: Any
    if kind == "pool":
        opened = open_pool(SharingEnv, "process", workers=workers)
        opened.reset()
    else:
        opened = gymtask.ProcessVectorEnv([SharingEnv] * 2, num_workers=workers)
        opened.reset(seed=0)
    with opened if kind == "pool" else closing(opened):
        assert opened.call("show", [7]) == ([7, 0], [7, 1])
        assert opened.call("show", values=[7]) == ([7, 0], [7, 1])
        assert [frame.tolist() for frame in opened.render()] == [[0, 0], [1, 1]]
        opened.set_attr("given", {})
        assert opened.call("keep") == ({"number": 0}, {"number": 1})
        assert opened.get_attr("given") == ({"number": 0}, {"number": 1})


def test_actions_that_go_by_pipe_are_each_environments_own() -> None:
    class Eating(NumberedEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Graph(spaces.Box(-1, 1, (1,)), None)

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            action.nodes[:] += 1
            return self.observe(), float(action.nodes[0, 0]), False, False, {}

    action = spaces.GraphInstance(np.zeros((1, 1), np.float32), None, None)
    envs = gymtask.ProcessVectorEnv([Eating] * 3, num_workers=1)
    envs.reset(seed=0)
    assert envs.step((action,) * 3)[1].tolist() == [1.0, 1.0, 1.0]
    envs.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 2])
def test_pools_give_each_environment_its_own(mode: str, workers: int) -> None:
    if mode == "thread":  # beside each other, they would write into it at once
        workers = 1
    keys = ("number", "deep")
    with open_pool(SharingEnv, mode, envs=4, workers=workers, info_keys=keys) as pool:
        pool.reset()
        pool.send([0] * 4)
        steps = pool.recv(4)
    assert steps.observation.tolist() == [[0, 1], [1, 1], [2, 1], [3, 1]]
    assert [info.get("number") for info in steps.info] == [None, 1, None, 3]
    assert steps.info[1]["deep"]["array"].tolist() == [1, 1]


def test_a_copy_leaves_out_only_what_cannot_be_copied() -> None:
    lock = threading.Lock()
    endless: dict[str, Any] = {"array": np.zeros(1)}
    endless["self"] = endless
    value: dict[str, Any] = {
        "array": np.asfortranarray(np.zeros((2, 3))),
        "objects": np.array([[1]], object),
        "listed": [1],
        "deep": {"listed": [2], "lock": lock, "endless": endless},
        "lock": lock,
    }
    made = copied(value)
    assert made.keys() == value.keys()
    assert made["array"] is not value["array"]
    assert made["array"].flags.f_contiguous
    assert made["listed"] == [1]
    assert made["listed"] is not value["listed"]
    assert made["deep"]["listed"] is not value["deep"]["listed"]
    assert made["deep"]["endless"]["array"] is not endless["array"]
    assert made["lock"] is made["deep"]["lock"] is lock
    numbers = copied_numbers({"deep": {"array": value["array"]}, "listed": value["listed"]})
    assert numbers["deep"]["array"] is not value["array"]
    assert numbers["listed"] is value["listed"]
