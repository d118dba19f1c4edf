"""Runs that save themselves: digits at β* = 0 under each rollback policy, 20 seeds each.

    python -m benchmarks.rollback                # the whole grid, two runs at a time
    python -m benchmarks.rollback --table-only   # the table of what has been run

The loop is a plain one, as a user has it; what recovery needs of it is the marked lines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from ebmguard import BudgetSpentError, guard
from ebmguard.recovery import Change, Recovery
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.trainer import Trainer, make_network
from ebmguard.reference_training.judge.evaluator import Evaluator
from ebmguard.samplers import ReplayBuffer, sgld
from ebmguard.sinks import JsonlSink

from .cells import (
    Grid,
    cell_command,
    is_done,
    load,
    number,
    percent,
    read_json,
    table,
    write_json,
)

STEPS = 2000
LONG = 6000
"""Steps of the policies that save: a gap at β* = 2 may drift long after the run was taken back."""
BUDGET = 5
SEEDS = range(20)
LADDER = (Change(beta_star=2), Change(sgld_steps=2), Change(beta_star=4, lr=0.5))
POLICIES: dict[str, tuple[str, Recovery | None]] = {
    "none": ("no guard's action", None),
    "reseed": ("reseed only", Recovery(ladder=(Change(),), budget=BUDGET)),
    "lr": ("learning rate / 3", Recovery(ladder=(Change(lr=1 / 3),), budget=BUDGET)),
    "steps": ("SGLD steps × 2", Recovery(ladder=(Change(sgld_steps=2),), budget=BUDGET)),
    "beta0.5": ("β* → 0.5", Recovery(ladder=(Change(beta_star=0.5),), budget=BUDGET)),
    "beta2": ("β* → 2", Recovery(ladder=(Change(beta_star=2),), budget=BUDGET)),
    "ladder": ("β* → 2, steps × 2, β* → 4", Recovery(ladder=LADDER, budget=BUDGET)),
    "default": ("the default, by cause", Recovery(budget=BUDGET)),
}
LASTING = ("ladder", "default")
LOST = 1e4
# What counts as saved.
LEAST_LR = 0.1
LARGEST_GAP = 20.0
LEAST_GRAD_SCALE = 0.5
LEAST_ACCURACY = 0.97
LAST = 100


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    policy: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.policy}_s{self.seed}"

    @property
    def stages(self) -> Sequence[int]:
        """The steps at which the run is judged; the last one is its end."""
        return (STEPS, LONG) if self.policy in LASTING else (STEPS,)

    def command(self, folder: Path) -> Sequence[str]:
        """What runs it."""
        return cell_command("rollback", folder)


# The ladder of a seed comes before β* → 2, which takes what it has run.
CELLS = [Cell(policy, seed) for seed in SEEDS for policy in reversed(POLICIES)]


def run(cell: Cell, root: Path) -> None:
    """Run a cell, and write what came of it."""
    (root / cell.name).mkdir(parents=True, exist_ok=True)
    write_json(root / cell.name / "result.json", result_of(cell, root))


def result_of(cell: Cell, root: Path) -> dict[str, Any]:
    """Train a cell, or take the run that it would repeat to the bit.

    The first rung of the ladder is β* → 2, so that as long as a run needs no second rollback it is
    also that of β* → 2 alone.
    """
    twin = Cell("ladder", cell.seed)
    if cell.policy == "beta2" and is_done(twin, root):
        result = read_json(root / twin.name / "result.json")
        first = result["judged"][0]
        if len(first["rollbacks"]) <= 1:
            return result | {"ended": None, "judged": [first]}
    return train(cell, root / cell.name)


def train(cell: Cell, folder: Path) -> dict[str, Any]:
    """Train a cell to its end, and say what came of it."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.jsonl"):
        old.unlink()
    config = JemConfig(out=str(folder), beta_star=0.0, seed=cell.seed, iterations=cell.stages[-1])
    data, settings = config.load_data(), config.settings
    network = make_network(config, data)
    trainer = Trainer(config, network, data)

    def sample_q(f: nn.Module, buffer: ReplayBuffer, labels: Tensor | None = None) -> Tensor:
        x0, rows = buffer.sample(settings.n_neg, labels)
        x = sgld(
            f,
            x0,
            steps=g.next_steps().steps,  # the guard says how many
            step_size=settings.step_size,
            noise_std=settings.noise_std,
            generator=trainer.rng,
        )
        buffer.write(rows, x)
        return x

    recovery = POLICIES[cell.policy][1]
    g = guard(
        None,
        sample_q,
        beta_star=0.0,
        output_scale=settings.output_scale,
        sinks=[JsonlSink(folder)],
        action="warn" if recovery is None else "rollback",
        recovery=recovery,
    )
    g.attach(  # everything that a step changes
        model=network,
        optimizer=trainer.optimizer,
        buffer=trainer.buffer,
        generators=[trainer.rng],
        sgld_steps=settings.sgld_steps,
    )
    trainer.loss_fn, trainer.sample_q = g
    gaps: list[float] = []
    scales: list[float] = []
    spent_samples, lost, ended = 0, None, None
    judged: list[dict[str, Any]] = []
    evaluator = Evaluator(data, noise_std=0.0, quality=None)

    def judge(until: int) -> None:
        rates = [each.changes["lr"] for each in g.rollbacks if "lr" in each.changes]
        found = {
            "until": until,
            "reached": g.step,
            "updates": len(gaps),
            "rollbacks": [each.record() for each in g.rollbacks],
            "accuracy": evaluator.test_accuracy(network),
            "median_abs_gap": statistics.median(map(abs, gaps[-LAST:])),
            "reference_grad_scale": statistics.median(scales[-LAST:]),
            "lr": round(rates[-1][1] / rates[0][0], 6) if rates else 1.0,
            "parameters_finite": all(bool(torch.isfinite(p).all()) for p in network.parameters()),
            "sgld_steps": spent_samples / (until * settings.sgld_steps),
            "seconds": time.perf_counter() - began,
        }
        judged.append(found)

    began = time.perf_counter()
    try:
        for until in cell.stages:
            while g.step < until and lost is None:  # g.step goes back in a rollback
                trainer.step(g.step)
                spent_samples += g.sgld_steps
                gaps.append(g.last["energy_gap"])
                scales += [value] if (value := g.last.get("ref/grad_scale")) is not None else []
                if not abs(gaps[-1]) <= LOST and recovery is None:
                    lost = len(gaps) - 1
            judge(until)
    except BudgetSpentError as error:
        ended = str(error)
        for until in cell.stages[len(judged) :]:
            judge(until)
    g.close()
    return {"diverged_at": lost, "ended": ended, "judged": judged}


