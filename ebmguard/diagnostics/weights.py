"""What the importance weights say: who carries the gradient, and how much of it is left.

Everything is per loss call, from detached energies, without waiting for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["weight_diagnostics"]


def weight_diagnostics(
    f_pos: Tensor, f_neg: Tensor, beta_star: float | Tensor
) -> dict[str, Tensor]:
    """Diagnostics of the weights at exponent β* (which may be 0: uniform weights).

    Args:
        f_pos: detached negative energies of positives, ``(N,)`` or ``(*models, N)``.
        f_neg: the same for negatives, ``(M,)`` or ``(*models, M)``.
        beta_star: number, 0-dim tensor, or tensor over the model dimensions.

    Returns:
        0-dim tensors, or ``(*models,)``:

        - ``grad_scale``: mean_i (1 - w⁺_i) (Eq. 30); M/(M+1) when the sampler is right.
        - ``weight_entropy``: H(w) / log M; 1 for uniform weights. Undefined (NaN) for M = 1.
        - ``ess``: 1 / Σ w², as a fraction of M.
        - ``max_weight``: the largest w.
        - ``positive_weight_entropy``: entropy of v(x⁺) (Eq. 31) / log N. NaN for N = 1.
        - ``reweighting_angle``: cosine between the gradient coefficients at β* and at β* = 0.

        All are NaN where an energy is not finite: a weight among NaNs means nothing.
    """
    if isinstance(beta_star, Tensor):
        beta_star = beta_star.to(f_neg.dtype).unsqueeze(-1)
    n, m = f_pos.shape[-1], f_neg.shape[-1]
    exponent = beta_star * f_neg
    log_sum = torch.logsumexp(exponent, -1, keepdim=True)
    log_w = exponent - log_sum
    w = log_w.exp()
    square = w.square().sum(-1)
    pull = torch.sigmoid(log_sum - beta_star * f_pos)
    grad_scale = pull.mean(-1)
    log_v = (pull / (grad_scale * n).unsqueeze(-1)).clamp(min=torch.finfo(pull.dtype).tiny).log()
    # <c, c0> / (|c| |c0|) for c = (pull/N, grad_scale w) and c0 = (1/N, 1/M), up to signs.
    length = (pull.square().mean(-1) / n + grad_scale.square() * square).sqrt()
    found = {
        "grad_scale": grad_scale,
        "weight_entropy": -(w * log_w).sum(-1) / _log(m),
        "ess": 1.0 / (m * square),
        "max_weight": w.amax(-1),
        "positive_weight_entropy": -(log_v.exp() * log_v).sum(-1) / _log(n),
        "reweighting_angle": grad_scale * math.sqrt(1 / n + 1 / m) / length,
    }
    finite = torch.isfinite(exponent).all(-1) & torch.isfinite(f_pos).all(-1)
    return {name: torch.where(finite, value, torch.nan) for name, value in found.items()}


def _log(count: int) -> float:
    return math.log(count) if count > 1 else math.nan
