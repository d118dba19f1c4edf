"""Alerts: rules, each with its watcher in one file; robust statistics; the judge. No torch."""

from .alert import Alert, Level
from .defaults import DEFAULT_RULES, Bands
from .failures import CollapsedRule, NonFiniteRule
from .growth import GrowthRule
from .judge import Judge, error_for
from .remedies import Remedies, Remedy, Situation
from .rule import Limits, Reading, Rule, Watcher
from .thresholds import Bound, FloorRule, MedianRule

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
