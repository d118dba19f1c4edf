"""Sentences of the paper that a toy of known density can judge: samplers, buffers, negative β.

python -m benchmarks.toy_claims                # all tables, two at a time
python -m benchmarks.toy_claims --table-only   # the page of what has been run
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.reference_training.studies.toy import COLUMNS
from ebmguard.reference_training.toy import evaluate
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.evaluate import Evaluator
from ebmguard.reference_training.toy.grid import Grid as Plane
from ebmguard.reference_training.toy.members import Members
from ebmguard.reference_training.toy.network import EnsembleMLP
from ebmguard.reference_training.toy.sampler import Draws, Sampler
from ebmguard.reference_training.toy.scenario import SCENARIOS
from ebmguard.samplers import Mixture, ReplayBuffer, hmc, mala, sgld

from .grid import Grid, Rows, number, percent, table_of

CPU = torch.device("cpu")
SEEDS = (0, 1, 2)
ITERATIONS = 1000
"""Updates of a training."""
LEAPFROGS = 5
COLDER = 2.0
"""How far the sampler over-shoots: its chains are those of exp(2 o f), by noise / √2."""
CHAINS = 1000
LENGTHS = (20, 200, 2000)
TEMPERED = "(1 - β) f"
SHOWN = ("kl", "energy_scale", "energy_r2", "mode_mass_error")
HEADS = COLUMNS | {"energy_r2": "R² to the truth", "tv_sgld": "TV of SGLD(p_θ)"}


def sampler(name: str, members: int, generator: torch.Generator) -> Sampler:
    """A sampler of the toy by its name.

    Args:
        name: sgld, mala, hmc, or mixed (half of the chains SGLD, half HMC); with "buffer" its
            chains persist, with "colder" they over-shoot.
        members: G.
        generator: of the buffer's starts and of MALA's and HMC's draws.
    """
    settings = SCENARIOS["gmm-default"]
    colder = math.sqrt(COLDER) if "colder" in name else 1.0
    own = {"step_size": settings.step_size, "noise_std": settings.noise_std / colder}
    tested = {**own, "generator": generator, "dim": 1}
    # A row has a chain of every member.
    buffer = ReplayBuffer(
        CHAINS, (members, 2), reinit_rate=0.05, generator=generator, low=-2, high=2
    )

    def langevin(f: nn.Module, x0: Tensor, noise: Tensor) -> Tensor:
        return sgld(f, x0, steps=len(noise), noise=noise, **own)

    def adjusted(f: nn.Module, x0: Tensor, noise: Tensor) -> Tensor:
        return mala(f, x0, steps=len(noise), **tested)

    def hamiltonian(f: nn.Module, x0: Tensor, noise: Tensor) -> Tensor:
        return hmc(f, x0, steps=len(noise) // LEAPFROGS, leapfrog_steps=LEAPFROGS, **tested)

    def both(f: nn.Module, x0: Tensor, noise: Tensor) -> Tensor:
        halves = {
            part.__name__: partial(part, x0=x0[:, first::2], noise=noise[:, :, first::2])
            for first, part in enumerate((langevin, hamiltonian))
        }
        return Mixture(halves, dim=1)(f)

    kinds = {"sgld": langevin, "mala": adjusted, "hmc": hamiltonian, "mixed": both}
    climb = kinds[name.split()[0]]

    def sample_q(f: nn.Module, x0: Tensor, noise: Tensor) -> Tensor:
        if "buffer" not in name:
            return climb(f, x0, noise)
        starts, rows = buffer.sample(x0.shape[1])
        x = climb(f, starts.transpose(0, 1), noise)
        buffer.write(rows, x.transpose(0, 1))
        return x

    return sample_q


def fit(name: str, betas: Sequence[str], *, tempered: bool = True) -> tuple[Evaluator, EnsembleMLP]:
    """Train the toy with a sampler.

    Args:
        name: of the sampler.
        betas: of the members, as the toy trainer has them; each has all the seeds.
        tempered: whether the sampler runs on (1 - β) f; otherwise on f, and only weights change.

    Returns:
        what measures the members, and the networks.
    """
    settings = replace(SCENARIOS["gmm-default"], iterations=ITERATIONS)
    members = Members.of(betas, ("default",), SEEDS)
    evaluator = Evaluator(settings, members, CPU)
    draws = Draws(settings, members, members.seeds, CPU)
    network = EnsembleMLP(members.seed_of_each, 2)
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.lr)
    strength = members.strength(settings.output_scale, ITERATIONS, CPU)
    if not tempered:
        strength["sampler_scale"] = 1.0
    rng = torch.Generator().manual_seed(1)
    loss_fn, sample_q = guard(None, sampler(name, len(members), rng), **strength)
    for step in range(ITERATIONS):
        optimizer.param_groups[0]["lr"] = settings.lr_at(step)
        x_pos = draws.positives()
        x_neg = sample_q(network, *draws.chains(settings.n_neg))
        loss = loss_fn(network(x_pos), network(x_neg))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return evaluator, network


def over_seeds(
    own: Mapping[str, str],
    betas: Sequence[str],
    rows: Sequence[Mapping[str, float]],
    shown: Sequence[str],
) -> list[dict[str, str]]:
    """A line for each β, with medians over the seeds of what is shown."""
    lines = []
    for i, beta in enumerate(betas):
        line = {**own, "β": beta}
        for column in shown:
            values = [row[column] for row in rows[i * len(SEEDS) : (i + 1) * len(SEEDS)]]
            spread = f"{number(min(values))} to {number(max(values))}"
            line[column] = f"{number(statistics.median(values))} ({spread})"
        lines.append(line)
    return lines


def trained(
    names: Sequence[str], betas: Sequence[str] = ("0", "0.5"), on: Sequence[str] = (TEMPERED,)
) -> list[dict[str, str]]:
    """How good densities are after :func:`fit`, a line for each β."""
    lines = []
    for name, f in itertools.product(names, on):
        evaluator, network = fit(name, betas, tempered=f == TEMPERED)
        rows = evaluator.measure(evaluator.log_density(network))
        lines += over_seeds({"sampler": name, "sampler on": f}, betas, rows, SHOWN)
    return lines


def masses(x: Tensor) -> Tensor:
    """Shares of the modes that samples (n, 2) lie nearest to, by the truth's components."""
    modes = DISTRIBUTIONS["gmm"].component_log_densities(x).argmax(-1)
    return torch.bincount(modes, minlength=8) / len(x)


