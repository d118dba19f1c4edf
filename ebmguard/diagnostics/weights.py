"""What the importance weights say: who carries the gradient, and how much of it is left.

Everything is per loss call, from detached energies, without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..energies import Groups

__all__ = ["weight_diagnostics", "weight_diagnostics_at"]


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
    (found,) = weight_diagnostics_at(f_pos, f_neg, (beta_star,), groups)
    return found


def weight_diagnostics_at(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_stars: Sequence[float | Tensor],
    groups: Groups | None = None,
) -> list[dict[str, Tensor]]:
    """:func:`weight_diagnostics` at several exponents, at hardly more than the price of one."""
    betas = [
        beta.to(f_neg.dtype).unsqueeze(-1) if isinstance(beta, Tensor) else beta
        for beta in beta_stars
    ]
    pos = torch.stack([beta * f_pos for beta in betas])
    neg = torch.stack([beta * f_neg for beta in betas])
    n, m = f_pos.shape[-1], f_neg.shape[-1]
    if groups is None:
        paired: int | Tensor = n
        log_sum = torch.logsumexp(neg, -1, keepdim=True)
        log_pull = F.logsigmoid(log_sum - pos)
        v = torch.softmax(log_pull, -1)
        w = torch.exp(neg - log_sum)
    else:
        same = groups[0].unsqueeze(-1) == groups[1]
        partnered = same.any(-1)
        rows = torch.where(same, neg.unsqueeze(-2), -torch.inf)
        log_sum = torch.logsumexp(rows, -1)
        log_pull = torch.where(partnered, F.logsigmoid(log_sum - pos), -torch.inf)
        # Normalised as logarithms: GradScale may be too small for a float where its shares are not.
        v = torch.softmax(log_pull, -1)
        w = torch.where(same, v.unsqueeze(-1) * torch.softmax(rows, -1), 0.0).sum(-2)
        paired = partnered.sum(-1)
    grad_scale = log_pull.exp().sum(-1) / paired
    w_norm, v_norm = torch.linalg.vector_norm(w, dim=-1), torch.linalg.vector_norm(v, dim=-1)
    found = {
        "grad_scale": grad_scale,
        "weight_entropy": _entropy(w) / _log(m),
        "ess": 1.0 / (m * w_norm.square()),
        "max_weight": w.amax(-1),
        "positive_weight_entropy": _entropy(v) / _log(n),
        # <c, c0> / (|c| |c0|) for c = grad_scale (v, w) and c0 = (1/N, 1/M), up to signs.
        "reweighting_angle": (1 / paired + 1 / m) ** 0.5 / torch.hypot(v_norm, w_norm),
    }
    if groups is not None:
        found["unpaired"] = torch.zeros_like(grad_scale) + n - paired
    # 0 where all energies are finite, and NaN otherwise.
    spoiler = (0.0 * neg).sum(-1) + (0.0 * pos).sum(-1)
    table = torch.stack(tuple(found.values()), -1) + spoiler.unsqueeze(-1)
    return [dict(zip(found, row.unbind(-1), strict=True)) for row in table.unbind()]


def _entropy(w: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(w).sum(-1)
    return entropy


def _log(count: int) -> float:
    return math.log(count) if count > 1 else math.nan
