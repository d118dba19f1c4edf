"""What the tests of the short-run models share: small runs, trained for moments or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.train import train
from ebmguard.reference_training.shortrun.trained import TrainedRun
from ebmguard.sinks import JsonlSink
from tests.reference_training.jem.parts import Silent

TINY: dict[str, Any] = {
    "data": "digits",
    "device": "cpu",
    "iterations": 6,
    "train_images": 64,
    "test_images": 32,
    "batch": 8,
    "nf": 4,
    "sgld_steps": 3,
    "sample_every": 3,
    "checkpoint_every": 3,
}
"""Settings of the smallest training that is one: digits of 8x8 pixels, K = 3."""


class Quadratic(nn.Module):
    """f(x) = -a/2 |x - m|², a the strength, whose Langevin chain is a Gaussian process."""

    strength: Tensor

    def __init__(self, strength: float, mean: float = 0.0) -> None:
        super().__init__()
        # Of no gradient: the chain asks for that of the images alone.
        self.register_buffer("strength", torch.tensor(strength))
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B,)."""
        f: Tensor = -self.strength / 2 * (x - self.mean).square().flatten(1).sum(1)
        return f


def config_for(out: str | os.PathLike[str], **settings: Any) -> ShortRunConfig:
    """The settings of a tiny run."""
    return ShortRunConfig(**{"out": Path(out), **TINY, **settings})


def go(config: ShortRunConfig, reporter: Reporter | None = None) -> dict[str, Any] | None:
    """Train; what results.json holds, or None where Ctrl-C stopped the run."""
    results: dict[str, Any] | None = train(*config.open(), reporter or Silent())
    return results


def tiny_run(
    path: str | os.PathLike[str] = "tiny",
    *,
    network: nn.Module | None = None,
    step: int = 6,
    **settings: Any,
) -> TrainedRun:
    """A run that was never trained, on digits, without a folder; the same for the same seed.

    No network is an EnergyNet of random parameters. The settings are the trainer's, over `TINY`.
    """
    config = config_for(path, **settings)
    data = config.load_data()
    if network is None:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            network = config.make_network(data)
    network = network.eval().requires_grad_(False)
    return TrainedRun(Path(path), config, network, data, step)


def trained_folder(out: Path, **settings: Any) -> Path:
    """A run folder of a few updates; `load_run` of trained.py opens it."""
    assert train(*config_for(out, **settings).open()) is not None
    return out


def write_rows(run: Path, columns: Mapping[str, Sequence[float]], first: int = 0) -> None:
    """Add rows to the metrics.jsonl of a run folder, as the guard writes them, by their columns."""
    sink = JsonlSink(run)
    for step, values in enumerate(zip(*columns.values(), strict=True), start=first):
        sink.write_row(step, dict(zip(columns, values, strict=True)), {})
    sink.flush()
