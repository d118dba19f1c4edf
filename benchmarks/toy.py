"""How fast the toys train: the ensemble against a plain loop over single models, side by side.

    python -m benchmarks.toy --device cpu --rounds 8

All contenders alternate in one process, there and back, each with a block of updates at a time;
medians over rounds of the ratios within rounds. Blocks of the ensemble are as long as the guard's
longest period, so that slow diagnostics and flushes of the sinks are in each of them. On a GPU a
block lies between two synchronisations.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebmguard.reference_training.device import find_device
from ebmguard.reference_training.toy import network as toy
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.scenario import SCENARIOS, Scenario
from ebmguard.reference_training.toy.train import Ensemble

from .grid import provenance, table_of
from .timing import Iterations, Seconds, Turn, alternate, prove_no_wait, ratios

NAMES = ("gmm-default", "circles-default")
BETAS = ("0.5", "0.3", "0.7", "0.1", "0.9", "0")
"""From the middle outwards: a single member is not that of β = 0."""
SIZES = {1: (1, 1), 2: (2, 1), 4: (4, 1), 8: (4, 2)} | {6 * n: (6, n) for n in (2, 4, 8, 16)}
"""Members: how many β, and how many seeds."""
MEMBERS, BETA = 24, 0.5
PERIOD = 50
"""Updates between two flushes, and between two slow tiers of the diagnostics."""
TARGET = "8"
STANDING = 1e-12
"""A learning rate at which networks stay as they are, so that all updates do the same work."""


class ToyLoop:
    """One model in a loop of the published structure, whose learning rate is 0.

    That of Nijkamp et al. (2020), with the loss of Algorithm 1 of *Energy-Based Model Training
    Objective Robust to Inaccurate SGLD Samples*, as 1x1 convolutions on (B, dim, 1, 1), as
    published, or as linear layers. Nothing is measured or written.
    """

    def __init__(self, settings: Scenario, device: torch.device, *, convolutions: bool) -> None:
        self.settings = settings
        self.distribution = DISTRIBUTIONS[settings.data]
        self.f = toy_network(self.distribution.dim, convolutions=convolutions).to(device)
        self.optimizer = torch.optim.Adam(self.f.parameters(), lr=0.0)
        self.rng = torch.Generator(device).manual_seed(0)
        self.trailing = (1, 1) if convolutions else ()

    def step(self) -> None:
        """One update of the model."""
        settings, rng = self.settings, self.rng
        x_pos = self.distribution.sample(settings.n_pos, rng)
        x_pos = x_pos.reshape(*x_pos.shape, *self.trailing)
        size = (settings.n_neg, *x_pos.shape[1:])
        x = settings.init_std * torch.randn(size, generator=rng, device=rng.device)
        for _ in range(settings.sgld_steps):
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(self.f(x).sum(), x)
            noise = torch.randn(size, generator=rng, device=rng.device)
            step = settings.step_size * (1 - BETA) * gradient + settings.noise_std * noise
            x = x.detach() + step
        f_pos = settings.output_scale * self.f(x_pos).flatten()
        f_neg = settings.output_scale * self.f(x).flatten()
        log_sum = (BETA * f_neg).logsumexp(0)
        loss = torch.logaddexp(BETA * f_pos, log_sum).mean() / BETA - f_pos.mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def toy_network(dim: int, *, convolutions: bool) -> nn.Sequential:
    """dim-32-64-64-64-1 with LeakyReLU 0.05."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise((dim, *toy.WIDTHS)):
        layers.append(nn.Conv2d(fan_in, fan_out, 1) if convolutions else nn.Linear(fan_in, fan_out))
        layers.append(nn.LeakyReLU(toy.NEGATIVE_SLOPE))
    return nn.Sequential(*layers[:-1])


class Stage:
    """Makes ensembles, as `ebmguard train toy` trains them, in a folder; and lets them alternate.

    On a GPU there are two modes: with CUDA graphs, and without.
    """

    def __init__(self, name: str, rounds: int, device: torch.device, folder: Path) -> None:
        self.scenario, self.rounds, self.device, self.folder = name, rounds, device, folder
        self.settings = SCENARIOS[name]
        cuda = device.type == "cuda"
        self.block, self.modes = (
            (PERIOD, {", graphs": True, ", eager": False}) if cuda else (10, {})
        )
        self.modes = self.modes or {"": True}

    def ensemble(
        self, members: int = MEMBERS, *, logs: bool = False, graphed: bool = True
    ) -> Iterations:
        """Of so many members; with the sinks of a log_dir or without."""
        betas, seeds = SIZES[members]
        own: dict[str, Any] = {"betas": BETAS[:betas], "seeds": seeds, "lr": STANDING}
        out = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        config = ToyConfig(out=out, scenario=self.scenario, device=str(self.device), **own)
        return Iterations(Ensemble, config, logs=logs, graphed=graphed)

    def alternate(self, turns: dict[str, Turn]) -> dict[str, list[Seconds]]:
        """Seconds of each."""
        return alternate(turns, self.device, rounds=self.rounds, warm_up=2)


