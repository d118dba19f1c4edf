"""What the controllers read of a judged row."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["REFERENCE", "finite"]

REFERENCE = "ref/"
"""Prefix of the diagnostics at the guard's reference exponent, which say something at β* = 0."""


def finite(row: Mapping[str, float], tag: str) -> float | None:
    """The number under a tag; None where it is absent, NaN or infinite: unknown."""
    value = row.get(tag)
    return None if value is None or not math.isfinite(value) else float(value)
