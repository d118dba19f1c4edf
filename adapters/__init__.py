"""Adapters: a table of codebases, and one file per framework, imported where it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    table = {} if name.startswith("_") else import_module(".codebases", __name__).CODEBASES
    if name not in table:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return table[name]
