"""examples/ppo.py: what it logs, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Categorical

import gymtask
from gymtask.training.logs import read_rows
from tests.integration.test_off_policy_examples import load_example

ppo: Any = load_example("ppo")

SETTINGS = gymtask.SamplingConfig(num_epoch_samples=64)


def train(run_dir: Path, task: Any) -> list[dict[str, float]]:
    torch.manual_seed(0)
    config = gymtask.TrainerConfig(
        SETTINGS, str(run_dir), clip_grad_norm=0.5, accelerator="cpu", eval_interval=1
    )
    gymtask.Trainer(config).train(task, task.get_model())
    return read_rows(run_dir / "metrics.csv")


def make_config() -> Any:
    config = ppo.PPOConfig(max_epochs=3, learning_rate=0.05)
    config.dataset.num_update_steps, config.train_dl.batch_size = 6, 32
    return config


def test_metrics_tell_of_episodes_losses_speed_time_and_how_far_the_policy_moved(
    tmp_path: Path,
) -> None:
    rows = train(tmp_path, ppo.PPO(make_config()))
    assert len(rows) == 3
    parts = ("collect", "train", "eval")
    wanted = {
        *("episode/return_mean", "episode/length_mean", "eval/return_mean", "learning_rate"),
        *("loss", "loss/policy", "loss/value", "loss/entropy", "grad_norm", "samples_per_second"),
        *("explained_variance", "kl", "clip_fraction"),
        *(f"{kind}/{part}" for kind in ("seconds", "time_share") for part in parts),
    }
    for row in rows:
        assert wanted - row.keys() <= {"episode/return_mean", "episode/length_mean"}
        assert 0 < sum(row[f"time_share/{part}"] for part in parts) <= 1
        assert all(np.isfinite(list(row.values())))


def test_kl_clip_fraction_and_explained_variance_are_what_they_are_called(tmp_path: Path) -> None:
    class Watched(ppo.PPO):  # type: ignore[misc]
        def postprocess_trajectories(self, trajectories: list[TensorDict]) -> list[TensorDict]:
            pieces: list[TensorDict] = super().postprocess_trajectories(trajectories)
            rows: Any = torch.cat([*pieces])
            target, value = rows["value_target"].numpy(), rows["state_value"].numpy()
            explained.append(1 - np.var(target - value) / np.var(target))
            return pieces

        def compute_loss(self, model: Any, batch: TensorDict, state: Any, output: Any) -> Any:
            new = output[0].detach().double().numpy()
            ratio = np.exp(new - batch["log_prob"].double().numpy())
            found.append((ratio - 1 - np.log(ratio), np.abs(ratio - 1) > self.config.clip_coef))
            return super().compute_loss(model, batch, state, output)

    explained: list[float] = []
    found: list[Any] = []
    rows = train(tmp_path, Watched(make_config()))
    for epoch, row in enumerate(rows):
        kl, is_clipped = map(np.stack, zip(*found[6 * epoch : 6 * epoch + 6], strict=True))
        assert row["explained_variance"] == pytest.approx(explained[epoch], rel=1e-3, abs=1e-4)
        assert row["kl"] == pytest.approx(kl.mean(), rel=1e-2, abs=1e-6)
        assert row["clip_fraction"] == pytest.approx(is_clipped.mean(), abs=1e-6)
    assert rows[-1]["kl"] > 0
    assert max(row["clip_fraction"] for row in rows) > 0


def test_log_probabilities_and_entropies_are_those_of_torchs_categorical() -> None:
    model = ppo.PPO(make_config()).get_model()
    logits, action = 3 * torch.randn(7, 1, 2).double(), torch.randint(2, (7, 1))
    log_prob, entropy = model.judge(logits, action)
    wanted = Categorical(logits=logits)
    assert torch.allclose(log_prob, wanted.log_prob(action))
    assert torch.allclose(entropy, wanted.entropy())


def test_the_estimate_of_kl_is_unbiased() -> None:
    """k3 of http://joschu.net/blog/kl-approx.html against the divergence itself."""
    both: Any = [Categorical(logits=torch.tensor(each).double()) for each in ([0, 1.0], [0.2, 0.7])]
    old, new = both
    actions = torch.arange(2)
    log_ratio = new.log_prob(actions) - old.log_prob(actions)
    mean = (old.probs * (log_ratio.exp() - 1 - log_ratio)).sum()
    assert float(mean) == pytest.approx(float(torch.distributions.kl_divergence(old, new)))
