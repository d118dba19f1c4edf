"""What the guard costs: a guarded over an unguarded JEM step, alternating in one process.

    python -m benchmarks.overhead --device cpu --pairs 40

Both kinds of step run on the same network, optimizer and start points: the learning rate is 0, so
that every step does the same work, and both steps of a pair get the same random numbers. The two
alternate (AB, BA, ...), and what is reported is the median of the ratios within pairs, which a slow
phase of the machine hits on both sides. All diagnostics are on, with TensorBoard events and JSON
lines, flushes included. On a GPU a measurement is a block of steps between two synchronisations.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ebmguard
from ebmguard.alerts import Judge
from ebmguard.diagnostics import energy_diagnostics, nonfinite_diagnostics, weight_diagnostics_at
from ebmguard.recovery.state import capture
from ebmguard.sinks import open_log_dir

from .jem_step import (
    BETA_STAR,
    FLUSH_EVERY,
    REFERENCE,
    SCENARIOS,
    Loss,
    Pool,
    Scenario,
    Trainer,
    build,
    guarded,
    with_everything,
)
from .reading import peak_resident_kib
from .timing import Seconds, Turn, alternate, spread
from .watching import prove_no_wait

# Measurements that are not counted: the first ones set up caches and allocators.
WARM_UP = 3
GPU_BLOCK = 10


@dataclass(frozen=True)
class Comparison:
    """Rounds of unguarded and of guarded steps."""

    plain: list[Seconds]
    guarded: list[Seconds]

    def over(self, name: str) -> list[float]:
        """Ratios within pairs, of "wall" or "cpu"."""
        pairs = zip(self.guarded, self.plain, strict=True)
        return [getattr(a, name) / getattr(b, name) for a, b in pairs]

    @property
    def plain_seconds(self) -> float:
        """Of an unguarded step."""
        return statistics.median(each.wall for each in self.plain)

    @property
    def extra(self) -> list[float]:
        """Seconds that the guard adds to a step."""
        return [a.wall - b.wall for a, b in zip(self.guarded, self.plain, strict=True)]

    def row(self, name: str, target: str) -> str:
        """A line of the table."""
        return (
            f"| {name} | {1e3 * self.plain_seconds:.2f} | {spread(self.over('wall'), '.4f')} "
            f"| {statistics.median(self.over('cpu')):.4f} "
            f"| {1e3 * statistics.median(self.extra):.2f} | {target} |"
        )


def compare(
    trainer: Trainer, guard: ebmguard.Guard, pairs: int, device: torch.device
) -> Comparison:
    """Alternate unguarded and guarded steps, which begin each round with the same numbers."""
    block = GPU_BLOCK if device.type == "cuda" else 1
    loss, sample = guard
    plain = trainer.optimizer

    def turn(loss: Loss, sample: Any, optimizer: torch.optim.Optimizer) -> Turn:
        seeds = itertools.count()

        def begin() -> None:
            trainer.rng.manual_seed(next(seeds))
            trainer.optimizer = optimizer

        return Turn(lambda: trainer.step(loss, sample), block, begin)

    turns = {
        "plain": turn(trainer.loss, trainer.sample, plain),
        "guarded": turn(loss, sample, guard.trainer.optimizer or plain),
    }
    found = alternate(turns, pairs, device, WARM_UP)
    trainer.optimizer = plain
    return Comparison(**found)


def parts(scenario: Scenario, device: torch.device, repeats: int) -> dict[str, float]:
    """Microseconds of each part of the guard, at the energies of a real step.

    The lower quartile of the repeats: for calls this short, all above it is the machine's.
    """
    generator = torch.Generator().manual_seed(0)
    f_pos, f_neg = torch.randn((2, scenario.batch), generator=generator).to(device)
    trainer = Trainer(scenario, Pool(scenario.shape[0]), device)
    with tempfile.TemporaryDirectory() as folder:
        guard = guarded(trainer, folder)
        loss, sample = guard
        for _ in range(2 * FLUSH_EVERY):
            trainer.step(loss, sample)
        row = dict(guard.last)
        own = Path(folder) / "sinks"  # the guard has the folder itself
        sinks, judge, steps = open_log_dir(own), Judge(), itertools.count()

        def difference(of: Loss) -> None:
            a, b = f_pos.clone().requires_grad_(), f_neg.clone().requires_grad_()
            of(a, b).backward()

        def diagnostics() -> None:
            with torch.no_grad():
                weight_diagnostics_at(f_pos, f_neg, (BETA_STAR, REFERENCE))
                energy_diagnostics(f_pos, f_neg)
                nonfinite_diagnostics(f_pos, f_neg, BETA_STAR)

        def write() -> None:
            for _ in range(FLUSH_EVERY):
                for sink in sinks:
                    sink.write_row(0, row, {})
            for sink in sinks:
                sink.flush()

        def time_of(call: Callable[[], object], times: int = repeats) -> float:
            return 1e6 * lower_quartile(call, times, device)

        found = {
            "loss": time_of(lambda: difference(lambda a, b: contrastive(a, b)))
            - time_of(lambda: difference(trainer.loss)),
            "diagnostics": time_of(diagnostics),
            "judge": time_of(lambda: judge.observe(next(steps), row)),
            "sinks": time_of(write, max(5, repeats // FLUSH_EVERY)) / FLUSH_EVERY,
            "sampler": time_of(lambda: guard.sampler(trainer.network))
            - time_of(lambda: trainer.sample(trainer.network)),
            "whole step": time_of(lambda: trainer.step(loss, sample))
            - time_of(lambda: trainer.step(trainer.loss, trainer.sample)),
        }
        guard.close()
    return found


def everything(name: str, arguments: argparse.Namespace) -> None:
    """The ratio with everything on: attached, recovering, adaptive; and a snapshot's cost."""
    device = torch.device(arguments.device)
    scenario = SCENARIOS[name]
    trainer = build(scenario, device)
    with tempfile.TemporaryDirectory() as folder:
        guard = with_everything(trainer, folder)
        found = compare(trainer, guard, arguments.pairs, device)
        run, state = guard.trainer, guard.state_dict()
        kept = capture(run, state)
        seconds = lower_quartile(lambda: capture(run, state, kept), WARM_UP * 10, device)
        guard.close()
    print(
        "\n| everything on | unguarded, ms | ratio: median (quartiles) | CPU time | added, ms | |"
    )
    print("|---|---|---|---|---|---|")
    print(found.row(scenario.title, "1.02"))
    slow = 1 + statistics.mean(found.extra) / found.plain_seconds
    print(f"\nThe mean over all pairs, those of the slow tier included: {slow:.4f}.")
    print(f"A snapshot: {1e3 * seconds:.1f} ms.", flush=True)


