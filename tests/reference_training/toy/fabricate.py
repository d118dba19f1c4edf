"""Toy run folders made by hand, in the format that the trainer writes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch

from ebmguard.reference_training.studies.toy import GOOD_WEIGHT
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.grid import Grid
from ebmguard.sinks import to_json
from tests.reference_training.jem.fabricate import write_lines

KL_AT_ZERO = 8.0


def made_up(beta: str, variant: str, seed: int) -> dict[str, Any]:
    """Metrics that improve with β, are worst for no_pos and differ a little between seeds."""
    worse = {"default": 1.0, "no_pos": 3.0, "batch": 1.1, "true": 1.2}[variant]
    kl = KL_AT_ZERO * math.exp(-6 * float(beta)) * worse * (1 + 0.1 * seed)
    return {
        "kl": kl,
        "tv": min(0.99, math.sqrt(kl / 8)),
        "kl_sgld": 0.02 * (1 + float(beta)) * (1 + 0.1 * seed),
        "tv_sgld": 0.05,
        "mode_mass_error": 0.1,
        "energy_scale": 1 + kl,
        "energy_r2": 0.98,
        "grad_scale": 0.9,
        "diverged_at": None,
    }


def write_run(
    config: ToyConfig,
    *,
    diverged: dict[str, int] | None = None,
    resolution: int = 40,
    samples: int = 200,
    metrics: Any = made_up,
) -> None:
    """Write the folder of a finished run, with a grid of `resolution` points a side.

    Args:
        config: what the run was to be.
        diverged: β -> update at which its members are lost, each with an alert three updates
            before.
        samples: of each member.
        metrics: (beta, variant, seed) -> what results.json says of a member.
    """
    diverged = diverged or {}
    distribution = DISTRIBUTIONS[config.settings.data]
    grid = Grid.of(distribution, resolution)
    generator = torch.Generator().manual_seed(0)
    log_density = distribution.log_density(grid.points).clamp(min=-40)
    energies, drawn, members, alerts = [], [], [], []
    blowup = {"rule": "energy_blowup"}
    for index, who in enumerate(config.members.describe()):
        numbers = metrics(**who)
        if not config.settings.sgld_steps:
            beta = float(who["beta"])
            numbers |= {"oracle_r2": 0.9 + 0.1 * beta - 0.01 * who["seed"] if beta else math.nan}
        if len(config.settings.sampler_names) > 1:
            numbers |= {GOOD_WEIGHT: 0.5 + 0.5 * float(who["beta"])}
        lost = diverged.get(who["beta"])
        cloud = distribution.sample(samples, generator)
        cloud += 0.2 * float(who["beta"]) * torch.randn(cloud.shape, generator=generator)
        energy = numbers["energy_scale"] * log_density
        if lost is not None:
            energy, cloud = energy * math.nan, cloud * math.nan
            numbers |= dict.fromkeys(set(numbers) - {"diverged_at"}, math.nan)
            numbers["diverged_at"] = lost
            for level, early in (("INFO", 9), ("ERROR", 3), ("ERROR", 1)):
                step = lost - early + who["seed"]
                alerts.append({"level": level, "step": step, "member": index} | blowup)
        energies.append(energy.reshape(grid.shape).float().numpy())
        drawn.append(cloud.numpy())
        members.append(who | numbers)
    (config.out / "figures").mkdir(parents=True)
    arrays = {"axis": grid.axis.numpy(), "negative_energy": energies, "samples": drawn}
    np.savez(config.out / "figures" / "grids.npz", **arrays)
    results = {
        "command": config.command(),
        "iterations": config.settings.iterations,
        "wall_seconds": 12.0,
        "members": members,
    }
    for name, value in (("config", config.to_json()), ("results", results)):
        (config.out / f"{name}.json").write_text(json.dumps(to_json(value), allow_nan=False))
    alerts.sort(key=lambda alert: int(str(alert["step"])))
    kept = ("kl", GOOD_WEIGHT)
    evaluations = [
        {"step": step, "member": i, **{name: m[name] for name in kept if name in m}}
        for step in (100, 200)
        for i, m in enumerate(members)
    ]
    for name, lines in (("alerts", alerts), ("members", evaluations)):
        write_lines(config.out / f"{name}.jsonl", lines)
