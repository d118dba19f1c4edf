"""The protocol of sinks, and the names and texts that sinks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ..tags import is_guard_tag

__all__ = [
    "LEVEL_NUMBERS",
    "MARKER_PREFIX",
    "TAG_PREFIX",
    "Histograms",
    "Record",
    "Scalars",
    "Sink",
    "prefixed",
]

Scalars: TypeAlias = Mapping[str, float]
Histograms: TypeAlias = Mapping[str, Sequence[float]]
Record: TypeAlias = Mapping[str, Any]

# Sinks that share their name space with the trainer's scalars put this before the guard's.
TAG_PREFIX = "guard/"
# TensorBoard's first page puts groups that start with _ first, and opens only the first two.
MARKER_PREFIX = "_alerts/"
# Levels as numbers, as in the scalar guard/alert_level.
LEVEL_NUMBERS = {"INFO": 0, "WARN": 1, "ERROR": 2}


@runtime_checkable
class Sink(Protocol):
    """The four methods of a sink. Anything that has them can be passed as ``sinks=[...]``.

    A subclass may leave out methods that it does not need, except ``write_alert``.
    """

    def write_row(self, step: int, scalars: Scalars, histograms: Histograms) -> None:
        """Take the diagnostics of one step, and the numbers that the trainer gave to ``g.log``.

        The ``scalars`` go by tag, the guard's without the prefix of :func:`prefixed`. Keep NaN and
        infinities: people look for them after a blow-up. ``histograms`` are the raw values of
        ``f_pos`` and ``f_neg``; most rows have none.
        """
        return

    def write_alert(self, record: Record) -> None:
        """Take one alert, as the plain dict that ``Alert.record()`` returns."""

    def write_recovery(self, record: Record) -> None:
        """Take one rollback, as the plain dict of the audit log.

        Rows from ``record["restored_step"]`` on come again; on a GPU, also a few before it.
        """
        return

    def flush(self) -> None:
        """Write all that is still in memory. The guard calls this every ``flush_every`` steps,
        on an alert, on a rollback and at exit."""
        return


@lru_cache(10_000)
def prefixed(name: str) -> str:
    """The tag of a row's number beside other scalars: ``guard/NAME``; a trainer's tag as it is."""
    return TAG_PREFIX + name if is_guard_tag(name) and not name.startswith(MARKER_PREFIX) else name
