"""`ebmguard train shortrun`: from settings to a run folder, and how the run went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebmguard import tags

from ..engine.launch import first_alerts, launch
from .config import ShortRunConfig
from .train import train


def run(config: ShortRunConfig) -> int:
    """`ebmguard train shortrun`: as :func:`..engine.launch.launch` says."""
    return launch(config, train, summary)


def summary(results: dict[str, Any], path: Path) -> str:
    """How the run went, in a few lines."""
    lines = [f"results in {path}"]
    if results["ended"] is not None:
        lines.append(f"ENDED by the guard after {results['steps']} updates: {results['ended']}")
    elif results["diverged_at"] is not None:
        lines.append(f"DIVERGED at update {results['diverged_at']}")
    else:
        lines.append(f"finished {results['steps']} updates in {results['wall_seconds']:.0f} s")
    lines += first_alerts(results)
    numbers = results["median_last_100"]
    beta_star = results["beta_star"]
    lines.append(
        "medians of the last 100 updates: "
        + ", ".join(
            f"{words} {value:.3g}"
            for words, tag in (
                ("energy gap", tags.ENERGY_GAP),
                ("GradScale", tags.weight_tag(tags.GRAD_SCALE, beta_star)),
                ("ESS", tags.weight_tag(tags.ESS, beta_star)),
            )
            if (value := numbers[tag]) is not None
        )
    )
    picture = path / "figures" / "samples_end.png"
    if picture.is_file():  # a run may be lost in its first update
        lines.append(f"its last samples: {picture}")
    return "\n".join(lines)
