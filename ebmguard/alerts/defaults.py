"""The rules that are shipped: every threshold in one place.

The measurement behind each is in ``docs/alerts.md``; what helps is worded in :mod:`.words`.
"""

from __future__ import annotations

import math

from . import words
from .rules import BandRule, Bound, FloorRule, MedianRule, NonFiniteRule, Rule, Series

__all__ = ["DEFAULT_RULES"]

DEFAULT_RULES: tuple[Rule, ...] = (
    NonFiniteRule(),
    BandRule(
        series=(
            Series("energy_gap", warn=8, error=20, floor_tag="f_pos/std", absorbed="up", cap=1e4),
            Series("f_pos/median", warn=8, error=16, floor_tag="f_pos/std", cap=1e4),
            Series("f_neg/min", warn=16, error=math.inf, side="down", floor_tag="f_pos/std"),
            Series("sampler/grad_norm", warn=8, error=14, side="up", log=True, absorbed="up"),
        )
    ),
    FloorRule(),
    MedianRule(
        "weights_degenerate",
        bounds=(
            Bound("ess", "below", 0.1, clear=0.15, window=50, remedies=words.WEIGHTS),
            # The Pareto shape comes rarely, and each value pools the weights of several steps.
            Bound("pareto_k", "above", 0.7, clear=0.6, window=5, remedies=words.WEIGHTS),
        ),
        reference_prefix="ref/",
    ),
    MedianRule(
        "stale_chains",
        bounds=(
            # A chain that moves never repeats itself to the last bit.
            Bound("sampler/repeated", "above", 0.5, clear=0.1, window=5, remedies=words.HUNG),
        ),
    ),
)
