"""Alerts: rules as data, robust statistics and the detector. Imports no torch."""

from .alert import Alert, Level
from .detector import Detector, error_for
from .rules import (
    DEFAULT_RULES,
    BandRule,
    FloorRule,
    NonFiniteRule,
    Rule,
    Series,
    WeightsRule,
)

__all__ = [
    "DEFAULT_RULES",
    "Alert",
    "BandRule",
    "Detector",
    "FloorRule",
    "Level",
    "NonFiniteRule",
    "Rule",
    "Series",
    "WeightsRule",
    "error_for",
]
