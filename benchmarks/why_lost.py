"""Why runs are lost: JEM on digits at β* = 0 with other chains, at equal gradients of f.

python -m benchmarks.why_lost                # all runs, two at a time
python -m benchmarks.why_lost --table-only   # the page of what has been run
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from torch import Tensor

from ebmguard.reference_training.plots.canvas import CONTRASTS, new_figure

from .grid import Grid, Rows, number, rate, table
from .population.families import Run
from .population.fates import fate_of
from .population.record import watched
from .population.trainer import SKILL, Trainer

PICTURE = Path("docs/pictures/why_lost.png")
SEEDS = range(20)
STEPS, UPDATES = 5, 2400
"""Langevin steps of an update, and updates, of the published arm; its gradients all arms have."""
FINER = 4
CLIP = 0.01
"""What IGEBM cuts the entries of the chain's gradient to."""
AFTER = 100
"""Updates for which a run is broken before it is given up."""
NETWORKS: dict[str, dict[str, Any]] = {
    "CNN": {"network": "cnn", "width": 8, "lr": 0.01},
    "MLP": {"network": "mlp", "width": 128, "lr": 0.01},
}
FINE = {"sgld_steps": FINER * STEPS, "step_size": 1 / FINER, "noise_std": 0.01 / FINER**0.5}
ARMS: dict[str, dict[str, Any]] = {
    "Langevin, as published": {},
    f"steps {FINER} times finer": FINE,
    "MALA": {"sampler": "mala"},
    f"MALA, steps {FINER} times finer": {"sampler": "mala", **FINE},
    f"gradient of the chain cut at {CLIP:g}": {"clipped": True},
    "twice the steps": {"sgld_steps": 2 * STEPS},
    "β* = 0.5": {"beta_star": 0.5},
    "β* = 2": {"beta_star": 2.0},
    f"steps {FINER} times finer, as many updates": {**FINE, "steps": UPDATES},
}
CELLS: dict[str, dict[str, Any]] = {
    f"{network}_{number}_s{seed}": {"network": network, "arm": arm, "seed": seed}
    for seed in SEEDS
    for network in NETWORKS
    for number, arm in enumerate(ARMS)
}
ACCEPTANCE = "sampler/acceptance"
TAGS = ("energy_gap", "f_pos/std", SKILL, "energy_overlap", "beta_star", "grad_scale", ACCEPTANCE)


class Clipped(Trainer):
    """Cuts the entries of the gradient along which chains climb."""

    def draw(self, f: Any, data: Tensor, y: Tensor | None, steps: int) -> Tensor:
        def cut(x: Tensor) -> Any:
            x = x.view_as(x)
            x.register_hook(lambda grad: grad.clamp(-CLIP, CLIP))
            return f(x)

        return super().draw(cut, data, y, steps)  # type: ignore[arg-type]


def updates(settings: Mapping[str, Any]) -> int:
    """For the published arm's gradients of f: of chains, of positives and of negatives."""
    steps = settings.get("sgld_steps", STEPS) + (settings.get("sampler") == "mala")
    own: int = settings.get("steps", UPDATES * (STEPS + 2) // (steps + 2))
    return own


def measure(_: Path, network: str, arm: str, seed: int) -> dict[str, Any]:
    """Train until the compute is spent, or the run has been broken for a while."""
    own = {"sgld_steps": STEPS, **NETWORKS[network], **ARMS[arm]}
    kind = Clipped if own.pop("clipped", False) else Trainer
    trainer = kind(Run("why-lost", seed, "digits", **own | {"steps": updates(own)}))
    begun = time.process_time()
    rows = [{tag: row.get(tag, math.nan) for tag in TAGS} for row in watched(trainer, AFTER)]
    trainer.guard.close()
    trace, cost = pd.DataFrame(rows), 1000 * (time.process_time() - begun) / len(rows)
    fate = fate_of({tag: trace[tag].to_numpy() for tag in TAGS})
    known = trace[ACCEPTANCE][: fate.death].dropna()
    return {
        **dataclasses.asdict(fate),
        "updates": trainer.run.steps,
        "acceptance": float(known.iloc[-1]) if len(known) else None,
        "ms": cost,
    }


def lost(own: Rows, before: float = math.inf) -> str:
    """Of runs, how many."""
    k = sum(x["name"] == "dead" and x["death"] < before for x in own)
    return rate(k, len(own))


def middle(own: Rows, name: str, form: str = ".3g") -> str:
    """The median of what is known."""
    values = [x[name] for x in own if x[name] is not None]
    return number(median(values) if values else None, form)


FEWEST = min(map(updates, ARMS.values()))
COLUMNS: dict[str, Callable[[Rows], str]] = {
    "network": lambda own: own[0]["network"],
    "chains": lambda own: own[0]["arm"],
    "updates": lambda own: f"{own[0]['updates']:,}",
    "lost": lost,
    f"within {FEWEST} updates": lambda own: lost(own, FEWEST),
    "median update of the loss": lambda own: middle(own, "death", ".0f"),
    "healthy": lambda own: str(sum(x["name"] == "healthy" for x in own)),
    "accuracy, %: best, last": lambda own: f"{middle(own, 'best')}, {middle(own, 'last')}",
    "last acceptance": lambda own: middle(own, "acceptance"),
    "ms an update": lambda own: middle(own, "ms"),
}


def draw(rows: Rows) -> None:
    """When each run was lost, and how far the others came, in updates of the published arm."""
    figure = new_figure(8, 3.6)
    for axes, network in zip(figure.subplots(1, 2, sharey=True), NETWORKS, strict=True):
        for row in (x for x in rows if x["network"] == network):
            at = [*ARMS].index(row["arm"]) + (row["seed"] - len(SEEDS) / 2) / 40
            lost = row["name"] == "dead"
            own = {k: x for k, x in ARMS[row["arm"]].items() if k != "steps"}
            spent = (row["death"] if lost else row["updates"]) * UPDATES / updates(own)
            axes.plot(spent, at, "x" if lost else ".", color=CONTRASTS[lost], markersize=4)
        axes.set(title=network, xscale="log")
        axes.set_yticks(range(len(ARMS)), [*ARMS])
    axes.invert_yaxis()
    figure.supxlabel("gradients of f, in published updates", fontsize="medium")
    figure.tight_layout()
    figure.savefig(PICTURE)


def slots(rows: Rows) -> dict[str, str]:
    draw(rows)
    arms = itertools.product(NETWORKS, ARMS)
    groups = [[x for x in rows if (x["network"], x["arm"]) == arm] for arm in arms]
    return {"summary": table([own for own in groups if own], COLUMNS)}


GRID = Grid("why_lost", CELLS, measure, slots)

if __name__ == "__main__":
    sys.exit(GRID.main())
