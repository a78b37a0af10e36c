"""A task and a model out of a checkpoint, in a process that did not train them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from torch import nn

from gymtask.errors import CheckpointError
from gymtask.task import ReinforcementLearningTask, State
from gymtask.training.checkpoint import find_checkpoint, load_checkpoint, module_problems

AnyTask = ReinforcementLearningTask[Any, Any]
TaskT = TypeVar("TaskT", bound=AnyTask)
ModelT = TypeVar("ModelT", bound=nn.Module)


@overload
def load(path: str | Path, *, task: TaskT, model: ModelT) -> tuple[TaskT, ModelT]: ...
@overload
def load(path: str | Path, *, task: TaskT, model: None = None) -> tuple[TaskT, nn.Module]: ...
@overload
def load(path: str | Path, *, task: None = None, model: ModelT) -> tuple[AnyTask, ModelT]: ...
@overload
def load(path: str | Path) -> tuple[AnyTask, nn.Module]: ...
def load(
    path: str | Path, *, task: AnyTask | None = None, model: nn.Module | None = None
) -> tuple[AnyTask, nn.Module]:
    """Takes task and model from a checkpoint, for evaluation, clips and the like.

    `task, model = gymtask.load("runs/walker/20260101-120000")`, and then
    `gymtask.evaluate(task, model)`.

    The task's class is imported by the module and name that it had (that of a script is
    "__main__": elsewhere its class is imported and given), and made from the config that
    it had; its `get_model()` makes the model. Whatever cannot be found that way must be given.

    Args:
        path: A checkpoint ("<run>/checkpoints/best" is one), or a run directory: its newest one.
        task: Takes what was saved of it; None makes it.
        model: Likewise.

    Returns:
        Both, on the CPU, where they were made here. `task.state` is that of the checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or it is of another task or model; or one of them
            cannot be made here.
    """
    folder = find_checkpoint(path, Path(), None, "path")
    if folder is None:
        raise CheckpointError(
            f"`path` must be a checkpoint folder or a run directory, got {path!r}"
        )
    saved, _ = load_checkpoint(folder)
    if task is None:
        task = _make_task(saved)
    if model is None:
        model = _make_model(task)
    problems = [
        *module_problems("model", model, saved["model"]),
        *module_problems("task", task, saved["task"]),
    ]
    if problems:
        raise CheckpointError(f"{folder} is of another task or model:\n" + "\n".join(problems))
    model.load_state_dict(saved["model"])
    task.load_state_dict(saved["task"])
    task.state = State(**saved["state"])
    task.num_evaluations, task.num_clips = saved["num_evaluations"], saved["num_clips"]
    return task, model


def _make_task(saved: Mapping[str, Any]) -> ReinforcementLearningTask[Any, Any]:
    name, hint = saved["task_class"], "; pass task=... to load()"
    if texts := saved["config_texts"]:
        raise CheckpointError(
            f"`{texts[0]}` must be a number, a string, or lists and dicts of them to be made from a"
            f" checkpoint{hint}"
        )
    kind, config_kind = _imported(name, hint), _imported(saved["config_class"], hint)
    config = _filled(config_kind, saved["config"]["task"], "config")
    try:
        task: Any = kind(config)
    except TypeError as error:
        raise CheckpointError(
            f"`{name}` must be made from its config alone to be loaded, got {error}{hint}"
        ) from error
    if not isinstance(task, ReinforcementLearningTask):
        raise CheckpointError(f"`{name}` must be a ReinforcementLearningTask, got {task!r:.80}")
    return task


def _make_model(task: ReinforcementLearningTask[Any, Any]) -> nn.Module:
    try:
        model = task.get_model()
    except Exception as error:
        raise CheckpointError(
            f"cannot make a model ({type(error).__name__}: {error}); define get_model() in"
            f" {type(task).__name__}, or pass model=... to load()"
        ) from error
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"`get_model` must return a torch.nn.Module, got {model!r:.80}")
    return model


def _imported(name: str, hint: str) -> Any:
    """What "module:qualified.name" says; a script's own names are those of the script that runs."""
    module_name, _, path = name.partition(":")
    try:
        found: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"cannot import `{name}` ({error}){hint}") from error
    return found


def _filled(kind: Any, values: Mapping[str, Any], name: str) -> Any:
    """A config from the plain values that were saved of it."""
    try:
        config = kind()
    except TypeError as error:
        raise CheckpointError(
            f"`{name}` ({kind.__name__}) must have a default for each field to be made from what"
            f" was saved, got {error}; pass task=... to load()"
        ) from error
    known = {item.name for item in fields(config)}
    if unknown := sorted(values.keys() - known):
        raise CheckpointError(
            f"`{name}` must have the fields that were saved, got none of {unknown} in"
            f" {kind.__name__}; pass task=... to load()"
        )
    for key, value in values.items():
        present = getattr(config, key)
        if is_dataclass(present) and isinstance(value, Mapping):
            value = _filled(type(present), value, f"{name}.{key}")
        # Past the __setattr__ of a frozen one, which refuses.
        (object.__setattr__ if kind.__dataclass_params__.frozen else setattr)(config, key, value)
    return config
