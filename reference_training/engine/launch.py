"""The command of a trainer that several ranks may share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ebmguard.errors import printable

from .interrupt import INTERRUPTED
from .progress import log_to_terminal
from .ranks import joined_ranks
from .run_config import RunConfig


def launch(
    config: RunConfig,
    train: Callable[..., dict[str, Any] | None],
    summary: Callable[[dict[str, Any], Path], str],
) -> int:
    """Join the ranks, open the run folder, train, and say how it went.

    Args:
        config: the settings as given.
        train: trains, by the settings that count, in a folder, with `ranks=`; returns what
            results.json holds, or None where Ctrl-C stopped the run.
        summary: says in a few lines how a run in a folder went.

    Returns:
        Exit status: 0, or 130 where Ctrl-C stopped the run. That the guard ended it is a result.

    Raises:
        ConfigError: the settings, the folder or the device cannot be meant.
    """
    log_to_terminal()
    with joined_ranks(config.device) as ranks:
        if not ranks.is_first:  # all see the same alerts, which are said once
            logging.getLogger("ebmguard").setLevel(logging.CRITICAL)
        config, folder = config.open(ranks)
        results = train(config, folder, ranks=ranks)
    if ranks.is_first:
        if results is None:
            by = f", by torchrun with {ranks.world} processes" if ranks.world > 1 else ""
            print(printable(f"stopped; go on with: {config.command()} --resume{by}"))
        else:
            print(printable(summary(results, folder.path)))
    return INTERRUPTED if results is None else 0


def first_alerts(results: Mapping[str, Any]) -> list[str]:
    """A line for the first WARN and the first ERROR; one that is both, or the end, is said once."""
    said = {results["ended"]}
    lines = []
    for level in ("first_error", "first_warn"):
        alert = results[level]
        if alert is not None and alert["message"] not in said:
            said.add(alert["message"])
            lines.append(f"{level.replace('_', ' ')}: {alert['message']}")
    return lines[::-1]
