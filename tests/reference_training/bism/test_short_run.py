"""Short runs of a latent model against the closed form of a quadratic energy."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from ebmguard.errors import ConfigError
from ebmguard.reference_training.bism.config import DeepConfig
from ebmguard.reference_training.bism.deep_train import SHORT_STD, SHORT_STEP, ShortRuns
from ebmguard.reference_training.engine.ranks import Ranks
from ebmguard.sinks import read_jsonl

from .parts import go, rng

COUNT, STEPS, STIFF = 4000, 5, 3.0


class Tied(nn.Module):
    """E = STIFF / 2 |h - v|^2, of v with as many entries as h."""

    hidden = 2

    def projected(self, v):
        return v.flatten(1)

    def of_projected(self, projected, h):
        return STIFF / 2 * (h - projected).square().sum(1)

    def energy(self, v, h):
        return self.of_projected(self.projected(v), h)


def agree(ends, mean, variance):
    """Whether chains have a mean and a variance, but for six standard errors."""
    off = (ends - mean).mean(0).abs().max().item()
    assert off < 6 * math.sqrt(variance / COUNT)
    spread = (ends - mean).var().item()
    assert abs(spread / variance - 1) < 6 * math.sqrt(2 / ends.numel())


def test_chains_end_where_a_quadratic_energy_takes_them():
    runs = ShortRuns(Tied(), (1, 1, 2), STEPS, rng())
    v = torch.tensor([0.3, -0.2]).view(1, 1, 1, 2).expand(COUNT, -1, -1, -1)
    h = torch.tensor([1.0, 2.0]).expand(COUNT, -1)
    flat = v.flatten(1)
    # Each step takes the distance to 1 - SHORT_STEP STIFF of it, and adds noise.
    kept = 1 - SHORT_STEP * STIFF
    noise = SHORT_STD**2 * sum(kept ** (2 * k) for k in range(STEPS))
    agree(runs.infer(v, h), flat + kept**STEPS * (h - flat), noise)
    # In (v, h) the sum stays, and the difference shrinks twice as fast.
    ends_v, ends_h = runs.synthesize(v, h)
    kept = 1 - 2 * SHORT_STEP * STIFF
    noise = 2 * SHORT_STD**2 * sum(kept ** (2 * k) for k in range(STEPS))
    agree(ends_h - ends_v.flatten(1), kept**STEPS * (h - flat), noise)
    agree(ends_h + ends_v.flatten(1), flat + h, 2 * SHORT_STD**2 * STEPS)


def test_training_moves_samples_towards_images(tmp_path):
    """The images are mostly black, chains begin at a mean of 1/2."""
    options = {"method": "sr5", "train_images": 200, "lr": 1e-3, "channels": 4}
    after = go(DeepConfig, tmp_path, iterations=100, evaluations=25, **options)
    first, *_ = read_jsonl(tmp_path / "evaluations.jsonl")
    assert after["reconstruction_error"] < 0.9 * first["reconstruction_error"]


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"method": "sr0"}, 1, "method is 'sr0'"),
        ({"method": "sr5", "model": "visible"}, 1, "method is 'sr5', expected mdsm"),
        ({"method": "psr5"}, 2, "psr5 is trained by one process, not by 2"),
    ],
)
def test_what_cannot_be_trained_is_refused(options, ranks, message):
    with pytest.raises(ConfigError, match=message):
        DeepConfig(out=Path("run"), **options).check(Ranks(world=ranks))
