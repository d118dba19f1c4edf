"""The importance weights: which samples carry the gradient, and how much of it is left."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..energies import Groups, LogQ
from ..objective import Terms
from .raw_energies import wide

__all__ = ["pareto_k", "weight_diagnostics"]


@torch.no_grad()
def weight_diagnostics(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: float | Tensor,
    groups: Groups | None = None,
    log_q: LogQ | None = None,
) -> dict[str, Tensor]:
    """The diagnostics of the weights of energies ``(..., N)`` and ``(..., M)`` at β*, by tag.

    The arguments are those of the objective; a tensor β* broadcasts against the energies. With
    groups, w is a negative's share of the gradient, positives without a negative of their class are
    left out, and ``unpaired`` is added. The entropy of one sample is NaN. All are NaN if a sample's
    energy or log q is not finite: the objective leaves such a sample out, and the other weights
    mean nothing then.
    """
    terms = Terms.of(f_pos, f_neg, beta_star, groups, log_q)
    low = torch.finfo(terms.logit.dtype).min / 16
    # Normalised as logarithms: GradScale may underflow where the shares in it do not.
    log_w, log_pull = terms.exponent, F.logsigmoid(-terms.logit)
    if terms.is_grouped:
        log_pull = torch.where(terms.is_paired, log_pull, low)
        v = log_pull.softmax(-1) * terms.is_paired
        # Finite where the weight is 0, which adds nothing to the entropy.
        log_w = terms.negative_weights(v).log().clamp(min=low)
    n, m = log_pull.shape[-1], log_w.shape[-1]
    if n != m:  # what has no weight changes no sum
        log_w = F.pad(log_w, (0, max(0, n - m)), value=low)
        log_pull = F.pad(log_pull, (0, max(0, m - n)), value=low)
    sides = torch.stack((log_w, log_pull), -2)
    logs = sides.log_softmax(-1)
    p, largest = logs.exp(), logs.amax(-1)
    log_total = wide(log_pull.amax(-1) - largest[..., 1])
    count = wide(terms.count.squeeze(-1))
    pos = wide(terms.is_pos.sum(-1)) if terms.is_grouped else count
    is_whole = pos + wide(terms.is_neg.sum(-1)) == n + m
    w_square, v_square = wide((p * p).sum(-1)).unbind(-1)
    w_log, v_log = wide((p * logs).sum(-1)).unbind(-1)
    numbers = {
        "grad_scale": log_total.exp() / count,
        "weight_entropy": w_log * _over_log(m),
        "ess": 1 / (w_square * m),
        "max_weight": wide(largest[..., 0]).exp(),
        "positive_weight_entropy": v_log * _over_log(n),
        # <c, c0> / (|c| |c0|) for c = grad_scale (v, w) and c0 = (1/N, 1/M), up to signs.
        "reweighting_angle": (w_square + v_square).rsqrt() * (1 / count + 1 / m).sqrt(),
    }
    is_known = is_whole & (count > 0) & (w_square > 0)
    numbers = {name: torch.where(is_known, x, math.nan) for name, x in numbers.items()}
    if terms.is_grouped:
        numbers["unpaired"] = torch.where(is_whole, n - count, math.nan)
    return numbers


def _over_log(count: int) -> float:
    """The factor -1/log(count), where log(count) is the largest entropy; NaN for one sample."""
    return -1 / math.log(count) if count > 1 else math.nan


@torch.no_grad()
def pareto_k(log_weights: Tensor) -> Tensor:
    """The shape k of the generalised Pareto distribution fitted to the upper tail of the weights.

    The fit is that of Pareto-smoothed importance sampling: Vehtari, Simpson, Gelman, Yao and Gabry,
    "Pareto smoothed importance sampling", JMLR 25(72), 2024, with the estimator of Zhang and
    Stephens, "A new and efficient estimation method for the generalized Pareto distribution",
    Technometrics 51(3), 2009. It is to the largest ``min(n / 5, 3 sqrt(n))`` weights, rounded down
    as arviz-stats does, with the next largest as threshold. Its prior gives even a bounded tail
    about 0.2. Below 0.7 the weights have a variance to trust; above, averages do not settle; above
    1 they have no mean. At n = 64 the standard deviation of k is 0.2 to 0.4: pool several steps.

    ``log_weights`` are β* f of the negatives up to a constant, ``(*models, n)``; k is
    ``(*models,)``, float64 (float32 on MPS). NaN if n < 25, if a log weight is not finite, or if a
    quarter of the tail equals its threshold: tied weights, or log weights more than 745 below the
    largest, which underflow.
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
