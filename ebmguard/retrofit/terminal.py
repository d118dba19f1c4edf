"""What a guarded run says on the terminal: lines that begin with ``ebmguard:``."""

from __future__ import annotations

import logging
import sys
from os import PathLike
from typing import Any

from torch import Tensor

from .strength import Strength

__all__ = ["announce"]

_log = logging.getLogger("ebmguard")


class _Terminal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # A program that has set up logging shows this as it shows everything.
        if _log.handlers == [self] and not logging.getLogger().handlers:
            print(f"ebmguard: {self.format(record)}", file=sys.stderr)


def announce(sampler: object, strength: Strength, folder: str | PathLike[str] | None) -> None:
    """Log what is guarded, how strongly, and how to watch it."""
    if not _log.handlers and not logging.getLogger().handlers:
        _log.addHandler(_Terminal())
        _log.setLevel(_log.level or logging.INFO)
    named = getattr(sampler, "__name__", type(sampler).__name__)
    what = "the loss" if sampler is None else f"the loss and {named}"
    given, scale = ", ".join(map(_shown, strength.given)), strength.output_scale
    told = f"{scale:g}" if scale else "to be measured" if strength.is_measured else "unknown"
    watch = "pass log_dir= to watch it" if folder is None else f"ebmguard watch {folder}"
    _log.info("guards %s, %s=%s, output_scale=%s; %s", what, strength.name, given, told, watch)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return _shown(value.tolist())
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return "a schedule" if callable(value) else f"{value:g}"
