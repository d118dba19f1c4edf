"""The rules that are shipped: every threshold in one place.

The measurement behind each is in ``docs/alerts.md``; what helps is worded in :mod:`.remedies`.
"""

from __future__ import annotations

import math

from ..errors import WeightsDegenerateError
from .alert import Level
from .band import BandRule, Series
from .floor import FloorRule
from .median import Bound, MedianRule
from .nonfinite import NonFiniteRule
from .remedies import CROWDED, HUNG, OLD, OVERSHOOT, SATURATED, TOO_LONG, TOO_SHORT, WEIGHTS

__all__ = ["DEFAULT_RULES"]

_SPREAD, _INFO = "f_pos/std", Level.INFO

# A series: tag, distance of WARN, distance of ERROR.
# A bound: tag, side, limit, where it is calm again, values in the median, what helps, level.
DEFAULT_RULES: tuple[NonFiniteRule | BandRule | FloorRule | MedianRule, ...] = (
    NonFiniteRule(),
    BandRule(
        (
            Series("energy_gap", 8, 20, floor_tag=_SPREAD, absorbed="up", cap=1e4, early_cap=100),
            # f is known up to a constant only. All energies shift together when a network begins to
            # learn, slowly or quickly, so that the positives alone never make an ERROR.
            Series("f_pos/median", 8, 16, floor_tag=_SPREAD, cap=1e4, most=0.5),
            Series("f_neg/min", 16, math.inf, side="down", floor_tag=_SPREAD),
            Series("sampler/grad_norm", 8, 14, side="up", log=True, absorbed="up"),
        )
    ),
    FloorRule(),
    MedianRule(
        "weights_degenerate",
        (
            Bound("ess", "below", 0.1, 0.15, 50, WEIGHTS),
            # The Pareto shape comes rarely, and each value pools the weights of several steps.
            Bound("pareto_k", "above", 0.7, 0.6, 5, WEIGHTS),
        ),
        reference_prefix="ref/",
        error=WeightsDegenerateError,
    ),
    MedianRule("overshoot", (Bound("energy_overlap", "above", 0.95, 0.9, 50, OVERSHOOT),)),
    MedianRule(
        "stale_chains",
        (
            # A chain that moves never repeats itself to the last bit.
            Bound("sampler/repeated", "above", 0.5, 0.1, 5, HUNG),
            Bound("buffer/duplicates", "above", 0.5, 0.4, 50, CROWDED),
            # Persistent chains that never start afresh are a method too: said, but not warned of.
            Bound("buffer/age", "above", 200.0, 150.0, 50, OLD, _INFO),
        ),
    ),
    # Of real images up to 0.82 of the entries lie at an end (MNIST).
    MedianRule("saturated", (Bound("sampler/clamped", "above", 0.95, 0.9, 50, SATURATED),)),
    # Trainers choose step and noise apart, and live with what is no exact sampler: INFO only.
    MedianRule(
        "step_size",
        (
            Bound("sampler/acceptance", "below", 0.01, 0.05, 5, TOO_LONG, _INFO),
            Bound("sampler/drift_to_noise", "above", 100.0, 50.0, 50, TOO_LONG, _INFO),
            Bound("sampler/drift_to_noise", "below", 0.001, 0.002, 50, TOO_SHORT, _INFO),
        ),
    ),
)
