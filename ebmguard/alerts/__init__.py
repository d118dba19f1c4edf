"""Alerts: rules, each with its watcher in one file; robust statistics; the judge. No torch."""

from .alert import Alert, Level
from .band import BandRule, Series
from .defaults import DEFAULT_RULES
from .floor import FloorRule
from .judge import Judge, error_for
from .limits import Bands
from .median import Bound, MedianRule
from .nonfinite import NonFiniteRule
from .remedies import Remedies, Remedy, Situation
from .rule import Limits, Reading, Rule, Watcher

__all__ = [
    "DEFAULT_RULES",
    "Alert",
    "BandRule",
    "Bands",
    "Bound",
    "FloorRule",
    "Judge",
    "Level",
    "Limits",
    "MedianRule",
    "NonFiniteRule",
    "Reading",
    "Remedies",
    "Remedy",
    "Rule",
    "Series",
    "Situation",
    "Watcher",
    "error_for",
]
