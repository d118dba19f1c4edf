"""How fast the toys train: the ensemble against a plain loop over single models, side by side.

    python -m benchmarks.toy --device cpu --rounds 8

All contenders alternate in one process (there and back: ABC, CBA, ...), each with a block of
updates at a time. What is reported are medians over rounds of the ratios within rounds, which a
slow phase of the machine hits on all sides. Blocks of the ensemble are as long as the guard's
longest period, so that slow diagnostics and flushes of the sinks are in each of them. On a GPU a
block lies between two synchronisations.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebmguard.reference_training.device import describe, find_device
from ebmguard.reference_training.toy.config import ToyConfig
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.sampler import make_training_sampler
from ebmguard.reference_training.toy.scenario import SCENARIOS, Scenario
from ebmguard.reference_training.toy.train import Ensemble

from .contenders import Iterations, ToyLoop, toy_network
from .grid import commit, table_of
from .timing import Seconds, Turn, alternate, ratios
from .watching import prove_no_wait

NAMES = ("gmm-default", "circles-default")
BETAS = ("0.5", "0.3", "0.7", "0.1", "0.9", "0")
"""From the middle outwards: a single member is not that of β = 0."""
# Members: how many β, and how many seeds.
SIZES = {
    1: (1, 1),
    2: (2, 1),
    4: (4, 1),
    8: (4, 2),
    12: (6, 2),
    24: (6, 4),
    48: (6, 8),
    96: (6, 16),
}
MEMBERS = 24
# Updates between two flushes, and between two slow tiers of the diagnostics.
PERIOD = 50
SHORT_BLOCK = 10
GPU_BLOCK = 50
WARM_UP = 2
UPDATE_TARGET, CHAINS_TARGET = 8, 3
STANDING = 1e-12
"""A learning rate at which networks stay as they are, so that all updates do the same work."""


def median_ms(seconds: Sequence[Seconds]) -> float:
    return 1e3 * statistics.median(each.wall for each in seconds)


def compared(one: Sequence[Seconds], ensemble: Sequence[Seconds]) -> dict[str, str]:
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
    }


class Stage:
    """Makes ensembles, as `ebmguard train toy` trains them, in a temporary folder."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device = device
        self.block = GPU_BLOCK if device.type == "cuda" else SHORT_BLOCK
        self.modes = {"": True}
        if device.type == "cuda":
            self.modes = {", CUDA graphs": True, ", eager": False}
        self._folder = folder
        self._made: list[Iterations] = []

    def ensemble(
        self, scenario: str, members: int = MEMBERS, *, logs: bool = False, graphed: bool = True
    ) -> Iterations:
        """Of so many members; with the sinks of a log_dir or without."""
        betas, seeds = SIZES[members]
        config = ToyConfig(
            out=self._folder / str(len(self._made)),
            scenario=scenario,
            betas=BETAS[:betas],
            seeds=seeds,
            lr=STANDING,
            device=str(self.device),
        )
        self._made.append(Iterations(Ensemble, config, logs=logs, graphed=graphed))
        return self._made[-1]

    def close(self) -> None:
        """Close the ensembles."""
        for ensemble in self._made:
            ensemble.close()


@contextmanager
def stage(device: torch.device) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory() as folder:
        made = Stage(device, Path(folder))
        try:
            yield made
        finally:
            made.close()


Lines = list[dict[str, str]]


def updates(name: str, rounds: int, device: torch.device) -> Lines:
    """A model update, alone and in an ensemble."""
    with stage(device) as made:
        single = {
            "1x1 convolutions": ToyLoop(SCENARIOS[name], device, convolutions=True),
            "linear layers": ToyLoop(SCENARIOS[name], device, convolutions=False),
        }
        ours = {
            f"{title}{mode}": made.ensemble(name, logs=logs, graphed=graphed)
            for mode, graphed in made.modes.items()
            for title, logs in (("no sinks", False), ("log_dir", True))
        }
        turns = {title: Turn(loop.step, made.block) for title, loop in single.items()}
        turns |= {title: Turn(each.step, PERIOD) for title, each in ours.items()}
        found = alternate(turns, rounds, device, WARM_UP)
    return [
        {"loop over single models": loop, "ensemble, guarded": title}
        | compared(found[loop], found[title])
        | {"target": f"{UPDATE_TARGET}" if loop == "1x1 convolutions" else ""}
        for title in ours
        for loop in single
    ]