def contrastive(f_pos: Tensor, f_neg: Tensor) -> Tensor:
    return ebmguard.contrastive_loss(f_pos, f_neg, BETA_STAR)


def lower_quartile(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    found = alternate({"call": Turn(call, 1)}, repeats, device, WARM_UP)["call"]
    return statistics.quantiles([each.wall for each in found], n=4)[0]


def peak_memory(name: str, kind: str, device: torch.device) -> float:
    """MiB at the peak of one run of its own: resident on a CPU, allocated on a GPU."""
    scenario = SCENARIOS[name]
    trainer = build(scenario, device)
    with tempfile.TemporaryDirectory() as folder:
        loss: Any = trainer.loss
        sample: Any = trainer.sample
        if kind == "guarded":
            loss, sample = guarded(trainer, folder)
        for _ in range(scenario.memory_steps):
            trainer.step(loss, sample)
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device) / 2**20
        return peak_resident_kib() / 2**10


def added_memory(name: str, device: str, runs: int) -> tuple[float, float]:
    """MiB at the peak of an unguarded and of a guarded run; medians over fresh processes."""

    def one(kind: str) -> float:
        command = [sys.executable, "-m", "benchmarks.overhead", "--device", device, "--only", name]
        command += ["--memory-of", kind]
        root = Path(__file__).parents[1]
        run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
        return float(run.stdout)

    found = [(one("plain"), one("guarded")) for _ in range(runs)]
    plain, with_guard = zip(*found, strict=True)
    return statistics.median(plain), statistics.median(with_guard)


def report(names: Sequence[str], arguments: argparse.Namespace) -> None:
    device = torch.device(arguments.device)
    print(f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} thread(s)\n")
    print("| step | unguarded, ms | ratio: median (quartiles) | CPU time | added, ms | target |")
    print("|---|---|---|---|---|---|")
    for name in names:
        scenario = SCENARIOS[name]
        trainer = build(scenario, device)
        target = "1.005" if device.type == "cuda" else f"{scenario.target}"
        for hold in (None, True) if device.type == "cuda" else (None,):
            with tempfile.TemporaryDirectory() as folder:
                guard = guarded(trainer, folder, judge_in_loss=hold)
                found = compare(trainer, guard, arguments.pairs, device)
                title = scenario.title + (", judge_in_loss=True" if hold else "")
                print(found.row(title, "" if hold else target), flush=True)
                if device.type == "cuda" and not hold:
                    step = partial(trainer.step, *guard)
                    for _ in range(FLUSH_EVERY + WARM_UP):
                        step()
                    prove_no_wait(step, 2 * FLUSH_EVERY)
                    print(f"no synchronising call in {2 * FLUSH_EVERY} steps", file=sys.stderr)
                alerts = [alert.message for alert in guard.alerts]
                guard.close()
            if alerts:
                print(f"alerts during the measurement: {alerts}", file=sys.stderr)
    print("\nMicroseconds per step of the guard's parts (lower quartile)\n")
    print("| step | loss | diagnostics | judge | sinks | sampler | whole step |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        cost = parts(SCENARIOS[name], device, arguments.repeats)
        print(
            f"| {SCENARIOS[name].title} | " + " | ".join(f"{x:.0f}" for x in cost.values()) + " |"
        )
    print("\n| peak memory | unguarded, MiB | guarded, MiB |\n|---|---|---|")
    for name in names:
        plain, with_guard = added_memory(name, arguments.device, arguments.memory_runs)
        print(f"| {SCENARIOS[name].title} | {plain:.1f} | {with_guard:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda")
    parser.add_argument("--only", choices=list(SCENARIOS), help="one of the steps")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps to compare")
    parser.add_argument("--repeats", type=int, default=400, help="repeats of each small part")
    parser.add_argument("--memory-runs", type=int, default=3, help="processes per memory figure")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    parser.add_argument("--everything-only", action="store_true", help="the last table alone")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        device = torch.device(arguments.device)
        print(peak_memory(arguments.only, arguments.memory_of, device))
        return
    names = [arguments.only] if arguments.only else list(SCENARIOS)
    if not arguments.everything_only:
        report(names, arguments)
    for name in names:
        everything(name, arguments)


if __name__ == "__main__":
    main()
