"""Losses of an unnormalised log density: score matching and noise-contrastive estimation.

Each takes a function ``(B, ...)`` to ``(B,)``, the log density but for its constant, and the random
numbers it is to use: a bi-level update repeats them, and a resumed run draws the same ones. (The
losses of libraries draw their own from PyTorch's global generator.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import HELD

__all__ = ["LogDensity", "contrastive", "denoising", "multiscale_denoising", "score", "sliced"]

LogDensity = Callable[[Tensor], Tensor]


def score(log_density: LogDensity, v: Tensor) -> Tensor:
    """Its gradient in v, of v's shape, differentiable once more."""
    v = v if v.requires_grad else v.detach().requires_grad_()
    (found,) = torch.autograd.grad(log_density(v).sum(), v, create_graph=True)
    return found


def denoising(log_density: LogDensity, v: Tensor, noise: Tensor, std: float) -> Tensor:
    """DSM (Vincent 2011): 1/2 |score(v + std noise) + noise / std|^2 of each, ``(B,)``."""
    return _halved_squares(score(log_density, v + std * noise) + noise / std)


def multiscale_denoising(
    log_density: LogDensity, v: Tensor, noise: Tensor, stds: Tensor, held: float = HELD
) -> Tensor:
    """MDSM (Li et al. 2019): denoising at a standard deviation of each sample's own.

    The model's is the density at noise ``held``: the score is divided by ``stds``, ``(B,)``.
    """
    own = stds.view(-1, *[1] * (v.ndim - 1))
    return _halved_squares(score(log_density, v + own * noise) / own + noise / held**2)


def sliced(log_density: LogDensity, v: Tensor, directions: Tensor) -> Tensor:
    """SSM-VR (Song et al. 2019): 1/2 |score|^2 + u . grad(u . score) of each, ``(B,)``.

    Its mean over directions u with unit covariance is the Fisher divergence to the data but for a
    constant of the data.
    """
    v = v.detach().requires_grad_()
    found = score(log_density, v)
    (along,) = torch.autograd.grad((found * directions).sum(), v, create_graph=True)
    return _halved_squares(found) + (along * directions).flatten(1).sum(1)


def contrastive(above_data: Tensor, above_noise: Tensor) -> Tensor:
    """NCE (Gutmann and Hyvarinen 2012): the logistic loss of each pair of data and noise, ``(B,)``.

    Both are log p - log p_noise, at data and at noise; log p has its learned constant.
    """
    return -F.logsigmoid(above_data) - F.logsigmoid(-above_noise)


def _halved_squares(x: Tensor) -> Tensor:
    return x.square().flatten(1).sum(1) / 2
