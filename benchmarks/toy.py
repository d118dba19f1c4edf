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
import importlib.metadata
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from ebmguard.reference_training.device import describe, find_device
from ebmguard.reference_training.toy.scenario import SCENARIOS

from .cells import commit
from .toy_update import Ensemble, PublishedLoop, config_of, torchebm_chains

NAMES = ("gmm-default", "circles-default")
BETAS = ("0", "0.1", "0.3", "0.5", "0.7", "0.9")
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


class Contender(NamedTuple):
    """Something to be measured, ``block`` calls at a time."""

    call: Callable[[], object]
    block: int


class Seconds(NamedTuple):
    """Of one call, of a block's mean."""

    wall: float
    cpu: float


Rounds = dict[str, list[Seconds]]


def measure(contenders: Mapping[str, Contender], rounds: int, device: torch.device) -> Rounds:
    """Let the contenders take turns, after some rounds that do not count."""
    found: Rounds = {name: [] for name in contenders}
    for index in range(-WARM_UP, rounds):
        for name in list(contenders)[:: -1 if index % 2 else 1]:
            call, block = contenders[name]
            synchronize(device)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(block):
                call()
            synchronize(device)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if index >= 0:
                found[name].append(Seconds(wall / block, cpu / block))
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(seconds: list[Seconds]) -> float:
    return 1e3 * statistics.median(each.wall for each in seconds)


def compared(one: list[Seconds], ensemble: list[Seconds], members: int) -> str:
    """Cells of a table: both sides' times, and how many times as long one model takes alone."""
    pairs = list(zip(one, ensemble, strict=True))
    low, middle, high = statistics.quantiles((members * a.wall / b.wall for a, b in pairs), n=4)
    cpu = statistics.median(members * a.cpu / b.cpu for a, b in pairs)
    ours = median_ms(ensemble)
    return (
        f"| {median_ms(one):.3f} | {ours:.3f} | {ours / members:.3f} "
        f"| {middle:.1f} ({low:.1f} to {high:.1f}) | {cpu:.1f} "
    )


