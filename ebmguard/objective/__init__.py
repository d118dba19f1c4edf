"""The robust contrastive objective: pure functions of the energies of one model and an exponent.

Notation follows *Energy-Based Model Training Objective Robust to Inaccurate SGLD Samples*:
``f`` is the negative energy (high on data), ``beta_star`` is the exponent β* on raw network
outputs, and S = logsumexp_j β* f(x⁻_j). The sampler's side, (1 - β) f, is in
:mod:`ebmguard.sampling`. Shapes are those of :mod:`ebmguard.energies`; an ensemble is
``torch.vmap`` of these functions. They compute in float32 at least; float64 stays float64.

Non-finite samples. A negative with ``|β* f| > 1e30`` or a NaN, in f or in log q, gets weight 0;
such a positive is left out. If that empties a side, the loss is 0 with zero gradients.
"""

from .losses import (
    coefficients,
    contrastive_loss,
    grad_scale,
    mean_difference,
    positive_weights,
    weights,
)
from .terms import Terms, usable

__all__ = [
    "Terms",
    "coefficients",
    "contrastive_loss",
    "grad_scale",
    "mean_difference",
    "positive_weights",
    "usable",
    "weights",
]
