"""Native mode: what infos say of one environment, and of an episode's end."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import gymtask
from gymtask.errors import ObservationError
from gymtask.vector.thread import ThreadVectorEnv
from gymtask.workers.vector_answers import info_of_environment
from tests.integration.native_envs import DriftVectorEnv, Scripts
from tests.integration.pool_envs import open_pool, step_all
from tests.integration.vector_envs import TellingEnv

NEXT, SAME = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        ({"x": np.array(3.5)}, [3.5, 3.5]),
        ({"x": np.float32(3.5)}, [3.5, 3.5]),
        ({"x": 3}, [3, 3]),
        ({"x": np.arange(2)}, [0, 1]),
        ({"x": [4, 5]}, [4, 5]),
        ({"x": np.arange(3)}, [[0, 1, 2]] * 2),
        ({"x": np.arange(2), "_x": np.array([False, True])}, [None, 1]),
        ({"x": np.arange(2), "_x": [False, True]}, [None, 1]),
        ({"x": np.arange(2), "_x": np.array(True)}, [0, 1]),
        ({"x": np.arange(2), "_x": False}, [None, None]),
        ({"x": np.arange(2), "_x": np.array(False)}, [None, None]),
        ({"x": np.arange(2), "_x": "another info"}, [0, 1]),
        ({"x": {"y": np.array(1), "z": np.arange(2)}}, [{"y": 1, "z": 0}, {"y": 1, "z": 1}]),
        ({"x": None}, [None, None]),
        ({}, [None, None]),
    ],
)
def test_what_an_info_says_of_one_environment(infos: dict[str, Any], expected: list[Any]) -> None:
    for index in range(2):
        found = info_of_environment(infos, "x", index, 2)
        assert getattr(found, "tolist", lambda found=found: found)() == expected[index]


def test_an_array_without_dimensions_is_of_all() -> None:
    class Timed(DriftVectorEnv):
        def _infos(self) -> dict[str, Any]:
            return {"time": np.array(3.5)}

    with open_pool(Timed, "native", workers=1, info_keys=("time",)) as pool:
        pool.reset()
        assert step_all(pool, np.zeros((2, 1))).info == [{"time": 3.5}] * 2


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ({"final_obs": np.array(1.0)}, "must hold one observation for each of 2 environments"),
        ({"final_obs": np.zeros((1, 3))}, "must hold one observation for each of 2 environments"),
        ({"final_obs": np.zeros((2, 3)), "_final_obs": np.array(False)}, "got some only"),
    ],
)
def test_final_observations_of_another_form_are_refused(infos: Any, message: str) -> None:
    def change(answer: list[Any]) -> Any:
        return [*answer[:4], infos] if answer[2].any() else answer

    with open_pool(lambda num_envs: Scripts(num_envs, change, mode=SAME), "native", workers=1) as p:
        p.reset()
        step_all(p)
        with pytest.raises(ObservationError, match=message):
            step_all(p)


@pytest.mark.parametrize(
    "kind", [SyncVectorEnv, AsyncVectorEnv, ThreadVectorEnv, gymtask.ProcessVectorEnv]
)
def test_a_reset_that_would_overwrite_final_observations_is_refused(kind: Any) -> None:
    pool = open_pool(
        lambda num_envs: kind([TellingEnv] * num_envs, autoreset_mode=SAME), "native", workers=1
    )
    message = "the info of reset() in"
    with pytest.raises(ObservationError, match=re.escape(message)) as caught:
        pool.reset()
    assert "must not hold 'final_obs', which would take the place of" in str(caught.value)
    assert pool.closed
    with open_pool(
        lambda num_envs: kind([TellingEnv] * num_envs, autoreset_mode=NEXT), "native", workers=1
    ) as pool:
        pool.reset()
        step_all(pool)
