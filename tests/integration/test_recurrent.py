"""Recurrent policies: where their state begins, is kept and goes on, and windows of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import gymtask
from gymtask.errors import ConfigurationError, HookError
from gymtask.recurrent import after_burn_in, unroll
from gymtask.testing import ScriptedEnv
from tests.tasks import make_task

LENGTHS = (7, 4, 9)
FIRST = 0.25  # the state at an episode's start; not 0, so that a forgotten one shows


def make_model(seed: int = 0) -> nn.LSTMCell:
    torch.manual_seed(seed)
    return nn.LSTMCell(3, 4)


def features(observation: Tensor) -> Tensor:
    return observation / torch.tensor([100.0, 1.0, 1.0])


def recurrent_hooks(**change: Any) -> dict[str, Any]:
    """An LSTM that acts by its output, so that what follows depends on all that it saw."""

    def get_initial_carry(self: Any, model: nn.LSTMCell) -> TensorDict:
        return TensorDict({"hidden": torch.full((4,), FIRST), "cell": torch.full((4,), FIRST)})

    def get_actions(self: Any, model: nn.LSTMCell, states: TensorDict, optimal: bool) -> TensorDict:
        carry = states["hidden"], states["cell"]
        hidden, cell = model(features(states["observation"]), carry)
        content = {"action": (hidden[:, 0] > hidden[:, 1]).long(), "output": hidden}
        content["next"] = {"hidden": hidden, "cell": cell}
        return TensorDict(content, batch_size=[len(states)])

    def get_environment(self: Any) -> gymtask.Environment:
        return gymtask.Environment(lambda: ScriptedEnv(LENGTHS))

    hooks = {"get_initial_carry": get_initial_carry, "get_actions": get_actions}
    return {**hooks, "get_environment": get_environment, **change}


def make_recurrent(mode: str = "sync", **change: Any) -> gymtask.ReinforcementLearningTask:
    return make_task(num_envs=3, workers=2, mode=mode, **recurrent_hooks(**change))


def collections(
    task: gymtask.ReinforcementLearningTask, model: nn.Module, *totals: int, **options: Any
) -> list[gymtask.MultiReplaySamples]:
    with task.get_worker_pool() as pool:
        return [
            task.collect_samples(model, pool, total, use_tqdm=False, **options) for total in totals
        ]


def episodes_of(rows: TensorDict) -> list[TensorDict]:
    """The rows of each episode in order of time, from its first on."""
    order = (rows["trajectory_id"] * 1000 + rows["step"]).argsort()
    rows = rows[order]
    counts = rows["trajectory_id"].unique_consecutive(return_counts=True)[1].tolist()
    episodes = list(rows.split(counts))
    assert all(bool(episode["is_init"][0]) for episode in episodes)
    return episodes


def pass_over(model: nn.LSTMCell, observation: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden and cell states [T + 1] of a pass over a whole episode [T]."""
    carry = torch.full((1, 4), FIRST), torch.full((1, 4), FIRST)
    states = [carry]
    with torch.no_grad():
        for row in features(observation):
            carry = model(row.unsqueeze(0), carry)
            states.append(carry)
    hidden, cell = zip(*states, strict=True)
    return torch.cat(hidden), torch.cat(cell)


def assert_carries_are_those_of_whole_passes(model: nn.LSTMCell, rows: TensorDict) -> None:
    for episode in episodes_of(rows):
        for key, states in zip(
            ("hidden", "cell"), pass_over(model, episode["observation"]), strict=True
        ):
            torch.testing.assert_close(episode[key], states[:-1])
            torch.testing.assert_close(episode["next", key], states[1:])


# ---- collection, evaluation, clips -------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"min_batch_size": 1, "max_batch_size": 2}, {"min_batch_size": 3},
     {"max_trajectory_length": 3}, {"allocation": "first_come"}],
    ids=["defaults", "partial", "whole", "short pieces", "first come"],
)  # fmt: skip
def test_stored_carries_are_those_of_a_pass_over_each_whole_episode(
    mode: str, options: dict[str, Any]
) -> None:
    model, task = make_model(), make_recurrent(mode)
    first, second, third = collections(task, model, 40, 2, 71, **options)
    rows = torch.cat([each.to_tensordict() for each in (first, second, third)])
    assert len(rows) == 113
    assert any(not bool(piece.samples["is_init"][0]) for piece in second)  # cut and gone on with
    assert len(rows["action"].unique()) == 2
    assert_carries_are_those_of_whole_passes(model, rows)


def test_values_see_the_carry_of_each_state_and_the_one_that_follows_an_end() -> None:
    task = make_recurrent(get_values=lambda self, model, states: states["hidden"][:, 0])
    for samples in collections(task, make_model(), 40, 31):
        rows = samples.to_tensordict()
        torch.testing.assert_close(rows["state_value"], rows["hidden"][:, 0])
        torch.testing.assert_close(rows["next", "state_value"], rows["next", "hidden"][:, 0])
        ended = rows["next", "done"]
        assert ended.any()
        assert (rows["next", "hidden"][ended] != FIRST).all()


