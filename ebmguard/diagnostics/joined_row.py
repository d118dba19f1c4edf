"""One row of several ranks: each number joined as its line in :mod:`ebmguard.tags` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..tags import TAGS

__all__ = ["joined_row"]


def joined_row(
    rows: Sequence[Mapping[str, float]], positives: Sequence[int], negatives: Sequence[int]
) -> dict[str, float]:
    """The numbers of all ranks, from rows of the same names.

    Args:
        rows: each rank's numbers by tag.
        positives, negatives: each rank's numbers of samples, which weigh some averages. A rank
            counts as many sampler's samples as negatives.
    """
    both = [n + m for n, m in zip(positives, negatives, strict=True)]
    weights = {"positives": positives, "negatives": negatives, "both": both}

    def join(name: str) -> float:
        values = [row[name] for row in rows]
        how = TAGS[name].join if name in TAGS else "average"
        if any(x != x for x in values):
            return float("nan")
        if how in ("lowest", "highest"):
            return min(values) if how == "lowest" else max(values)
        if how == "sum":
            return sum(values)
        by = weights.get(how, [1] * len(rows))
        return sum(x * w for x, w in zip(values, by, strict=True)) / sum(by)

    return {name: join(name) for name in rows[0]}
