"""Every error that gymtask raises on its own account.

    GymtaskError
    ├── ConfigurationError (ValueError)   a bad value in a config or an argument
    │   ├── SpaceError                    a space that cannot be stored
    │   └── MakerError                    an environment that cannot be made, or sent to a worker
    ├── ActionError (ValueError)          what get_actions returned does not fit the action space
    ├── HookError (ValueError)            another hook of a task returned something it must not
    ├── WindowError (ValueError)          no window of the asked length exists
    ├── ObservationError (ValueError)     what an environment returned does not fit its space
    ├── CheckpointError (RuntimeError)    a checkpoint that is missing, damaged or of another task
    ├── ReplayError (RuntimeError)        the disk cannot hold a replay buffer, or it is damaged
    ├── PoolStateError (RuntimeError)     a call that the pool's state does not allow
    │   ├── PoolClosedError               ... because it is closed
    │   └── NothingPendingError           ... because no step was asked for
    ├── WorkerDiedError (RuntimeError)    a worker process ended without being asked to
    ├── EpisodeError (RuntimeError)       a recorded episode is damaged, or does not repeat itself
    ├── VideoError (RuntimeError)         a film could not be encoded
    └── CollectionInterrupted             a collection was asked to stop between two steps

An exception raised inside an environment reaches the caller as itself, with a note that names the
environment; when it comes from a process, its cause is a `WorkerTraceback` that holds the text of
the traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class GymtaskError(Exception):
    """Base class of all errors of gymtask."""


class ConfigurationError(GymtaskError, ValueError):
    """A value in a config, or an argument of a public function, breaks its rule."""


class SpaceError(ConfigurationError):
    """A space has no fixed shape, or is of a kind that cannot be stored in arrays."""


class MakerError(ConfigurationError):
    """An environment cannot be made, or its recipe cannot travel to a worker."""


class ActionError(GymtaskError, ValueError):
    """What `get_actions` returned does not fit the action space; no environment has moved."""


class HookError(GymtaskError, ValueError):
    """A hook of a task returned something that its contract does not allow."""


class WindowError(GymtaskError, ValueError):
    """No trajectory is long enough for one window."""


class ObservationError(GymtaskError, ValueError):
    """An environment returned an observation that does not fit its own observation space."""


class ReplayError(GymtaskError, RuntimeError):
    """The disk cannot hold a replay buffer, or a saved one is missing or damaged."""


class CheckpointError(GymtaskError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another task."""


class PoolStateError(GymtaskError, RuntimeError):
    """The state of a worker pool does not allow the call."""


class PoolClosedError(PoolStateError):
    """The worker pool is closed."""


class NothingPendingError(PoolStateError):
    """Rows were asked for although no environment was sent an action."""


class WorkerDiedError(GymtaskError, RuntimeError):
    """A worker process ended without being asked to.

    The message names it, its environments and the signal.
    """


class EpisodeError(GymtaskError, RuntimeError):
    """A recorded episode cannot be read, or was another one when it was played again."""


class VideoError(GymtaskError, RuntimeError):
    """A film could not be encoded; the message ends with what the encoder said."""


class CollectionInterrupted(GymtaskError):
    """A collection was asked to stop and did so between two steps.

    The rows stepped stay with the pool.
    """


class WorkerTraceback(Exception):
    """The traceback of an exception raised in a worker process, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def note_others(
    error: BaseException, others: Sequence[tuple[int, BaseException]], otherwise: str
) -> None:
    """Lets an exception tell what else was raised.

    Args:
        error: The exception.
        others: The rest, each with the environment that raised it, or -1.
        otherwise: Who raised it where that is not known, such as "closing the pool then".
    """
    for env_id, other in others:
        who = f"environment {env_id} also" if env_id >= 0 else otherwise
        error.add_note(f"{who} raised {type(other).__name__}: {other}")


class CutReturnWarning(UserWarning):
    """A return over a cut episode lacks the value of what follows, and is too low."""