def chains() -> list[dict[str, str]]:
    """Langevin at the truth itself: plateaus, weights of modes, and by β mixing and arrival."""
    truth, settings = DISTRIBUTIONS["gmm"], SCENARIOS["gmm-default"]
    points = Plane.of(truth).points
    log_p = truth.log_density(points)
    labels = truth.component_log_densities(points).argmax(-1)
    peak = float(log_p.max())

    def walk(f: Callable[[Tensor], Tensor], x: Tensor, steps: int, factor: float = 1.0) -> Tensor:
        scaled = {"step_size": settings.step_size, "noise_std": settings.noise_std}
        factor /= settings.output_scale
        return sgld(lambda y: factor * f(y), x, steps=steps, generator=rng, **scaled)

    lines: dict[str, dict[str, str]] = {}
    for seed in SEEDS:
        rng = torch.Generator().manual_seed(seed)
        far = torch.rand(CHAINS, 2, generator=rng) * 8 - 4
        # Constant where the density is under exp(-10) of its peak.
        floored = walk(
            lambda x: truth.log_density(x).clamp_min(peak - 10), far, settings.sgld_steps
        )
        whole = walk(truth.log_density, far, settings.sgld_steps)
        ends = {
            "out of the data at the start": far,
            "after 20 steps, plateau": floored,
            "after 20 steps, no plateau": whole,
        }
        line = {name: percent(outside(x, peak).double().mean()) for name, x in ends.items()}
        equal = torch.randint(8, (CHAINS,), generator=rng)
        angle = equal * math.pi / 4
        start = torch.stack((angle.cos(), angle.sin()), -1)
        true = evaluate.mode_masses(log_p, labels)
        for steps in (20, 500):
            found = masses(walk(truth.log_density, start, steps))
            near, far_off = (0.5 * float((found - w).abs().sum()) for w in (masses(start), true))
            line[f"{steps} steps: TV to the starts' weights, to the truth's"] = (
                f"{near:.3f}, {far_off:.3f}"
            )
        one = torch.tensor([[1.0, 0.0]]).expand(CHAINS, 2)
        for beta in (0.0, 0.5, 0.9):
            target = evaluate.mode_masses((1 - beta) * log_p, labels)
            x, taken, distance = one, 0, 1.0
            while distance >= 0.1 and taken < 1000:
                x = walk(truth.log_density, x, 25, 1 - beta)
                taken += 25
                distance = 0.5 * float((masses(x) - target).abs().sum())
            line[f"steps to TV 0.1 of the modes at β = {beta:g}"] = (
                str(taken) if distance < 0.1 else f"> {taken} (TV {distance:.2f})"
            )
        for beta in (0.0, 0.5, 0.9):
            x, taken, on_the_way = far, 0, outside(far, peak)
            while on_the_way.double().mean() > 0.1:
                x, taken = walk(truth.log_density, x, 1, 1 - beta), taken + 1
                on_the_way &= outside(x, peak)
            line[f"steps until 90% have been in the data at β = {beta:g}"] = str(taken)
        for name, value in line.items():
            lines.setdefault(name, {"chains": name})[f"seed {seed}"] = value
    return list(lines.values())


