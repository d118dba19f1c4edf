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
BETAS, SEEDS = ("0.5", "0.3", "0.7", "0.1", "0.9", "0"), 4
MEMBERS, BETA = len(BETAS) * SEEDS, 0.5
PERIOD = 50
"""Updates between two flushes, and between two slow tiers of the diagnostics."""
TARGET = "8"
STANDING = 1e-12
"""A learning rate at which networks stay as they are, so that all updates do the same work."""
PUBLISHED = "1x1 convolutions"


class ToyLoop:
    """One model in a loop of the published structure, whose learning rate is 0.

    That of Nijkamp et al. (2020), with the loss of Algorithm 1 of *Energy-Based Model Training
    Objective Robust to Inaccurate SGLD Samples*, as 1x1 convolutions on (B, dim, 1, 1), as
    published, or as linear layers. Nothing is measured or written.
    """

    def __init__(self, settings: Scenario, device: torch.device, *, convolutions: bool) -> None:
        self.settings = settings
        self.distribution = DISTRIBUTIONS[settings.data]
        layers: list[nn.Module] = []
        for i, o in itertools.pairwise((self.distribution.dim, *toy.WIDTHS)):
            layers.append(nn.Conv2d(i, o, 1) if convolutions else nn.Linear(i, o))
            layers.append(nn.LeakyReLU(toy.NEGATIVE_SLOPE))
        self.f = nn.Sequential(*layers[:-1]).to(device)
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


def measured(scenario: str, rounds: int, device: torch.device, folder: Path) -> str:
    """A table of a model's update, alone and in an ensemble; and whether a GPU is waited for."""
    settings, cuda = SCENARIOS[scenario], device.type == "cuda"
    loops = {
        title: ToyLoop(settings, device, convolutions=title == PUBLISHED)
        for title in (PUBLISHED, "linear layers")
    }
    own: dict[str, Any] = {"betas": BETAS, "seeds": SEEDS, "lr": STANDING, "device": str(device)}
    ours = {
        mode: Iterations(
            Ensemble,
            ToyConfig(out=folder / mode, scenario=scenario, **own),
            graphed=mode != "eager",
        )
        for mode in (("graphs", "eager") if cuda else ("guarded",))
    }
    turns = {title: Turn(loop.step, PERIOD if cuda else 10) for title, loop in loops.items()}
    turns |= {mode: Turn(each.step, PERIOD) for mode, each in ours.items()}
    found = alternate(turns, device, rounds=rounds, warm_up=2)
    ms = {name: 1e3 * statistics.median(x.wall for x in taken) for name, taken in found.items()}
    lines = []
    for mode, title in itertools.product(ours, loops):
        alone = [Seconds(MEMBERS * each.wall, MEMBERS * each.cpu) for each in found[title]]
        cpu = statistics.median(a.cpu / b.cpu for a, b in zip(alone, found[mode], strict=True))
        line = {"loop over single models": title, f"ensemble of {MEMBERS}": mode}
        line |= {"alone, ms": f"{ms[title]:.3f}", "ensemble, ms": f"{ms[mode]:.3f}"}
        line["ratio: median (quartiles)"] = ratios(alone, found[mode], ".1f")
        line |= {"of CPU time": f"{cpu:.1f}", "target": TARGET if title == PUBLISHED else ""}
        lines.append(line)
    # All periods have been gone through twice and more.
    waits = prove_no_wait(next(iter(ours.values())).step, 2 * PERIOD, device)
    for each in ours.values():
        each.close()
    return f"{table_of(lines, words=2)}\n\n{waits}"


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
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            told = measured(name, given.rounds, device, Path(folder))
        print(f"\n### {name}\n\n{told}", flush=True)


if __name__ == "__main__":
    main()
