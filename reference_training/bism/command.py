"""`ebmguard train bism`: from settings to a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..engine.launch import launch
from .config import BismConfig
from .train import train


def run(config: BismConfig) -> int:
    """`ebmguard train bism`: as :func:`..engine.launch.launch` says."""
    return launch(config, train, summary)


def summary(results: dict[str, Any], path: Path) -> str:
    """How the run went."""
    nats, below = results["log_likelihood"], results["kl"]
    return (
        f"results in {path}, {results['wall_seconds']:.0f} s\n"
        f"log-likelihood {nats:.4f} nats per sample, {below:.4f} below the data's own density"
    )
