"""The raw energies: how far positives and negatives lie apart, and how many are not finite."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..energies import LogQ, of_tensors
from ..objective import usable

__all__ = ["energy_diagnostics", "nonfinite_diagnostics"]

_QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}
_SUMMARIES = ("mean", "std", "min", *_QUANTILES, "max")


@of_tensors
def energy_diagnostics(f_pos: Tensor, f_neg: Tensor) -> dict[str, Tensor]:
    """Summaries of detached negative energies, ``(N,)`` and ``(M,)``, or ``(*models, N or M)``.

    Returns:
        0-dim tensors, or ``(*models,)``, by the tags whose lines in :mod:`ebmguard.tags` define
        them; std is that of the population. NaN if an energy is NaN, or if infinities leave a
        number undefined.
    """
    # Few kinds of kernels, see weight_diagnostics_at, and one pass for sides of the same shape.
    if f_pos.shape == f_neg.shape:
        found = [x.unbind() for x in _summaries(torch.stack((f_pos, f_neg)))]
        (ranked_pos, ranked_neg), (of_pos, of_neg), (pos, neg) = found
    else:
        (ranked_pos, of_pos, pos), (ranked_neg, of_neg, neg) = map(_summaries, (f_pos, f_neg))
    ranked_neg = ranked_neg.contiguous()
    below = torch.searchsorted(ranked_pos, ranked_neg)
    not_above = torch.searchsorted(ranked_pos, ranked_neg, right=True)
    pairs = f_pos.shape[-1] * f_neg.shape[-1]
    overlap = (below + not_above).sum(-1).to(ranked_pos.dtype) * (0.5 / pairs)
    sides = {
        f"{side}/{name}": value
        for side, numbers in (("f_pos", pos), ("f_neg", neg))
        for name, value in zip(_SUMMARIES, numbers.unbind(-1), strict=True)
    }
    return {
        "energy_gap": sides["f_pos/mean"] - sides["f_neg/mean"],
        "energy_overlap": overlap + (of_pos + of_neg).squeeze(-1),
        **sides,
    }


@of_tensors
def nonfinite_diagnostics(
    f_pos: Tensor, f_neg: Tensor, beta_star: float | Tensor, log_q: LogQ | None = None
) -> dict[str, Tensor]:
    """Samples that the objective leaves out: f or log q not finite, or |β* f| > 1e30.

    0-dim tensors, or ``(*models,)``: counts of both sides, and their share of all.
    """
    if isinstance(beta_star, Tensor):
        beta_star = beta_star.unsqueeze(-1)
    if log_q is None and f_pos.shape == f_neg.shape:
        pos, neg = _left_out(torch.stack((f_pos, f_neg)), beta_star).unbind()
    else:
        q_pos, q_neg = log_q or (None, None)
        pos, neg = _left_out(f_pos, beta_star, q_pos), _left_out(f_neg, beta_star, q_neg)
    return {
        "nonfinite/pos": pos,
        "nonfinite/neg": neg,
        "nonfinite/energies": (pos + neg) * (1 / (f_pos.shape[-1] + f_neg.shape[-1])),
    }


def _left_out(f: Tensor, beta: float | Tensor, log_q: Tensor | None = None) -> Tensor:
    return f.shape[-1] - usable(f, beta, log_q).sum(-1, dtype=f.dtype)


def _summaries(f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted energies, what makes numbers NaN where one of them is, else 0, and the summaries."""
    n, ranked = f.shape[-1], f.sort(-1).values
    # A NaN is sorted to the end and would leave the lower quantiles as they are.
    spoiler = 0.0 * ranked[..., -1:].clamp(-1.0, 1.0)
    ranked = ranked + spoiler
    mean = ranked.sum(-1, keepdim=True) * (1 / n)
    deviation = ranked - mean
    std = ((deviation * deviation).sum(-1, keepdim=True) * (1 / n)).sqrt()
    places, part = _positions(n, f.dtype, f.device)
    low, high = ranked.index_select(-1, places).chunk(2, -1)
    quantiles = low + part * (high - low)
    table = torch.cat((mean, std, ranked[..., :1], quantiles, ranked[..., -1:]), -1)
    return ranked, spoiler, table


@lru_cache
def _positions(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The lower neighbours of all quantiles among n sorted values, the upper ones, and the places
    of the quantiles between them."""
    # Cached: making them again would copy from the host in every step.
    exact = [level * (n - 1) for level in _QUANTILES.values()]
    neighbours = [math.floor(x) for x in exact] + [math.ceil(x) for x in exact]
    return (
        torch.tensor(neighbours, device=device),
        torch.tensor([x - math.floor(x) for x in exact], dtype=dtype, device=device),
    )
