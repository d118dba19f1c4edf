"""Alerts: rules, each with its watcher in one file; robust statistics; the judge. No torch."""

from .alert import Alert, Level
from .collapsed import CollapsedRule
from .defaults import DEFAULT_RULES, Bands
from .floor import FloorRule
from .growth import GrowthRule
from .judge import Judge, error_for
from .median import Bound, MedianRule
from .nonfinite import NonFiniteRule
from .remedies import Remedies, Remedy, Situation
from .rule import Limits, Reading, Rule, Watcher

__all__ = [
    "DEFAULT_RULES",
    "Alert",
    "Bands",
    "Bound",
    "CollapsedRule",
    "FloorRule",
    "GrowthRule",
    "Judge",
    "Level",
    "Limits",
    "MedianRule",
    "NonFiniteRule",
    "Reading",
    "Remedies",
    "Remedy",
    "Rule",
    "Situation",
    "Watcher",
    "error_for",
]
