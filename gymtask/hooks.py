"""The contract of a task: four methods to write, and hooks that may be written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeAlias

from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypeVar

from gymtask.config import ReinforcementLearningTaskConfig
from gymtask.environment import Environment
from gymtask.errors import HookError

ConfigT = TypeVar(
    "ConfigT", bound=ReinforcementLearningTaskConfig, default=ReinforcementLearningTaskConfig
)
ModelT = TypeVar("ModelT", default=nn.Module)
Loss: TypeAlias = "Tensor | dict[str, Tensor] | dict[str, Tensor | None]"
Key: TypeAlias = "str | tuple[str, ...]"


@dataclass
class State:
    """Where a run stands.

    Attributes:
        num_epochs: Epochs finished.
        num_steps: Training steps (updates of the model).
        num_epoch_steps: Training steps in this epoch.
        num_samples: Environment transitions.
        num_epoch_samples: Environment transitions in this epoch.
        elapsed_time: Seconds of training, over all resumed parts of the run.
        phase: What is going on: "collect", "train" or "eval".
    """

    num_epochs: int = 0
    num_steps: int = 0
    num_epoch_steps: int = 0
    num_samples: int = 0
    num_epoch_samples: int = 0
    elapsed_time: float = 0.0
    phase: Literal["collect", "train", "eval"] = "collect"


class TaskHooks(nn.Module, ABC, Generic[ConfigT, ModelT]):
    """The methods of a task that its author writes.

    `ReinforcementLearningTask` adds what they make possible.
    """

    batch_keys: Sequence[Key] | None = None
    forward_methods: ClassVar[Sequence[str]] = ()

    config: ConfigT

    # ---- the four methods to write ---------------------------------------------------------------

    @abstractmethod
    def get_environment(self) -> Environment:
        """Returns the environment of the task."""

    @abstractmethod
    def get_actions(self, model: ModelT, states: TensorDict, optimal: bool) -> Tensor | TensorDict:
        """Chooses an action for each of n environments.

        Called without gradients and with the model in eval mode. `states` is reused by the next
        call: keep a clone.

        Args:
            model: The model.
            states: [n] with "observation", "is_init" (bool), "env_id", "trajectory_id", "step",
                "run_step" (int64) and the keys of `get_initial_carry`.
            optimal: Whether to take the best action or to sample from the policy.

        Returns:
            The actions [n, *shape]: int64 indices from 0 for a Discrete space, the space's own
            units otherwise; or a TensorDict [n] with "action" and whatever else the rows are to
            keep ("log_prob", "logits", ...).
        """

    @abstractmethod
    def run_model(self, model: ModelT, batch: TensorDict, state: State) -> Any:
        """Runs the model on a batch [B, W]; what it returns goes to `compute_loss`."""

    @abstractmethod
    def compute_loss(self, model: ModelT, batch: TensorDict, state: State, output: Any) -> Loss:
        """Returns the loss, a tensor (), or a dict of named losses.

        With one optimizer their sum is minimised. With several there is one loss for each, under
        its name: loss k is differentiated with respect to the parameters of optimizer k alone, so
        that an actor's loss does not move the critics; then all of them step. Where it is None, its
        optimizer takes no step in this update.
        """

    # ---- hooks with a default --------------------------------------------------------------------

    def get_model(self) -> ModelT:
        """Makes the model, for those who load a run without having one. Optional."""
        raise HookError(
            f"{type(self).__name__} must define get_model() to make a model without being given one"
        )

    def get_optimizers(self, model: ModelT) -> Optimizer | dict[str, Optimizer] | None:
        """Makes the optimizer, or several by name.

        None takes Adam with the trainer's `learning_rate`. The names are those that `compute_loss`
        gives its losses.
        """
        return None

    def get_lr_schedulers(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Any]:
        """Makes learning rate schedules; each is stepped after every update."""
        return ()

    def get_values(self, model: ModelT, states: TensorDict) -> Tensor:
        """Estimates the value of M states, float [M]. Optional.

        Fills "state_value" and ("next", "state_value").

        Called once per collection, over all pieces end to end, each followed by its last row's next
        state, without gradients and with the model in eval mode. It looks at rows, not along time.
        """
        raise HookError("get_values is optional and has no default")

    def get_initial_carry(self, model: ModelT) -> TensorDict:
        """The recurrent state at an episode's start, a TensorDict []. Optional.

        Its keys then stand in `states`, and `get_actions` must return all of them under ("next",
        key).
        """
        raise HookError("get_initial_carry is optional and has no default")

    def postprocess_trajectory(self, trajectory: TensorDict) -> TensorDict:
        """Adds to one trajectory [T] or changes it, for example with returns.

        Its length must stay.
        """
        return trajectory

    def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
        """Adds to all trajectories of a collection or changes them.

        Their number, order and lengths must stay. There may be none in a process of a run of
        several, as what is done with all of them, such as updating statistics, is done in each.
        """
        return trajectories

    def epoch_is_over(self, state: State) -> bool:
        """Whether the epoch ends; asked after each update.

        With several processes it ends for all when one of them says so.
        """
        return state.num_epoch_steps >= self.config.dataset.num_update_steps

    def on_epoch_start(self, model: ModelT, state: State) -> None:
        """Called before each collection."""

    def on_update_end(self, model: ModelT, state: State) -> None:
        """Called after each update, when its step is counted."""

    def on_epoch_end(self, model: ModelT, state: State) -> None:
        """Called after an epoch's last update, before logging, evaluation and checkpoint."""
