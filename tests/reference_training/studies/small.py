"""Small runs of every trainer, from which the studies are drawn: the same on every call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ebmguard.reference_training.shortrun.trained import TrainedRun
from tests.reference_training.shortrun.parts import Quadratic, tiny_run, write_rows

NETWORK: dict[str, Any] = {"activation": "gelu", "beta_star": 2000.0, "data_noise": 0.03}
"""Of an EnergyNet that was never trained."""


def courses(folder: Path) -> list[TrainedRun]:
    """Runs with rows: two seeds at β* = 0, a wide gap at 2, and one at 20 that is lost."""
    rng = np.random.default_rng(7)
    runs = []
    for i, (beta_star, size) in enumerate([(20.0, 3.0), (0.0, 0.1), (0.0, 0.2), (2.0, 1.0)]):
        path = folder / f"run{i}"
        f_neg = rng.normal(size=230)
        f_pos = f_neg + size * (1 + rng.normal(size=230) / 4)
        if beta_star == 20.0:
            f_pos[100:110] = np.nan
        weights = {name: rng.uniform(0.2, 1, 230) for name in ("grad_scale", "ess")}
        reference = {f"ref/{name}": rng.uniform(0.2, 1, 230) for name in weights}
        rows = {"f_pos/mean": f_pos, "f_neg/mean": f_neg, **weights, **reference}
        write_rows(path, {name: values.tolist() for name, values in rows.items()})
        runs.append(tiny_run(path, beta_star=beta_star, seed=i, step=230))
    return runs


def chains() -> list[TrainedRun]:
    """Runs whose chains start from noise: on quadratic f, one of it steep, and of a network."""
    return [
        tiny_run("steep", network=Quadratic(0.1, 0.2), beta_star=20.0, sgld_steps=5),
        tiny_run("flat", network=Quadratic(0.02), beta_star=0.0),
        tiny_run("drawn", most_sgld_steps=6, **NETWORK),
    ]


def flows() -> list[TrainedRun]:
    """Runs that are maps of noise to images: a linear one, and one of a network."""
    return [
        tiny_run("linear", network=Quadratic(0.2), activation="gelu", beta_star=0.0),
        tiny_run("net", **NETWORK),
    ]


def long_chains() -> list[TrainedRun]:
    """Runs whose long chains stay, grow, and are lost, the last of them persistent."""
    persistent: dict[str, Any] = {
        "init": "persistent",
        "buffer_size": 16,
        "sgld_steps": 2,
        "noise_std": 0.05,
    }
    return [
        tiny_run("stays", network=Quadratic(0.1), beta_star=0.0),
        tiny_run("grows", network=Quadratic(-0.02), beta_star=0.0),
        tiny_run("lost", network=Quadratic(-9.0), beta_star=0.0, **persistent),
    ]
