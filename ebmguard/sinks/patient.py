"""A sink that may fail, behind one that never does: a full disk must not end a training run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .protocol import Sink

__all__ = ["PatientSink"]

_log = logging.getLogger("ebmguard")

# Rows that wait for a sink that fails: some 50 MB. At a row a step, hours to make room on a disk.
_KEPT = 10_000


class PatientSink:
    """Passes everything on to another sink, and keeps it while that one raises ``OSError``.

    The first failure is logged as an error. From then on rows, alerts and rollbacks are kept here
    in their order, and are tried again at every flush. Of more than 10,000 the oldest rows are
    dropped and counted. It is said when the sink takes everything again, and by :meth:`close` when
    it has not until then. Errors of any other type are bugs, and are raised.

    Args:
        sink: the other one; it keeps for its next flush what a failing flush has not written.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._error: OSError | None = None  # set while the sink fails
        self._kept: deque[tuple[Callable[[], None], bool]] = deque()  # calls; whether it is a row
        self._dropped = 0
        self._unflushed = 0  # what the sink has taken since it was last flushed

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
