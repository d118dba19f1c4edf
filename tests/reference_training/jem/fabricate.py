"""JEM run folders made by hand, in the format that the trainer writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.sinks import to_json

INCEPTION = {
    "features": "Inception 2015-12-05 (sha256 6726825d)",
    "features_comparable": True,
    "features_fixed": True,
}
OWN = {
    "features": "the run's own classifier (comparable within one evaluation only)",
    "features_comparable": False,
    "features_fixed": False,
}
"""What rows of evaluations.jsonl say of the network that judged the samples."""


def write_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(to_json(row), allow_nan=False) + "\n" for row in rows))


def made_up_evaluation(step: int, epoch: float, beta_star: float, lost: bool) -> dict[str, Any]:
    """Accuracy and quality that rise with the epochs, and are gone after a divergence."""
    risen = 1 - math.exp(-epoch / 30)
    good = 0.1 if lost else 1.0
    return {
        "step": step,
        "epoch": epoch,
        "valid_accuracy": 0.1 + 0.8 * risen * good,
        "test_accuracy": 0.1 + (0.81 + 0.002 * math.log1p(beta_star)) * risen * good,
        "ece": 0.05,
        "buffer_is": 1 + (7 - 0.3 * beta_star) * risen * good,
        "buffer_is_std": 0.1,
        "buffer_fid": 400 - (350 - 4 * beta_star) * risen * good,
        "buffer_samples": 10_000,
        **INCEPTION,
    }


def write_run(
    folder: Path,
    *,
    beta_star: float = 0.0,
    seed: int = 0,
    scenario: str | None = "1",
    data: Any = "cifar10",
    steps: int | None = None,
    steps_per_epoch: int = 703,
    diverged_at: int | None = None,
    finished: bool = True,
    evaluate: Callable[..., dict[str, Any]] = made_up_evaluation,
    gaps: Any = None,
    alerts: Iterable[Mapping[str, Any]] = (),
    samples: Iterable[int] = (),
    **settings: Any,
) -> Path:
    """Write a run's folder, and return it.

    Args:
        folder: made.
        beta_star, seed, scenario, data, settings: of the run.
        steps: updates that were done; None is all, or two epochs after the divergence.
        steps_per_epoch: evaluations lie an epoch apart.
        diverged_at: the lost step; the gap grows before it and is NaN after it.
        finished: whether there are results.
        evaluate: (step, epoch, beta_star, lost) -> a line of evaluations.jsonl.
        gaps: (steps,) energy gaps, in place of made-up ones.
        alerts: lines of alerts.jsonl.
        samples: steps whose negatives are stored.
    """
    settings |= {"out": folder, "data": data, "scenario": scenario}
    config = JemConfig(beta_star=beta_star, seed=seed, **settings)
    asked = config.settings.iterations
    if steps is None:
        after = 2 * steps_per_epoch
        steps = asked if diverged_at is None else min(asked, diverged_at + after)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    rng = np.random.default_rng(1000 * seed + int(10 * beta_star))
    if gaps is None:
        gaps = 0.02 * (1 + beta_star) + 0.05 * (1 + beta_star / 4) * rng.standard_normal(steps)
        if diverged_at is not None:
            gaps[diverged_at - 5 : diverged_at] *= 10.0 ** np.arange(1, 6)
            gaps[diverged_at:] = 1e9 * rng.standard_normal(steps - diverged_at)
            gaps[diverged_at + 50 :] = np.nan
    write_lines(
        folder / "metrics.jsonl",
        (
            {"step": s, "energy_gap": float(gaps[s]), "grad_scale": 0.9, "cross_entropy": 2.3}
            for s in range(steps)
        ),
    )
    write_lines(folder / "alerts.jsonl", alerts)
    due = [*range(0, steps, steps_per_epoch), *([steps] if finished else [])]
    evaluations = [
        evaluate(s, s / steps_per_epoch, beta_star, diverged_at is not None and s > diverged_at)
        for s in due
    ]
    write_lines(folder / "evaluations.jsonl", evaluations)
    if finished:
        results = {"iterations": asked, "steps": steps, "wall_seconds": 3725.0}
        results |= {"diverged_at": diverged_at}
        (folder / "results.json").write_text(json.dumps(results))
    (folder / "samples").mkdir()
    for step in samples:
        lost = diverged_at is not None and step >= diverged_at
        np.save(folder / "samples" / f"{step:08d}.npy", picture(rng, lost))
    return folder


def picture(rng: np.random.Generator, lost: bool) -> Any:
    """(64, 3, 32, 32) bytes: smooth colours, or what is left of a lost sampler."""
    if lost:
        return (255 * (rng.random((64, 3, 1, 1)) > 0.5)).repeat(32, 2).repeat(32, 3).astype("uint8")
    small = rng.integers(30, 226, (64, 3, 4, 4))
    return small.repeat(8, axis=2).repeat(8, axis=3).astype(np.uint8)
