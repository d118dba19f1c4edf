"""How well the alerts of the shipped rules tell runs that die from runs that live: JEM on digits.

    python -m benchmarks.alerts                # the whole grid, two runs at a time
    python -m benchmarks.alerts --table-only   # the tables of what has been recorded

The runs are only watched, so that the rules have no influence on them: a grid that is there is
judged again by whatever rules are shipped now, within a minute. Cells that are done are kept, and
the tables are written anew after each.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .alerts_fates import read_fates
from .alerts_reliance import reliance
from .alerts_tables import detection
from .cells import commits, run_cells, write_json, write_page

ITERATIONS = 2000
DIVERGED, HOPELESS = 1e4, 1e8
AFTERMATH = 300
"""Steps that a diverged run goes on for, unless its gap passes HOPELESS before."""
BASE: dict[str, Any] = {"lr": 3e-3, "sgld_steps": 5, "n_neg": 64, "width": 1, "step_size": 1.0}
DYING: dict[str, dict[str, Any]] = {
    "base": {},
    "lr1e-2": {"lr": 1e-2},
    "k3": {"sgld_steps": 3},
    "neg32": {"n_neg": 32},
    "w2": {"width": 2},
    "step2": {"step_size": 2.0},
    "lr1e-3": {"lr": 1e-3},
    "k10": {"sgld_steps": 10},
    "neg128": {"n_neg": 128},
    "step0.5": {"step_size": 0.5},
    "lr5e-3_neg32": {"lr": 5e-3, "n_neg": 32},
    "lr1e-2_k10": {"lr": 1e-2, "sgld_steps": 10},
}
"""Settings at β* = 0 over learning rate, SGLD steps, negatives, width and step size; most die."""
EARLY: dict[str, dict[str, Any]] = {
    "lr1e-2_k3": {"lr": 1e-2, "sgld_steps": 3},
    "lr2e-2": {"lr": 2e-2},
    "lr3e-2_k3": {"lr": 3e-2, "sgld_steps": 3},
}
"""Settings at β* = 0 that die within some hundred steps or less."""
LIVING = ("base", "lr1e-3", "k10", "neg32", "step2", "neg128")
"""Of these, the settings that are run at β* = 1 and 2 as well."""
SLOW: dict[str, tuple[float, dict[str, Any]]] = {
    "lr3e-4": (0.0, {"lr": 3e-4}),
    "lr1e-3_k20": (0.0, {"lr": 1e-3, "sgld_steps": 20}),
    "base": (0.5, {}),
    "lr3e-4_k10": (0.0, {"lr": 3e-4, "sgld_steps": 10}),
}
"""Further settings that were hoped to live."""
WORDS = ("python", "-m", "benchmarks.alerts")


@dataclass(frozen=True)
class Cell:
    """One recorded training run."""

    setting: str
    beta_star: float
    seed: int
    settings: dict[str, Any] = field(compare=False)

    @property
    def name(self) -> str:
        return f"b{self.beta_star:g}_{self.setting}_s{self.seed}"

    def command(self, folder: Path) -> Sequence[str]:
        root = str(folder.parent)
        return [sys.executable, "-m", "benchmarks.alerts", "--runs", root, "--cell", self.name]


def grid() -> list[Cell]:
    """All cells, dying and living ones mixed, so that a part of the grid has both."""
    dying = [
        [Cell(setting, 0.0, seed, BASE | own) for setting, own in DYING.items()]
        for seed in (10, 11, 12)
    ]
    living = [
        Cell(setting, beta_star, seed, BASE | DYING[setting])
        for seed in (10, 11)
        for beta_star in (1.0, 2.0)
        for setting in LIVING
    ]
    slow = [
        Cell(setting, beta_star, seed, BASE | own)
        for seed in (10, 11)
        for setting, (beta_star, own) in SLOW.items()
    ]
    early = [
        Cell(setting, 0.0, seed, BASE | own)
        for setting, own in EARLY.items()
        for seed in (10, 11, 12)
    ]
    return [*dying[0], *living[:12], *dying[1], *living[12:], *slow, *dying[2], *early]


def record(cell: Cell, folder: Path) -> None:
    """Run a cell from its beginning; its result.json is written last.

    Test accuracy is taken of the parameters that a step starts with: of every step at β* = 0, where
    an ERROR's step matters, and of every 25th elsewhere.
    """
    import torch

    from ebmguard.reference_training.jem.config import JemConfig
    from ebmguard.reference_training.jem.evaluation import Evaluator
    from ebmguard.reference_training.jem.trainer import Trainer, make_network

    torch.set_num_threads(1)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    config = JemConfig(
        out=folder,
        beta_star=cell.beta_star,
        seed=cell.seed,
        iterations=ITERATIONS,
        **cell.settings,
    )
    data = config.load_data()
    network = make_network(config, data)
    trainer = Trainer(config, network, data, log_dir=folder)
    evaluator = Evaluator(data, noise_std=0.0, quality=None)
    accuracy: list[tuple[int, float]] = []
    diverged_at, step, start = None, 0, time.perf_counter()
    for step in range(ITERATIONS):
        if cell.beta_star == 0 or step % 25 == 0:
            accuracy.append((step, evaluator.test_accuracy(network)))
        gap = float(trainer.step(step)[0][1])
        if diverged_at is None and not abs(gap) <= DIVERGED:
            diverged_at = step
        if diverged_at is not None and (step > diverged_at + AFTERMATH or not abs(gap) <= HOPELESS):
            break
    accuracy.append((step + 1, evaluator.test_accuracy(network)))
    trainer.close()
    result = {
        "name": cell.name,
        "beta_star": cell.beta_star,
        "seed": cell.seed,
        **cell.settings,
        "accuracy": accuracy,
        "diverged_at": diverged_at,
        "steps": step + 1,
        "seconds": time.perf_counter() - start,
    }
    write_json(folder / "result.json", result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench-alerts"))
    parser.add_argument("--table", type=Path, default=Path("docs/results/alerts.md"))
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument("--cell", help="record this cell alone, and write no tables")
    given = parser.parse_args()
    cells = grid()
    if given.cell is not None:
        record(next(each for each in cells if each.name == given.cell), given.runs / given.cell)
        return

    def write() -> None:
        fates = read_fates([each.name for each in cells], given.runs)
        head = [
            "# Alerts: what they find, how early, and how often they are wrong",
            "",
            f"Runs recorded at commit {', '.join(commits(given.runs)) or 'unknown'}, "
            f"{platform.machine()} CPU, one thread a run, `{' '.join(WORDS)}`; {len(fates)} of "
            f"{len(cells)} runs are there.",
            "",
        ]
        write_page(given.table, [*head, *detection(fates), *reliance(fates)])

    if not given.table_only:
        run_cells(cells, given.runs, workers=given.workers, after=write)
    write()
    print(given.table.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
