"""Energy Matching in the plane (Balcerak et al. 2025): its contrastive phase, plain and guarded.

python -m benchmarks.energy_matching                # the whole grid, two runs at a time
python -m benchmarks.energy_matching --table-only   # the page of what has been run
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from ebmguard import guard

from .grid import Grid, Rows, table_of

SEEDS = range(3)
WIDTH = 64  # published: 256, which takes five times as long
WARM_UP = 20_000
BATCH, SIGMA, DT = 128, 0.1, 0.01
TAU, EPSILON = 0.8, 0.15
CLAMP, TRIM = 0.02, 0.1
DRAWN = 1024
LAST = 20
FAR = 100.0
"""A gap of the potential, or a coordinate of a sample, beyond which a run is lost."""


@dataclass(frozen=True)
class Setting:
    """Of the contrastive phase; the defaults are published."""

    title: str
    updates: int
    lr: float = 1e-4
    steps: int = 200
    weight: float = 2.0


SETTINGS = {
    "heavy": Setting("rate 0.03, λ = 200, 20 steps", 60, 0.03, 20, 200.0),
    "short": Setting("rate 0.01, λ = 20, 5 steps", 200, 0.01, 5, 20.0),
    "fast": Setting("rate 0.03, λ = 20, 200 steps", 60, 0.03, 200, 20.0),
    "published": Setting("rate 1e-4, λ = 2, 200 steps (published)", 300),
}
"""Chosen on seed 0 without a guard: the first three are lost there, or nearly."""
ARMS = {"plain": "plain", "trimmed": "clamp, trimmed mean", "0.5": "β\\* = 0.5", "2": "β\\* = 2"}
CELLS = {
    f"{setting}_{arm}_s{seed}": {"setting": setting, "arm": arm, "seed": seed}
    for seed in SEEDS
    for setting in SETTINGS
    for arm in ARMS
}
WARM = {f"warm_s{seed}": {"seed": seed} for seed in SEEDS}


class Potential(nn.Sequential):
    """V(x) of points of the plane, (B, 1); low on data."""

    def __init__(self) -> None:
        hidden = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.SiLU())]
        super().__init__(nn.Linear(2, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 1))


def gaussians(n: int) -> Tensor:
    """Eight of variance 0.1, on a circle of radius 5."""
    angle = torch.randint(8, (n,)) * (math.pi / 4)
    return 5 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1**0.5 * torch.randn(n, 2)


def moons(n: int) -> Tensor:
    """Two half circles of radius 3, moved along the diagonal by up to 0.6."""
    angle = torch.linspace(0, math.pi, n // 2)
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    return 3 * (torch.cat([upper, lower]) + 0.2 * torch.rand(n, 1)) - 1


def pairing(x: Tensor, y: Tensor) -> Tensor:
    """For each x the y of the optimal transport."""
    _, found = linear_sum_assignment(torch.cdist(x, y).square().numpy())
    return torch.as_tensor(found)


def wasserstein(x: Tensor, y: Tensor) -> float:
    """W2 of two samples of the same size; infinite where x is."""
    if not bool(x.isfinite().all()):
        return math.inf
    return float((x - y[pairing(x, y)]).square().sum(1).mean().sqrt())


def flow_errors(f: nn.Module) -> tuple[Tensor, Tensor]:
    """Times, and the squared errors of -grad V as the velocity of the transport there."""
    start, end = gaussians(BATCH), moons(BATCH)
    drawn = torch.randint(BATCH, (BATCH,))
    start, end = start[drawn], end[pairing(start, end)[drawn]]
    t = torch.rand(BATCH)
    x = start + t[:, None] * (end - start) + SIGMA * torch.randn(BATCH, 2)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return t, (slope + end - start).square().mean(1)


def gibbs_sampler(f: nn.Module, x: Tensor, times: Tensor) -> Tensor:
    """Langevin chains; ``times`` (steps, B or 1) give the temperature of each step."""
    temperatures = EPSILON * ((times - TAU) / (1 - TAU)).clamp(0, 1)
    noises = (2 * DT * temperatures).sqrt().unsqueeze(-1) * torch.randn(len(times), *x.shape)
    for noise in noises:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(f(x).sum(), x)
        x = x - DT * slope + noise
    return x.detach()


def negatives(f: nn.Module, sampler: Any, steps: int) -> Tensor:
    """Half from data, at the highest temperature; half from the source, where it rises."""
    half = BATCH // 2
    begun = torch.arange(BATCH) < half
    passed = torch.arange(1, steps + 1)[:, None] / steps
    found: Tensor = sampler(
        f, torch.cat([moons(half), gaussians(half)]), torch.where(begun, 1.0, passed)
    )
    return found


def difference(v_pos: Tensor, v_neg: Tensor) -> Tensor:
    return v_pos.mean() - v_neg.mean()


def trimmed(v_pos: Tensor, v_neg: Tensor, weight: float) -> Tensor:
    """As the CIFAR-10 script has it, times the weight."""
    low = v_neg.flatten().sort().values[: len(v_neg) - int(TRIM * len(v_neg))]
    return (weight * difference(v_pos, low)).clamp(min=-CLAMP)


def warm_up(folder: Path, seed: int) -> dict[str, Any]:
    """Flow matching alone; every arm of a seed goes on from it."""
    torch.manual_seed(seed)
    f = Potential()
    optimizer = torch.optim.Adam(f.parameters(), lr=1e-4)
    for _ in range(WARM_UP):
        optimizer.zero_grad()
        flow_errors(f)[1].mean().backward()
        optimizer.step()
    torch.save([f.state_dict(), optimizer.state_dict()], folder / "warm.pt")
    return judged(f)


def judged(f: nn.Module) -> dict[str, Any]:
    """W2 to real samples at two times of the chain, and between two real samples."""
    torch.manual_seed(1000)
    x, found = gaussians(DRAWN), {}
    for end, steps in ((3, 300), (10, 700)):
        x = gibbs_sampler(f, x, (end + DT * torch.arange(-steps, 0))[:, None])
        found[f"w2_{end}"] = wasserstein(x, moons(DRAWN))
    return {**found, "w2_real": wasserstein(moons(DRAWN), moons(DRAWN))}


def measure(folder: Path, seed: int, setting: str = "", arm: str = "") -> dict[str, Any]:
    """Train a cell: the contrastive phase, from the warm-up of its seed."""
    if not arm:
        return warm_up(folder, seed)
    own = SETTINGS[setting]
    f, beta_star = Potential(), float(arm) if arm in ("0.5", "2") else 0.0
    optimizer = torch.optim.Adam(f.parameters(), lr=own.lr)
    network, moments = torch.load(folder.parent / f"warm_s{seed}" / "warm.pt")
    f.load_state_dict(network)
    optimizer.load_state_dict(moments)
    optimizer.param_groups[0]["lr"] = own.lr
    torch.manual_seed(seed)
    # At β* = 0 it only watches.
    loss_fn, sampler = g = guard(
        None,
        gibbs_sampler,
        model=f,
        optimizer=optimizer,
        convention="energy",
        beta_star=beta_star,
        output_scale=1 / EPSILON,
        sinks=[],
    )
    gaps, scales, far, is_lost = [0.0], [], 0.0, False
    while len(gaps) <= own.updates and not is_lost:
        optimizer.zero_grad()
        t, errors = flow_errors(f)
        weights = ((1 - t) / (1 - TAU)).clamp(max=1)
        x = negatives(f, sampler, own.steps)
        v_pos, v_neg = f(moons(BATCH)), f(x)
        loss = own.weight * loss_fn(v_pos, v_neg)
        if arm == "trimmed":
            loss = trimmed(v_pos, v_neg, own.weight)
        ((weights * errors).mean() + loss).backward()
        optimizer.step()
        gaps.append(float(difference(v_neg, v_pos).detach()))
        scales.append(g.last["grad_scale"])
        far = float(x.abs().max())
        is_lost = not (abs(gaps[-1]) <= FAR and far <= FAR)
    g.close()
    return {
        "updates": len(gaps) - 1,
        "lost": is_lost,
        "verdict": str(g.verdict),
        "gap": statistics.median(map(abs, gaps[-LAST:])),
        "grad_scale": statistics.median(scales[-LAST:]),
        **judged(f),
    }


def spread(rows: Rows, name: str) -> str:
    """The median of the seeds and their range; infinite where a run ended so."""
    found = sorted(float(row[name]) for row in rows)
    middle, low, high = (f"{x:.3g}" for x in (statistics.median(found), found[0], found[-1]))
    return f"{middle} ({low} to {high})"


def lines(rows: Rows) -> Iterator[dict[str, str]]:
    for setting, own in reversed(SETTINGS.items()):
        for arm, title in ARMS.items():
            cells = [x for x in rows if (x["setting"], x["arm"]) == (setting, arm)]
            if not cells:
                continue
            lost, said = [x for x in cells if x["lost"]], [x["verdict"] for x in cells]
            at = ", ".join(str(x["updates"]) for x in lost)
            yield {
                "setting": f"{own.title}, {own.updates} updates" if arm == "plain" else "",
                "arm": title,
                "lost": f"{len(lost)} of {len(cells)}" + (f", at {at}" if at else ""),
                "an ERROR stands": f"{sum(x.startswith('lost') for x in said)} of {len(cells)}",
                "gap": spread(cells, "gap"),
                "GradScale": f"{statistics.median(x['grad_scale'] for x in cells):.2g}",
                "W2 at t = 3": spread(cells, "w2_3"),
                "at t = 10": spread(cells, "w2_10"),
            }


def slots(rows: Rows) -> dict[str, str]:
    real = [x["w2_real"] for x in rows]
    return {"arms": table_of([*lines(rows)]), "real": f"{statistics.median(real):.3g}"}


GRID = Grid("energy_matching", CELLS, measure, slots, judge=WARM, trains_here=True)

if __name__ == "__main__":
    sys.exit(GRID.main())
