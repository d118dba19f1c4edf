"""Folders of JEM runs made by hand: healthy, lost, unfinished, of two setups and two scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.reference_training.jem.fabricate import OWN, made_up_evaluation, write_run

SMALL: dict[str, Any] = {
    "iterations": 1200,
    "steps_per_epoch": 100,
    "depth": 10,
    "width": 1,
    "train_images": 640,
}


def _own(*given: Any) -> dict[str, Any]:
    return made_up_evaluation(*given) | OWN


def write(folder: Path) -> None:
    """Write all of them."""
    lost = [{"rule": "energy_blowup", "level": "ERROR", "step": 457}]
    write_run(
        folder / "zero",
        diverged_at=460,
        samples=(0, 300, 400, 500),
        alerts=lost,
        **SMALL,
    )
    for seed in (0, 1):
        stored = (0, *range(100, 1200, 100)) if seed == 0 else ()
        name = folder / f"half-{seed}"
        write_run(name, beta_star=0.5, seed=seed, samples=stored, **SMALL)
    write_run(folder / "ten", beta_star=10, steps=700, finished=False, samples=(0, 600), **SMALL)
    for beta_star in (0, 1):
        write_run(
            folder / f"other-{beta_star}",
            scenario="2",
            beta_star=beta_star,
            evaluate=_own,
            data="digits",
            **SMALL,
        )
