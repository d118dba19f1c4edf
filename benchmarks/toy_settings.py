"""Small sweeps over what the paper leaves open on its toys.

    python -m benchmarks.toy_settings [--only noise] [--out runs/toy-settings]

Every cell is an ordinary toy run with β = 0, 0.5 and 0.9 and two seeds, in a folder of its own:
a finished one is used as it is, an unfinished one is resumed. The table shows medians over seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebmguard.reference_training.engine.run_folder import read_json
from ebmguard.reference_training.plots.numbers import median
from ebmguard.reference_training.toy.command import train_run
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS, GaussianMixture
from ebmguard.reference_training.toy.scenario import SCENARIOS, Scenario

BETAS = ("0", "0.5", "0.9")
SEEDS = 2


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting of one sweep."""

    sweep: str
    label: str
    scenario: Scenario

    @property
    def name(self) -> str:
        return f"{self.sweep}_{self.label}".replace(" ", "-").replace("/", "-")


def cells() -> Iterator[Cell]:
    gmm, circles = SCENARIOS["gmm-default"], SCENARIOS["circles-default"]
    for noise in (0.03, 0.05, 0.1, 0.15):
        # At a constant learning rate: the noise was chosen first.
        constant = dataclasses.replace(gmm, noise_std=noise, lr=1e-3, lr_end=1e-3)
        yield Cell("noise, GMM", f"{noise:g}", constant)
    for noise in (0.01, 0.02, 0.03, 0.04, 0.05, 0.1):
        yield Cell("noise, circles", f"{noise:g}", dataclasses.replace(circles, noise_std=noise))
    for lr in (1e-4, 3e-4, 1e-3, 3e-3):
        yield Cell("lr, GMM", f"{lr:g} constant", dataclasses.replace(gmm, lr=lr, lr_end=lr))
    for lr in (1e-3, 3e-3):
        decayed = dataclasses.replace(gmm, lr=lr, lr_end=lr / 100)
        yield Cell("lr, GMM", f"{lr:g} to {lr / 100:g}", decayed)
    for lr in (1e-4, 1e-3, 3e-3):
        changed = dataclasses.replace(circles, lr=lr, lr_end=lr)
        yield Cell("lr, circles", f"{lr:g} constant", changed)
    mixture = DISTRIBUTIONS["gmm"]
    assert isinstance(mixture, GaussianMixture)
    for label, weights in (
        ("equal", (1 / 8,) * 8),
        ("1 to 8", tuple(i / 36 for i in range(1, 9))),
        ("1, 2, 4, ..., 128", tuple(2.0**i / 255 for i in range(8))),
    ):
        name = f"gmm weighted {label}"
        DISTRIBUTIONS[name] = dataclasses.replace(mixture, weights=weights)
        yield Cell("weights, GMM", label, dataclasses.replace(gmm, data=name))
    for n_pos, n_neg in ((50, 20), (100, 100)):
        changed = dataclasses.replace(gmm, n_pos=n_pos, n_neg=n_neg)
        yield Cell("batch, GMM", f"{n_pos}/{n_neg}", changed)
    for steps in (20, 100):
        changed = dataclasses.replace(circles, sgld_steps=steps, iterations=5_000)
        yield Cell("steps, circles, 5000 updates", f"{steps}", changed)
    for data in ("gmm", "circles"):
        shifted = SCENARIOS[f"{data}-shifted"]
        for share in (0.25, 0.5, 1.0):
            changed = dataclasses.replace(shifted, init_mean=2 * share * shifted.init_std)
            yield Cell(f"shift of Figure 6, {data}", f"{share:g} std", changed)
    figure_9, known = SCENARIOS["circles-degenerate"], SCENARIOS["circles-proposal"]
    negatives = {"n_neg": known.n_neg}
    decay = {"lr": known.lr, "lr_end": known.lr_end}
    yield Cell("Figure 9, circles", "as it is", figure_9)
    for label, change in (
        ("100 negatives", negatives),
        ("output scale 200", {"noise_std": known.noise_std}),
        ("lr 0.003 to 3e-05", decay),
        ("negatives and lr", negatives | decay),
        ("40,000 updates", {"iterations": known.iterations}),
        ("all four", dataclasses.asdict(known)),
    ):
        yield Cell("Figure 9, circles", label, dataclasses.replace(figure_9, **change))


def train_cell(cell: Cell, out: Path, threads: int) -> dict[str, Any]:
    SCENARIOS[cell.name] = cell.scenario
    folder = out / cell.name
    finished = folder / "results.json"
    if finished.is_file():
        found: dict[str, Any] = read_json(finished)
        return found
    config = ToyConfig(
        out=folder,
        resume=(folder / "config.json").is_file(),
        scenario=cell.name,
        betas=BETAS,
        seeds=SEEDS,
        threads=threads,
    )
    results: dict[str, Any] | None = train_run(config)
    if results is None:
        raise KeyboardInterrupt
    return results


def line(cell: Cell, results: dict[str, Any]) -> str:
    columns = [f"| {cell.sweep} | {cell.label}"]
    for metric in ("kl", "kl_sgld", "oracle_r2"):
        for beta in BETAS:
            same = [float(m.get(metric, math.nan)) for m in results["members"] if m["beta"] == beta]
            columns.append(f"{median(same):.3g}")
    lost = sum(m["diverged_at"] is not None for m in results["members"])
    return " | ".join([*columns, f"{lost} of {len(results['members'])}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/toy-settings"))
    parser.add_argument("--only", default="", help="only sweeps whose name contains this")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    head = ["| sweep | setting", *(f"KL, β = {b}" for b in BETAS)]
    head += [f"{name}, β = {b}" for name in ("KL(SGLD)", "R² to the optimum") for b in BETAS]
    head.append("diverged |")
    lines = [" | ".join(head), "|---" * (len(head) - 1) + "|---|"]
    for cell in cells():
        if arguments.only in cell.sweep:
            lines.append(line(cell, train_cell(cell, arguments.out, arguments.threads)))
            print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
