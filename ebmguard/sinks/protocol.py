"""The protocol of a sink, and a sink that waits for another one that cannot write."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["MARKER_PREFIX", "TAG_PREFIX", "PatientSink", "Sink"]

_log = logging.getLogger("ebmguard")

# Rows kept for a sink that fails: some 50 MB. At a row a step, hours to make room on a disk.
_KEPT = 10_000

# Sinks that share their name space with the trainer's own scalars put this before every tag.
TAG_PREFIX = "guard/"
# Markers of alerts have their own: TensorBoard's first page sorts groups of tags by name, those
# that start with _ before all others, and opens only the first two.
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

        Rows of the steps from ``record["restored_step"]`` on come again afterwards. On a GPU, where
        rows are read late, those of a few steps before it come again too.
        """

    def flush(self) -> None:
        """Write everything taken so far to where it belongs."""


class PatientSink:
    """Passes everything on to another sink, and keeps it while that one raises ``OSError``.

    A full disk must not end a training run. The first failure is logged as an error. From then on
    rows, alerts and rollbacks are kept here in order and tried again at every flush. Beyond 10,000
    the oldest rows are dropped and counted. A log message says when the sink takes everything
    again; :meth:`close` logs what it has not taken. Errors of any other type are bugs and are
    raised.

    Args:
        sink: the other sink. What a failing flush of it has not written, it keeps for the next.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._error: OSError | None = None  # set while the sink fails
        self._kept: deque[tuple[Callable[[], None], bool]] = deque()  # calls; whether it is a row
        self._dropped = 0
        self._unflushed = 0  # taken by the sink since its last flush

    def write_row(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        """Pass the row on, or keep it."""
        row, samples = dict(scalars), dict(histograms)
        self._pass_on(lambda: self.sink.write_row(step, row, samples), is_row=True)

    def write_alert(self, record: Mapping[str, Any]) -> None:
        """Pass the alert on, or keep it."""
        self._pass_on(lambda: self.sink.write_alert(record), is_row=False)

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        """Pass the rollback on, or keep it."""
        self._pass_on(lambda: self.sink.write_recovery(record), is_row=False)

    def flush(self) -> None:
        """Flush the sink, and pass on what has been kept."""
        try:
            self.sink.flush()
            if self._kept:
                while self._kept:
                    self._kept[0][0]()
                    self._kept.popleft()
                    self._unflushed += 1
                self.sink.flush()
        except OSError as error:
            self._fail(error)
            return
        self._unflushed = 0
        if self._error is not None:
            self._error = None
            lost = f"all but the {self._dropped} oldest rows" if self._dropped else "everything"
            _log.warning("%s takes its rows again: %s was written.", self._name, lost)
            self._dropped = 0

    def close(self) -> None:
        """Flush, and say what is lost if nothing more is tried."""
        self.flush()
        if self._error is not None:
            alerts = sum(not is_row for _, is_row in self._kept)
            _log.error(
                "%s has not taken up to %d rows and alerts until the end, among them %d alerts and "
                "rollbacks that were kept: %s. Unless it takes them later, they are lost.",
                self._name,
                self._unflushed + len(self._kept) + self._dropped,
                alerts,
                self._error,
            )

    @property
    def _name(self) -> str:
        return type(self.sink).__name__

    def _pass_on(self, call: Callable[[], None], *, is_row: bool) -> None:
        if self._error is None:
            try:
                call()
            except OSError as error:
                self._fail(error)
            else:
                self._unflushed += 1
                return
        self._kept.append((call, is_row))
        if len(self._kept) > _KEPT:
            oldest = next((i for i, (_, is_row) in enumerate(self._kept) if is_row), 0)
            del self._kept[oldest]
            self._dropped += 1

    def _fail(self, error: OSError) -> None:
        if self._error is None:
            _log.error(
                "%s cannot write: %s. Training goes on; the last %d rows and alerts are kept in "
                "memory and tried again at every flush. Make room, or restore what is missing.",
                self._name,
                error,
                _KEPT,
            )
        self._error = error
