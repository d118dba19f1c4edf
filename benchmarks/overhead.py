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
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

# Measurements that are not counted: the first ones set up caches and allocators.
WARM_UP = 3
GPU_BLOCK = 10


@dataclass(frozen=True)
class Comparison:
    """Ratios of paired measurements, and the seconds of one unguarded step."""

    wall: list[float]
    cpu: list[float]
    plain_seconds: float
    extra: list[float]

    def row(self, name: str, target: str) -> str:
        low, middle, high = statistics.quantiles(self.wall, n=4)
        return (
            f"| {name} | {1e3 * self.plain_seconds:.2f} | {middle:.4f} ({low:.4f} to {high:.4f}) "
            f"| {statistics.median(self.cpu):.4f} | {1e3 * statistics.median(self.extra):.2f} "
            f"| {target} |"
        )


def compare(
    trainer: Trainer, guard: ebmguard.Guard, pairs: int, device: torch.device
) -> Comparison:
    """Alternate unguarded and guarded steps."""
    block = GPU_BLOCK if device.type == "cuda" else 1
    loss, sample = guard
    optimizers = {False: trainer.optimizer, True: guard.trainer.optimizer or trainer.optimizer}

    def measure(kind: bool, seed: int) -> tuple[float, float]:
        trainer.rng.manual_seed(seed)
        trainer.optimizer = optimizers[kind]
        synchronize(device)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(block):
            if kind:
                trainer.step(loss, sample)
            else:
                trainer.step(trainer.loss, trainer.sample)
        synchronize(device)
        return time.perf_counter() - wall, time.process_time() - cpu

    for seed in range(WARM_UP):
        measure(False, seed)
        measure(True, seed)
    wall, cpu, plain, extra = [], [], [], []
    for seed in range(pairs):
        order = (False, True) if seed % 2 else (True, False)
        found = {kind: measure(kind, seed) for kind in order}
        wall.append(found[True][0] / found[False][0])
        cpu.append(found[True][1] / found[False][1])
        plain.append(found[False][0] / block)
        extra.append((found[True][0] - found[False][0]) / block)
    trainer.optimizer = optimizers[False]
    return Comparison(wall, cpu, statistics.median(plain), extra)


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
    for _ in range(WARM_UP):
        call()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.quantiles(seconds, n=4)[0]


def prove_no_wait(trainer: Trainer, guard: ebmguard.Guard, steps: int) -> None:
    """Run good steps in which PyTorch raises at any synchronising call.

    The event wait for the row of step t - 2 is explicit and so is not one of them; neither is
    anything that the steps before have set up once.
    """
    loss, sample = guard
    for _ in range(FLUSH_EVERY + WARM_UP):
        trainer.step(loss, sample)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps):
            trainer.step(loss, sample)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def peak_resident_kib() -> int:
    # ru_maxrss of a child process starts at its parent's value on Linux, /proc does not.
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = (line.split() for line in status.read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == "VmHWM:")


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
                    prove_no_wait(trainer, guard, 2 * FLUSH_EVERY)
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
