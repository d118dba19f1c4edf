"""The loss and its gradient without checks, for energies that have been checked already.

Call :func:`ebmguard.energies.check_energies` first: these do not say what is wrong with an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..energies import (
    SMALLEST,
    BetaStar,
    Groups,
    LogQ,
    Reduce,
    Variant,
    Variants,
    exponents,
    per_sample,
    variant_runs,
)
from ._terms import Terms
from .joined import join

__all__ = ["coefficients", "contrastive_loss"]

F = TypeVar("F", bound=Callable[..., Any])


def _each(function: F) -> F:
    """Averages over a sequence of exponents and joins the models of a sequence of variants."""

    @wraps(function)
    def each(
        f_pos: Tensor,
        f_neg: Tensor,
        beta_star: Any,
        *,
        variant: Variants = "default",
        log_q: LogQ | None = None,
        **options: Any,
    ) -> Any:
        if isinstance(beta_star, Sequence):
            options |= {"variant": variant, "log_q": log_q}
            found = [each(f_pos, f_neg, one, **options) for one in exponents(beta_star)]
            return _joined(found, lambda tensors: torch.stack(tensors).mean(0))
        if isinstance(variant, str):
            return function(f_pos, f_neg, beta_star, variant=variant, log_q=log_q, **options)
        found = []
        for name, i in variant_runs(variant):
            own = None if log_q is None else (log_q[0][i], log_q[1][i])
            part = f_pos[i], f_neg[i], beta_star[i]
            found.append(function(*part, variant=name, log_q=own, **options))
        return _joined(found, torch.cat)

    return cast("F", each)


def _joined(found: list[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    if isinstance(found[0], Tensor):
        return join(found)
    return tuple(join(list(side)) for side in zip(*found, strict=True))


@_each
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
            "default" and "no_pos" only. A third tensor ``(N,)`` has the output scale of each
            positive's class, in units of that of β*: the exponent of its class is β* times it. The
            numbers are positive, and the same within a class; a pair of its own is a class too.
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
            "true" halves each rank's positives. First-order only. The loss of one β* takes two
            messages, of two (with ``log_q`` three) and of at most nine numbers per model; with
            ``groups`` they grow with the batch, and the host waits for the batch sizes.

    Returns:
        0-dim, or ``(*models,)``.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: see :func:`check_energies`.
    """
    assert isinstance(variant, str)
    assert not isinstance(beta_star, Sequence)
    if process_group is None:
        if not isinstance(beta_star, Tensor) and abs(beta_star) < SMALLEST:
            return _mean(f_neg, reduce) - _mean(f_pos, reduce)
        terms = Terms.of(f_pos, f_neg, beta_star, groups=groups, log_q=log_q, reduce=reduce)
        return terms.loss(variant)
    # The value is that of all ranks; the gradient is this rank's share, times the world size that
    # the averaging of gradients divides by.
    value, (to_pos, to_neg), (pos, neg) = _over_ranks(
        f_pos, f_neg, beta_star, variant, groups, log_q, reduce, process_group
    )
    share = (to_pos * pos).sum(-1) + (to_neg * neg).sum(-1)
    return value + dist.get_world_size(process_group) * (share - share.detach())


@_each
@torch.no_grad()
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
    assert isinstance(variant, str)
    assert not isinstance(beta_star, Sequence)
    if process_group is None:
        terms = Terms.of(f_pos, f_neg, beta_star, groups=groups, log_q=log_q, reduce=reduce)
        return terms.coefficients(variant)
    return _over_ranks(f_pos, f_neg, beta_star, variant, groups, log_q, reduce, process_group)[1]


def _over_ranks(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar,
    variant: Variant,
    groups: Groups | None,
    log_q: LogQ | None,
    reduce: Reduce,
    process_group: dist.ProcessGroup,
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The loss of all ranks and this rank's coefficients, detached, and its energies, attached."""
    if groups is None:
        terms = Terms.of(
            f_pos, f_neg, beta_star, log_q=log_q, reduce=reduce, process_group=process_group
        )
        value, sides = terms.over_ranks(variant, process_group)
        return value, sides, (terms.pos, terms.neg)
    # Sums do not suffice for classes: every rank computes the loss of the whole batch.
    pos, neg = per_sample(f_pos, beta_star, reduce), per_sample(f_neg, beta_star, reduce)
    batch = join(pos, neg, groups, log_q, process_group)
    terms = Terms.of(batch.f_pos, batch.f_neg, beta_star, groups=batch.groups, log_q=batch.log_q)
    to_pos, to_neg = batch.own(*terms.coefficients(variant))
    attached = torch.where(to_pos == 0, 0.0, pos), torch.where(to_neg == 0, 0.0, neg)
    return terms.loss(variant), (to_pos, to_neg), attached


def _mean(f: Tensor, reduce: Reduce) -> Tensor:
    if reduce == "mean" or f.ndim == 1 or f.numel() == f.shape[0]:
        return f.mean()
    return f.flatten(1).sum(1).mean()
