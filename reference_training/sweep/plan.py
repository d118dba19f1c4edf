"""What a sweep works on: runs of a trainer, and whatever else has cells that are commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class Task(Protocol):
    """A cell, as a sweep sees it."""

    @property
    def title(self) -> str:
        """In words."""

    @property
    def log(self) -> Path:
        """What it prints; also its lock."""

    @property
    def device(self) -> str:
        """Where it is to run."""

    @property
    def begun_by(self) -> Path | None:
        """A file that is there when `--resume` goes on with it; None where nothing does."""

    def over(self) -> str | None:
        """How it went, in words, once it has come to its end; ConfigError where that is unclear."""

    def progress(self) -> str:
        """How far it has come."""


class Plan(Protocol):
    """Which cells there are to do, and how; a :class:`~.grid.Grid` is one."""

    @property
    def out(self) -> Path:
        """The folder of all."""

    @property
    def address(self) -> str:
        """Where Ray is, or "local"."""

    @property
    def workers(self) -> int | None:
        """Cells at a time at most."""

    @property
    def gpus_per_cell(self) -> int:
        """Of each, where there are GPUs."""

    def words(self, cell: Any) -> list[str]:
        """What Python runs for a cell."""

    def page(self) -> str | None:
        """Text for OUT/table.md, made anew after each cell."""
