"""The alerts: rules, in the file of their watchers; robust statistics; the judge. No torch."""

from .growth import GrowthRule
from .judge import DEFAULT_RULES, Bands, Judge, error_for
from .remedies import Remedies, Remedy, Situation
from .rule import Alert, Level, Limits, Reading, Rule, Watcher
from .thresholds import Bound, CollapsedRule, FloorRule, MedianRule, NonFiniteRule
from .verdict import Verdict, VerdictTracker

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
    "Verdict",
    "VerdictTracker",
    "Watcher",
    "error_for",
]
