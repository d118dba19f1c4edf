"""The end of a guard: what its parts leave behind, also where nobody has closed it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes as without_modes

from ..sinks import Writer
from .first_losses import FirstLosses
from .optimizer import OptimizerHooks
from .rows import Rows

__all__ = ["finish", "remove_hooks", "write_the_rest"]


def write_the_rest(rows: Rows, writer: Writer) -> None:
    """Write the rows that are under way, unjudged."""
    for row in () if writer.is_released else rows.drain():
        writer.write(row.step, row.numbers | row.logged, row.samples)


def remove_hooks(first_losses: FirstLosses, hung: Iterable[weakref.ref[OptimizerHooks]]) -> None:
    """Remove the hooks that hang on others' objects."""
    first_losses.stop()
    for hooks in filter(None, (reference() for reference in hung)):
        hooks.remove()


def finish(rows: Rows, writer: Writer, *hanging: Any) -> None:
    """Write what a guard had that is gone, and take off what it hung."""
    remove_hooks(*hanging)
    with without_modes():  # the collector may run anywhere, as while torch.compile traces
        write_the_rest(rows, writer)
    writer.close()
