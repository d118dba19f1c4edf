"""Steering on digits: a sampler that has lost the data, and β* from both ends.

python -m benchmarks.steering                # all cells, two at a time
python -m benchmarks.steering --table-only   # the table of what has been run

"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ebmguard import Guard
from ebmguard.reference_training.jem import trainer as jem
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.judge.evaluator import Evaluator
from ebmguard.steering import AdaptiveSteps, SteerBeta

from .cells import Grid, cell_command, is_done, number, percent, read_json, table, write_json

SEEDS = range(3)
LOST_AT = 300
"""From here on arms of a lost sampler are adaptive; GradScale has been 0 for hundreds of steps."""
ADAPTIVE = AdaptiveSteps()
STRETCH = 50
RESULT = "result.json"
COLUMNS = {
    "steps": "",
    "grad_scale": "grad_scale",
    "ess": "ess",
    "gap": "energy_gap",
    "beta_star": "beta_star",
}
"""What is kept of every step, and the tag that it has in the guard's row."""


@dataclass(frozen=True)
class Arm:
    """One way to run; what it starts with is the trainer's default otherwise.

    Attributes:
        adaptive: how the steps adapt; None: they do not.
        start: step from which they do.
        finer: whether additional steps are finer ones, or as long as the others.
    """

    title: str
    sgld_steps: int
    beta_star: float
    iterations: int = 2000
    adaptive: AdaptiveSteps | None = None
    start: int = 0
    finer: bool = True
    steer: bool = False


LOST = {
    "fixed": Arm("1 step, fixed", 1, 0.5),
    "adaptive": Arm("adaptive from step 0", 1, 0.5, adaptive=ADAPTIVE),
    "lost": Arm(f"adaptive from step {LOST_AT}", 1, 0.5, adaptive=ADAPTIVE, start=LOST_AT),
    "longer": Arm(
        f"from {LOST_AT}, steps not finer",
        1,
        0.5,
        600,
        adaptive=ADAPTIVE,
        start=LOST_AT,
        finer=False,
    ),
    "slow": Arm(
        f"from {LOST_AT}, 5 rows for a doubling",
        1,
        0.5,
        600,
        adaptive=dataclasses.replace(ADAPTIVE, rise_after=5),
        start=LOST_AT,
    ),
}
BETA = {
    f"{'steered' if steer else 'fixed'}{start:g}": Arm(
        f"{'from ' if steer else ''}{start:g}", 5, start, steer=steer
    )
    for start in (8.0, 0.1)
    for steer in (False, True)
}


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}_s{self.seed}"

    def command(self, folder: Path) -> Sequence[str]:
        return cell_command("steering", folder)


CELLS = [
    Cell(arm, seed)
    for arms in (("fixed", "adaptive", "lost"), BETA, ("longer", "slow"))
    for seed in SEEDS
    for arm in arms
]


def run(cell: Cell, root: Path) -> None:
    """One cell, from its start: they take minutes."""
    logging.getLogger("ebmguard").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    arm = (LOST | BETA)[cell.arm]
    config = JemConfig(
        out=root / cell.name,
        beta_star=arm.beta_star,
        sgld_steps=arm.sgld_steps,
        seed=cell.seed,
        iterations=arm.iterations,
        steer_beta=arm.steer,
    )
    data = config.load_data()
    network = jem.make_network(config, data)
    evaluator = Evaluator(data, noise_std=0.0, quality=None)
    if not arm.finer:
        asked = Guard.next_steps

        def not_finer(own: Guard) -> Any:
            return asked(own)._replace(refinement=1)

        Guard.next_steps = not_finer  # type: ignore[assignment, method-assign]
    if arm.adaptive is not None:
        jem.AdaptiveSteps = lambda **_: arm.adaptive
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    accuracy, alerts = [], []
    begun = time.process_time()
    trainer = jem.Trainer(config, network, data)
    for step in range(arm.iterations):
        if arm.adaptive is not None and step == arm.start:
            adaptive = dataclasses.replace(config, most_steps=arm.adaptive.most)
            before, alerts = trainer, trainer.loss_fn.guard.alerts
            trainer = jem.Trainer(adaptive, network, data)
            for own, was in ((trainer.parts, before.parts), (trainer.guards, before.guards)):
                for name, part in own.items():
                    part.load_state_dict(was[name].state_dict())
        if step % 25 == 0:
            accuracy.append([step, evaluator.test_accuracy(network)])
        guard = trainer.loss_fn.guard
        columns["steps"].append(guard.sgld_steps)
        trainer.step(step)
        for name, tag in COLUMNS.items():
            if tag:
                columns[name].append(guard.last[tag])
    seconds = time.process_time() - begun
    accuracy.append([arm.iterations, evaluator.test_accuracy(network)])
    records = [alert.record() for alert in (*alerts, *trainer.loss_fn.guard.alerts)]
    result = {**columns, "accuracy": accuracy, "alerts": records, "seconds": seconds}
    (root / cell.name).mkdir(parents=True, exist_ok=True)
    write_json(root / cell.name / RESULT, result)


