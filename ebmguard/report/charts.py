"""Which diagnostics are drawn, and on which scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..alerts import Bands, Limits
from ..tags import REFERENCE, TAGS, Scale

__all__ = ["ACCURACY", "CHARTS", "MORE_CHARTS", "Bands", "Chart", "Limits", "Scale", "value_of"]


@dataclass(frozen=True)
class Chart:
    """One diagnostic as a person reads it.

    Attributes:
        tag: the diagnostic, without the ``guard/`` prefix.
        title: its name.
        scale: as of :class:`ebmguard.tags.Tag`.
        note: what is healthy and what else it tells, in a few words.
    """

    tag: str
    title: str
    scale: Scale
    note: str


ACCURACY = Chart("accuracy", "test accuracy", "share", "of the evaluations")
_ALL = {
    tag.name: Chart(
        tag.name,
        tag.title,
        tag.scale,
        "; ".join(filter(None, (tag.healthy, tag.tells))) or tag.definition,
    )
    for tag in TAGS.values()
    if tag.scale is not None
}
CHARTS = tuple(
    _ALL.pop(tag)
    for tag in ("energy_gap", "grad_scale", "ess", "energy_overlap", "sampler/grad_norm")
)
MORE_CHARTS = tuple(_ALL.values())


def value_of(row: Mapping[str, float], tag: str) -> float | None:
    """A diagnostic of a row, None where the row lacks it.

    At β* = 0 the weights are uniform and say nothing; as the alert rules do, it is then read at the
    reference exponent.
    """
    if row.get("beta_star") == 0 and REFERENCE + tag in row:
        tag = REFERENCE + tag
    return row.get(tag)
