"""Small sweeps over what the paper leaves open on its toys.

python -m benchmarks.toy_settings                # all runs, two at a time: an hour
python -m benchmarks.toy_settings --table-only   # the page of what has been run

Every cell is an ordinary toy run with β = 0, 0.5 and 0.9 and two seeds; an unfinished one is
resumed. The table shows medians over seeds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ebmguard.reference_training.plots.numbers import median
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS, GaussianMixture
from ebmguard.reference_training.toy.scenario import SCENARIOS, Scenario
from ebmguard.reference_training.toy.train import train_run

from .grid import RESULTS, Grid, Rows, table

BETAS, SEEDS = ("0", "0.5", "0.9"), 2
GMM, CIRCLES = SCENARIOS["gmm-default"], SCENARIOS["circles-default"]
WEIGHTS = {
    "equal": (1 / 8,) * 8,
    "1 to 8": tuple(i / 36 for i in range(1, 9)),
    "1, 2, 4, ..., 128": tuple(2.0**i / 255 for i in range(8)),
}
CHOSEN = {
    "noise, GMM": "0.1",
    "noise, circles": "0.04",
    "lr, GMM": "0.003 to 3e-05",
    "lr, circles": "0.001 constant",
    "weights, GMM": "1 to 8",
    "batch, GMM": "50/20",
    "steps, circles, 5000 updates": "20",
    "shift of Figure 6, gmm": "1 std",
    "shift of Figure 6, circles": "1 std",
}
"""Settings of the trainer by sweep."""


def scenarios() -> Iterator[tuple[str, str, Scenario]]:
    """Sweep, setting and scenario of each cell."""
    for noise in (0.03, 0.05, 0.1, 0.15):
        # At a constant learning rate: the noise was chosen first.
        yield "noise, GMM", f"{noise:g}", replace(GMM, noise_std=noise, lr=1e-3, lr_end=1e-3)
    for noise in (0.01, 0.02, 0.03, 0.04, 0.05, 0.1):
        yield "noise, circles", f"{noise:g}", replace(CIRCLES, noise_std=noise)
    for lr in (1e-4, 3e-4, 1e-3, 3e-3):
        yield "lr, GMM", f"{lr:g} constant", replace(GMM, lr=lr, lr_end=lr)
    for lr in (1e-3, 3e-3):
        yield "lr, GMM", f"{lr:g} to {lr / 100:g}", replace(GMM, lr=lr, lr_end=lr / 100)
    for lr in (1e-4, 1e-3, 3e-3):
        yield "lr, circles", f"{lr:g} constant", replace(CIRCLES, lr=lr, lr_end=lr)
    mixture = DISTRIBUTIONS["gmm"]
    assert isinstance(mixture, GaussianMixture)
    for label, weights in WEIGHTS.items():
        name = f"gmm weighted {label}"
        DISTRIBUTIONS[name] = replace(mixture, weights=weights)
        yield "weights, GMM", label, replace(GMM, data=name)
    for n_pos, n_neg in ((50, 20), (100, 100)):
        yield "batch, GMM", f"{n_pos}/{n_neg}", replace(GMM, n_pos=n_pos, n_neg=n_neg)
    for steps in (20, 100):
        changed = replace(CIRCLES, sgld_steps=steps, iterations=5_000)
        yield "steps, circles, 5000 updates", f"{steps}", changed
    for data in ("gmm", "circles"):
        shifted = SCENARIOS[f"{data}-shifted"]
        for share in (0.25, 0.5, 1.0):
            changed = replace(shifted, init_mean=2 * share * shifted.init_std)
            yield f"shift of Figure 6, {data}", f"{share:g} std", changed
    known = SCENARIOS["circles-proposal"]
    negatives, decay = {"n_neg": known.n_neg}, {"lr": known.lr, "lr_end": known.lr_end}
    for label, change in (
        ("as it is", {}),
        ("100 negatives", negatives),
        ("output scale 200", {"noise_std": known.noise_std}),
        ("lr 0.003 to 3e-05", decay),
        ("negatives and lr", negatives | decay),
        ("40,000 updates", {"iterations": known.iterations}),
        ("all four", asdict(known)),
    ):
        yield "Figure 9, circles", label, replace(SCENARIOS["circles-degenerate"], **change)


FOUND = {f"{own[0]}_{own[1]}".replace(" ", "-").replace("/", "-"): own for own in scenarios()}
SCENARIOS.update({name: scenario for name, (_, _, scenario) in FOUND.items()})
CELLS = {name: {"sweep": sweep, "label": label} for name, (sweep, label, _) in FOUND.items()}


def measure(folder: Path, **_: str) -> dict[str, Any]:
    """Train a run, or go on with it."""
    own: dict[str, Any] = {"scenario": folder.name, "betas": BETAS, "seeds": SEEDS, "threads": 1}
    resume = (folder / "config.json").is_file()
    results: dict[str, Any] | None = train_run(ToyConfig(out=folder, resume=resume, **own))
    if results is None:
        raise SystemExit(130)
    return results


def middle(metric: str, beta: str) -> Any:
    """The median over a run's members of one β."""
    return lambda run: "{:.3g}".format(
        median([float(m.get(metric, math.nan)) for m in run["members"] if m["beta"] == beta])
    )


def lost(run: Any) -> str:
    return f"{sum(x['diverged_at'] is not None for x in run['members'])}/{len(run['members'])}"


COLUMNS = {
    "sweep": lambda run: run["sweep"],
    "setting": lambda run: (
        f"**{run['label']}**" if CHOSEN.get(run["sweep"]) == run["label"] else run["label"]
    ),
    **{f"KL, β = {b}": middle("kl", b) for b in BETAS},
    "diverged": lost,
}


def slots(rows: Rows) -> dict[str, str]:
    return {"settings": table(rows, COLUMNS, words=2)}


GRID = Grid("toy_settings", CELLS, measure, slots, page=RESULTS / "toy-settings.md")

if __name__ == "__main__":
    sys.exit(GRID.main())
