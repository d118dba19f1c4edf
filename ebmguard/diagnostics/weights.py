"""The importance weights: which samples carry the gradient, and how much of it is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..energies import Groups, LogQ, of_tensors
from ..objective.finite_samples import log_q_at

__all__ = ["Shares", "log_weights", "named", "weight_diagnostics", "weight_diagnostics_at"]


@of_tensors
def weight_diagnostics(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: float | Tensor,
    groups: Groups | None = None,
    log_q: LogQ | None = None,
) -> dict[str, Tensor]:
    """Diagnostics of the weights at exponent β* (which may be 0: uniform weights).

    Args:
        f_pos, f_neg: detached negative energies, ``(N,)`` and ``(M,)``, or with ``*models`` first.
        beta_star: number, 0-dim tensor, or tensor over the model dimensions.
        groups: class labels ``(y_pos, y_neg)``, or these and output scales, as in the objective: w
            is then each negative's share of the gradient, and positives without a negative of their
            class are left out.
        log_q: log-densities of the proposal, as in the objective.

    Returns:
        0-dim tensors, or ``(*models,)``, by the tags whose lines in :mod:`ebmguard.tags` define
        them; ``unpaired`` with groups only. An entropy of one sample is NaN. All are NaN if an
        energy or log q is not finite: the other weights mean nothing then.
    """
    (found,) = weight_diagnostics_at(f_pos, f_neg, (beta_star,), groups, log_q)
    return found


@of_tensors
def weight_diagnostics_at(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_stars: Sequence[float | Tensor],
    groups: Groups | None = None,
    log_q: LogQ | None = None,
) -> list[dict[str, Tensor]]:
    """:func:`weight_diagnostics` at several exponents, for little more than the cost of one.

    ``log_q`` is divided out at the first exponent only, that of the loss.
    """
    # Between two passes of a network the first use of each kind of kernel on small tensors costs as
    # much as ten more of it, so everything here is made of a few kinds.
    q_pos, q_neg = log_q or (None, None)
    if groups is not None and len(groups) == 3:
        scale = groups[2].to(f_pos)
        of_neg = torch.where(groups[0].unsqueeze(-1) == groups[1], scale.unsqueeze(-1), 0.0)
        f_pos, f_neg = scale * f_pos, of_neg.amax(0) * f_neg
    pos, neg = log_weights(f_pos, beta_stars, q_pos), log_weights(f_neg, beta_stars, q_neg)
    n, m = f_pos.shape[-1], f_neg.shape[-1]
    if groups is None:
        paired: int | Tensor = n
        log_w = torch.log_softmax(neg, -1)
        w = log_w.exp()
        # logsumexp is the largest entry less the logarithm of its weight.
        log_sum = (neg.amax(-1) - log_w.amax(-1)).unsqueeze(-1)
        log_pull = F.logsigmoid(log_sum - pos)
        log_v = torch.log_softmax(log_pull, -1)
        v = log_v.exp()
    else:
        same = groups[0].unsqueeze(-1) == groups[1]
        partnered = same.any(-1)
        paired = partnered.sum(-1, dtype=pos.dtype)
        rows = torch.where(same, neg.unsqueeze(-2), -torch.inf)
        log_pull = F.logsigmoid(torch.logsumexp(rows, -1) - pos)
        log_pull = torch.where(partnered, log_pull, -torch.inf)
        # Normalised as logarithms: GradScale may underflow where the shares in it do not.
        log_v = torch.log_softmax(log_pull, -1)
        v = log_v.exp()
        w = torch.where(same, v.unsqueeze(-1) * torch.softmax(rows, -1), 0.0).sum(-2)
        w = w / (paired > 0).unsqueeze(-1)  # NaN if there is no pair at all
        # Finite where the weight is 0, which adds nothing to the entropy.
        lowest = torch.finfo(w.dtype).min
        log_v, log_w = log_v.clamp(min=lowest), w.log().clamp(min=lowest)
    found = named(
        Shares((w * w).sum(-1), (w * log_w).sum(-1), m),
        Shares((v * v).sum(-1), (v * log_v).sum(-1), n),
        largest=w.amax(-1),
        scale=log_pull.exp().sum(-1) / paired,
        paired=paired,
    )
    if groups is not None:
        found["unpaired"] = torch.zeros_like(found["ess"]) + n - paired
    # 0 where all energies are finite, and NaN otherwise.
    spoiler = 0.0 * (neg.sum(-1) + pos.sum(-1))
    table = torch.stack(tuple(found.values()), -1) + spoiler.unsqueeze(-1)
    return [dict(zip(found, row.unbind(-1), strict=True)) for row in table.unbind()]


@dataclass(frozen=True)
class Shares:
    """Sums over samples' shares p of the gradient, where Σ p = 1."""

    square: Tensor  # Σ p²
    entropy: Tensor  # Σ p log p
    count: int | Tensor  # of samples

    @property
    def relative_entropy(self) -> Tensor:
        """Entropy in units of its largest value, log(count); NaN for one sample."""
        if isinstance(self.count, Tensor):
            return self.entropy / -self.count.log()
        return self.entropy * (-1 / math.log(self.count) if self.count > 1 else math.nan)


def named(
    w: Shares, v: Shares, *, largest: Tensor, scale: Tensor, paired: int | Tensor
) -> dict[str, Tensor]:
    """The diagnostics by name, from sums over negatives (w) and ``paired`` positives (v)."""
    w_inverse = w.square.rsqrt()
    return {
        "grad_scale": scale,
        "weight_entropy": w.relative_entropy,
        "ess": w_inverse * w_inverse / w.count,
        "max_weight": largest,
        "positive_weight_entropy": v.relative_entropy,
        # <c, c0> / (|c| |c0|) for c = grad_scale (v, w) and c0 = (1/N, 1/M), up to signs.
        "reweighting_angle": (w.square + v.square).rsqrt() * (1 / paired + 1 / w.count) ** 0.5,
    }


@of_tensors
def log_weights(
    f: Tensor, beta_stars: Sequence[float | Tensor], log_q: Tensor | None = None
) -> Tensor:
    """β* f for each exponent, less log q for the first: ``(exponents, *models, samples)``."""
    betas = [x.to(f.dtype).unsqueeze(-1) if isinstance(x, Tensor) else x for x in beta_stars]
    logits = [beta * f for beta in betas]
    if log_q is not None:
        logits[0] = (logits[0] - log_q_at(log_q, betas[0])).to(f.dtype)
    return torch.stack(logits)
