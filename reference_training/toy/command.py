"""`ebmguard train toy`: from settings to a run folder, and how close each member came."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine.launch import launch
from ..engine.progress import log_to_terminal
from ..plots.markdown import markdown_table
from ..plots.numbers import median, number
from .config import ToyConfig
from .train import train


def run(config: ToyConfig) -> int:
    """`ebmguard train toy`: as :func:`..engine.launch.launch` says, with medians over the seeds."""
    return launch(config, train, summary)


def train_run(config: ToyConfig) -> dict[str, Any] | None:
    """Open or resume the run folder and train.

    Returns:
        What results.json holds, or None where Ctrl-C stopped the run.

    Raises:
        ConfigError: the settings, the folder or the device cannot be meant.
    """
    log_to_terminal()
    return train(*config.open())


def summary(results: dict[str, Any], path: Path) -> str:
    """How the run went: medians over the seeds."""
    head = f"results in {path}, {results['wall_seconds']:.0f} s"
    return f"{head}\n\n{table(results['members'])}"


def table(members: Sequence[dict[str, Any]]) -> str:
    """Medians over the seeds, one line for each variant and β."""
    columns = ("kl", "tv", "mode_mass_error", "energy_scale", "kl_sgld")
    rows = []
    for variant, beta in dict.fromkeys((m["variant"], m["beta"]) for m in members):
        same = [m for m in members if (m["variant"], m["beta"]) == (variant, beta)]
        medians = (number(median([m[name] for m in same]), 4) for name in columns)
        lost = sum(m["diverged_at"] is not None for m in same)
        rows.append([variant, beta, *medians, f"{lost} of {len(same)}"])
    return markdown_table(["variant", "beta", *columns, "diverged"], rows, words=2)
