"""Small models and posteriors in float64, and small runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from ebmguard.reference_training.bism import deep_train, train
from ebmguard.reference_training.bism.config import BismConfig, DeepConfig
from ebmguard.reference_training.bism.posterior import BernoulliPosterior
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
from ebmguard.reference_training.engine.ranks import ONE_RANK, Ranks

Config = type[BismConfig] | type[DeepConfig]
SMALL: dict[Config, dict[str, Any]] = {
    BismConfig: {
        "iterations": 30,
        "batch": 20,
        "evaluations": 3,
        "test_samples": 200,
        "inner_steps": 2,
        "unrolled_steps": 2,
        "checkpoint_every": 7,
    },
    DeepConfig: {
        "iterations": 12,
        "batch": 10,
        "train_images": 50,
        "test_images": 20,
        "channels": 2,
        "evaluations": 2,
        "checkpoint_every": 5,
        "inner_steps": 2,
    },
}


def attempt(
    make: Config, out: Path, ranks: Ranks = ONE_RANK, **options: Any
) -> dict[str, Any] | None:
    """What a small run's results.json holds, None where Ctrl-C stopped it."""
    trainer = train.train if make is BismConfig else deep_train.train
    found: dict[str, Any] | None = trainer(
        *make(out=out, **{**SMALL[make], **options}).open(ranks), ranks=ranks
    )
    return found


def go(make: Config, out: Path, **options: Any) -> dict[str, Any]:
    """The same of one that comes to its end."""
    found = attempt(make, out, **options)
    assert found is not None
    return found


def rng(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def binary_states(bits: int) -> Tensor:
    """Every state of at least two bits, (2^bits, bits)."""
    return torch.cartesian_prod(*[torch.arange(2.0, dtype=torch.float64)] * bits)


def rbm(visible: int = 2, hidden: int = 4, seed: int = 0) -> GaussianBernoulliRBM:
    """One whose modes are well apart but meet, with a scale of its own for each entry."""
    model = GaussianBernoulliRBM(visible, hidden, rng(seed)).double()
    with torch.no_grad():
        model.weight.mul_(3)
        model.log_std.copy_(torch.linspace(-0.4, 0.3, visible))
    return model


def exact_posterior(model: GaussianBernoulliRBM) -> BernoulliPosterior:
    posterior = BernoulliPosterior(*model.weight.shape).double()
    with torch.no_grad():
        posterior.weight.copy_(model.weight.T)
        posterior.bias.copy_(model.hidden_bias)
    return posterior
