"""Run folders as the guard's own sink writes them: judge, rollback and all."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ebmguard.alerts import Alert, Judge
from ebmguard.sinks import JsonlSink

LOST_AT, BACK_TO = 180, 130


def rows(steps: range, seed: int, *, beta_star: float = 0.0, attempt: int = 0) -> Iterator[Any]:
    """Rows of a healthy run, with the guard's tags."""
    draw = random.Random(seed)
    for step in steps:
        row = {
            "energy_gap": draw.gauss(0.2, 0.1),
            "f_pos/median": draw.gauss(3.0, 0.1),
            "f_pos/std": 0.5,
            "f_neg/min": draw.gauss(1.0, 0.1),
            "f_neg/median": draw.gauss(2.8, 0.1),
            "f_neg/q95": 3.2,
            "energy_overlap": draw.uniform(0.4, 0.6),
            "sampler/grad_norm": math.exp(draw.gauss(-2.0, 0.1)),
            "grad_scale": 0.98,
            "ref/grad_scale": draw.uniform(0.95, 0.99),
            "ess": draw.uniform(0.5, 0.9),
            "ref/ess": draw.uniform(0.5, 0.9),
            "nonfinite/energies": 0.0,
            "beta_star": beta_star,
            "recovery/attempt": float(attempt),
        }
        if step % 50 == 0:
            row["pareto_k"] = math.nan if beta_star == 0 else 0.3
        yield step, row


def write(path: Path, *, rescued: bool = True, finished: bool = True) -> Path:
    """A run of 300 steps that blows up at ``LOST_AT``, and goes on from ``BACK_TO`` if rescued."""
    sink, judge = JsonlSink(path), Judge()

    def take(step: int, row: dict[str, float]) -> list[Alert]:
        sink.write_row(step, row, {})
        alerts = judge.observe(step, row)
        for alert in alerts:
            sink.write_alert(alert.record())
        return alerts

    alerts: list[Alert] = []
    for step, row in rows(range(LOST_AT + 12), seed=1):
        since = step - LOST_AT
        if since >= 0:
            row["energy_gap"] *= 10.0 ** (since + 2)
            row["sampler/grad_norm"] *= 10.0**since
            row["ref/grad_scale"] = 0.0
        if since >= 10:
            row["energy_gap"] = (math.nan, math.inf)[since - 10]
            row["nonfinite/energies"] = 1.0
        alerts += take(step, row)
    if rescued:
        sink.write_recovery(
            {
                "step": LOST_AT + 12,
                "restored_step": BACK_TO,
                "attempt": 1,
                "rule": alerts[-1].rule,
                "tag": alerts[-1].tag,
                "value": alerts[-1].value,
                "certified": True,
                "relapse": False,
                "condemned": [],
                "changes": {"beta_star": [0.0, 0.5], "lr_factor": [1.0, 0.3]},
                "reseeded": 2,
                "budget_left": 4,
                "message": f"Rollback 1 at step {LOST_AT + 12}: back to step {BACK_TO}. 4 left.",
            }
        )
        for step, row in rows(range(BACK_TO, 300), seed=2, beta_star=0.5, attempt=1):
            take(step, row)
    sink.flush()
    config = {"beta_star": 0.0, "lr": 3e-3, "settings": {"iterations": 300, "sgld_steps": 5}}
    (path / "config.json").write_text(json.dumps(config))
    accuracy = [{"step": s, "test_accuracy": min(0.97, 0.1 + s / 100)} for s in range(0, 300, 20)]
    (path / "accuracy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in accuracy))
    if finished:
        results = {
            "steps": 300 if rescued else LOST_AT + 12,
            "diverged_at": None if rescued else LOST_AT,
            "accuracy": 0.97,
            "best_accuracy": 0.97,
            "wall_seconds": 12.5,
        }
        (path / "results.json").write_text(json.dumps(results))
    return path


def record(path: Path, rows: Iterable[tuple[int, dict[str, float]]]) -> Path:
    """A folder with rows alone."""
    sink = JsonlSink(path)
    for step, row in rows:
        sink.write_row(step, row, {})
    sink.flush()
    return path
