"""Where environments stand on the tape.

As long as the environments of a worker, or all of them, step together, they stand at one row, and
what they give is a part of one row of each table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gymtask.workers.layout import Array


class Cursors:
    """The cursor of each of N environments.

    Blocks are all environments, and those of each worker. They are known by the identity of the
    array of their ids, as in the `blocks` of a pool.

    Attributes:
        rows: int64 [N], rows of the tape.
        common: The row at which all stand, -1 where they stand at different ones.
        highest: No row is higher.

    Args:
        rows: Where they are counted.
        all_ids: The ids of all.
        blocks: For the identity of the ids of a block, which slice of all they are.
    """

    def __init__(self, rows: Array, all_ids: Array, blocks: Mapping[int, slice]) -> None:
        self.rows = rows
        self.common = self.highest = -1
        self._all = id(all_ids)
        self._blocks = blocks
        # The row of each block, -1 where its environments stand at different ones. Not kept while
        # `common` is set.
        self._row = dict.fromkeys(blocks, -1)
        # How far the steps of the run are ahead of the rows of a block; None where that differs.
        self._ahead: dict[int, int | None] = dict.fromkeys(blocks)

    def set_all(self, row: int, run_step: Array) -> None:
        """Puts all environments at one row, at these steps of the run (int64 [N])."""
        self.rows[:] = self.common = self.highest = row
        for key, block in self._blocks.items():
            ahead = run_step[block] - row
            self._ahead[key] = int(ahead[0]) if (ahead == ahead[0]).all() else None

    def row_of(self, env_ids: Array) -> int:
        """The row at which all of a block stand, -1 where there is none."""
        if self.common < 0:
            return self._row.get(id(env_ids), -1)
        return self.common if id(env_ids) in self._blocks else -1

    def run_step_of(self, env_ids: Array) -> int:
        """The step of the run at which all of a block stand, -1 where there is none."""
        ahead, row = self._ahead.get(id(env_ids)), self.row_of(env_ids)
        return -1 if ahead is None or row < 0 else row + ahead

    def forget_run_steps(self) -> None:
        """Notes that rows were written that are no steps of the run."""
        self._ahead = dict.fromkeys(self._ahead)

    def place(self, env_ids: Array) -> tuple[Any, Any]:
        """Where they stand, as an index into tables [capacity, N, ...].

        A row and a slice of the columns if they are a block that stands at one row; else rows and
        columns, int64 [n] each.
        """
        row = self.row_of(env_ids)
        return (row, self._blocks[id(env_ids)]) if row >= 0 else (self.rows[env_ids], env_ids)

    def moved(self, env_ids: Array, row: Any) -> None:
        """Notes that some have come to `row`, or to rows [n], as `place` tells it, in `rows`."""
        self.highest += 1
        if self.common >= 0:
            self._row = dict.fromkeys(self._row, self.common)
            self.common = -1
        if type(row) is not int:
            self._row = dict.fromkeys(self._row, -1)
            return
        self._row[id(env_ids)] = self._row[self._all] = row
        if all(other == row for other in self._row.values()):
            self.common = row
        else:
            self._row[self._all] = -1

    def tighten(self) -> None:
        """Lowers `highest` to what it says."""
        self.highest = int(np.max(self.rows))
