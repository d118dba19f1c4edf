"""The losses, their weights and their gradient in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..energies import (
    BetaStar,
    Groups,
    Reduce,
    Variants,
    check_energies,
    exponents,
    per_sample,
    variant_runs,
)
from ._ranks import ProcessGroup
from ._terms import SMALLEST, Terms, usable_softmax

__all__ = [
    "coefficients",
    "contrastive_loss",
    "grad_scale",
    "positive_weights",
    "weights",
]


def weights(f_neg: Tensor, beta_star: BetaStar, *, reduce: Reduce = "sum") -> Tensor:
    """Self-normalised importance weights of the negatives: softmax of β* f⁻ (Eq. 5 and 7).

    Args:
        f_neg: negative energies of the negatives, ``(M,)``, ``(M, *heads)`` or ``(*models, M)``.
        beta_star: exponent on raw outputs; 0 gives uniform weights.
        reduce: how heads become one energy.

    Returns:
        ``(M,)`` or ``(*models, M)``, summing to one unless no negative is finite.
    """
    neg = per_sample(f_neg, beta_star, reduce)
    beta = beta_star.to(neg).unsqueeze(-1) if isinstance(beta_star, Tensor) else beta_star
    return usable_softmax(neg, beta)


def positive_weights(
    f_pos: Tensor, f_neg: Tensor, beta_star: BetaStar, *, reduce: Reduce = "sum"
) -> Tensor:
    """Weight that each positive would get as one more negative: sigmoid(β* f⁺ - S) (Eq. 8).

    Returns:
        ``(N,)`` or ``(*models, N)``; NaN for positives whose energy is not usable. At β* = 0 it is
        1 / (M + 1).
    """
    terms = Terms.of(f_pos, f_neg, beta_star, reduce=reduce, zero_at=0.0)
    return torch.where(terms.valid_pos, torch.sigmoid(-terms.margin), torch.nan)


def grad_scale(
    f_pos: Tensor, f_neg: Tensor, beta_star: BetaStar, *, reduce: Reduce = "sum"
) -> Tensor:
    """GradScale, mean_i (1 - w⁺_i) (Eq. 30): the factor on the whole contrastive gradient.

    M / (M + 1) when positives and negatives look alike, towards 0 when no negative is competitive.
    Computed as mean sigmoid(S - β* f⁺): ``1 - sigmoid`` has no digits left where it matters.

    Returns:
        0-dim, or ``(*models,)``.
    """
    terms = Terms.of(f_pos, f_neg, beta_star, reduce=reduce, zero_at=0.0)
    return terms.scale_of(terms.valid_pos)


def contrastive_loss(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar | Sequence[BetaStar],
    *,
    variant: Variants = "default",
    groups: Groups | None = None,
    reduce: Reduce = "sum",
    process_group: ProcessGroup = None,
) -> Tensor:
    """The contrastive loss to minimise, in the units of ``f_neg.mean() - f_pos.mean()``.

    ======== =============================================================================
    β* = 0   mean f⁻ - mean f⁺, the standard loss (Eq. 3), in the dtype given
    default  (1/β*) mean_i softplus(S - β* f⁺_i) (Eq. 8, Algorithm 1 without its cancellation)
    no_pos   (1/β*) S - mean f⁺ (Eq. 7)
    batch    GradScale, detached, times no_pos (Eq. 33; its positive sum is a mean)
    true     halves A and B of the positives: ½ [GradScale_B no_pos(A) + GradScale_A no_pos(B)],
             all negatives in both (Eq. 34); the order of the batch must be random
    ======== =============================================================================

    Args:
        f_pos: negative energies of the positives, ``(N,)``, ``(N, *heads)`` or ``(*models, N)``.
        f_neg: the same for M negatives.
        beta_star: a number, a 0-dim tensor, a tensor over leading model dimensions, or a sequence
            of these, whose losses are averaged.
        variant: see the table. A sequence of names has one for each entry of the first model
            dimension.
        groups: class labels ``(y_pos, y_neg)`` of shapes ``(N,)`` and ``(M,)``: every positive is
            set against the negatives of its own class, since class-conditional chains have one
            normaliser per class. Positives without a partner are left out. For "default" and
            "no_pos" only.
        reduce: "sum" or "mean": how heads become one energy (whatever the sampler uses).
        process_group: sums and logsumexp run over all ranks' samples; after an averaging
            all-reduce of the gradients the result is that of one process with the joined batch.
            "true" halves each rank's positives. Each loss of one β* takes two messages, of two and
            of at most nine numbers per model. First-order only.

    Returns:
        0-dim, or ``(*models,)``.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: see :func:`check_energies`.
    """
    check_energies(f_pos, f_neg, beta_star, variant=variant, groups=groups, reduce=reduce)
    part = partial(contrastive_loss, groups=groups, reduce=reduce, process_group=process_group)
    if isinstance(beta_star, Sequence):
        losses = [part(f_pos, f_neg, each, variant=variant) for each in exponents(beta_star)]
        return torch.stack(losses).mean(0)
    if not isinstance(variant, str):
        assert isinstance(beta_star, Tensor)
        losses = [
            part(f_pos[i], f_neg[i], beta_star[i], variant=name)
            for name, i in variant_runs(variant)
        ]
        return torch.cat(losses)
    if not isinstance(beta_star, Tensor) and abs(beta_star) < SMALLEST:
        if process_group is None:
            return _mean(f_neg, reduce) - _mean(f_pos, reduce)
        beta_star = torch.zeros((), device=f_pos.device)
    terms = Terms.of(
        f_pos, f_neg, beta_star, groups=groups, reduce=reduce, process_group=process_group
    )
    if process_group is None:
        return torch.where(terms.both_sides(), terms.loss(variant), 0.0)
    # The value is every rank's; the gradient is this rank's share of it, times the world size that
    # averaging divides by.
    value, to_pos, to_neg = terms.over_ranks(variant, process_group)
    share = (to_pos * terms.pos).sum(-1) + (to_neg * terms.neg).sum(-1)
    return value + dist.get_world_size(process_group) * (share - share.detach())


def coefficients(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar | Sequence[BetaStar],
    *,
    variant: Variants = "default",
    groups: Groups | None = None,
    reduce: Reduce = "sum",
    process_group: ProcessGroup = None,
) -> tuple[Tensor, Tensor]:
    """Gradient of :func:`contrastive_loss` with respect to each sample's energy, in closed form.

    For ``default``: -(1 - w⁺_i)/N on the positives and GradScale · w_j on the negatives. The two
    sides sum to zero in every variant.

    Returns:
        detached tensors of shapes ``(N,)`` and ``(M,)``, or ``(*models, N)`` and ``(*models, M)``.
    """
    check_energies(f_pos, f_neg, beta_star, variant=variant, groups=groups, reduce=reduce)
    part = partial(coefficients, groups=groups, reduce=reduce, process_group=process_group)
    if isinstance(beta_star, Sequence):
        sides = [part(f_pos, f_neg, each, variant=variant) for each in exponents(beta_star)]
        to_pos, to_neg = (torch.stack(side).mean(0) for side in zip(*sides, strict=True))
        return to_pos, to_neg
    if not isinstance(variant, str):
        assert isinstance(beta_star, Tensor)
        sides = [
            part(f_pos[i], f_neg[i], beta_star[i], variant=name)
            for name, i in variant_runs(variant)
        ]
        return torch.cat([pos for pos, _ in sides]), torch.cat([neg for _, neg in sides])
    with torch.no_grad():
        if not isinstance(beta_star, Tensor) and abs(beta_star) < SMALLEST:
            beta_star = torch.zeros((), device=f_pos.device)
        terms = Terms.of(
            f_pos, f_neg, beta_star, groups=groups, reduce=reduce, process_group=process_group
        )
        if process_group is not None:
            return terms.over_ranks(variant, process_group)[1:]
        defined = terms.both_sides().unsqueeze(-1)
        to_pos, to_neg = terms.coefficients(variant)
        return torch.where(defined, to_pos, 0.0), torch.where(defined, to_neg, 0.0)


def _mean(f: Tensor, reduce: Reduce) -> Tensor:
    if reduce == "mean" or f.ndim == 1 or f.numel() == f.shape[0]:
        return f.mean()
    return f.flatten(1).sum(1).mean()
