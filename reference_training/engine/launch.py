"""The command of a trainer, which several ranks may share: `ebmguard train`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ebmguard.errors import printable

from .interrupt import INTERRUPTED
from .progress import log_to_terminal
from .ranks import joined_ranks
from .run_config import RunConfig


def launch(
    train: Callable[..., dict[str, Any] | None],
    told: Callable[[Mapping[str, Any]], str],
    config: RunConfig,
) -> int:
    """Join the ranks, open the run folder, train, and say how it went.

    Args:
        train: trains, by the settings that count, in a folder, with `ranks=`; returns what
            results.json holds, or None where Ctrl-C stopped the run.
        told: of that what is the trainer's own, in a few lines.
        config: the settings as given.

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
            print(printable("\n".join([*course(results, folder.path), told(results)])))
    return INTERRUPTED if results is None else 0


def course(results: Mapping[str, Any], path: Path) -> Iterator[str]:
    """How a run went; an alert that is the first WARN and the first ERROR, or the end, once."""
    yield f"results in {path}"
    for rollback in results["rollbacks"]:
        yield rollback["message"]
    if results["ended"] is not None:
        yield f"ENDED by the guard after {results['steps']} steps: {results['ended']}"
    elif results["diverged_at"] is not None:
        yield f"DIVERGED at step {results['diverged_at']}"
    else:
        yield f"finished {results['steps']} steps without divergence"
    said, alerts = {results["ended"]}, []
    for level in ("first_error", "first_warn"):
        alert = results[level]
        if alert is not None and alert["message"] not in said:
            said.add(alert["message"])
            alerts.append(f"{level.replace('_', ' ')}: {alert['message']}")
    yield from reversed(alerts)
