"""What both controllers read of a row, and check of their settings and states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ConfigError

__all__ = ["check_keys", "finite", "is_count"]


def finite(row: Mapping[str, float], tag: str) -> float | None:
    """The number under a tag; None where it is absent, NaN or infinite: unknown."""
    value = row.get(tag)
    return None if value is None or not math.isfinite(value) else float(value)


def is_count(value: object) -> bool:
    """Whether it is a whole number of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_keys(owner: str, state: Mapping[str, Any], expected: Iterable[str]) -> None:
    """Refuse a saved state that has not these keys."""
    names = sorted(expected)
    if sorted(map(str, state)) != names:
        raise ConfigError(
            f"Not a state of {owner}: expected the keys {', '.join(names)}; got "
            f"{', '.join(sorted(map(str, state)))}."
        )
