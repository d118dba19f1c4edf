"""The robust contrastive objective: pure functions of energies and an exponent.

Notation follows *Energy-Based Model Training Objective Robust to Inaccurate SGLD Samples*:
``f`` is the negative energy (high on data), ``beta_star`` is the exponent β* on raw network
outputs, and S = logsumexp_j β* f(x⁻_j). Only β* enters here; the sampler's side, (1 - β) f, is in
:mod:`ebmguard.temper`.

Shapes are those of :mod:`ebmguard.energies`. Everything is computed in float32 at least; float64
stays float64.

Non-finite policy. A negative with ``|β* f| > 1e30`` or a NaN gets weight 0; such a positive is left
out. If a side is then empty the loss is 0 with zero gradients. Nothing is dropped in silence: the
guard counts these samples and raises an alert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .energies import (
    BetaStar,
    Groups,
    Reduce,
    Variant,
    Variants,
    check_energies,
    exponents,
    per_sample,
    variant_runs,
)
from .errors import ConfigError

__all__ = [
    "coefficients",
    "contrastive_loss",
    "grad_scale",
    "positive_weights",
    "usable",
    "weights",
]

ProcessGroup: TypeAlias = "dist.ProcessGroup | None"

# Beyond this a product with β* is as good as infinite.
_LARGEST = 1e30
# Below this β* counts as 0: 1/β* would overflow float32.
_SMALLEST = 1e-35


def usable(f: Tensor, beta: float | Tensor) -> Tensor:
    """Which energies the objective uses: finite ones with ``|β* f| <= 1e30``.

    Args:
        f: energies, ``(..., samples)``.
        beta: β*, broadcastable against ``f``.

    Returns:
        boolean tensor of ``f``'s shape.
    """
    # A comparison with NaN is False, so one comparison finds NaN, infinities and overflow. The
    # second limit keeps sums and differences of energies finite where β* is tiny.
    f, limit = f.detach(), 1e-4 * torch.finfo(f.dtype).max
    if isinstance(beta, Tensor):
        return ((beta * f).abs() <= _LARGEST) & (f.abs() <= limit)
    return f.abs() <= (min(_LARGEST / abs(beta), limit) if beta else limit)


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
    valid = usable(neg, beta)
    neg = torch.where(valid, neg, 0.0)
    neg = beta * (neg - _dominant(neg, valid, beta))
    return torch.softmax(torch.where(valid, neg, _void(neg)), dim=-1) * valid


def positive_weights(
    f_pos: Tensor, f_neg: Tensor, beta_star: BetaStar, *, reduce: Reduce = "sum"
) -> Tensor:
    """Weight that each positive would get as one more negative: sigmoid(β* f⁺ - S) (Eq. 8).

    Returns:
        ``(N,)`` or ``(*models, N)``; NaN for positives whose energy is not usable. At β* = 0 it is
        1 / (M + 1).
    """
    terms = _Terms.of(f_pos, f_neg, beta_star, reduce=reduce, zero_at=0.0)
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
    terms = _Terms.of(f_pos, f_neg, beta_star, reduce=reduce, zero_at=0.0)
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
            First-order only.

    Returns:
        0-dim, or ``(*models,)``.

    Raises:
        EnergyTypeError, ShapeError, ConfigError: see :func:`check_energies`.
    """
    check_energies(f_pos, f_neg, beta_star, variant=variant, groups=groups, reduce=reduce)
    if isinstance(beta_star, Sequence):
        part = partial(contrastive_loss, groups=groups, reduce=reduce, process_group=process_group)
        losses = [part(f_pos, f_neg, each, variant=variant) for each in exponents(beta_star)]
        return torch.stack(losses).mean(0)
    if not isinstance(variant, str):
        assert isinstance(beta_star, Tensor)
        part = partial(contrastive_loss, groups=groups, reduce=reduce, process_group=process_group)
        losses = [
            part(f_pos[i], f_neg[i], beta_star[i], variant=name)
            for name, i in variant_runs(variant)
        ]
        return torch.cat(losses)
    if not isinstance(beta_star, Tensor) and abs(beta_star) < _SMALLEST:
        return _mean(f_neg, reduce) - _mean(f_pos, reduce)
    terms = _Terms.of(
        f_pos, f_neg, beta_star, groups=groups, reduce=reduce, process_group=process_group
    )
    loss = terms.loss(variant)
    if process_group is not None:
        # The value is every rank's; the gradient is this rank's share of it, times the world size
        # that averaging divides by.
        to_pos, to_neg = terms.coefficients(variant)
        share = (to_pos.detach() * terms.pos).sum(-1) + (to_neg.detach() * terms.neg).sum(-1)
        share = share * dist.get_world_size(process_group)
        loss = loss.detach() + (share - share.detach())
    return torch.where(terms.both_sides(), loss, 0.0)


