"""The rules that are shipped: every threshold in one place.

The measurement behind each is in ``docs/alerts.md``; what helps is worded in :mod:`.remedies`.
"""

from __future__ import annotations

from ..errors import WeightsDegenerateError
from .alert import Level
from .collapsed import CollapsedRule
from .floor import FloorRule
from .growth import GrowthRule
from .median import Bound, MedianRule
from .nonfinite import NonFiniteRule
from .remedies import CROWDED, HUNG, OLD, OVERSHOOT, SATURATED, TOO_LONG, TOO_SHORT, WEIGHTS

__all__ = ["DEFAULT_RULES"]

_INFO = Level.INFO

# A bound: tag, side, limit, where it is calm again, values in the median, what helps, level.
DEFAULT_RULES: tuple[NonFiniteRule | GrowthRule | CollapsedRule | FloorRule | MedianRule, ...] = (
    NonFiniteRule(),
    GrowthRule(),
    CollapsedRule(),
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
