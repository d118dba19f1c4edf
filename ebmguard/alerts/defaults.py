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
from .remedies import (
    CROWDED,
    HUNG,
    OLD,
    OVERSHOOT,
    SATURATED,
    TOO_LONG,
    TOO_SHORT,
    WEIGHTS,
)
from .rule import Rule

__all__ = ["DEFAULT_RULES"]

DEFAULT_RULES: tuple[Rule, ...] = (
    NonFiniteRule(),
    BandRule(
        series=(
            Series(
                "energy_gap",
                warn=8,
                error=20,
                floor_tag="f_pos/std",
                absorbed="up",
                cap=1e4,
                early_cap=100,
            ),
            # f is known up to a constant only. All energies shift together when a network begins to
            # learn, slowly or quickly, so that the positives alone never make an ERROR.
            Series("f_pos/median", warn=8, error=16, floor_tag="f_pos/std", cap=1e4, most=0.5),
            Series("f_neg/min", warn=16, error=math.inf, side="down", floor_tag="f_pos/std"),
            Series("sampler/grad_norm", warn=8, error=14, side="up", log=True, absorbed="up"),
        )
    ),
    FloorRule(),
    MedianRule(
        "weights_degenerate",
        bounds=(
            Bound("ess", "below", 0.1, clear=0.15, window=50, remedies=WEIGHTS),
            # The Pareto shape comes rarely, and each value pools the weights of several steps.
            Bound("pareto_k", "above", 0.7, clear=0.6, window=5, remedies=WEIGHTS),
        ),
        reference_prefix="ref/",
        error=WeightsDegenerateError,
    ),
    MedianRule(
        "overshoot",
        bounds=(Bound("energy_overlap", "above", 0.95, clear=0.9, window=50, remedies=OVERSHOOT),),
    ),
    MedianRule(
        "stale_chains",
        bounds=(
            # A chain that moves never repeats itself to the last bit.
            Bound("sampler/repeated", "above", 0.5, clear=0.1, window=5, remedies=HUNG),
            Bound("buffer/duplicates", "above", 0.5, clear=0.4, window=50, remedies=CROWDED),
            # Persistent chains that never start afresh are a method too: said, but not warned of.
            Bound(
                "buffer/age",
                "above",
                200.0,
                clear=150.0,
                window=50,
                remedies=OLD,
                level=Level.INFO,
            ),
        ),
    ),
    MedianRule(
        "saturated",
        bounds=(
            # Of real images up to 0.82 of the entries lie at an end (MNIST).
            Bound("sampler/clamped", "above", 0.95, clear=0.9, window=50, remedies=SATURATED),
        ),
    ),
    # Trainers choose step and noise apart, and live with what is no exact sampler: INFO only.
    MedianRule(
        "step_size",
        bounds=(
            Bound(
                "sampler/acceptance",
                "below",
                0.01,
                clear=0.05,
                window=5,
                remedies=TOO_LONG,
                level=Level.INFO,
            ),
            Bound(
                "sampler/drift_to_noise",
                "above",
                100.0,
                clear=50.0,
                window=50,
                remedies=TOO_LONG,
                level=Level.INFO,
            ),
            Bound(
                "sampler/drift_to_noise",
                "below",
                0.001,
                clear=0.002,
                window=50,
                remedies=TOO_SHORT,
                level=Level.INFO,
            ),
        ),
    ),
)
