"""Settings of `ebmguard table jem`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class TableConfig:
    """Print Tables 1 and 2 of the paper beside the numbers of JEM runs, and a list of the runs.

    Runs that are not over are listed too, with what they have, and marked. Nothing is trained.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders of `ebmguard train jem`, or folders with some anywhere below."""
    out: Path | None = None
    """File for the same page, in Markdown."""