def why_not(result: dict[str, Any]) -> str:
    """What a run lacks to have reached its end alive, and by more than standing still."""
    gap, scale = result["median_abs_gap"], result["reference_grad_scale"]
    reasons = {
        f"ended at step {result['reached']}": result["reached"] < result["until"],
        f"learning rate {result['lr']:.2g} of the first": result["lr"] < LEAST_LR,
        f"|gap| {gap:.3g}": not gap < LARGEST_GAP,
        f"GradScale {scale:.2g}": not scale >= LEAST_GRAD_SCALE,
        f"accuracy {percent(result['accuracy'])}": result["accuracy"] < LEAST_ACCURACY,
        "parameters that are not finite": not result["parameters_finite"],
    }
    return ", ".join(text for text, failed in reasons.items() if failed)


def is_saved(result: dict[str, Any]) -> bool:
    """Whether it lacks nothing."""
    return not why_not(result)


def page(root: Path) -> list[str]:
    """The lines of docs/results/rollback.md."""
    rows = [run | judged for run in load(CELLS, root) for judged in run["judged"]]
    frame = pd.DataFrame(rows, columns=RESULT).assign(
        saved=[is_saved(row) for row in rows],
        count=[len(row["rollbacks"]) for row in rows],
        relapses=[sum(x["relapse"] for x in row["rollbacks"]) for row in rows],
    )
    lost = [row for row in rows if not is_saved(row) and row["policy"] != "none"]
    lines = [
        "# Runs that save themselves",
        "",
        *GRID.source(root),
        "Digits with the defaults of `ebmguard train jem` at β* = 0, which diverges. A plain loop "
        f'of {STEPS:,} steps under `action="rollback"`, at most {BUDGET} rollbacks; two policies '
        f"go on to step {LONG:,}. Saved is a run that reaches the step with a learning rate of at "
        f"least {LEAST_LR:g} of the first, a median |gap| of the last {LAST} steps under "
        f"{LARGEST_GAP:g}, a reference GradScale (β* = 0.5) of at least {LEAST_GRAD_SCALE:g} and a "
        f"test accuracy of at least {LEAST_ACCURACY:.0%}. SGLD steps and seconds are those of all "
        "updates, the abandoned ones included.",
    ]
    for until in (STEPS, LONG):
        these = frame[frame["until"] == until]
        groups = [own for policy in POLICIES if len(own := these[these["policy"] == policy])]
        lines += ["", f"## Until step {until:,}", "", table(groups, BY_POLICY)]
    lines += ["", "## What was not saved", "", table(lost, NOT_SAVED)]
    lines += ["", "## The audit log of each run under the default policy", "", "```"]
    for row in rows:
        if row["policy"] == "default" and row["until"] == LONG:
            lines.append(f"seed {row['seed']}: {percent(row['accuracy'])} at the end")
            lines += [f"  {record['message']}" for record in row["rollbacks"]]
    return [*lines, "```", ""]


def path(result: dict[str, Any]) -> str:
    """The steps of the rollbacks, and to which they went."""
    steps = [f"{each['step']} ({each['restored_step']})" for each in result["rollbacks"]]
    return ", ".join(steps) or "–"


RESULT = (
    "policy",
    "until",
    "reached",
    "accuracy",
    "median_abs_gap",
    "reference_grad_scale",
    "sgld_steps",
    "seconds",
)
BY_POLICY = {
    "policy": lambda own: POLICIES[own["policy"].iloc[0]][0],
    "saved": lambda own: f"{own['saved'].sum()} of {len(own)}",
    "reached the end": lambda own: str((own["reached"] >= own["until"]).sum()),
    "rollbacks (median, most)": lambda own: f"{own['count'].median():g}, {own['count'].max()}",
    "relapses": lambda own: str(own["relapses"].sum()),
    "accuracy": lambda own: percent(own["accuracy"].median()),
    "median |gap|": lambda own: number(own["median_abs_gap"].median()),
    "reference GradScale": lambda own: number(own["reference_grad_scale"].median(), ".2f"),
    "SGLD steps": lambda own: f"× {own['sgld_steps'].median():.2f}",
    "seconds": lambda own: f"{own['seconds'].median():.0f}",
}
NOT_SAVED = {
    "policy": lambda row: POLICIES[row["policy"]][0],
    "until": lambda row: f"{row['until']:,}",
    "seed": lambda row: str(row["seed"]),
    "rollbacks at (to)": path,
    "why it does not count": lambda row: why_not(row),
}
GRID = Grid(
    "rollback",
    CELLS,
    page,
    Path("docs/results/rollback.md"),
    Path("runs/bench-rollback"),
    run,
    kept=True,
)

if __name__ == "__main__":
    GRID.main()
