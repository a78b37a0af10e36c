"""What was collected, and the windows of rows that training draws from it."""

from gymtask.replay.buffer import ReplayBuffer
from gymtask.replay.dataset import ReplayDataset
from gymtask.replay.pieces import EpisodeRecord, MultiReplaySamples, ReplaySamples
from gymtask.replay.priorities import Prioritization

__all__ = [
    "EpisodeRecord",
    "MultiReplaySamples",
    "Prioritization",
    "ReplayBuffer",
    "ReplayDataset",
    "ReplaySamples",
]
