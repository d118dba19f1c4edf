"""Small models and posteriors in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from ebmguard.reference_training.bism.posterior import BernoulliPosterior
from ebmguard.reference_training.bism.rbm import GaussianBernoulliRBM
from tests.reference_training.parts import rng


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
