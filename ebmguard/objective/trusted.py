"""The loss and its gradient without checks, for energies that have been checked already.

Call :func:`ebmguard.energies.check_energies` first: these do not say what is wrong with an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
    """:func:`ebmguard.objective.contrastive_loss` without its checks."""
    part = partial(contrastive_loss, groups=groups, reduce=reduce, process_group=process_group)
    if isinstance(beta_star, Sequence):
        losses = [
            part(f_pos, f_neg, each, variant=variant, log_q=log_q) for each in exponents(beta_star)
        ]
        return torch.stack(losses).mean(0)
    if not isinstance(variant, str):
        assert isinstance(beta_star, Tensor)
        losses = [
            part(f_pos[i], f_neg[i], beta_star[i], variant=name, log_q=_of_models(log_q, i))
            for name, i in variant_runs(variant)
        ]
        return torch.cat(losses)
    if not isinstance(beta_star, Tensor) and abs(beta_star) < SMALLEST:
        if process_group is None:
            return _mean(f_neg, reduce) - _mean(f_pos, reduce)
        beta_star = torch.zeros((), device=f_pos.device)
    if process_group is None:
        terms = Terms.of(f_pos, f_neg, beta_star, groups=groups, log_q=log_q, reduce=reduce)
        return terms.loss(variant)
    # The value is that of all ranks; the gradient is this rank's share, times the world size that
    # the averaging of gradients divides by.
    value, (to_pos, to_neg), (pos, neg) = _over_ranks(
        f_pos, f_neg, beta_star, variant, groups, log_q, reduce, process_group
    )
    share = (to_pos * pos).sum(-1) + (to_neg * neg).sum(-1)
    return value + dist.get_world_size(process_group) * (share - share.detach())


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
    """:func:`ebmguard.objective.coefficients` without its checks."""
    part = partial(coefficients, groups=groups, reduce=reduce, process_group=process_group)
    if isinstance(beta_star, Sequence):
        sides = [
            part(f_pos, f_neg, each, variant=variant, log_q=log_q) for each in exponents(beta_star)
        ]
        to_pos, to_neg = (torch.stack(side).mean(0) for side in zip(*sides, strict=True))
        return to_pos, to_neg
    if not isinstance(variant, str):
        assert isinstance(beta_star, Tensor)
        sides = [
            part(f_pos[i], f_neg[i], beta_star[i], variant=name, log_q=_of_models(log_q, i))
            for name, i in variant_runs(variant)
        ]
        return torch.cat([pos for pos, _ in sides]), torch.cat([neg for _, neg in sides])
    with torch.no_grad():
        if not isinstance(beta_star, Tensor) and abs(beta_star) < SMALLEST:
            beta_star = torch.zeros((), device=f_pos.device)
        if process_group is not None:
            return _over_ranks(
                f_pos, f_neg, beta_star, variant, groups, log_q, reduce, process_group
            )[1]
        terms = Terms.of(f_pos, f_neg, beta_star, groups=groups, log_q=log_q, reduce=reduce)
        return terms.coefficients(variant)


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
    """The loss of all ranks' samples and the coefficients of this rank's, both detached.

    Returns:
        also this rank's energies, not detached, with 0 for samples that have no part.
    """
    if groups is None:
        terms = Terms.of(
            f_pos, f_neg, beta_star, log_q=log_q, reduce=reduce, process_group=process_group
        )
        value, to_pos, to_neg = terms.over_ranks(variant, process_group)
        return value, (to_pos, to_neg), (terms.pos, terms.neg)
    # Sums do not suffice for classes: every rank computes the loss of the whole batch.
    pos, neg = per_sample(f_pos, beta_star, reduce), per_sample(f_neg, beta_star, reduce)
    batch = join(pos, neg, groups, log_q, process_group)
    terms = Terms.of(batch.f_pos, batch.f_neg, beta_star, groups=batch.groups, log_q=batch.log_q)
    to_pos, to_neg = batch.own(*terms.coefficients(variant))
    return (
        terms.loss(variant),
        (to_pos, to_neg),
        (torch.where(to_pos == 0, 0.0, pos), torch.where(to_neg == 0, 0.0, neg)),
    )


def _of_models(log_q: LogQ | None, models: slice) -> LogQ | None:
    return None if log_q is None else (log_q[0][models], log_q[1][models])


def _mean(f: Tensor, reduce: Reduce) -> Tensor:
    if reduce == "mean" or f.ndim == 1 or f.numel() == f.shape[0]:
        return f.mean()
    return f.flatten(1).sum(1).mean()
