"""`ebmguard train toy`: from settings to a run folder, and how close each member came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ebmguard.printable import printable

from ..engine.interrupt import INTERRUPTED
from ..engine.progress import log_to_terminal
from ..numbers import median
from .config import ToyConfig
from .train import train


def run(config: ToyConfig) -> int:
    """`ebmguard train toy`: train, and print the medians over the seeds.

    Returns:
        Exit status: 0, or 130 where Ctrl-C stopped the run.

    Raises:
        ConfigError: the settings, the folder or the device cannot be meant.
    """
    results = train_run(config)
    if results is None:
        print(printable(f"stopped; go on with: {config.command()} --resume"))
        return INTERRUPTED
    print(f"results in {printable(config.out)}, {results['wall_seconds']:.0f} s\n")
    print(table(results["members"]))
    return 0


def train_run(config: ToyConfig) -> dict[str, Any] | None:
    """Open or resume the run folder and train.

    Returns:
        What results.json holds, or None where Ctrl-C stopped the run.

    Raises:
        ConfigError: the settings, the folder or the device cannot be meant.
    """
    log_to_terminal()
    return train(*config.open())


def table(members: Sequence[dict[str, Any]]) -> str:
    """Medians over the seeds, one line for each variant and β."""
    columns = ("kl", "tv", "mode_mass_error", "energy_scale", "kl_sgld")
    lines = [
        f"{'variant':8} {'beta':>12} " + " ".join(f"{name:>15}" for name in columns) + "  diverged"
    ]
    for variant, beta in dict.fromkeys((m["variant"], m["beta"]) for m in members):
        same = [m for m in members if (m["variant"], m["beta"]) == (variant, beta)]
        cells = (f"{median([m[name] for m in same]):15.4g}" for name in columns)
        lost = sum(m["diverged_at"] is not None for m in same)
        lines.append(f"{variant:8} {beta:>12} {' '.join(cells)}  {lost} of {len(same)}")
    return "\n".join(lines)
