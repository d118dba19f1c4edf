"""From what the caller passes to sinks."""

from __future__ import annotations

import os
from typing import Any

from ..errors import ConfigError
from .add_scalar import AddScalarSink
from .jsonl import JsonlSink
from .protocol import Sink
from .tensorboard import TensorBoardSink
from .writer import check_free

__all__ = ["as_sink", "open_log_dir"]

_METHODS = ("write_row", "write_alert", "write_recovery", "flush")


def as_sink(obj: Any) -> Sink:
    """The object itself if it is a :class:`Sink`; an :class:`AddScalarSink` around a logger.

    Args:
        obj: an entry of ``sinks=``.

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
    """The sinks behind ``log_dir=``: JSON lines and TensorBoard, both in the same folder.

    Args:
        path: folder, created if missing.

    Raises:
        ConfigError: if it cannot be written, another guard of this process is using it, or the
            package tensorboard is missing.
    """
    check_free(path)
    # TensorBoard first: where its package is missing, nothing has been created yet.
    events = TensorBoardSink(path)
    return [JsonlSink(path), events]
