"""`ebmguard train shortrun`: from settings to a run folder, and how the run went."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..interrupt import INTERRUPTED
from ..ranks import joined_ranks
from .config import ShortRunConfig
from .train import train


def run(config: ShortRunConfig) -> int:
    """`ebmguard train shortrun`: open the run folder, train, and say how it went.

    Returns:
        Exit status: 0, or 130 where Ctrl-C stopped the run. That the guard ended it is a result.

    Raises:
        ConfigError: the settings, the folder or the device cannot be meant.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with joined_ranks(config.device) as ranks:
        if not ranks.is_first:  # all see the same alerts, which are said once
            logging.getLogger("ebmguard").setLevel(logging.CRITICAL)
        config, folder = config.open(ranks)
        results = train(config, folder, ranks=ranks)
    if ranks.is_first:
        if results is None:
            by = f", by torchrun with {ranks.world} processes" if ranks.world > 1 else ""
            print(f"stopped; go on with: {config.command()} --resume{by}")
        else:
            print(summary(results, folder.path))
    return INTERRUPTED if results is None else 0


def summary(results: dict[str, Any], path: Path) -> str:
    """How the run went, in a few lines."""
    lines = [f"results in {path}"]
    if results["ended"] is not None:
        lines.append(f"ENDED by the guard after {results['steps']} updates: {results['ended']}")
    elif results["diverged_at"] is not None:
        lines.append(f"DIVERGED at update {results['diverged_at']}")
    else:
        lines.append(f"finished {results['steps']} updates in {results['wall_seconds']:.0f} s")
    said = {results["ended"]}
    alerts = []
    for level in ("first_error", "first_warn"):  # an ERROR may be the first of both
        alert = results[level]
        if alert is not None and alert["message"] not in said:
            said.add(alert["message"])
            alerts.append(f"{level.replace('_', ' ')}: {alert['message']}")
    lines += reversed(alerts)
    numbers = results["median_last_100"]
    prefix = "" if results["beta_star"] else "ref/"
    lines.append(
        "medians of the last 100 updates: "
        + ", ".join(
            f"{words} {value:.3g}"
            for words, tag in (
                ("energy gap", "energy_gap"),
                ("GradScale", f"{prefix}grad_scale"),
                ("ESS", f"{prefix}ess"),
            )
            if (value := numbers[tag]) is not None
        )
    )
    picture = path / "figures" / "samples_end.png"
    if picture.is_file():  # a run may be lost in its first update
        lines.append(f"its last samples: {picture}")
    return "\n".join(lines)
