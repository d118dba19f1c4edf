"""What the tests of the toy trainer share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.toy import evaluate
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.grid import Grid
from ebmguard.reference_training.toy.train import train
from tests.reference_training.jem.parts import Silent, saved


def config_for(out: Path, **settings: Any) -> ToyConfig:
    base: dict[str, Any] = {
        "scenario": "gmm-default",
        "betas": ("0", "0.5", "-0.2"),
        "seeds": 2,
        "iterations": 12,
        "evaluations": 3,
        "checkpoint_every": 5,
        "threads": 1,
        "device": "cpu",
    }
    return ToyConfig(out=out, **(base | settings))


def go(config: ToyConfig, reporter: Reporter | None = None) -> dict[str, Any] | None:
    results: dict[str, Any] | None = train(*config.open(), reporter or Silent())
    return results


def small_evaluations(monkeypatch: Any) -> None:
    """10,000 samples a member and 40,000 points of the grid take longer than these trainings."""
    monkeypatch.setattr(evaluate, "SAMPLES", 200)
    monkeypatch.setattr(evaluate, "SAMPLES_AT_ONCE", 100)
    coarse = SimpleNamespace(of=lambda distribution: Grid.of(distribution, 20))
    monkeypatch.setattr(evaluate, "Grid", coarse)


def parameters(out: Path) -> dict[str, torch.Tensor]:
    return dict(saved(out)["network"])
