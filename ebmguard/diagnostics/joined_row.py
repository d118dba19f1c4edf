"""The diagnostics of all ranks' samples, from a few numbers of each rank.

A weight in the joined batch is the weight in the rank's own times the rank's share, so that sums
over weights join exactly, in logarithms; so do means, standard deviations, extremes and counts.
Of quantiles, the overlap and Pareto shapes the row has averages over ranks. With classes no such
sums exist, and the ranks exchange their energies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..energies import Groups, LogQ
from ..objective.joined import join
from ..ranks import gathered
from ..tags import TAGS, Join
from .weights import Shares, log_weights, named, weight_diagnostics_at

__all__ = ["diagnostics_of_ranks"]


def diagnostics_of_ranks(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_stars: Sequence[float | Tensor],
    own: Mapping[str, Tensor],
    process_group: dist.ProcessGroup,
    groups: Groups | None = None,
    log_q: LogQ | None = None,
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The numbers of the joined batch, from two messages that no batch size makes longer.

    With ``groups`` from four: the ranks exchange their energies and labels.

    Args:
        f_pos, f_neg, beta_stars, groups, log_q: this rank's, as of :func:`weight_diagnostics_at`.
        own: this rank's other numbers, 0-dim or ``(*models,)``, with those of
            :func:`energy_diagnostics` among them. All ranks have the same names.

    Returns:
        on every rank what :func:`weight_diagnostics_at` gives for the joined batch, and ``own``,
        each joined as its line in :mod:`ebmguard.tags` says, an average where there is none. Each
        rank counts as many sampler's samples as negatives.
    """
    names = sorted(own, key=_how)
    models, dtype = f_neg.shape[:-1], reduce(torch.promote_types, (x.dtype for x in own.values()))
    counted = (
        torch.stack([own[name].to(dtype).expand(models) for name in names]),
        f_pos.new_full((), f_pos.shape[-1]),
        f_neg.new_full((), f_neg.shape[-1]),
    )
    if groups is None:
        weights, counts = _weights(f_pos, f_neg, beta_stars, log_q, counted, process_group)
    else:
        counts = gathered(process_group, *counted)
        batch = join(f_pos, f_neg, groups, log_q, process_group)
        weights = weight_diagnostics_at(
            batch.f_pos, batch.f_neg, beta_stars, batch.groups, batch.log_q
        )
    joined = _joined(names, *counts)
    return weights, {name: joined[name] for name in own}


def _weights(
    f_pos: Tensor,
    f_neg: Tensor,
    beta_stars: Sequence[float | Tensor],
    log_q: LogQ | None,
    counted: Sequence[Tensor],
    process_group: dist.ProcessGroup,
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """The weights' numbers from the ranks' sums, and all ranks' ``counted``, N and M last in it."""
    q_pos, q_neg = log_q or (None, None)
    pos, neg = log_weights(f_pos, beta_stars, q_pos), log_weights(f_neg, beta_stars, q_neg)
    # NaN where an energy is not finite, and then on all ranks; else 0.
    spoiler = 0.0 * (neg.sum(-1) + pos.sum(-1))
    found = gathered(process_group, *counted, neg.amax(-1), *_moments(neg + spoiler.unsqueeze(-1)))
    counts, (largest, *of_neg) = found[: len(counted)], found[len(counted) :]
    n, m = counts[-2].sum(), counts[-1].sum()
    log_sum, w = _merged(of_neg, m)
    log_pull = F.logsigmoid(log_sum.unsqueeze(-1) - pos)
    log_total, v = _merged(gathered(process_group, *_moments(log_pull)), n)
    most, scale = (largest.amax(0) - log_sum).exp(), log_total.exp() / n
    weights = named(w, v, largest=most, scale=scale, paired=n)
    rows = zip(*(value.unbind() for value in weights.values()), strict=True)
    return [dict(zip(weights, row, strict=True)) for row in rows], counts


def _moments(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of shares p ∝ exp(logits) along the last dimension: log Σ exp(logits), Σ p², Σ p log p."""
    log_sum = logits.logsumexp(-1, keepdim=True)
    log_p = logits - log_sum
    p = log_p.exp()
    return log_sum.squeeze(-1), (p * p).sum(-1), (p * log_p).sum(-1)


def _merged(moments: Sequence[Tensor], count: Tensor) -> tuple[Tensor, Shares]:
    """log Σ exp(logits) of all ranks, and their shares together; ranks come first in moments."""
    log_sum, square, entropy = moments
    log_q = torch.log_softmax(log_sum, 0)
    q = log_q.exp()
    shares = Shares((q * q * square).sum(0), (q * (entropy + log_q)).sum(0), count)
    return log_sum.logsumexp(0), shares


def _joined(names: Sequence[str], table: Tensor, n: Tensor, m: Tensor) -> dict[str, Tensor]:
    """Numbers by name, from a table ``(ranks, names, *models)`` sorted by how they are joined."""
    by_rank = (-1,) + (1,) * (table.ndim - 2)
    n, m = n.view(by_rank), m.view(by_rank)
    found: dict[str, Tensor] = {}
    for how, group in groupby(names, _how):
        same = list(group)
        block = table[:, len(found) : len(found) + len(same)]
        found |= zip(same, _join(how, block, n, m).unbind(), strict=True)
    of_rank = dict(zip(names, table.unbind(1), strict=True))
    for side, count in (("f_pos", n), ("f_neg", m)):
        std, apart = of_rank[f"{side}/std"], of_rank[f"{side}/mean"] - found[f"{side}/mean"]
        variance = (count * (std * std + apart * apart)).sum(0) / count.sum(0)
        found[f"{side}/std"] = variance.sqrt()
    found["energy_gap"] = found["f_pos/mean"] - found["f_neg/mean"]
    return found


def _how(name: str) -> Join:
    return TAGS[name].join if name in TAGS else "average"


def _join(how: Join, x: Tensor, n: Tensor, m: Tensor) -> Tensor:
    match how:
        case "lowest":
            return x.amin(0)
        case "highest":
            return x.amax(0)
        case "sum":
            return x.sum(0)
        case "positives" | "negatives" | "both":
            count = {"positives": n, "negatives": m, "both": n + m}[how]
            return (x * count.unsqueeze(1)).sum(0) / count.sum(0)
        case _:  # also what is replaced by an exact number
            return x.mean(0)