class Result:
    """What a cell left behind.

    Attributes:
        rows: one for each step, with :data:`COLUMNS`.
        accuracy: of the test images, by step.
        alerts: their records.
        seconds: of the CPU.
    """

    def __init__(self, file: Path) -> None:
        found = read_json(file)
        self.rows = pd.DataFrame({name: found[name] for name in COLUMNS})
        self.accuracy = dict(found["accuracy"])
        self.alerts = pd.DataFrame(found["alerts"], columns=["rule", "level", "step"])
        self.seconds = found["seconds"]

    def first(self, **only: str) -> str:
        """When the first of these alerts came, and the rest of what it says."""
        own = self.alerts
        for name, value in only.items():
            own = own[own[name] == value]
        rest = "level" if "rule" in only else "rule"
        return f"{own['step'].iloc[0]} ({own[rest].iloc[0]})" if len(own) else "–"


def lost_row(arm: Arm, result: Result) -> dict[str, str]:
    """A line of the table of lost samplers."""
    scale, steps = result.rows["grad_scale"], result.rows["steps"]
    low = next(iter(scale.index[scale < 0.1]), None)
    # Over 0.5, and in the steps from there on the median too.
    ahead = scale[::-1].rolling(STRETCH, min_periods=1).median()[::-1]
    over = scale.index[(scale > 0.5) & (ahead > 0.5)]
    back = None if low is None else next(iter(over[over >= max(low, arm.start)]), None)
    after = [a for step, a in result.accuracy.items() if back is not None and step > back]
    return {
        "first under 0.1": number(low, ".0f"),
        "back over 0.5": number(back, ".0f"),
        "of the last 500 over 0.5": percent((scale[-500:] > 0.5).mean()),
        "largest factor": str(steps.max() // arm.sgld_steps),
        "`sampler_failing`": result.first(rule="sampler_failing"),
        "accuracy: lowest after the return": percent(min(after, default=None)),
        "final": percent([*result.accuracy.values()][-1]),
        "SGLD steps per one of the base": f"{steps[arm.start :].mean() / arm.sgld_steps:.1f}",
        "CPU seconds": f"{result.seconds:.0f}",
    }


def beta_row(_: Arm, result: Result) -> dict[str, str]:
    """A line of the table of β*."""
    last = result.rows[-100:].median()
    beta_star = result.rows["beta_star"][499:2000:500]
    return {
        "β* at 500, 1,000, 1,500, 2,000": ", ".join(f"{x:.3g}" for x in beta_star),
        "ESS / M": f"{last['ess']:.2f}",
        "GradScale": f"{last['grad_scale']:.3f}",
        "gap": f"{last['gap']:.3g}",
        "largest gap": f"{result.rows['gap'].abs().max():.3g}",
        "first ERROR": result.first(level="ERROR"),
        "final accuracy": percent([*result.accuracy.values()][-1]),
    }


def trajectory_row(_: Arm, result: Result) -> dict[str, str]:
    """Medians of GradScale."""
    scale = result.rows["grad_scale"]
    medians = scale.groupby(scale.index // 100 * 100 + 100).median()
    return {str(mark): f"{median:.2f}" for mark, median in medians.items()}


def by_arm(root: Path, arms: Mapping[str, Arm], of: Callable[[Arm, Result], dict[str, str]]) -> str:
    """A table of the cells of some arms that are done."""
    rows = [
        {"arm": arm.title, "seed": str(cell.seed), **of(arm, Result(root / cell.name / RESULT))}
        for name, arm in arms.items()
        for cell in (Cell(name, seed) for seed in SEEDS)
        if is_done(cell, root)
    ]
    return table(rows, {name: itemgetter(name) for name in rows[0]}) if rows else "None yet."


def page(root: Path) -> list[str]:
    """The lines of docs/results/steering.md."""
    settings, beta = (
        json.dumps(dataclasses.asdict(own))[1:-1].replace('"', "")
        for own in (ADAPTIVE, SteerBeta())
    )
    return [
        "# Steering: SGLD steps and β* that follow the run",
        "",
        *GRID.source(root),
        "JEM on digits as `ebmguard train jem` has it (WRN-10-1, 64 positives and negatives, Adam "
        "3e-3, step size 1.0 and noise 0.01).",
        "",
        "## A sampler that has lost the data",
        "",
        "One SGLD step, β* = 0.5, 2,000 training steps (600 in the last two groups). Adaptive "
        f"steps: {settings}; each additional step is finer, unless it says otherwise. The columns "
        f"are steps of GradScale (back: with a median over 0.5 in the {STRETCH} from there on), of "
        "the rule's first alert, test accuracies (taken every 25 steps), and gradient evaluations "
        "instead of one of the fixed sampler's, from where the arm is adaptive on.",
        "",
        by_arm(root, LOST, lost_row),
        "",
        "Median GradScale in windows of 100 steps, by their end:",
        "",
        by_arm(root, {name: LOST[name] for name in ("fixed", "adaptive", "lost")}, trajectory_row),
        "",
        "## β* from both ends",
        "",
        f"Five SGLD steps, 2,000 training steps, β* fixed or steered from its start: {beta}. ESS, "
        "GradScale and gap are medians of the last 100 steps.",
        "",
        by_arm(root, BETA, beta_row),
        "",
    ]


GRID = Grid(
    "steering", CELLS, page, Path("docs/results/steering.md"), Path("runs/bench-steering"), run
)

if __name__ == "__main__":
    GRID.main()
