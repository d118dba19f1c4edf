"""JEM without its output scale (Appendix M.2): o = 1, and 20,000 on the logits instead of on f.

python -m benchmarks.jem_scale                # the whole grid, two runs at a time
python -m benchmarks.jem_scale --table-only   # the table of what has been run
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.trainer import Trainer, make_network
from ebmguard.reference_training.judge.evaluator import Evaluator
from ebmguard.reference_training.networks import WideResNet
from ebmguard.samplers import sgld

from .cells import Grid, cell_command, load, number, percent, table, write_json

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


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    way: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.way}_s{self.seed}"

    def command(self, folder: Path) -> Sequence[str]:
        """What runs it."""
        return cell_command("jem_scale", folder)


CELLS = [Cell(way, seed) for seed in SEEDS for way in WAYS]


def scaled(network: WideResNet, factor: float) -> WideResNet:
    """The network with logits `factor` times as large, for the classifier and for f."""
    plain = network.classify

    def classify(x: Tensor) -> Tensor:
        logits: Tensor = factor * plain(x)
        return logits

    network.classify = classify
    return network


def run(cell: Cell, root: Path) -> None:
    """Train a cell from its start, and write what came of it."""
    logging.getLogger("ebmguard").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    way = WAYS[cell.way]
    config = JemConfig(
        out=root / cell.name,
        beta_star=0.0,
        seed=cell.seed,
        iterations=STEPS,
        noise_std=NOISE,
        step_size=way.output_scale * NOISE**2 / 2,
    )
    data, settings = config.load_data(), config.settings
    network = scaled(make_network(config, data), way.logits)
    trainer, judge = Trainer(config, network, data), Evaluator(data, noise_std=0.0, quality=None)
    climb = partial(
        sgld, network, steps=settings.sgld_steps, step_size=settings.step_size, noise_std=NOISE
    )
    gaps: list[float] = []
    drifts, accuracies, losses = [], [], []
    while len(gaps) < STEPS and all(abs(gap) <= FAR for gap in gaps[-1:]):
        trainer.step(len(gaps))
        row = trainer.loss_fn.guard.last
        gaps.append(row["energy_gap"] / way.logits)
        losses.append(row["cross_entropy"])
        if len(gaps) % 10 == 0:
            x0 = trainer.chains(settings.n_neg)
            quiet = torch.zeros(settings.sgld_steps, *x0.shape)
            drifts.append(float((climb(x0, noise=quiet) - x0).square().mean().sqrt()))
            accuracies.append(judge.test_accuracy(network))
    trainer.close()
    (root / cell.name).mkdir(parents=True, exist_ok=True)
    result = {
        "ended": len(gaps),
        "gap": statistics.median(gaps[-LAST:]),
        "cross_entropy": statistics.median(losses[-LAST:]),
        "drift": statistics.median(drifts) if drifts else None,
        "best": max(accuracies, default=None),
        "accuracy": judge.test_accuracy(network),
    }
    write_json(root / cell.name / "result.json", result)


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


def page(root: Path) -> list[str]:
    """The lines of docs/results/jem_scale.md."""
    order = list(WAYS)
    own = sorted(load(CELLS, root), key=lambda each: order.index(each["way"]))
    steps = JemConfig(out=root).settings.sgld_steps
    return [
        "# JEM without its output scale",
        "",
        *GRID.source(root),
        f"Digits with the defaults of `ebmguard train jem` at β\\* = 0, {STEPS:,} steps. Noise is "
        f"{NOISE:g}; the step size is o · noise² / 2, so that the chains stand for exp(o f). Moved "
        f"by the gradient: root mean square over pixels, in {steps} SGLD steps without noise from "
        "the buffer, median over the run; the noise of as many steps moves by "
        f"{NOISE * math.sqrt(steps):.2g}, and pixels have the range 2. Gap and cross-entropy are "
        f"medians of the last {LAST} steps, the gap in units of the f that is not scaled. A run is "
        f"lost when its gap passes {FAR:,.0f}.",
        "",
        table(own, COLUMNS) if own else "None yet.",
        "",
    ]


GRID = Grid(
    "jem_scale", CELLS, page, Path("docs/results/jem_scale.md"), Path("runs/bench-jem-scale"), run
)

if __name__ == "__main__":
    GRID.main()
