"""From rows of a ring to batches: next observations, frame stacks and n-step rewards by link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from gymtask.replay.links import Links
from gymtask.replay.records import Path, RecordLayout, is_below, nested
from gymtask.workers.layout import Array

REWARD: Path = ("next", "reward")
LARGEST = 1 << 31  # bytes of one element of a numpy array, and more


@dataclass(frozen=True)
class Reading:
    """What a batch shows.

    Attributes:
        n_step: Rewards that are summed up for a row.
        gamma: The factor between one of them and the next.
        frame_stack: Observations that are stacked; None shows single ones, without an axis.
    """

    n_step: int = 1
    gamma: float = 1.0
    frame_stack: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it shows rows as they are stored."""
        return self.n_step == 1 and self.frame_stack is None

    @property
    def history(self) -> int:
        """Rows before a row that its observation is made of."""
        return (self.frame_stack or 1) - 1


class Reader:
    """Reads batches of rows.

    Args:
        links: Which row follows which.
        layout: What the records hold.
        records: The records of the rows.
        side: The states that rows without a successor lead to, by side slot.
        reading: What a batch shows.
        keys: Keys that it shows, with all that lies below them; None for all.
    """

    def __init__(
        self,
        links: Links,
        layout: RecordLayout,
        records: Array,
        side: Array,
        reading: Reading,
        keys: Sequence[Path] | None = None,
    ) -> None:
        self._links, self._layout, self._reading = links, layout, reading
        self._records, self._side = records, side
        self._fields, self._linked = list(layout.fields.values()), layout.linked
        if keys is not None:
            self._fields = [field for field in self._fields if is_below(field.path, keys)]
            self._linked = [field for field in self._linked if is_below(field.next_path, keys)]
        self._names = [(field.path, field.name) for field in self._fields]

    def reads(self, records: Array, side: Array, reading: Reading) -> bool:
        """Whether it reads these tables so."""
        return self._records is records and self._side is side and self._reading is reading

    def read(
        self,
        rows: Array,
        *,
        consecutive: bool = False,
        mask: Array | None = None,
        more: Mapping[Path, Array] | None = None,
    ) -> TensorDict:
        """The batch of some rows, which shares no memory with the ring.

        Args:
            rows: int64 [B, W].
            consecutive: Whether each row of a window is the successor of the one before.
            mask: bool [B, W]: which of them count; the others become 0, and "mask" tells.
            more: What else the batch is to hold, [B, W, ...].
        """
        records = self._records.take(rows)
        values: dict[Path, Array] = {path: records[name] for path, name in self._names}
        last = rows
        if self._reading.n_step > 1:
            last = self._sum_rewards(rows, values)
        if self._linked:
            self._add_states(records, rows, last, values, consecutive and last is rows)
        if self._reading.frame_stack is not None:
            self._stack_observations(rows, last, values)
        if mask is not None:
            for array in values.values():
                array[~mask] = 0
            values["mask",] = mask.copy()
        return self._batch(values, more, rows.shape)

    def _batch(
        self, values: dict[Path, Array], more: Mapping[Path, Array] | None, shape: tuple[int, ...]
    ) -> TensorDict:
        if more is not None:
            values.update(more)
        if not self._layout.reinterpreted:
            return nested(values, shape)
        tensors = {path: torch.from_numpy(array) for path, array in values.items()}
        for path, dtype in self._layout.reinterpreted.items():
            if path in tensors:
                tensors[path] = tensors[path].view(dtype)
        return nested(tensors, shape)

    # ---- windows that lie whole in the ring ------------------------------------------------------

    def lie_whole(self, starts: Array, width: int) -> bool:
        """Whether windows of consecutive rows lie side by side, with a row behind each.

        Those of one row take as long otherwise.
        """
        return (
            self._links.is_even
            and self._reading.is_plain
            and self._records.itemsize * (width + 1) < LARGEST
            and int(starts.max()) + width < self._links.capacity
        )

    def read_whole(
        self, starts: Array, width: int, more: Mapping[Path, Array] | None = None
    ) -> TensorDict:
        """What `read` gives for windows that lie whole, at two thirds of the time.

        A window and the row behind it, which holds the state that it leads to, are copied as one
        piece of memory; the pieces overlap where they are copied from::

            ring          | r4 | r5 | r6 | r7 | r8 |
            of width 2         [ r5   r6   r7 ]           starts on r5
                                    [ r6   r7   r8 ]      starts on r6
        """
        size = self._records.itemsize
        every = np.ndarray(
            self._links.capacity - width,
            np.dtype((np.void, size * (width + 1))),
            buffer=self._records.view(np.uint8),
            strides=(size,),  # the next piece begins one record further
        )
        pieces = every[starts].view(self._records.dtype).reshape(len(starts), width + 1)
        records = pieces[:, :-1]
        values: dict[Path, Array] = {path: records[name] for path, name in self._names}
        if self._linked:
            ended, slots = self._links.side_slots(starts + (width - 1))
            for field in self._linked:
                # A copy, as what is done to observations in place is not to change the next ones.
                states = pieces[field.name][:, 1:].copy()
                if len(slots):
                    states[ended, -1] = self._side[field.name][slots]
                values[field.next_path] = states
        return self._batch(values, more, (len(starts), width))

    # ---- states ----------------------------------------------------------------------------------

    def _add_states(
        self, records: Array, rows: Array, last: Array, values: dict[Path, Array], consecutive: bool
    ) -> None:
        """Adds the states that the rows `last` lead to."""
        following = self.states_after(last[:, -1:] if consecutive else last)
        for field in self._linked:
            states = following[field.name]
            if consecutive and rows.shape[1] > 1:
                states = np.concatenate([records[field.name][:, 1:], states], axis=1)
            values[field.next_path] = states

    def _stack_observations(self, rows: Array, last: Array, values: dict[Path, Array]) -> None:
        """Puts stacks of frames in the place of single ones."""
        count = self._reading.history
        history = self._links.lead_up(rows, count)
        before_next = history if last is rows else self._links.lead_up(last, count)
        for field in self._layout.fields.values():
            if field.path[0] != "observation":
                continue
            if field.path in values:
                values[field.path] = self._records[field.name][history]
            path = field.next_path
            if path in values:
                # What is seen next: the last frames but for the oldest, and the new one.
                stacked = self._records[field.name][before_next]
                stacked[:, :, :-1] = stacked[:, :, 1:].copy()
                stacked[:, :, -1] = values[path]
                values[path] = stacked

    def states_after(self, rows: Array) -> Array:
        """Records of the shape of `rows` whose linked fields are the states that they lead to."""
        links = self._links
        found = self._records.take(links.following(rows), mode="wrap")
        ended, slots = links.side_slots(rows)
        if len(slots):
            for field in self._layout.linked:
                found[field.name][ended] = self._side[field.name][slots]
        return found

    # ---- n-step rewards --------------------------------------------------------------------------

    def _sum_rewards(self, rows: Array, values: dict[Path, Array]) -> Array:
        """Sums up the rewards of up to n rows, and gives the last of these rows, int64 [B, W].

        Everything under "next" is then what that row holds, and ("next", "discount") the power of
        gamma with which the value of the state after it counts.
        """
        n_step, gamma = self._reading.n_step, self._reading.gamma
        reward = self._layout.fields[REWARD]
        rewards = self._records[reward.name]
        total = reward.numbers(rewards[rows])
        discount = np.full(rows.shape, gamma)
        links = self._links
        last, goes_on = rows, np.ones(rows.shape, bool)
        for _ in range(n_step - 1):
            goes_on = goes_on & ~links.is_last.take(last)  # else an end, or a cut
            last = np.where(goes_on, links.following(last) % links.capacity, last)
            total += np.where(goes_on, discount * reward.numbers(rewards[last]), 0.0)
            discount = np.where(goes_on, discount * gamma, discount)
        records = self._records.take(last)
        for field in self._fields:
            if field.path[0] == "next":
                values[field.path] = records[field.name]
        if REWARD in values:
            values[REWARD] = reward.bits(total)
        values["next", "discount"] = discount.astype(np.float32)
        return last
