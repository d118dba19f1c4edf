"""What the importance weights say: who carries the gradient, and how much of it is left.

Everything is per loss call, from detached energies, without waiting for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..energies import Groups

__all__ = ["weight_diagnostics"]


def weight_diagnostics(
    f_pos: Tensor, f_neg: Tensor, beta_star: float | Tensor, groups: Groups | None = None
) -> dict[str, Tensor]:
    """Diagnostics of the weights at exponent β* (which may be 0: uniform weights).

    Args:
        f_pos: detached negative energies of positives, ``(N,)`` or ``(*models, N)``.
        f_neg: the same for negatives, ``(M,)`` or ``(*models, M)``.
        beta_star: number, 0-dim tensor, or tensor over the model dimensions.
        groups: class labels ``(y_pos, y_neg)``, as in the objective: w is then the share of each
            negative in the gradient, and positives without a negative of their class are left out.

    Returns:
        0-dim tensors, or ``(*models,)``:

        - ``grad_scale``: mean_i (1 - w⁺_i) (Eq. 30); M/(M+1) when the sampler is right.
        - ``weight_entropy``: H(w) / log M; 1 for uniform weights. Undefined (NaN) for M = 1.
        - ``ess``: 1 / Σ w², as a fraction of M.
        - ``max_weight``: the largest w.
        - ``positive_weight_entropy``: entropy of v(x⁺) (Eq. 31) / log N. NaN for N = 1.
        - ``reweighting_angle``: cosine between the gradient coefficients at β* and at β* = 0.
        - ``unpaired``, with groups only: number of positives left out.

        All are NaN where an energy is not finite: a weight among NaNs means nothing.
    """
    if isinstance(beta_star, Tensor):
        beta_star = beta_star.to(f_neg.dtype).unsqueeze(-1)
    n, m = f_pos.shape[-1], f_neg.shape[-1]
    exponent = beta_star * f_neg
    if groups is None:
        log_sum = torch.logsumexp(exponent, -1, keepdim=True)
        pull = torch.sigmoid(log_sum - beta_star * f_pos)
        log_w = exponent - log_sum
        paired = f_pos.new_full((), n)
    else:
        same = groups[0].unsqueeze(-1) == groups[1]
        partnered = same.any(-1)
        rows = torch.where(same, exponent.unsqueeze(-2), -torch.inf)
        log_sum = torch.logsumexp(rows, -1)
        pull = torch.where(partnered, torch.sigmoid(log_sum - beta_star * f_pos), 0.0)
        share = torch.where(same, pull.unsqueeze(-1) * torch.softmax(rows, -1), 0.0).sum(-2)
        log_w = (share / pull.sum(-1, keepdim=True)).log()
        paired = partnered.sum(-1)
    w = log_w.exp()
    square = w.square().sum(-1)
    total = pull.sum(-1)
    grad_scale = total / paired
    v = pull / total.unsqueeze(-1)
    # <c, c0> / (|c| |c0|) for c = (pull/N, grad_scale w) and c0 = (1/N, 1/M), up to signs.
    length = (pull.square().sum(-1) / paired**2 + grad_scale.square() * square).sqrt()
    found = {
        "grad_scale": grad_scale,
        "weight_entropy": _entropy(w) / _log(m),
        "ess": 1.0 / (m * square),
        "max_weight": w.amax(-1),
        "positive_weight_entropy": _entropy(v) / _log(n),
        "reweighting_angle": grad_scale * (1 / paired + 1 / m).sqrt() / length,
    }
    if groups is not None:
        found["unpaired"] = (n - paired).to(grad_scale.dtype)
    finite = torch.isfinite(exponent).all(-1) & torch.isfinite(f_pos).all(-1)
    return {name: torch.where(finite, value, torch.nan) for name, value in found.items()}


def _entropy(w: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(w).sum(-1)
    return entropy


def _log(count: int) -> float:
    return math.log(count) if count > 1 else math.nan
