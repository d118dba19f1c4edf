"""How much of the weight each sampler of a mixture carries, and how good its negatives are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..energies import Groups, LogQ, of_tensors
from ..objective import trusted
from ..ranks import summed

__all__ = ["mixture_gaps", "mixture_weights"]


@of_tensors
def mixture_weights(
    f_pos: Tensor,
    f_neg: Tensor,
    parts: Mapping[str, slice],
    beta_star: float | Tensor,
    groups: Groups | None = None,
    log_q: LogQ | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Share of the whole weight that each sampler's negatives carry (Eq. 5).

    Args:
        f_pos, f_neg, beta_star, log_q: as of :func:`weight_diagnostics`; at β* = 0 the share of the
            weight is that of the samples, and there is no ``log_q``.
        parts: each sampler's negatives, by its name; together all M.
        groups: class labels ``(y_pos, y_neg)``: shares of the weights within each positive's class,
            averaged over the positives that have a negative of their class.
        process_group: the shares are those of all ranks' negatives together, for the messages of
            the objective and one more.

    Returns:
        ``mixture/<name>/weight``, 0-dim or ``(*models,)``; they add up to 1. NaN if no negative
        has a weight, or if the parts do not add up to M negatives.
    """
    # "no_pos" has no GradScale, so the shares are defined where GradScale underflows.
    data: dict[str, Any] = {"groups": groups, "log_q": log_q, "process_group": process_group}
    _, pull = trusted.coefficients(f_pos, f_neg, beta_star, variant="no_pos", **data)
    found = _sums(pull, parts)
    if process_group is not None:
        found = summed(process_group, *found)
    total = torch.stack(found).sum(0)
    return {f"mixture/{name}/weight": x / total for name, x in zip(parts, found, strict=True)}


@of_tensors
def mixture_gaps(
    f_pos: Tensor,
    f_neg: Tensor,
    parts: Mapping[str, slice],
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """How far each sampler's negatives lie below the positives: mean f⁺ - mean f⁻ of the part.

    The arguments are as of :func:`mixture_weights`; all ranks' means come from one message.

    Returns:
        ``mixture/<name>/energy_gap``, 0-dim or ``(*models,)``. NaN for a part without samples,
        if energies leave it undefined, or if the parts do not add up to M negatives.
    """
    counts = [f_pos.shape[-1], *(part.stop - part.start for part in parts.values())]
    sizes = [f_neg.new_full((), count) for count in counts]
    sums = [f_pos.sum(-1), *_sums(f_neg, parts)]
    if process_group is not None:
        everyone = summed(process_group, *sums, *sizes)
        sums, sizes = everyone[: len(sums)], everyone[len(sums) :]
    top, *each = (x / size for x, size in zip(sums, sizes, strict=True))
    return {f"mixture/{name}/energy_gap": top - x for name, x in zip(parts, each, strict=True)}


def _sums(x: Tensor, parts: Mapping[str, slice]) -> list[Tensor]:
    """Sum of x over each part; NaN if the parts do not add up to the samples of x."""
    if sum(part.stop - part.start for part in parts.values()) != x.shape[-1]:
        return [x.new_full(x.shape[:-1], torch.nan) for _ in parts]
    return [x[..., part].sum(-1) for part in parts.values()]
