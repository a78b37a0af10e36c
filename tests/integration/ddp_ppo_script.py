"""examples/ppo.py with its command line; each process writes down what it saw: <OUT>-<rank>.pt."""

from __future__ import annotations

import os
from typing import Any

import torch
from tensordict import TensorDict

import gymtask
from tests.integration.test_off_policy_examples import load_example

ppo: Any = load_example("ppo")
Example: Any = ppo.PPO
seen: dict[str, Any] = {"observations": [], "ids": [], "num_rows": 0, "greedy": None}


class Seen(Example):  # type: ignore[misc]
    def get_model(self) -> Any:
        seen["model"] = super().get_model()
        return seen["model"]

    def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
        rows: Any = torch.cat([*trajectories])
        seen["num_rows"] += len(rows)
        seen["observations"].append(rows["observation"][rows["is_init"]].clone())
        seen["ids"].append(rows["trajectory_id"].unique())
        pieces: list[TensorDict] = super().postprocess_trajectories(trajectories)
        return pieces


def evaluate(*args: Any, **options: Any) -> Any:
    episodes = original(*args, **options)
    if options["optimal"]:
        seen["greedy"] = sum(each.episode_return for each in episodes) / len(episodes)
    return episodes


def main() -> None:
    ppo.main()
    is_spread = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if is_spread else 0
    model = seen.pop("model")
    found = {name: torch.cat(seen.pop(name)) for name in ("observations", "ids")}
    parameters = [parameter.detach() for parameter in model.parameters()]
    torch.save({**seen, **found, "parameters": parameters}, f"{os.environ['OUT']}-{rank}.pt")


if __name__ == "__main__":
    original, gymtask.evaluate = gymtask.evaluate, evaluate
    ppo.PPO = Seen
    main()
