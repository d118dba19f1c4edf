"""`ebmguard train jem`: from settings to a run folder, and how the run went."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..interrupt import INTERRUPTED
from ..ranks import joined_ranks
from .config import JemConfig
from .train import train


def run(config: JemConfig) -> int:
    """`ebmguard train jem`: open the run folder, train, and say how it went.

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
    lines += [rollback["message"] for rollback in results["rollbacks"]]
    if results["ended"] is not None:
        lines.append(f"ENDED by the guard after {results['steps']} steps: {results['ended']}")
    elif results["diverged_at"] is None:
        lines.append(f"finished {results['steps']} steps without divergence")
    else:
        lines.append(f"DIVERGED at step {results['diverged_at']}")
    for level in ("first_warn", "first_error"):
        alert = results[level]
        if alert is not None:
            lines.append(f"{level.replace('_', ' ')}: {alert['message']}")
    best = results["best_accuracy"]
    lines.append(f"test accuracy {results['accuracy']:.1%}, best {best:.1%}")
    best = results["best_evaluations"]
    if "valid_accuracy" in best:
        row = best["valid_accuracy"]
        lines.append(
            f"test accuracy {row['test_accuracy']:.1%} where the validation accuracy was best "
            f"({row['valid_accuracy']:.1%}, step {row['step']})"
        )
    for name, words in (("buffer_is", "Inception score"), ("buffer_fid", "FID")):
        if name in best:
            row = best[name]
            lines.append(
                f"best {words} of {row['buffer_samples']} samples of the buffer {row[name]:.4g} "
                f"(step {row['step']}; features: {row['features']})"
            )
    return "\n".join(lines)
