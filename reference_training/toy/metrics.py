"""How far a learned density is from the truth, by quadrature on a grid.

Every density is given as its logarithm on the cells of a grid, up to a constant: it is normalised
here, over the grid. That is how an unnormalised model F = o f is compared, and it means that mass
outside the grid is not seen. Values are ``(..., cells)`` with leading dimensions that broadcast,
results ``(...)`` in float64. A NaN, or a +inf, anywhere in a member makes its results NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_masses(log_values: Tensor) -> Tensor:
    """Log of the probability in each cell: the log softmax over cells, in float64."""
    return torch.log_softmax(log_values.double(), -1)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Kullback-Leibler divergence KL(p‖q) in nats.

    0 log 0 is 0; where q is 0 and p is not the divergence is inf.
    """
    log_p, log_q = log_masses(log_p), log_masses(log_q)
    p = log_p.exp()
    return torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation distance: half the sum of |P - Q|, between 0 and 1."""
    return 0.5 * (log_masses(log_p).exp() - log_masses(log_q).exp()).abs().sum(-1)


def mode_masses(log_p: Tensor, labels: Tensor) -> Tensor:
    """Mass of each mode, ``(..., modes)``.

    Args:
        log_p: ``(..., cells)``.
        labels: ``(cells,)``, the mode of each cell: the likeliest component of the truth,
            ``distribution.component_log_densities(grid.points).argmax(-1)``.
    """
    masses = log_masses(log_p).exp()
    modes = masses.new_zeros(*masses.shape[:-1], int(labels.max()) + 1)
    return modes.index_add(-1, labels, masses)


def mode_mass_error(log_p: Tensor, log_q: Tensor, labels: Tensor) -> Tensor:
    """Half the sum over modes of the absolute difference in mass: mass in the wrong mode."""
    return 0.5 * (mode_masses(log_p, labels) - mode_masses(log_q, labels)).abs().sum(-1)


def energy_scale(f: Tensor, log_density: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Slope of the least-squares line of F on the true log density, weighted by p, and its R².

    A slope of 1 is a model at the right temperature, 0.5 one that is twice as flat as the truth.
    ``log_p`` is the logarithm of the weights up to a constant. R² is NaN where F is constant.
    """
    weight = log_masses(log_p).exp()
    y, x = _centred(f, weight), _centred(log_density, weight)
    xx, xy, yy = ((weight * a * b).sum(-1) for a, b in ((x, x), (x, y), (y, y)))
    return xy / xx, xy.square() / (xx * yy)


def offset_r2(f: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """R² of F against a target where only an additive constant is free.

    Against Figure 9's fixed proposal q the target is (log p_d - log q) / β. 1 means that F equals
    the target up to a constant, 0 that it is no better than a constant; it may be negative. Only
    ratios of the weights matter. NaN where the target is constant.
    """
    weight = weight.double() / weight.double().sum(-1, keepdim=True)
    wanted = _centred(target, weight)
    left = _centred(f, weight) - wanted
    return 1 - (weight * left.square()).sum(-1) / (weight * wanted.square()).sum(-1)


def _centred(values: Tensor, weight: Tensor) -> Tensor:
    # Cells without weight may hold -inf, the log of a density that is 0 there. Their value has no
    # part in any weighted sum.
    values = torch.where((weight == 0) & (values == -torch.inf), 0.0, values.double())
    return values - (weight * values).sum(-1, keepdim=True)
