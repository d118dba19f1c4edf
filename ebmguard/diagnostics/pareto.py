"""The Pareto shape of importance weights: how heavy their tail is.

The fit is that of Pareto-smoothed importance sampling: Vehtari, Simpson, Gelman, Yao and Gabry,
"Pareto smoothed importance sampling", JMLR 25(72), 2024, with the estimator of Zhang and Stephens,
"A new and efficient estimation method for the generalized Pareto distribution", Technometrics
51(3), 2009.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["pareto_k"]


@torch.no_grad()
def pareto_k(log_weights: Tensor) -> Tensor:
    """Shape k of the generalised Pareto distribution fitted to the upper tail of the weights.

    The fit is to the largest ``min(n / 5, 3 sqrt(n))`` weights, rounded down as arviz-stats does,
    with the next largest as threshold. Its prior gives even a bounded tail about 0.2. Below 0.7 the
    weights have a variance to trust; above, averages do not settle; above 1 they have no mean. At
    n = 64 the standard deviation of k is 0.2 to 0.4: pool several steps.

    Of ``log_weights``, β* f of the negatives up to a constant, ``(*models, n)``, it is
    ``(*models,)``, float64 (float32 on MPS). NaN if n < 25, if a log weight is not finite, and if a
    quarter of the tail cannot be told from its threshold: tied weights, or weights more than 745
    below the largest in log, which underflow.
    """
    count = log_weights.shape[-1]
    n = math.floor(3 * math.sqrt(count)) if count > 225 else count // 5
    # MPS has no float64.
    dtype = torch.float32 if log_weights.device.type == "mps" else torch.float64
    values = log_weights.detach().to(dtype)
    if n < 5:  # too short a tail
        return torch.full(values.shape[:-1], math.nan, dtype=dtype, device=values.device)

    upper = torch.topk(values, n + 1).values.flip(-1)
    upper = (upper - upper[..., -1:]).exp()
    excess = upper[..., 1:] - upper[..., :1]
    points = 30 + math.isqrt(n)
    grid = torch.arange(1, points + 1, dtype=excess.dtype, device=excess.device)
    position = int(n / 4 + 0.5) - 1
    quartile = excess[..., position : position + 1]
    # Candidates for b = -k / sigma, on which the likelihood can be profiled, on a grid of 3
    # quartiles of the tail (Zhang and Stephens 2009, Eq. 7).
    b = 1 / excess[..., -1:] + (1 - (points / (grid - 0.5)).sqrt()) / (3.0 * quartile)
    shape = torch.log1p(-b.unsqueeze(-1) * excess.unsqueeze(-2)).mean(-1)
    log_likelihood = n * (torch.log(-b / shape) - shape - 1)
    weights = torch.softmax(log_likelihood, -1)
    # What weighs next to nothing is dropped, as arviz and arviz-stats do.
    weights = torch.where(weights >= 10 * torch.finfo(torch.float64).eps, weights, 0.0)
    b_mean = (b * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    k = torch.log1p(-b_mean * excess).mean(-1)
    # A weakly informative prior: 10 observations of k = 0.5 (Vehtari et al. 2024).
    k = (n * k + 10 * 0.5) / (n + 10)
    defined = values.isfinite().all(-1) & (upper[..., -1] > upper[..., 1])
    return torch.where(defined, k, math.nan)
