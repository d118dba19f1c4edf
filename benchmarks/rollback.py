"""Runs that save themselves: digits at β* = 0 under each rollback policy, 20 seeds each.

    python -m benchmarks.rollback                # the whole grid, two runs at a time
    python -m benchmarks.rollback --table-only   # the page of what has been run

The loop is a plain one, as a user has it; what recovery needs of it is the marked lines.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from ebmguard import BudgetSpentError, guard
from ebmguard.recovery import Change, Recovery
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.trainer import Trainer, make_network
from ebmguard.reference_training.judge.classification import accuracy_of
from ebmguard.samplers import ReplayBuffer, sgld
from ebmguard.sinks import JsonlSink

from .grid import Grid, Rows, number, percent, table

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
LEAST_LR, LARGEST_GAP, LEAST_GRAD_SCALE, LEAST_ACCURACY = 0.1, 20.0, 0.5, 0.97
LAST = 100
CELLS = {
    f"{policy}_s{seed}": {"policy": policy, "seed": seed}
    for seed in SEEDS
    for policy in reversed(POLICIES)
}


def measure(folder: Path, policy: str, seed: int) -> dict[str, Any]:
    """Train a cell to its end, and say what came of it."""
    stages = (STEPS, LONG) if policy in LASTING else (STEPS,)
    torch.set_num_threads(1)
    for old in folder.glob("*.jsonl"):
        old.unlink()
    config = JemConfig(out=str(folder), beta_star=0.0, seed=seed, iterations=stages[-1])
    data, settings = config.load_data(), config.settings
    network = make_network(config, data)
    trainer = Trainer(config, network, data)

    def sample_q(f: nn.Module, buffer: ReplayBuffer, labels: Tensor | None = None) -> Tensor:
        x0, rows = buffer.sample(settings.n_neg, labels)
        x = sgld(
            f,
            x0,
            steps=g.next_steps(),  # the guard says how many
            step_size=settings.step_size,
            noise_std=settings.noise_std,
            generator=trainer.rng,
        )
        buffer.write(rows, x)
        return x

    recovery = POLICIES[policy][1]
    g = guard(
        None,
        sample_q,
        beta_star=0.0,
        substeps="auto" if policy == "default" else 1,
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

    def judge(until: int) -> None:
        rates = [each.changes["lr"] for each in g.rollbacks if "lr" in each.changes]
        found = {
            "until": until,
            "reached": g.step,
            "updates": len(gaps),
            "rollbacks": [each.record() for each in g.rollbacks],
            "accuracy": accuracy_of(network, data),
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
        for until in stages:
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
        for until in stages[len(judged) :]:
            judge(until)
    g.close()
    return {"diverged_at": lost, "ended": ended, "judged": judged}


def saved(own: pd.DataFrame) -> int:
    """How many runs reached their end alive, and by more than standing still."""
    held = (own["reached"] >= own["until"]) & own["parameters_finite"]
    held &= (own["lr"] >= LEAST_LR) & (own["median_abs_gap"] < LARGEST_GAP)
    held &= (own["reference_grad_scale"] >= LEAST_GRAD_SCALE) & (own["accuracy"] >= LEAST_ACCURACY)
    return int(held.sum())


COLUMNS = {
    "policy": lambda own: POLICIES[own["policy"].iloc[0]][0],
    "saved": lambda own: f"{saved(own)} of {len(own)}",
    "until step": lambda own: f"{own['until'].iloc[0]:,}",
    "reached it": lambda own: str((own["reached"] >= own["until"]).sum()),
    "rollbacks (median, most)": lambda own: f"{own['count'].median():g}, {own['count'].max()}",
    "accuracy": lambda own: percent(own["accuracy"].median()),
    "median |gap|": lambda own: number(own["median_abs_gap"].median()),
    "reference GradScale": lambda own: number(own["reference_grad_scale"].median(), ".2f"),
    "SGLD steps": lambda own: f"× {own['sgld_steps'].median():.2f}",
}


def slots(rows: Rows) -> dict[str, str]:
    judged = [{**run, **each} for run in rows for each in run["judged"]]
    frame = pd.DataFrame(judged).assign(count=[len(row["rollbacks"]) for row in judged])
    of = dict(iter(frame.groupby(["until", "policy"])))
    cells = [(until, policy) for until in (STEPS, LONG) for policy in POLICIES]
    return {"policies": table([of[cell] for cell in cells if cell in of], COLUMNS)}


GRID = Grid("rollback", CELLS, measure, slots)

if __name__ == "__main__":
    sys.exit(GRID.main())
