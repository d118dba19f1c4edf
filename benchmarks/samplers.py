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
from typing import Any

import torch
from ebm.samplers import HMC, MALA, LangevinDynamics
from ebm.samplers.base import Sampler
from torch import Tensor, nn

from ebmguard.samplers import hmc, mala, sgld

from .grid import provenance, table_of
from .timing import Turn, alternate, spread

LEAPFROGS = 10
CPU = torch.device("cpu")
Density = Callable[[Tensor], Tensor]


def bowl(x: Tensor) -> Tensor:
    """Negative energy of N(0, I)."""
    return -0.5 * x.square().sum(1)


def cases() -> dict[str, tuple[Density, int, float]]:
    """By name: a density, the dimensions of its samples, the standard deviation of a step's noise.

    The energy of the network has a bowl around it, so that it has a density.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1)]
    net = nn.Sequential(*layers, nn.Flatten(0)).requires_grad_(requires_grad=False)
    return {
        "Gaussian, 2D": (bowl, 2, 0.8),
        "Gaussian, 100D": (bowl, 100, 0.3),
        "MLP, 2-128-128-1": (lambda x: net(x) + bowl(x), 2, 0.8),
    }


def walks(noise_std: float) -> dict[str, tuple[Callable[..., Tensor], Sampler]]:
    """Ours and theirs, with as many steps of the same length, at o = 1."""
    size: dict[str, Any] = {"step_size": noise_std**2 / 2, "noise_std": noise_std}
    step, own_hmc = noise_std**2 / 2, partial(hmc, steps=20, leapfrog_steps=LEAPFROGS, **size)
    return {
        "HMC": (own_hmc, HMC(noise_std, LEAPFROGS, 20)),
        "MALA": (partial(mala, steps=100, **size), MALA(step, 100)),
        "SGLD": (partial(sgld, steps=100, **size), LangevinDynamics(step, 100)),
    }


def measured(
    ours: Callable[..., Tensor], theirs: Sampler, f: Density, x: Tensor, rounds: int
) -> dict[str, str]:
    """The ratio, milliseconds of both, acceptance of both."""
    turns = {
        "ours": Turn(lambda: ours(f, x), 1),
        "theirs": Turn(lambda: theirs.sample(lambda x: -f(x), x), 1),
    }
    found = alternate(turns, CPU, rounds=rounds, warm_up=3)
    own, other = ([each.cpu for each in side] for side in found.values())
    ratio = spread([a / b for a, b in zip(own, other, strict=True)], ".2f")
    ms = [f"{1e3 * statistics.median(side):.1f}" for side in (own, other)]
    line = {"ratio of CPU time: median (quartiles)": ratio}
    line |= {"ours, ms": ms[0], "ebmkit's, ms": ms[1], "acceptance: ours": "", "ebmkit's": ""}
    if isinstance(theirs, LangevinDynamics):
        return line
    accepted: list[Tensor] = []
    ours(f, x, on_step=lambda step: accepted.append(step.accepted.double().mean()))
    at, rates = x, list[float]()
    for _ in range(theirs.steps):
        at = theirs.sample(lambda x: -f(x), at, steps=1)
        assert theirs.last_accept_rate is not None
        rates.append(theirs.last_accept_rate)
    shares = {"acceptance: ours": torch.stack(accepted).mean(), "ebmkit's": statistics.fmean(rates)}
    return line | {name: f"{share:.3f}" for name, share in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--chains", type=int, nargs="+", default=[100, 1000])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(provenance(CPU, ["python", "-m", "benchmarks.samplers", *sys.argv[1:]]), end="\n\n")
    lines = []
    for name, (f, dim, noise_std) in cases().items():
        for chains in options.chains:
            x = torch.randn(chains, dim, generator=torch.Generator().manual_seed(1))
            for sampler, both in walks(noise_std).items():
                line = {"energy": name, "chains": str(chains), "sampler": sampler}
                lines.append(line | measured(*both, f, x, options.rounds))
    print(table_of(lines))


if __name__ == "__main__":
    main()
