"""JEM without its output scale (Appendix M.2): o = 1, and 20,000 on the logits instead of on f.

python -m benchmarks.jem_scale                # the whole grid, two runs at a time
python -m benchmarks.jem_scale --table-only   # the page of what has been run
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.trainer import Trainer, make_network
from ebmguard.reference_training.judge.classification import accuracy_of
from ebmguard.reference_training.networks import WideResNet
from ebmguard.samplers import sgld

from .grid import Grid, Rows, number, percent, table

SEEDS = range(3)
STEPS = 1000
NOISE = 0.01
SCALE = 20_000.0
LAST = 100
FAR = 1e4
"""A gap of the unscaled f beyond which a run is lost."""


@dataclass(frozen=True)
class Way:
    """Where the 20,000 stands.

    Attributes:
        output_scale: o of the chains, which stand for exp(o f): their step size is o noise² / 2.
        logits: what the logits are multiplied by.
    """

    title: str
    output_scale: float
    logits: float = 1.0


WAYS = {
    "published": Way("o = 20,000 (published)", SCALE),
    "one": Way("o = 1", 1.0),
    "logits": Way("o = 1, logits × 20,000", 1.0, SCALE),
}


CELLS = {f"{way}_s{seed}": {"way": way, "seed": seed} for seed in SEEDS for way in WAYS}


def scaled(network: WideResNet, factor: float) -> WideResNet:
    """The network with logits `factor` times as large, for the classifier and for f."""
    plain = network.classify

    def classify(x: Tensor) -> Tensor:
        logits: Tensor = factor * plain(x)
        return logits

    network.classify = classify
    return network


def measure(folder: Path, way: str, seed: int) -> dict[str, Any]:
    """Train a cell from its start."""
    factor, step_size = WAYS[way].logits, WAYS[way].output_scale * NOISE**2 / 2
    own: dict[str, Any] = {"iterations": STEPS, "noise_std": NOISE, "step_size": step_size}
    config = JemConfig(out=folder, beta_star=0.0, seed=seed, **own)
    data, settings = config.load_data(), config.settings
    network = scaled(make_network(config, data), factor)
    trainer = Trainer(config, network, data)
    climb = partial(
        sgld, network, steps=settings.sgld_steps, step_size=settings.step_size, noise_std=NOISE
    )
    gaps: list[float] = []
    drifts, accuracies, losses = [], [], []
    while len(gaps) < STEPS and all(abs(gap) <= FAR for gap in gaps[-1:]):
        trainer.step(len(gaps))
        row = trainer.loss_fn.guard.last
        gaps.append(row["energy_gap"] / factor)
        losses.append(row["cross_entropy"])
        if len(gaps) % 10 == 0:
            x0 = trainer.chains(settings.n_neg)
            quiet = torch.zeros(settings.sgld_steps, *x0.shape)
            drifts.append(float((climb(x0, noise=quiet) - x0).square().mean().sqrt()))
            accuracies.append(accuracy_of(network, data))
    trainer.close()
    return {
        "ended": len(gaps),
        "gap": statistics.median(gaps[-LAST:]),
        "cross_entropy": statistics.median(losses[-LAST:]),
        "drift": statistics.median(drifts) if drifts else None,
        "best": max(accuracies, default=None),
        "accuracy": accuracy_of(network, data),
    }


COLUMNS = {
    "": lambda own: WAYS[own["way"]].title,
    "seed": lambda own: str(own["seed"]),
    "lost at": lambda own: "–" if own["ended"] == STEPS else str(own["ended"] - 1),
    "moved by the gradient": lambda own: number(own["drift"], ".2g"),
    "gap": lambda own: number(own["gap"]),
    "cross-entropy": lambda own: number(own["cross_entropy"]),
    "best accuracy": lambda own: percent(own["best"]),
    "final accuracy": lambda own: percent(own["accuracy"]),
}


def slots(rows: Rows) -> dict[str, str]:
    order = list(WAYS)
    return {"every": table(sorted(rows, key=lambda own: order.index(own["way"])), COLUMNS)}


GRID = Grid("jem_scale", CELLS, measure, slots, trains_here=True)

if __name__ == "__main__":
    sys.exit(GRID.main())