def coefficients(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_star: BetaStar,
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
    if not isinstance(variant, str):
        assert isinstance(beta_star, Tensor)
        part = partial(coefficients, groups=groups, reduce=reduce, process_group=process_group)
        sides = [
            part(f_pos[i], f_neg[i], beta_star[i], variant=name)
            for name, i in variant_runs(variant)
        ]
        return torch.cat([pos for pos, _ in sides]), torch.cat([neg for _, neg in sides])
    with torch.no_grad():
        if not isinstance(beta_star, Tensor) and abs(beta_star) < _SMALLEST:
            beta_star = torch.zeros((), device=f_pos.device)
        terms = _Terms.of(
            f_pos, f_neg, beta_star, groups=groups, reduce=reduce, process_group=process_group
        )
        defined = terms.both_sides().unsqueeze(-1)
        to_pos, to_neg = terms.coefficients(variant)
        return torch.where(defined, to_pos, 0.0), torch.where(defined, to_neg, 0.0)


@dataclass
class _Terms:
    """What every variant is made of, for shifted energies of shape ``(*models, samples)``.

    Energies are shifted by the negative of the largest weight *before* β* multiplies them: the
    objective does not depend on a common offset, but float32 does.
    """

    pos: Tensor
    neg: Tensor
    valid_pos: Tensor
    valid_neg: Tensor
    beta: float | Tensor  # with a trailing dimension for samples where it is a tensor
    zero: Tensor | None  # entries of a β* tensor that are 0, computed at 1
    exponent: Tensor  # β* f⁻, (*models, M), or (*models, N, M) with groups
    log_sum: Tensor  # S, (*models, 1), or (*models, N) with groups
    margin: Tensor  # S - β* f⁺
    process_group: ProcessGroup

    @classmethod
    def of(
        cls,
        f_pos: Tensor,
        f_neg: Tensor,
        beta_star: BetaStar,
        *,
        groups: Groups | None = None,
        reduce: Reduce = "sum",
        process_group: ProcessGroup = None,
        zero_at: float = 1.0,
    ) -> _Terms:
        if groups is not None and process_group is not None:
            raise ConfigError("groups across ranks are not defined; leave process_group out.")
        pos, neg = per_sample(f_pos, beta_star, reduce), per_sample(f_neg, beta_star, reduce)
        beta: float | Tensor
        zero = None
        if isinstance(beta_star, Tensor):
            beta_star = beta_star.to(pos)
            zero = beta_star.abs() < _SMALLEST
            beta = torch.where(zero, zero_at, beta_star).unsqueeze(-1)
        else:
            beta = beta_star if beta_star != 0 else zero_at
        valid_pos, valid_neg = usable(pos, beta), usable(neg, beta)
        pos, neg = torch.where(valid_pos, pos, 0.0), torch.where(valid_neg, neg, 0.0)
        shift = _dominant(neg, valid_neg, beta, process_group)
        pos, neg = pos - shift, neg - shift
        exponent, visible = beta * neg, valid_neg
        if groups is not None:
            visible = (groups[0].unsqueeze(-1) == groups[1]) & valid_neg.unsqueeze(-2)
            exponent = exponent.unsqueeze(-2)
            partnered = visible.any(-1)
            if zero is not None:  # β* = 0 sets nobody against anybody
                partnered = partnered | zero.unsqueeze(-1)
            valid_pos = valid_pos & partnered
        exponent = torch.where(visible, exponent, _void(exponent))
        log_sum = torch.logsumexp(exponent, -1)
        if process_group is not None:
            log_sum = _logsumexp_over_ranks(log_sum, process_group)
        if groups is None:
            log_sum = log_sum.unsqueeze(-1)
        return cls(
            pos,
            neg,
            valid_pos,
            valid_neg,
            beta,
            zero,
            exponent,
            log_sum,
            log_sum - beta * pos,
            process_group,
        )

    def total(self, x: Tensor) -> Tensor:
        """Sum over samples, of all ranks."""
        x = x.sum(-1)
        if self.process_group is not None:
            x = x.detach().clone()
            dist.all_reduce(x, group=self.process_group)
        return x

    def count(self, valid: Tensor) -> Tensor:
        """Number of usable samples, at least 1 so that an empty side divides by something."""
        return self.total(valid.to(self.pos.dtype)).clamp(min=1.0)

    def mean(self, x: Tensor, valid: Tensor) -> Tensor:
        return self.total(torch.where(valid, x, 0.0)) / self.count(valid)

    def scale_of(self, valid: Tensor) -> Tensor:
        """GradScale over the positives selected by ``valid``."""
        return self.mean(torch.sigmoid(self.margin), valid)

    def halves(self) -> tuple[Tensor, Tensor]:
        first = torch.arange(self.pos.shape[-1], device=self.pos.device) < self.pos.shape[-1] // 2
        return self.valid_pos & first, self.valid_pos & ~first

    def both_sides(self) -> Tensor:
        """Whether positives and negatives have a usable sample.

        An empty half needs no check in ``true``: its GradScale and its means are 0, and either
        product has one of each.
        """
        return self._any(self.valid_pos) & self._any(self.valid_neg)

    def _any(self, valid: Tensor) -> Tensor:
        if self.process_group is None:
            return valid.any(-1)
        return self.total(valid.to(self.pos.dtype)) > 0

    def no_pos(self, valid: Tensor) -> Tensor:
        return self.mean(self.log_sum / self.beta - self.pos, valid)

    def loss(self, variant: Variant) -> Tensor:
        loss = self._loss(variant)
        if self.zero is None:
            return loss
        plain = self.mean(self.neg, self.valid_neg) - self.mean(self.pos, self.valid_pos)
        return torch.where(self.zero, plain, loss)

    def _loss(self, variant: Variant) -> Tensor:
        if variant == "default":
            # -logsigmoid, as softplus is cut off at 20 and would lose nine digits in float64.
            return self.mean(F.logsigmoid(-self.margin) / -self.beta, self.valid_pos)
        if variant == "no_pos":
            return self.no_pos(self.valid_pos)
        if variant == "batch":
            return self.scale_of(self.valid_pos).detach() * self.no_pos(self.valid_pos)
        first, second = self.halves()
        scale_first, scale_second = self.scale_of(first).detach(), self.scale_of(second).detach()
        return 0.5 * (scale_second * self.no_pos(first) + scale_first * self.no_pos(second))

    def coefficients(self, variant: Variant) -> tuple[Tensor, Tensor]:
        """Gradient of the loss with respect to each energy."""
        pull = self._pull(variant)
        if self.exponent.ndim > self.neg.ndim:  # groups: each positive weighs its own class
            weight = torch.exp(self.exponent - self.log_sum.unsqueeze(-1))
            to_neg = (pull.unsqueeze(-1) * weight).sum(-2)
        else:
            weight = torch.exp(self.exponent - self.log_sum)
            to_neg = self.total(pull).unsqueeze(-1) * weight * self.valid_neg
        if self.zero is None:
            return -pull, to_neg
        zero = self.zero.unsqueeze(-1)
        return (
            torch.where(zero, -self.share(self.valid_pos), -pull),
            torch.where(zero, self.share(self.valid_neg), to_neg),
        )

    def share(self, valid: Tensor) -> Tensor:
        """1/N on each of the N usable samples."""
        return valid / self.count(valid).unsqueeze(-1)

    def _pull(self, variant: Variant) -> Tensor:
        """How strongly each positive is pulled up: (1 - w⁺_i)/N for ``default``."""
        if variant == "default":
            return torch.sigmoid(self.margin) * self.share(self.valid_pos)
        if variant == "no_pos":
            return self.share(self.valid_pos)
        if variant == "batch":
            return self.scale_of(self.valid_pos).unsqueeze(-1) * self.share(self.valid_pos)
        first, second = self.halves()
        return 0.5 * (
            self.scale_of(second).unsqueeze(-1) * self.share(first)
            + self.scale_of(first).unsqueeze(-1) * self.share(second)
        )


def _dominant(
    neg: Tensor, valid: Tensor, beta: float | Tensor, process_group: ProcessGroup = None
) -> Tensor:
    """The usable negative of the largest weight, detached, ``(*models, 1)``, of all ranks.

    That is the lowest one where β* is negative. 0 stands in where no negative is usable.
    """
    void = torch.finfo(neg.dtype).min
    largest = torch.where(valid, _ascending(neg.detach(), beta), void).amax(-1, keepdim=True)
    if process_group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, process_group)
    return torch.where(largest == void, 0.0, _ascending(largest, beta))


def _ascending(neg: Tensor, beta: float | Tensor) -> Tensor:
    """±neg, in the order of their weights; its own inverse."""
    if isinstance(beta, Tensor):
        return torch.where(beta < 0, -neg, neg)
    return -neg if beta < 0 else neg


def _void(x: Tensor) -> float:
    # In the place of -inf, whose differences are NaN in the backward pass.
    return torch.finfo(x.dtype).min / 16


def _logsumexp_over_ranks(local: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    highest = local.detach().clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, process_group)
    total = torch.exp(local.detach() - highest)
    dist.all_reduce(total, group=process_group)
    return highest + total.log()


def _mean(f: Tensor, reduce: Reduce) -> Tensor:
    if reduce == "mean" or f.ndim == 1 or f.numel() == f.shape[0]:
        return f.mean()
    return f.flatten(1).sum(1).mean()
