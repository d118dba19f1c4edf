"""The losses, their weights and their gradient in closed form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..energies import (
    BetaStar,
    Groups,
    LogQ,
    Reduce,
    Variants,
    check_energies,
    check_log_q,
    per_sample,
)
from . import trusted
from ._anchor import Anchor
from ._terms import Terms
from .finite_samples import log_q_at, lowest, masked

__all__ = [
    "coefficients",
    "contrastive_loss",
    "grad_scale",
    "positive_weights",
    "weights",
]


def weights(
    f_neg: Tensor, beta_star: BetaStar, *, log_q: Tensor | None = None, reduce: Reduce = "sum"
) -> Tensor:
    """Self-normalised importance weights of the negatives: softmax of β* f⁻ - log q (Eq. 5 to 7).

    Args:
        f_neg: negative energies of the negatives, ``(M,)``, ``(M, *heads)`` or ``(*models, M)``.
        beta_star: exponent on raw outputs; 0 gives uniform weights.
        log_q: log-density of the proposal at the negatives, ``(M,)`` or ``(*models, M)``, see
            :func:`contrastive_loss`.
        reduce: how heads become one energy.

    Returns:
        ``(M,)`` or ``(*models, M)``, summing to one unless no negative is finite.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: ``log_q`` that is not one number per negative, or
            with ``beta_star=0``.
    """
    if log_q is not None:
        check_log_q(log_q, f_neg, beta_star)
    neg = per_sample(f_neg, beta_star, reduce)
    beta = beta_star.to(neg).unsqueeze(-1) if isinstance(beta_star, Tensor) else beta_star
    valid, neg, log_q = masked(neg, beta, None if log_q is None else log_q_at(log_q, beta))
    anchor = Anchor.of(neg, valid, beta, log_q)
    exponent = anchor.exponent(neg - anchor.f, log_q, beta)
    return torch.softmax(torch.where(valid, exponent, lowest(exponent)), -1) * valid


def positive_weights(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar,
    *,
    log_q: LogQ | None = None,
    reduce: Reduce = "sum",
) -> Tensor:
    """Weight each positive would get as one more negative: sigmoid(β* f⁺ - log q⁺ - S) (Eq. 8).

    Args: as for :func:`contrastive_loss`.

    Returns:
        ``(N,)`` or ``(*models, N)``; NaN for positives whose energy or log q is not usable;
        1 / (M + 1) at β* = 0.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: see :func:`check_energies`.
    """
    check_energies(f_pos, f_neg, beta_star, log_q=log_q, reduce=reduce)
    terms = Terms.of(f_pos, f_neg, beta_star, log_q=log_q, reduce=reduce, zero_at=0.0)
    return torch.where(terms.valid_pos, torch.sigmoid(-terms.margin), torch.nan)


def grad_scale(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar,
    *,
    log_q: LogQ | None = None,
    reduce: Reduce = "sum",
) -> Tensor:
    """GradScale, mean_i (1 - w⁺_i) (Eq. 30): the factor on the whole contrastive gradient.

    M / (M + 1) when positives and negatives look alike, towards 0 when no negative is competitive.
    Computed as mean sigmoid(S - r⁺), r = β* f - log q: ``1 - sigmoid`` has no digits left where it
    matters.

    Args: as for :func:`contrastive_loss`.

    Returns:
        0-dim, or ``(*models,)``; 0 if a side has no usable sample, as the loss is then.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: see :func:`check_energies`.
    """
    check_energies(f_pos, f_neg, beta_star, log_q=log_q, reduce=reduce)
    terms = Terms.of(f_pos, f_neg, beta_star, log_q=log_q, reduce=reduce, zero_at=0.0)
    return terms.scale_of(terms.valid_pos)


def contrastive_loss(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar | Sequence[BetaStar],
    *,
    variant: Variants = "default",
    groups: Groups | None = None,
    log_q: LogQ | None = None,
    reduce: Reduce = "sum",
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The contrastive loss to minimise, in the units of ``f_neg.mean() - f_pos.mean()``.

    ======== =============================================================================
    β* = 0   mean f⁻ - mean f⁺, the standard loss (Eq. 3), in the dtype given
    default  (1/β*) mean_i softplus(S - r⁺_i) (Eq. 8, Algorithm 1 without its cancellation)
    no_pos   (1/β*) (S - mean r⁺) (Eq. 7)
    batch    GradScale, detached, times no_pos (Eq. 33; its positive sum is a mean)
    true     halves A and B of the positives: ½ [GradScale_B no_pos(A) + GradScale_A no_pos(B)],
             all negatives in both (Eq. 34); the order of the batch must be random
    ======== =============================================================================

    with r = β* f, or r = β* f - log q, and S = logsumexp_j r⁻_j.

    Args:
        f_pos: negative energies of the positives, ``(N,)``, ``(N, *heads)`` or ``(*models, N)``.
        f_neg: the same for M negatives.
        beta_star: a number, a 0-dim tensor, a tensor over leading model dimensions, or a sequence
            of these, whose losses are averaged.
        variant: see the table. A sequence of names has one for each entry of the first model
            dimension.
        groups: class labels ``(y_pos, y_neg)`` of shapes ``(N,)`` and ``(M,)``: every positive is
            set against the negatives of its own class, since class-conditional chains have one
            normaliser per class. Positives without a negative of their class are left out. For
            "default" and "no_pos" only.
        log_q: log-densities ``(log_q_pos, log_q_neg)`` of the proposal that drew the negatives, at
            the samples of both sides: ``(N,)`` and ``(M,)``, or ``(*models, N)`` and
            ``(*models, M)``. A constant common to both sides does not matter; they are high where
            the proposal draws often, whatever the sign of f. The weights are then p / q (Eq. 6).
            If the negatives are drawn from q(x) exp(a f) for a model exp(o f), give log q alone
            and β* = o - a. No gradient flows into log q, a sample whose log q is not finite
            is left out, and entries of a β* tensor that are 0 ignore it.
        reduce: "sum" or "mean": how heads become one energy (whatever the sampler uses).
        process_group: sums and logsumexp run over all ranks' samples; after an averaging
            all-reduce of the gradients the result is that of one process with the joined batch.
            "true" halves each rank's positives. The loss of one β* takes two messages, of two
            (with ``log_q`` three) and of at most nine numbers per model. With ``groups`` the ranks
            exchange their energies and labels instead: the messages grow with the batch, and the
            host waits for the batch sizes. First-order only.

    Returns:
        0-dim, or ``(*models,)``.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: see :func:`check_energies`.
    """
    check_energies(
        f_pos, f_neg, beta_star, variant=variant, groups=groups, log_q=log_q, reduce=reduce
    )
    return trusted.contrastive_loss(
        f_pos,
        f_neg,
        beta_star,
        variant=variant,
        groups=groups,
        log_q=log_q,
        reduce=reduce,
        process_group=process_group,
    )


def coefficients(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar | Sequence[BetaStar],
    *,
    variant: Variants = "default",
    groups: Groups | None = None,
    log_q: LogQ | None = None,
    reduce: Reduce = "sum",
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradient of :func:`contrastive_loss` with respect to each sample's energy, in closed form.

    For ``default``: -(1 - w⁺_i)/N on the positives and GradScale · w_j on the negatives. The two
    sides sum to zero in every variant.

    Returns:
        detached tensors of shapes ``(N,)`` and ``(M,)``, or ``(*models, N)`` and ``(*models, M)``.
    """
    check_energies(
        f_pos, f_neg, beta_star, variant=variant, groups=groups, log_q=log_q, reduce=reduce
    )
    return trusted.coefficients(
        f_pos,
        f_neg,
        beta_star,
        variant=variant,
        groups=groups,
        log_q=log_q,
        reduce=reduce,
        process_group=process_group,
    )
