"""What both controllers check of their settings and states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ConfigError

__all__ = ["check_keys", "is_count"]


def is_count(value: object) -> bool:
    """Whether it is a whole number of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_keys(owner: str, state: Mapping[str, Any], expected: Iterable[str]) -> None:
    """Refuse a saved state that has not these keys."""
    names, found = sorted(expected), sorted(map(str, state))
    if found != names:
        raise ConfigError(
            f"Not a state of {owner}: expected the keys {', '.join(names)}; got {', '.join(found)}."
        )
