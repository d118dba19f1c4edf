"""`ebmguard train jem`: from settings to a run folder, and how the run went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..engine.launch import first_alerts, launch
from .config import JemConfig
from .train import train


def run(config: JemConfig) -> int:
    """`ebmguard train jem`: as :func:`..engine.launch.launch` says."""
    return launch(config, train, summary)


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
    lines += first_alerts(results)
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
