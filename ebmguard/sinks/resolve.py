"""What the caller passes as ``sinks=`` or ``log_dir=``, as sinks."""

from __future__ import annotations

import os
from typing import Any

from ..errors import ConfigError
from .jsonl import JsonlSink
from .protocol import (
    LEVEL_NUMBERS,
    TAG_PREFIX,
    Histograms,
    Record,
    Scalars,
    Sink,
    alert_markdown,
    marker_tag,
)
from .tensorboard import TensorBoardSink
from .writer import check_free

__all__ = ["AddScalarSink", "as_sink", "open_log_dir"]

_METHODS = ("write_row", "write_alert", "write_recovery", "flush")


class AddScalarSink:
    """Writes to anything that has ``add_scalar(tag, value, step)``.

    For example ``torch.utils.tensorboard.SummaryWriter``, tensorboardX's, or Lightning's
    ``logger.experiment``. Its ``add_text``, ``add_histogram`` and ``flush`` are used if it has
    them. Tags get the prefix ``guard/``. An alert becomes the scalar ``_alerts/<LEVEL>_<rule>``
    (the level: 0 INFO, 1 WARN, 2 ERROR) at its step, and a text under ``guard/alerts``.

    Such loggers take one call per scalar, and some 60 calls a step are slow: a ``SummaryWriter``
    costs several times as much as ``log_dir=``, which writes the row at once.

    Args:
        logger: the object. It stays the caller's to close.
    """

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self._add_text = getattr(logger, "add_text", None)
        self._add_histogram = getattr(logger, "add_histogram", None)
        self._flush = getattr(logger, "flush", None)

    def write_row(self, step: int, scalars: Scalars, histograms: Histograms) -> None:
        """Pass every scalar on, and the histograms where the logger has ``add_histogram``."""
        for tag, value in scalars.items():
            self.logger.add_scalar(TAG_PREFIX + tag, value, step)
        if self._add_histogram is None or not histograms:
            return
        import torch  # only here: other sinks need none

        for tag, values in histograms.items():
            # Histograms of a SummaryWriter raise on NaN. The row's nonfinite/* tags count those.
            drawn = torch.tensor(values, dtype=torch.float64)
            drawn = drawn[drawn.isfinite()]
            if drawn.numel():
                self._add_histogram(TAG_PREFIX + tag, drawn, step)

    def write_alert(self, record: Record) -> None:
        """Pass the alert on as a marker, and as text where the logger has ``add_text``."""
        step = record["step"]
        self.logger.add_scalar(marker_tag(record), LEVEL_NUMBERS[record["level"]], step)
        if self._add_text is not None:
            self._add_text(TAG_PREFIX + "alerts", alert_markdown(record), step)

    def write_recovery(self, record: Record) -> None:
        """Nothing: a logger shows a rollback by the rows' ``recovery/attempt``."""

    def flush(self) -> None:
        """Flush the logger where it can be flushed."""
        if self._flush is not None:
            self._flush()


def as_sink(obj: Any) -> Sink:
    """An entry of ``sinks=`` if it is a :class:`Sink`; an :class:`AddScalarSink` around a logger.

    Raises:
        ConfigError: if it is neither.
    """
    if isinstance(obj, type):
        raise ConfigError(
            f"sinks= holds the class {obj.__name__}, but expected an object made from it. "
            f"Pass {obj.__name__}(...)."
        )
    missing = [name for name in _METHODS if not callable(getattr(obj, name, None))]
    if not missing and isinstance(obj, Sink):
        return obj
    if callable(getattr(obj, "add_scalar", None)):
        return AddScalarSink(obj)
    if isinstance(obj, str | os.PathLike):
        raise ConfigError(
            f"sinks= holds the path {os.fspath(obj)!r}, but expected sinks. Pass "
            "log_dir=path, or sinks=[ebmguard.sinks.JsonlSink(path)]."
        )
    lacks = f" It lacks {', '.join(missing)}." if len(missing) < len(_METHODS) else ""
    raise ConfigError(
        f"sinks= holds an object of type {type(obj).__name__}, which is no sink.{lacks} Expected "
        "an object with the methods write_row, write_alert, write_recovery and flush, or a logger "
        "with add_scalar(tag, value, step), such as a SummaryWriter."
    )


def open_log_dir(path: str | os.PathLike[str]) -> list[Sink]:
    """The sinks behind ``log_dir=``: JSON lines and TensorBoard in one folder, made if missing.

    Raises:
        ConfigError: if it cannot be written, another guard of this process is using it, or the
            package tensorboard is missing.
    """
    check_free(path)
    # TensorBoard first: where its package is missing, nothing has been created yet.
    events = TensorBoardSink(path)
    return [JsonlSink(path), events]
