"""A logger that the trainer already has, used as a sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .protocol import TAG_PREFIX
from .text import LEVEL_NUMBERS, alert_markdown, marker_tag

__all__ = ["AddScalarSink"]


class AddScalarSink:
    """Writes to anything that has ``add_scalar(tag, value, step)``.

    For example ``torch.utils.tensorboard.SummaryWriter``, tensorboardX's, or Lightning's
    ``logger.experiment``. Its ``add_text``, ``add_histogram`` and ``flush`` are used where it has
    them. Tags get the prefix ``guard/``. An alert becomes the scalar ``_alerts/<LEVEL>_<rule>``
    (the level: 0 INFO, 1 WARN, 2 ERROR) at its step, and a text under ``guard/alerts``.

    One call per scalar is what such loggers offer, and some 60 of them a step are slow: a
    ``SummaryWriter`` costs several times as much as ``log_dir=``, which writes the row at once.

    Args:
        logger: the object. It stays the caller's to close.
    """

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self._add_text = _method(logger, "add_text")
        self._add_histogram = _method(logger, "add_histogram")
        self._flush = _method(logger, "flush")

    def write_row(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        """Pass every scalar on, and the histograms where the logger has ``add_histogram``."""
        for tag, value in scalars.items():
            self.logger.add_scalar(TAG_PREFIX + tag, value, step)
        if self._add_histogram is None:
            return
        for tag, values in histograms.items():
            # Histograms of a SummaryWriter raise on NaN. The row's nonfinite/* tags count those.
            drawn = torch.tensor(values, dtype=torch.float64)
            drawn = drawn[drawn.isfinite()]
            if drawn.numel():
                self._add_histogram(TAG_PREFIX + tag, drawn, step)

    def write_alert(self, record: Mapping[str, Any]) -> None:
        """Pass the alert on as a marker, and as text where the logger has ``add_text``."""
        step = record["step"]
        level = LEVEL_NUMBERS[record["level"]]
        self.logger.add_scalar(marker_tag(record), level, step)
        if self._add_text is not None:
            self._add_text(TAG_PREFIX + "alerts", alert_markdown(record), step)

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        """Nothing: a logger shows a rollback by the rows' ``recovery/attempt``."""

    def flush(self) -> None:
        """Flush the logger where it can be flushed."""
        if self._flush is not None:
            self._flush()


def _method(logger: Any, name: str) -> Any:
    method = getattr(logger, name, None)
    return method if callable(method) else None
