"""Energy Matching in the plane (Balcerak et al. 2025): its contrastive phase, plain and guarded.

python -m benchmarks.energy_matching                # the whole grid, two runs at a time
python -m benchmarks.energy_matching --table-only   # the page of what has been run
"""

from __future__ import annotations

import math
import statistics
import sys
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
CLAMP, TRIM, DRAWN, LAST = 0.02, 0.1, 1024, 20
FAR = 100.0
"""A gap of the potential, or a coordinate of a sample, beyond which a run is lost."""
SETTINGS: dict[str, tuple[str, int, float, int, float]] = {
    "brief": ("rate 1e-4, λ = 2, 20 steps", 300, 1e-4, 20, 2.0),
    "short": ("rate 0.01, λ = 20, 5 steps", 200, 0.01, 5, 20.0),
    "fast": ("rate 0.03, λ = 20, 200 steps", 60, 0.03, 200, 20.0),
    "published": ("rate 1e-4, λ = 2, 200 steps (published)", 300, 1e-4, 200, 2.0),
}
"""Title, updates, learning rate, Langevin steps, λ; the first three were found on seed 0."""
HEADS = {"gap": "gap", "w2_3": "W2 at t = 3", "w2_10": "at t = 10"}
ARMS = {"plain": "plain", "trimmed": "clamp, trimmed mean", "0.5": "β\\* = 0.5", "2": "β\\* = 2"}
CELLS = {
    f"{setting}_{arm}_s{seed}": {"setting": setting, "arm": arm, "seed": seed}
    for seed in SEEDS
    for setting in SETTINGS
    for arm in ARMS
}
WARM = {"warm": {"seed": 0}}


def potential() -> nn.Sequential:
    """V(x) of points of the plane, (B, 1); low on data."""
    hidden = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.SiLU())]
    return nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 1))


def gaussians(n: int) -> Tensor:
    """Eight of variance 0.1, on a circle of radius 5."""
    angle = torch.randint(8, (n,)) * (math.pi / 4)
    centres = 5 * torch.stack([angle.cos(), angle.sin()], 1)
    return centres.add(0.1**0.5 * torch.randn(n, 2))


def moons(n: int) -> Tensor:
    """Two half circles of radius 3, moved along the diagonal by up to 0.6."""
    angle = torch.linspace(0, math.pi, n // 2)
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    return torch.cat([upper, lower]).add(0.2 * torch.rand(n, 1)).mul(3).sub(1)


def pairing(x: Tensor, y: Tensor) -> Tensor:
    """For each x the y of the optimal transport."""
    _, found = linear_sum_assignment(torch.cdist(x, y).square().numpy())
    return torch.as_tensor(found)


def wasserstein(x: Tensor, y: Tensor) -> float:
    """W2 of two samples of the same size; infinite where x is."""
    is_finite = bool(x.isfinite().all())
    return float((x - y[pairing(x, y)]).square().sum(1).mean().sqrt()) if is_finite else math.inf


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
    for noise in (2 * DT * temperatures).sqrt()[..., None] * torch.randn(len(times), *x.shape):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(f(x).sum(), x)
        x = x - DT * slope + noise
    return x.detach()


def trimmed(v_pos: Tensor, v_neg: Tensor, weight: float) -> Tensor:
    """As the CIFAR-10 script has it, times the weight."""
    low = v_neg.flatten().sort().values[: len(v_neg) - int(TRIM * len(v_neg))]
    return (weight * (v_pos.mean() - low.mean())).clamp(min=-CLAMP)


def warm_up(folder: Path, seed: int) -> dict[str, Any]:
    """Flow matching alone; every run goes on from it."""
    torch.manual_seed(seed)
    f = potential()
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
    """Train a cell: the contrastive phase, from the warm-up."""
    if not arm:
        return warm_up(folder, seed)
    _, updates, lr, steps, weight = SETTINGS[setting]
    f, half = potential(), BATCH // 2
    optimizer = torch.optim.Adam(f.parameters())
    network, moments = torch.load(folder.parent / "warm" / "warm.pt")
    f.load_state_dict(network)
    optimizer.load_state_dict(moments)
    optimizer.param_groups[0]["lr"] = lr
    torch.manual_seed(seed)
    # At β* = 0 it only watches.
    beta_star = 0.0 if arm in ("plain", "trimmed") else float(arm)
    about: dict[str, Any] = {"beta_star": beta_star, "output_scale": 1 / EPSILON, "substeps": 1}
    about |= {"model": f, "optimizer": optimizer, "convention": "energy"}
    loss_fn, sampler = g = guard(None, gibbs_sampler, **about)
    # Half of the chains from data, at the highest temperature; half from the source.
    passed = torch.arange(1, steps + 1)[:, None] / steps
    times = torch.where(torch.arange(BATCH) < half, 1.0, passed)
    gaps, scales, is_lost = list[float](), [], False
    while len(gaps) < updates and not is_lost:
        optimizer.zero_grad()
        t, errors = flow_errors(f)
        flow = (((1 - t) / (1 - TAU)).clamp(max=1) * errors).mean()
        x = sampler(f, torch.cat([moons(half), gaussians(half)]), times)
        v_pos, v_neg = f(moons(BATCH)), f(x)
        loss = weight * loss_fn(v_pos, v_neg)
        loss = trimmed(v_pos, v_neg, weight) if arm == "trimmed" else loss
        (flow + loss).backward()
        optimizer.step()
        gaps.append(abs(float((v_neg.mean() - v_pos.mean()).detach())))
        scales.append(g.last["grad_scale"])
        is_lost = not max(gaps[-1], float(x.abs().max())) <= FAR
    g.close()
    found = {"updates": len(gaps), "lost": is_lost, "verdict": str(g.verdict), **judged(f)}
    end = {"gap": gaps, "grad_scale": scales}
    return found | {name: statistics.median(values[-LAST:]) for name, values in end.items()}


def spread(rows: Rows, name: str) -> str:
    """The median of the seeds and their range; infinite where a run ended so."""
    found = sorted(float(row[name]) for row in rows)
    middle, low, high = (f"{x:.3g}" for x in (statistics.median(found), found[0], found[-1]))
    return f"{middle} ({low} to {high})"


def slots(rows: Rows) -> dict[str, str]:
    lines = []
    for setting, (title, updates, *_) in reversed(SETTINGS.items()):
        for arm, name in ARMS.items():
            cells = [x for x in rows if (x["setting"], x["arm"]) == (setting, arm)]
            lost = [str(x["updates"]) for x in cells if x["lost"]]
            errors = sum(x["verdict"].startswith("lost") for x in cells)
            line = {
                "setting": f"{title}, {updates} updates" if arm == "plain" else "",
                "arm": name,
                "lost, at": f"{len(lost)} of {len(cells)}: {', '.join(lost)}".removesuffix(": "),
                "an ERROR stands": f"{errors} of {len(cells)}",
            }
            lines += [line | {head: spread(cells, x) for x, head in HEADS.items()}] if cells else []
    return {"arms": table_of(lines), "real": f"{rows[0]['w2_real']:.3g}"}


GRID = Grid("energy_matching", CELLS, measure, slots, judge=WARM)

if __name__ == "__main__":
    sys.exit(GRID.main())
