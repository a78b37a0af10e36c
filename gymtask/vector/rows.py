"""What `step` and `reset` of a vector environment hand out: batches, and infos of all rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeAlias

import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from gymtask.workers.layout import Array, nest
from gymtask.workers.slots import Slots
from gymtask.workers.vector_stepper import Row, VectorProgram

AddInfo: TypeAlias = "Callable[[dict[str, Any], dict[str, Any], int], dict[str, Any]]"
Rows: TypeAlias = "Mapping[int, Row]"


class Batches:
    """Puts together what the environments wrote to the slots, and what they said beside it.

    Attributes:
        observation: The observations of all environments, arranged as the batched space is: the
            arrays of the slots themselves, if their space has a fixed shape.
    """

    def __init__(self, program: VectorProgram, slots: Slots) -> None:
        self._program, self._slots = program, slots
        self._shared = program.shares_observations
        self._ends = program.autoreset_mode.value == "SameStep"
        self._last: list[Any] = [None] * program.num_envs  # what did not come through the slots
        self.observation: Any = (
            nest(slots.observation_space, slots.observation)
            if self._shared
            else create_empty_array(program.observation_space, n=program.num_envs, fn=np.zeros)
        )

    def observations(self, rows: Rows, *, copy: bool) -> Any:
        """The observations after a step or a reset; copies are the caller's own."""
        if self._shared:
            if not copy:
                return self.observation
            slots = self._slots
            return nest(slots.observation_space, [leaf.copy() for leaf in slots.observation])
        for index, row in rows.items():
            self._last[index] = row.observation
        space = self._program.observation_space
        self.observation = concatenate(space, self._last, self.observation)
        return deepcopy(self.observation) if copy else self.observation

    def outcome(self) -> tuple[Array, Array, Array]:
        """Rewards float64 [N], terminations and truncations bool [N], as the caller's own."""
        slots = self._slots
        return slots.reward.copy(), slots.terminated.copy(), slots.truncated.copy()

    def infos(self, rows: Rows, add: AddInfo) -> dict[str, Any]:
        """The infos in Gymnasium's format; `add` puts one among those of other environments."""
        infos: dict[str, Any] = {}
        for index in sorted(rows):
            infos = add(infos, rows[index].info, index)
        return infos

    def step_infos(
        self, rows: Rows, terminated: Array, truncated: Array, add: AddInfo
    ) -> dict[str, Any]:
        """The infos of a step, with those of the episodes that SAME_STEP mode has ended."""
        if not self._ends:
            return self.infos(rows, add) if rows else {}
        ended = np.flatnonzero(terminated | truncated).tolist()
        if not ended and not rows:
            return {}
        infos: dict[str, Any] = {}
        for index in sorted({*rows, *ended}):
            row = rows.get(index) or Row({})
            info = row.info
            if terminated[index] or truncated[index]:
                last = {"final_info": row.final_info or {}, "final_obs": self._final(index, row)}
                info = {**last, **info}
            infos = add(infos, info, index)
        return infos

    def _final(self, index: int, row: Row) -> Any:
        if not self._shared or row.final_observation is not None:
            return row.final_observation
        slots = self._slots
        copies = [leaf[index].copy() for leaf in slots.final_observation]
        return nest(slots.observation_space, copies)
