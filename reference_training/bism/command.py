"""`ebmguard train bism`: from settings to a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..engine.launch import launch
from . import deep_train
from .config import BismConfig
from .deep_config import DeepConfig
from .train import train


def run(config: BismConfig) -> int:
    """`ebmguard train bism`: as :func:`..engine.launch.launch` says."""
    return launch(config, train, summary)


def run_deep(config: DeepConfig) -> int:
    """`ebmguard train bism deep`: likewise."""
    return launch(config, deep_train.train, deep_summary)


def summary(results: dict[str, Any], path: Path) -> str:
    """How the run went."""
    nats, below = results["log_likelihood"], results["kl"]
    return (
        f"results in {path}, {results['wall_seconds']:.0f} s\n"
        f"log-likelihood {nats:.4f} nats per sample, {below:.4f} below the data's own density"
    )


def deep_summary(results: dict[str, Any], path: Path) -> str:
    """How the run of a deep model went."""
    return (
        f"results in {path}, {results['wall_seconds']:.0f} s\n"
        f"loss on test images {results['test_loss']:.4f}"
    )