def median_ms(seconds: Sequence[Seconds]) -> float:
    return 1e3 * statistics.median(each.wall for each in seconds)


def compared(one: Sequence[Seconds], ensemble: Sequence[Seconds], target: str) -> dict[str, str]:
    """Both sides' times, and how many times as long one model takes alone."""
    alone = [Seconds(MEMBERS * each.wall, MEMBERS * each.cpu) for each in one]
    cpu = statistics.median(a.cpu / b.cpu for a, b in zip(alone, ensemble, strict=True))
    ours = median_ms(ensemble)
    return {
        "alone, ms": f"{median_ms(one):.3f}",
        "ensemble, ms": f"{ours:.3f}",
        "a member, ms": f"{ours / MEMBERS:.3f}",
        "ratio: median (quartiles)": ratios(alone, ensemble, ".1f"),
        "of CPU time": f"{cpu:.1f}",
        "target": target,
    }


Lines = list[dict[str, str]]


def updates(stage: Stage) -> Lines:
    """A model update, alone and in an ensemble."""
    single = {
        title: ToyLoop(stage.settings, stage.device, convolutions=title == "1x1 convolutions")
        for title in ("1x1 convolutions", "linear layers")
    }
    ours = {
        f"{title}{mode}": stage.ensemble(logs=title == "log_dir", graphed=graphed)
        for mode, graphed in stage.modes.items()
        for title in ("no sinks", "log_dir")
    }
    turns = {title: Turn(loop.step, stage.block) for title, loop in single.items()}
    found = stage.alternate(turns | {x: Turn(each.step, PERIOD) for x, each in ours.items()})
    return [
        {"loop over single models": loop, "ensemble, guarded": title}
        | compared(found[loop], found[title], TARGET if "1x1" in loop else "")
        for title in ours
        for loop in single
    ]


def sizes(stage: Stage) -> Lines:
    """Cost against the size of the ensemble."""
    turns = {
        f"{members}{mode}": Turn(stage.ensemble(members, graphed=graphed).step, stage.block)
        for members in SIZES
        for mode, graphed in stage.modes.items()
    }
    found, lines = stage.alternate(turns), Lines()
    for members, (betas, seeds) in SIZES.items():
        lines.append({"members": str(members), "β x seeds": f"{betas} x {seeds}"})
        for mode in stage.modes:
            ms = median_ms(found[f"{members}{mode}"])
            lines[-1][f"update{mode}, ms"] = f"{ms:.2f}"
            lines[-1][f"a member{mode}, ms"] = f"{ms / members:.3f}"
    return lines


def waits(stage: Stage) -> Lines:
    """Waiting for the GPU."""
    ensemble = stage.ensemble(logs=True)
    for _ in range(2 * PERIOD * (stage.device.type == "cuda")):
        ensemble.step()
    return [{"found": prove_no_wait(ensemble.step, 2 * PERIOD, stage.device)}]


def main(words: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda")
    parser.add_argument("--rounds", type=int, default=8, help="rounds in which all take turns")
    given = parser.parse_args(words)
    if given.rounds < 2:
        parser.error(f"--rounds is {given.rounds}, expected 2 or more: quartiles need two")
    torch.set_num_threads(1)
    # At the initial weights, where all stays here, the guard rightly warns.
    logging.getLogger("ebmguard").setLevel(logging.CRITICAL)
    device = find_device(given.device)
    print(provenance(device, ["python", "-m", "benchmarks.toy", "--rounds", str(given.rounds)]))
    for measure in (updates, sizes, waits):
        print(f"\n### {(measure.__doc__ or '').rstrip('.')}")
        for name in NAMES:
            with tempfile.TemporaryDirectory() as folder:
                lines = measure(Stage(name, given.rounds, device, Path(folder)))
            print(f"\n{name}\n\n{table_of(lines)}", flush=True)


if __name__ == "__main__":
    main()
