"""The protocol of a sink: where rows of diagnostics, alerts and rollbacks are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["MARKER_PREFIX", "TAG_PREFIX", "Sink"]

# Sinks that share their name space with the trainer's own scalars put this before every tag.
TAG_PREFIX = "guard/"
# Markers of alerts have another: TensorBoard's first page sorts groups of tags by name, those that
# start with _ before all others, and opens the first two alone.
MARKER_PREFIX = "_alerts/"


@runtime_checkable
class Sink(Protocol):
    """Four methods. Anything that has them can be passed as ``sinks=[...]``.

    The guard calls ``flush`` every ``flush_every`` steps, on an alert, on a rollback and at exit,
    so a sink may keep rows in memory until then.
    """

    def write_row(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        """Take the diagnostics of one step.

        Args:
            step: the guard's step.
            scalars: tag to value, tags without the ``guard/`` prefix. Values may be NaN or
                infinite and must not be dropped: they are what one looks for after a blow-up.
            histograms: raw values of ``f_pos`` and ``f_neg`` on rows of the slower tier, empty on
                all others.
        """

    def write_alert(self, record: Mapping[str, Any]) -> None:
        """Take one alert, as the plain dict that ``Alert.record()`` returns."""

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        """Take one rollback, as the plain dict of the audit log.

        Rows of the steps from ``record["restored_step"]`` on come again afterwards; where rows are
        read late, those of a few steps before it as well.
        """

    def flush(self) -> None:
        """Write everything taken so far to where it belongs."""
