"""Actions that no policy chose: what an off-policy run collects before it trains."""

from __future__ import annotations

import copy

import numpy as np
from gymnasium import spaces

from gymtask.sampling import stream_seed
from gymtask.spaces import ActionCodec
from gymtask.tape import Key
from gymtask.workers.layout import Array

MASK: Key = ("observation", "action_mask")
"""Where observations hold which actions are allowed."""


class RandomActions:
    """Draws from the action space, as its `sample()` does.

    What an environment gets at a step of the run depends on the seed, on its index and on that step
    alone: not on who else is in the batch, and not on what was drawn before. So nothing about it
    needs to be saved.

    Args:
        codec: Of the action space.
        seed: Of the run.
        first_env: The global index of environment 0.
    """

    def __init__(self, codec: ActionCodec, seed: int, first_env: int) -> None:
        self._codec, self._seed, self._first_env = codec, seed, first_env
        self._space = copy.deepcopy(codec.space)  # its generator is not to be anybody else's

    def takes(self, mask: Array) -> bool:
        """Whether that is a mask of the actions: [n, K], or [n, k, K] where frames are stacked."""
        space = self._space
        return isinstance(space, spaces.Discrete) and mask.shape[-1:] == (space.n,)

    def draw(self, env_ids: Array, run_steps: Array, mask: Array | None = None) -> list[Array]:
        """Rows to store, one array [n, *shape] for each leaf of the space.

        Args:
            env_ids: int64 [n].
            run_steps: int64 [n], their steps of the run.
            mask: Which of K actions are allowed, 0 where one is not, [n, K] or [n, k, K], of which
                the newest counts; None allows all.
        """
        samples = []
        allowed = None
        if mask is not None:
            allowed = (mask.reshape(len(mask), -1, mask.shape[-1])[:, -1] != 0).astype(np.int8)
        for row, (index, step) in enumerate(zip(env_ids.tolist(), run_steps.tolist(), strict=True)):
            self._space.seed(stream_seed(self._seed, "warmup", self._first_env + index, step))
            sample = self._space.sample(None if allowed is None else allowed[row])
            samples.append(self._codec.inverse(sample))
        return [np.stack(rows) for rows in zip(*samples, strict=True)]
