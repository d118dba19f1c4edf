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
    return launch(config, deep_train.train, summary)


def summary(results: dict[str, Any], path: Path) -> str:
    """How the run went."""
    head = f"results in {path}, {results['wall_seconds']:.0f} s\n"
    if "test_loss" in results:
        return f"{head}loss on test images {results['test_loss']:.4f}"
    if "reconstruction_error" in results:
        return f"{head}error of a reconstructed pixel {results['reconstruction_error']:.4f}"
    if "verdict" in results:
        low, high = results["log_likelihood_low"], results["log_likelihood_high"]
        return f"{head}log-likelihood {low:.3f} to {high:.3f} nats per sample: {results['verdict']}"
    below = f", {results['kl']:.4f} below the data's own density" if "kl" in results else ""
    return f"{head}log-likelihood {results['log_likelihood']:.4f} nats per sample{below}"