def sizes(name: str, rounds: int, device: torch.device) -> Lines:
    """Cost against the size of the ensemble."""
    with stage(device) as made:
        block = GPU_BLOCK if device.type == "cuda" else SHORT_BLOCK // 2
        turns = {
            f"{members}{mode}": Turn(made.ensemble(name, members, graphed=graphed).step, block)
            for members in SIZES
            for mode, graphed in made.modes.items()
        }
        found = alternate(turns, rounds, device, WARM_UP)
    lines = []
    for members, (betas, seeds) in SIZES.items():
        lines.append({"members": str(members), "β x seeds": f"{betas} x {seeds}"})
        for mode in made.modes:
            ms = median_ms(found[f"{members}{mode}"])
            lines[-1][f"update{mode}, ms"] = f"{ms:.2f}"
            lines[-1][f"a member{mode}, ms"] = f"{ms / members:.3f}"
    return lines


def chains(name: str, rounds: int, device: torch.device) -> Lines:
    """Chains alone, against torchebm's, where that is installed."""
    theirs = torchebm_chains(SCENARIOS[name], device)
    if theirs is None:
        return []
    with stage(device) as made:
        ours = {
            f"ours{mode}": our_chains(made.ensemble(name, graphed=graphed).task, graphed=graphed)
            for mode, graphed in made.modes.items()
        }
        turns = {title: Turn(call, made.block) for title, call in ours.items()}
        turns["torchebm"] = Turn(theirs, made.block)
        found = alternate(turns, rounds, device, WARM_UP)
    target = {"target": f"{CHAINS_TARGET}"}
    return [
        {"ensemble": each, **compared(found["torchebm"], found[each]), **target} for each in ours
    ]


def our_chains(task: Any, *, graphed: bool) -> Callable[[], object]:
    """The chains of every member, without a guard."""
    settings = task.settings
    device = task.record.device if graphed else torch.device("cpu")  # where nothing is a graph
    sample_q = make_training_sampler(settings, device)
    return lambda: sample_q(task.network, *task.draws.chains(settings.n_neg))


def torchebm_chains(settings: Scenario, device: torch.device) -> Callable[[], object] | None:
    """torchebm's Langevin sampler on the network of linear layers; None where it is missing."""
    if importlib.util.find_spec("torchebm") is None:
        return None
    core: Any = importlib.import_module("torchebm.core")
    samplers: Any = importlib.import_module("torchebm.samplers")
    dim = DISTRIBUTIONS[settings.data].dim
    network = toy_network(dim, convolutions=False).to(device)

    def energy(_: object, x: Tensor) -> Tensor:
        f: Tensor = network(x)
        return -f.squeeze(-1)

    model = type("Energy", (core.BaseModel,), {"forward": energy})(device=device)
    # Its noise is sqrt(2 step_size) noise_scale.
    noise_scale = settings.noise_std / (2 * settings.step_size) ** 0.5
    sampler = samplers.LangevinDynamics(
        model, step_size=settings.step_size, noise_scale=noise_scale, device=device
    )
    rng = torch.Generator(device).manual_seed(0)

    def chains() -> object:
        x0 = torch.randn((settings.n_neg, dim), generator=rng, device=device)
        return sampler.sample(x=settings.init_std * x0, n_steps=settings.sgld_steps, generator=rng)

    return chains


def report(rounds: int, device: torch.device) -> None:
    print(
        f"Commit {commit()}, {describe(device)}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s), {rounds} rounds; ensembles of {MEMBERS}."
    )
    for measured in (updates, sizes, chains):
        print(f"\n### {(measured.__doc__ or '').rstrip('.')}")
        for name in NAMES:
            lines = measured(name, rounds, device)
            missing = "Skipped: torchebm is not installed here (pip install torchebm==0.8.9)."
            print(f"\n{name}\n\n{table_of(lines) if lines else missing}", flush=True)
    if device.type == "cuda":
        for name in NAMES:
            with stage(device) as made:
                ensemble = made.ensemble(name, logs=True)
                for _ in range(WARM_UP * PERIOD):
                    ensemble.step()
                prove_no_wait(ensemble.step, 2 * PERIOD)
            print(f"\n{name}: no synchronising call in {2 * PERIOD} guarded updates.", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda")
    parser.add_argument("--rounds", type=int, default=8, help="rounds in which all take turns")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds is {arguments.rounds}, expected 2 or more: quartiles need two")
    torch.set_num_threads(arguments.threads)
    # At the initial weights, where all stays here, the guard rightly warns.
    logging.getLogger("ebmguard").setLevel(logging.CRITICAL)
    report(arguments.rounds, find_device(arguments.device))


if __name__ == "__main__":
    main()