def test_evaluation_begins_anew_with_each_episode_and_leaves_collection_alone(mode: str) -> None:
    seen: list[TensorDict] = []
    plain = recurrent_hooks()["get_actions"]

    def get_actions(self: Any, model: Any, states: TensorDict, optimal: bool) -> Any:
        answer = plain(self, model, states, optimal)
        if self.state.phase == "eval":
            seen.append(states.clone().update({"next": answer["next"]}))
        return answer

    model, task = make_model(), make_recurrent(mode, get_actions=get_actions)
    with task.get_worker_pool() as pool:
        parts = [task.collect_samples(model, pool, 20, use_tqdm=False)]
        records = gymtask.evaluate(task, model, num_episodes=7)
        parts.append(task.collect_samples(model, pool, 25, use_tqdm=False))
    rows = torch.cat(seen)
    assert len(episodes_of(rows)) == len(records) == 7
    assert_carries_are_those_of_whole_passes(model, rows)
    assert_carries_are_those_of_whole_passes(
        model, torch.cat([part.to_tensordict() for part in parts])
    )


def test_clips_hand_the_carry_on_from_an_initial_one() -> None:
    model, task = make_model(), make_recurrent()
    for _ in range(2):
        rows = task.sample_clip(model=model, return_images=False, return_states=True)
        assert len(rows) in LENGTHS
        for key, states in zip(
            ("hidden", "cell"), pass_over(model, rows["observation"]), strict=True
        ):
            torch.testing.assert_close(rows[key], states[:-1])
            torch.testing.assert_close(rows["next", key], states[1:])


# ---- windows -----------------------------------------------------------------------------------


def run_windows(model: Any, batch: TensorDict, **options: Any) -> Tensor:
    inputs, carries = features(batch["observation"]), (batch["hidden"], batch["cell"])
    return unroll(model, inputs, carries, batch["is_init"], **options)


@pytest.mark.parametrize("burn_in", [0, 2])
@pytest.mark.parametrize("window", [3, 4])
def test_windows_give_the_outputs_of_a_pass_over_the_whole_episode(
    window: int, burn_in: int
) -> None:
    model, task = make_model(), make_recurrent()
    for samples in collections(task, model, 47, 52):
        dataset = gymtask.ReplayDataset(samples, window, 1, 8, replacement=False)
        batches = torch.cat(list(dataset))
        assert {0, 1, 5} <= set(batches["step"][:, 0].tolist())
        output = run_windows(model, batches, burn_in=burn_in)
        torch.testing.assert_close(output.detach(), batches["output"])
        single = unroll(
            lambda inputs, carry: model(inputs, carry),  # neither an nn.LSTMCell
            features(batches["observation"]),
            (batches["hidden"], batches["cell"]),
            batches["is_init"],
        )
        assert torch.equal(single, output)


def test_windows_of_a_buffer_go_on_where_a_later_collection_did() -> None:
    model, task = make_model(), make_recurrent()
    buffer = gymtask.ReplayBuffer(200, seed=0)
    for samples in collections(task, model, 10, 11, 40):
        buffer.extend(samples)
    batch = buffer.sample(200, clip_size=4)
    output = run_windows(model, batch)
    torch.testing.assert_close(output.detach(), batch["output"])
    padded = buffer.sample(200, clip_size=8, pad=True)
    real = padded["mask"]
    assert not real.all()
    torch.testing.assert_close(run_windows(model, padded).detach()[real], padded["output"][real])


def test_other_parameters_give_another_state_but_where_the_episode_began() -> None:
    """A stored state is old, while one that is computed from an episode's start is not."""
    (samples,) = collections(make_recurrent(), make_model(), 60)
    model = make_model(1)
    batch = torch.cat(list(gymtask.ReplayDataset(samples, 4, 1, 8, replacement=False)))
    output, found = run_windows(model, batch).detach(), 0
    for episode in episodes_of(samples.to_tensordict()):
        hidden, _ = pass_over(model, episode["observation"])
        mine = batch["trajectory_id"][:, 0] == episode["trajectory_id"][0]
        for start, outputs in zip(batch["step"][mine, 0].tolist(), output[mine], strict=True):
            wanted = hidden[start + 1 : start + 5]
            assert torch.allclose(outputs, wanted, atol=1e-6) == (start == 0)
            found += start == 0
    assert found


# ---- unroll alone --------------------------------------------------------------------------------


def make_windows(num: int = 5, length: int = 6) -> dict[str, Tensor]:
    torch.manual_seed(3)
    is_init = torch.zeros(num, length, dtype=torch.bool)
    is_init[0, 0] = is_init[1, 2] = is_init[2, 3] = is_init[2, 5] = True
    carries = torch.randn(num, length, 4)
    carries[is_init] = FIRST
    return {
        "inputs": torch.randn(num, length, 3, requires_grad=True),
        "carries": carries.requires_grad_(),
        "is_init": is_init,
    }