def outside(x: Tensor, peak: float) -> Tensor:
    """Which samples are where the density is under exp(-10) of its peak."""
    far: Tensor = DISTRIBUTIONS["gmm"].log_density(x) < peak - 10
    return far


def longer() -> list[dict[str, str]]:
    """Samples of the whole f by more steps than in training, beside the density itself."""
    betas, shown = ("0", "0.5", "0.9"), ("kl_sgld", "tv_sgld")
    evaluator, network = fit("sgld", betas)
    rows = evaluator.measure(evaluator.log_density(network))
    rows = [{f"{name}_sgld": row[name] for name in ("kl", "tv")} for row in rows]
    lines = over_seeds({"steps": "the density"}, betas, rows, shown)
    for steps in LENGTHS:
        settings = replace(evaluator.settings, sgld_steps=steps)
        sampling = Evaluator(settings, evaluator.members, CPU)
        rows = sampling.measure_samples(sampling.samples(network, ITERATIONS))
        lines += over_seeds({"steps": f"{steps:,}"}, betas, rows, shown)
    return lines


TABLES: dict[str, Callable[[], list[dict[str, str]]]] = {
    "buffer": partial(trained, ("sgld", "sgld buffer")),
    "samplers": partial(trained, ("mala", "hmc", "mixed")),
    # Chains of exp(2 o f), with β down to the one at which the weights undo it.
    "overshoot": partial(
        trained, ("sgld buffer colder",), ("-1", "-0.5", "0", "0.5"), ("f", TEMPERED)
    ),
    "longer": longer,
    "chains": chains,
}


def measure(folder: Path) -> dict[str, Any]:
    """The lines of a table."""
    torch.set_num_threads(1)
    return {"lines": TABLES[folder.name]()}


def slots(rows: Rows) -> dict[str, str]:
    lines = {row["cell"]: row["lines"] for row in rows}
    return {
        name: table_of(
            [{HEADS.get(k, k): x for k, x in line.items()} for line in lines.get(name, [])]
        )
        for name in ("buffer", "samplers")
    }


GRID = Grid("toy_claims", {name: {} for name in TABLES}, measure, slots)

if __name__ == "__main__":
    sys.exit(GRID.main())
