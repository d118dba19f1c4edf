"""The losses, the weights in them, and their gradient with respect to the energies."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..energies import (
    SMALLEST,
    BetaStar,
    Groups,
    LogQ,
    Variant,
    check_energies,
    check_log_q,
    heads_summed,
    in_rows,
    per_sample,
)
from ..errors import ConfigError
from ..ranks import Batch, whole_batch
from .terms import Terms

__all__ = [
    "coefficients",
    "contrastive_loss",
    "grad_scale",
    "mean_difference",
    "positive_weights",
    "weights",
]


def contrastive_loss(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar,
    *,
    variant: Variant = "default",
    groups: Groups | None = None,
    log_q: LogQ | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the loss to minimise, 0-dim, in the units of ``f_neg.mean() - f_pos.mean()``.

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
        f_pos: negative energies of the positives, ``(N,)``, or ``(N, *heads)``, which are summed.
        f_neg: the same for M negatives.
        beta_star: a number or a 0-dim tensor.
        variant: see the table.
        groups: class labels ``(y_pos, y_neg)`` of shapes ``(N,)`` and ``(M,)``: every positive is
            set against the negatives of its class, which share a normaliser; without any it is left
            out. For "default" and "no_pos" only. A third tensor ``(N,)`` has the output scale of
            every positive's class in units of that of β*, which it multiplies: positive, and the
            same within a class; a single pair is a class, too. ``"rows"``: the negatives of
            positive i are row i of ``f_neg``, ``(N, M)``, as of f(x, y).
        log_q: log-densities ``(log_q_pos, log_q_neg)`` of the proposal that drew the negatives, at
            the samples of both sides: ``(N,)`` and ``(M,)``, up to a common constant; high where
            the proposal draws often, whatever the sign of f. The weights are then p / q (Eq. 6). If
            the negatives are drawn from q(x) exp(a f) for a model exp(o f), give log q alone and
            β* = o - a. No gradient flows into log q, and a β* tensor that is 0 ignores it.
        process_group: the loss is that of all ranks' samples, in the order of the ranks, whose
            batches may be uneven; after an averaging all-reduce of the gradients the result is that
            of one process with the whole batch. First-order only. See :func:`.ranks.whole_batch`.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: see :func:`check_energies`; or ranks that do not
            pass the same.
    """
    f_pos, f_neg, log_q = in_rows(f_pos, f_neg, groups, log_q)
    check_energies(f_pos, f_neg, beta_star, variant=variant, groups=groups, log_q=log_q)
    pos, neg = per_sample(f_pos), per_sample(f_neg)
    if process_group is not None:
        _check_group(process_group)
        batch = Batch(pos, neg, groups, log_q)
        pos, neg, groups, log_q = whole_batch(process_group, batch, same=(beta_star, variant))[:4]
    elif not isinstance(beta_star, Tensor) and abs(beta_star) < SMALLEST:
        return mean_difference(f_pos, f_neg)
    return Terms.of(pos, neg, _as_tensor(beta_star, pos), groups, log_q).loss(variant)


def coefficients(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar,
    *,
    variant: Variant = "default",
    groups: Groups | None = None,
    log_q: LogQ | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of :func:`contrastive_loss` with respect to the energies, by autograd.

    Detached, ``(N,)`` and ``(M,)``; of rows ``(N * M,)``. For ``default`` without groups they are
    -(1 - w⁺_i)/N and GradScale · w_j. The two sides sum to zero in every variant. Across ranks they
    are those of this rank's samples, in the mean over all ranks' samples.
    """
    options: dict[str, Any] = {"variant": variant, "groups": groups, "log_q": log_q}
    pos, neg, log_q = in_rows(f_pos, f_neg, groups, log_q)
    check_energies(pos, neg, beta_star, **options | {"log_q": log_q})
    with torch.enable_grad():
        pos, neg = (per_sample(f.detach()).requires_grad_() for f in (pos, neg))
        beta_star = _as_tensor(beta_star, pos)  # a tensor of 0 leaves out what is not usable
        sides = pos, neg.reshape(f_neg.shape) if groups == "rows" else neg
        loss = contrastive_loss(*sides, beta_star, **options, process_group=process_group)
        to_pos, to_neg = torch.autograd.grad(loss, (pos, neg))
    ranks = 1 if process_group is None else dist.get_world_size(process_group)
    return to_pos / ranks, to_neg / ranks


def weights(f_neg: Tensor, beta_star: BetaStar, *, log_q: Tensor | None = None) -> Tensor:
    """Return the negatives' importance weights, the softmax of β* f⁻ - log q (Eq. 5 to 7).

    ``(M,)``, summing to one unless no negative is finite; uniform at β* = 0. Args and errors are
    those of :func:`contrastive_loss`; ``log_q`` is that of the negatives.
    """
    if log_q is not None:
        check_energies(f_neg, f_neg, beta_star)
        check_log_q(log_q, f_neg, beta_star)
    terms = _terms(f_neg, f_neg, beta_star, None if log_q is None else (log_q, log_q))
    return torch.exp(terms.log_w) * terms.is_neg


def positive_weights(
    f_pos: Tensor, f_neg: Tensor, beta_star: BetaStar, *, log_q: LogQ | None = None
) -> Tensor:
    """Return the weights of positives as one more negative: sigmoid(β* f⁺ - log q⁺ - S) (Eq. 8).

    ``(N,)``; NaN for positives whose energy or log q is not usable; 1 / (M + 1) at β* = 0. Args and
    errors are those of :func:`contrastive_loss`.
    """
    terms = _terms(f_pos, f_neg, beta_star, log_q)
    # Without a usable negative it would have the whole weight.
    weight = torch.where(terms.is_paired, torch.sigmoid(terms.logit), 1.0)
    return torch.where(terms.is_pos, weight, torch.nan)


def grad_scale(
    f_pos: Tensor, f_neg: Tensor, beta_star: BetaStar, *, log_q: LogQ | None = None
) -> Tensor:
    """Return GradScale, mean_i (1 - w⁺_i) (Eq. 30), 0-dim: the factor on the contrastive gradient.

    M / (M + 1) when positives and negatives look alike, towards 0 when no negative is competitive;
    0 if a side has no usable sample. Args and errors are those of :func:`contrastive_loss`.
    """
    terms = _terms(f_pos, f_neg, beta_star, log_q)
    return terms.grad_scale(terms.is_paired)


def _terms(f_pos: Tensor, f_neg: Tensor, beta_star: BetaStar, log_q: LogQ | None) -> Terms:
    check_energies(f_pos, f_neg, beta_star, log_q=log_q)
    pos, neg = per_sample(f_pos), per_sample(f_neg)
    return Terms.of(pos, neg, _as_tensor(beta_star, pos), log_q=log_q)


def _as_tensor(beta_star: BetaStar, like: Tensor) -> BetaStar:
    if isinstance(beta_star, Tensor):
        return beta_star.to(like)
    return float(beta_star) if abs(beta_star) >= SMALLEST else like.new_zeros(())


def _check_group(group: object) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"process_group= is a {type(group).__name__}; expected a ProcessGroup.")


def mean_difference(f_pos: Tensor, f_neg: Tensor) -> Tensor:
    """Return mean f⁻ - mean f⁺, the standard loss (Eq. 3), in the dtype given; heads are summed."""
    return heads_summed(f_neg).mean() - heads_summed(f_pos).mean()