def by_hand(cell: nn.GRUCell, windows: dict[str, Tensor], first: int = 0) -> list[Tensor]:
    """The outputs of each window, row by row, from row `first` on or its episode's start."""
    outputs = []
    for inputs, carries, is_init in zip(*windows.values(), strict=True):
        carry, rows = carries[0], []
        for t in range(len(inputs)):
            carry = cell(inputs[t], carries[t] if is_init[t] else carry)
            if t < first and not is_init[: t + 1].any():
                carry = carry.detach()
            rows.append(carry)
        outputs.append(torch.stack(rows))
    return outputs


def test_rows_with_is_init_begin_anew_inside_a_window_too() -> None:
    cell, windows = nn.GRUCell(3, 4), make_windows()
    output = unroll(cell, **windows)
    assert output.shape == (5, 6, 4)
    torch.testing.assert_close(output, torch.stack(by_hand(cell, windows)))
    # Nothing flows over an episode's start, forwards or backwards.
    (gradient,) = torch.autograd.grad(output[2, 3:].sum(), windows["inputs"])
    assert (gradient[2, :3] == 0).all()
    assert (gradient[2, 3:] != 0).any(-1).all()


@pytest.mark.parametrize("burn_in", [0, 1, 3, 5])
def test_no_gradient_comes_from_or_through_burn_in(burn_in: int) -> None:
    cell, windows = nn.GRUCell(3, 4), make_windows()
    counts = after_burn_in(windows["is_init"], burn_in)
    output = unroll(cell, **windows, burn_in=burn_in)
    torch.testing.assert_close(output, unroll(cell, **windows))
    asked = [windows["inputs"], windows["carries"], *cell.parameters()]
    found = torch.autograd.grad(output.square().sum(), asked)
    wanted = torch.stack(by_hand(cell, windows, burn_in)).square()
    for mine, other in zip(found, torch.autograd.grad(wanted.sum(), asked), strict=True):
        torch.testing.assert_close(mine, other)
    assert ((found[0] != 0).any(-1) == counts).all()
    assert (found[1][3:] != 0).any() == (burn_in == 0)  # the stored state is no leaf of these


def test_rows_count_after_burn_in_or_since_their_episode_began() -> None:
    found = after_burn_in(make_windows()["is_init"], 3)
    wanted = ["111111", "001111", "000111", "000111", "000111"]
    assert [["01"[one] for one in row] for row in found.tolist()] == [list(row) for row in wanted]
    assert after_burn_in(make_windows()["is_init"], 0).all()


def test_a_carry_may_be_a_tensordict_and_a_cell_any_function() -> None:
    windows = make_windows()
    sums = TensorDict({"sum": windows["carries"][..., :3], "count": torch.zeros(5, 6)}, [5, 6])

    def add(inputs: Tensor, carry: TensorDict) -> tuple[Tensor, TensorDict]:
        following = TensorDict(
            {"sum": carry["sum"] + inputs, "count": carry["count"] + 1}, carry.batch_size
        )
        return following["sum"] / following["count"].unsqueeze(-1), following

    output = unroll(add, windows["inputs"], sums, windows["is_init"], burn_in=2)
    inputs, start = windows["inputs"], windows["carries"][..., :3]
    torch.testing.assert_close(output[3, 5], (start[3, 0] + inputs[3].sum(0)) / 6)
    torch.testing.assert_close(output[1, 3], (start[1, 2] + inputs[1, 2:4].sum(0)) / 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"burn_in": 6}, "`burn_in` must be less than W = 6, got 6"),
        ({"burn_in": -1}, "`burn_in` must be"),
        ({"is_init": torch.zeros(5, 6)}, "`is_init` must be bool"),
        (
            {
                "inputs": torch.zeros(5, 0, 3),
                "carries": torch.zeros(5, 0, 4),
                "is_init": torch.zeros(5, 0, dtype=torch.bool),
            },
            r"`is_init` must have one row a window at least, got \[5, 0\]",
        ),
        ({"carries": torch.zeros(5, 4)}, r"`carries` must begin with .*\[5, 6\], got \[5, 4\]"),
        ({"carries": (torch.zeros(5, 6, 4), torch.zeros(4, 6, 4))}, "`carries` must begin"),
        ({"inputs": torch.zeros(5, 7, 3)}, r"`inputs` must begin .* got \[5, 7, 3\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        unroll(nn.GRUCell(3, 4), **{**make_windows(), **change})


@pytest.mark.parametrize("answer", [lambda i, c: None, lambda i, c: (i, (c, c)), lambda i, c: [i]])
def test_a_cell_that_returns_something_else_is_refused(answer: Any) -> None:
    with pytest.raises(HookError, match="the cell must return its next carry"):
        unroll(answer, **make_windows())
