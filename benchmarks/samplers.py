"""Our samplers beside ebmkit's: CPU time of calls that alternate in one process.

    python -m benchmarks.samplers --rounds 31

Both follow the same density from the same start points, with steps of the same length, and
differentiate the same function. Acceptance is the mean over all steps of a call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from ebm.samplers import HMC, MALA, LangevinDynamics
from ebm.samplers.base import Sampler
from torch import Tensor, nn

from ebmguard.samplers import hmc, mala, sgld

from .grid import provenance
from .timing import Turn, alternate, spread

LEAPFROGS = 10
CPU = torch.device("cpu")


class Case(NamedTuple):
    """A density, the dimensions of its samples, and the standard deviation of a step's noise."""

    f: Callable[[Tensor], Tensor]
    dim: int
    noise_std: float


def bowl(x: Tensor) -> Tensor:
    """Negative energy of N(0, I)."""
    return -0.5 * x.square().sum(1)


def cases() -> dict[str, Case]:
    """By name; the energy of the network has a bowl around it, so that it has a density."""
    torch.manual_seed(0)
    layers = [nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1)]
    net = nn.Sequential(*layers, nn.Flatten(0)).requires_grad_(requires_grad=False)
    return {
        "Gaussian, 2D": Case(bowl, 2, 0.8),
        "Gaussian, 100D": Case(bowl, 100, 0.3),
        "MLP, 2-128-128-1": Case(lambda x: net(x) + bowl(x), 2, 0.8),
    }


class Walk(NamedTuple):
    """A sampler of each side, with as many steps of the same length."""

    ours: Callable[..., Tensor]
    theirs: Sampler

    def measured(self, f: Callable[[Tensor], Tensor], x: Tensor, rounds: int) -> str:
        """Cells of a row: the ratio, milliseconds of both, acceptance of both."""
        turns = {
            "ours": Turn(lambda: self.ours(f, x), 1),
            "theirs": Turn(lambda: self.theirs.sample(lambda x: -f(x), x), 1),
        }
        found = alternate(turns, CPU, rounds=rounds, warm_up=3)
        ours, theirs = ([each.cpu for each in side] for side in found.values())
        ratio = spread([a / b for a, b in zip(ours, theirs, strict=True)], ".2f")
        times = " | ".join(f"{1e3 * statistics.median(side):.1f}" for side in (ours, theirs))
        return f"{ratio} | {times} | {self._acceptance(f, x)}"

    def _acceptance(self, f: Callable[[Tensor], Tensor], x: Tensor) -> str:
        if isinstance(self.theirs, LangevinDynamics):
            return " | "
        own: list[Tensor] = []
        rates: list[float | None] = []
        self.ours(f, x, on_step=lambda step: own.append(step.accepted.double().mean()))
        at = x
        for _ in range(self.theirs.steps):
            at = self.theirs.sample(lambda x: -f(x), at, steps=1)
            rates.append(self.theirs.last_accept_rate)
        assert None not in rates
        return f"{torch.stack(own).mean():.3f} | {statistics.fmean(filter(None, rates)):.3f}"


def walks(noise_std: float) -> dict[str, Walk]:
    """At o = 1, of one step size for all."""
    size: dict[str, Any] = {"step_size": noise_std**2 / 2, "noise_std": noise_std}
    return {
        "HMC": Walk(
            partial(hmc, steps=20, leapfrog_steps=LEAPFROGS, **size),
            HMC(noise_std, LEAPFROGS, 20),
        ),
        "MALA": Walk(partial(mala, steps=100, **size), MALA(noise_std**2 / 2, 100)),
        "SGLD": Walk(partial(sgld, steps=100, **size), LangevinDynamics(noise_std**2 / 2, 100)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--chains", type=int, nargs="+", default=[100, 1000])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(provenance(CPU, ["python", "-m", "benchmarks.samplers", *sys.argv[1:]]), end="\n\n")
    print(
        "| energy | chains | sampler | ratio of CPU time: median (quartiles) | ours, ms | "
        "ebmkit's, ms | acceptance: ours | ebmkit's |\n|---|---:|---|---|---:|---:|---:|---:|"
    )
    for name, case in cases().items():
        for chains in options.chains:
            x = torch.randn(chains, case.dim, generator=torch.Generator().manual_seed(1))
            for sampler, walk in walks(case.noise_std).items():
                cells = walk.measured(case.f, x, options.rounds)
                print(f"| {name} | {chains} | {sampler} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
