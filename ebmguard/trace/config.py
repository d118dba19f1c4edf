"""The settings of `ebmguard trace`, whose help needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

__all__ = ["TraceConfig"]


@dataclass(frozen=True)
class TraceConfig:
    """Run a trainer for a few steps and say where and how to guard it.

    The script runs as it would by itself, with seeds of 0, until some optimizer steps are done, and
    again with the lines that guard it. It writes its usual files. The exit status is 1 where no
    lines could be proven.
    """

    script: tyro.conf.Positional[Path]
    """The Python file of a trainer."""

    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    """The script's arguments: all that follows."""

    steps: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 4
    """The number of optimizer steps to watch whose loss compares samples with data; 2 or more."""
