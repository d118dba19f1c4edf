"""Alerts: rules as data, robust statistics and the detector. Imports no torch."""

from .alert import Alert, Level
from .defaults import DEFAULT_RULES
from .detector import Detector, error_for
from .rules import BandRule, Bound, FloorRule, MedianRule, NonFiniteRule, Rule, Series

__all__ = [
    "DEFAULT_RULES",
    "Alert",
    "BandRule",
    "Bound",
    "Detector",
    "FloorRule",
    "Level",
    "MedianRule",
    "NonFiniteRule",
    "Rule",
    "Series",
    "error_for",
]
