"""Which diagnostics are drawn, and what a chart reads of a row."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import printable
from ..tags import TAGS, Tag, weight_tag

__all__ = ["ACCURACY", "CHARTS", "MORE_CHARTS", "note", "unnamed", "value_of"]

# By the name of its file: a trainer may log an accuracy of its own.
ACCURACY = Tag("accuracy.jsonl", "test accuracy", "share", "of the evaluations")
CHARTS = tuple(
    TAGS[name]
    for name in ("energy_gap", "grad_scale", "ess", "energy_overlap", "sampler/grad_norm")
)
MORE_CHARTS = tuple(tag for tag in TAGS.values() if tag.scale is not None and tag not in CHARTS)


def unnamed(name: str) -> Tag:
    """The chart of a number that no line of the tags describes: a trainer's own, as a rule."""
    return Tag(name, printable(name), "symlog", "")


def note(chart: Tag) -> str:
    """What is healthy and what else it tells, in a few words."""
    return "; ".join(filter(None, (chart.healthy, chart.tells))) or chart.definition


def value_of(row: Mapping[str, float], tag: str) -> float | None:
    """A diagnostic of a row, None where the row lacks it.

    At β* = 0 the weights are uniform and say nothing; as the alert rules do, it is then read at the
    reference exponent.
    """
    return row.get(weight_tag(tag, row.get("beta_star", math.nan)), row.get(tag))