class Stage:
    """Makes contenders, in a temporary folder."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device = device
        self.modes = {"": True}
        if device.type == "cuda":
            self.modes = {", CUDA graphs": True, ", eager": False}
        self._folder = folder
        self._made: list[Ensemble] = []

    def ensemble(self, scenario: str, members: int, *, sinks: bool, graphs: bool) -> Ensemble:
        betas, seeds = SIZES[members]
        out = self._folder / str(len(self._made))
        # From the middle outwards: a single member is not that of β = 0.
        chosen = sorted(BETAS, key=lambda beta: abs(float(beta) - 0.5))[:betas]
        config = config_of(scenario, chosen, seeds, self.device, out)
        made = Ensemble(config, sinks=sinks, graphs=graphs)
        self._made.append(made)
        return made

    def close(self) -> None:
        for ensemble in self._made:
            ensemble.close()
        self._made.clear()


@contextmanager
def stage(device: torch.device) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory() as folder:
        made = Stage(device, Path(folder))
        try:
            yield made
        finally:
            made.close()


def report_updates(name: str, rounds: int, device: torch.device) -> None:
    """Rows of the first table."""
    settings = SCENARIOS[name]
    block = GPU_BLOCK if device.type == "cuda" else SHORT_BLOCK
    with stage(device) as made:
        single = {
            "1x1 convolutions": PublishedLoop(settings, device, convolutions=True),
            "linear layers": PublishedLoop(settings, device, convolutions=False),
        }
        ours = {
            f"{title}{mode}": made.ensemble(name, MEMBERS, sinks=sinks, graphs=graphs)
            for mode, graphs in made.modes.items()
            for title, sinks in (("no sinks", False), ("log_dir", True))
        }
        contenders = {title: Contender(loop.update, block) for title, loop in single.items()}
        contenders |= {title: Contender(each.update, PERIOD) for title, each in ours.items()}
        found = measure(contenders, rounds, device)
    for title in ours:
        for loop in single:
            target = UPDATE_TARGET if loop == "1x1 convolutions" else ""
            cells = compared(found[loop], found[title], MEMBERS)
            print(f"| {name} | {loop} | {title} {cells}| {target} |", flush=True)


def report_sizes(name: str, rounds: int, device: torch.device) -> None:
    """A table of ensemble sizes."""
    with stage(device) as made:
        ensembles = {
            f"{members}{mode}": made.ensemble(name, members, sinks=False, graphs=graphs)
            for members in SIZES
            for mode, graphs in made.modes.items()
        }
        block = GPU_BLOCK if device.type == "cuda" else SHORT_BLOCK // 2
        contenders = {title: Contender(each.update, block) for title, each in ensembles.items()}
        found = measure(contenders, rounds, device)
        modes = list(made.modes)
    print(f"\n{name}\n")
    print(
        "| members | β x seeds"
        + "".join(f" | update{m}, ms | a member{m}, ms" for m in modes)
        + " |"
    )
    print("|---:|---:" + "|---:|---:" * len(modes) + "|")
    for members, (betas, seeds) in SIZES.items():
        times = [median_ms(found[f"{members}{mode}"]) for mode in modes]
        cells = "".join(f"| {ms:.2f} | {ms / members:.3f} " for ms in times)
        print(f"| {members} | {betas} x {seeds} {cells}|", flush=True)


def report_chains(name: str, rounds: int, device: torch.device) -> None:
    """Rows of the table against torchebm, where it is installed."""
    theirs = torchebm_chains(SCENARIOS[name], device)
    assert theirs is not None
    block = GPU_BLOCK if device.type == "cuda" else SHORT_BLOCK
    with stage(device) as made:
        ours = {
            f"ours{mode}": made.ensemble(name, MEMBERS, sinks=False, graphs=graphs)
            for mode, graphs in made.modes.items()
        }
        contenders = {title: Contender(each.chains, block) for title, each in ours.items()}
        contenders["torchebm"] = Contender(theirs, block)
        found = measure(contenders, rounds, device)
    for title in ours:
        cells = compared(found["torchebm"], found[title], MEMBERS)
        print(f"| {name} | {title} {cells}| {CHAINS_TARGET} |", flush=True)


def prove_no_wait(name: str, device: torch.device) -> int:
    """Run good updates in which PyTorch raises at any synchronising call; how many it were.

    The event wait for the guard's row of two updates ago is explicit and so is not one of them;
    neither is anything that the updates before have set up once.
    """
    with stage(device) as made:
        ensemble = made.ensemble(name, MEMBERS, sinks=True, graphs=True)
        for _ in range(WARM_UP * PERIOD):
            ensemble.update()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2 * PERIOD):
                ensemble.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return 2 * PERIOD


def report(rounds: int, device: torch.device) -> None:
    print(
        f"Commit {commit()}, {describe(device)}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s), {rounds} rounds.\n"
    )
    print(f"### A model update, alone and in an ensemble of {MEMBERS}\n")
    print(
        "| scenario | loop over single models | ensemble, guarded | one model, ms | ensemble, ms "
        "| a member, ms | ratio: median (quartiles) | of CPU time | target |"
    )
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    for name in NAMES:
        report_updates(name, rounds, device)
    print("\n### Cost against the size of the ensemble")
    for name in NAMES:
        report_sizes(name, rounds, device)
    print(f"\n### Chains alone, against torchebm, in an ensemble of {MEMBERS}\n")
    if torchebm_chains(SCENARIOS[NAMES[0]], device) is None:
        print("Skipped: torchebm is not installed here (pip install torchebm==0.8.9).")
    else:
        print(f"torchebm {importlib.metadata.version('torchebm')}\n")
        print(
            "| scenario | ensemble | torchebm, ms | ensemble, ms | a member, ms "
            "| ratio: median (quartiles) | of CPU time | target |"
        )
        print("|---|---|---:|---:|---:|---:|---:|---:|")
        for name in NAMES:
            report_chains(name, rounds, device)
    if device.type == "cuda":
        print()
        for name in NAMES:
            updates = prove_no_wait(name, device)
            print(f"{name}: no synchronising call in {updates} guarded updates.", flush=True)


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
