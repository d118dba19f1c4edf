"""A trainer on a GPU against an eager loop of the published structure: what all trainers share."""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ebmguard.errors import ConfigError
from ebmguard.reference_training.device import find_device
from ebmguard.reference_training.precision import set_precision

from . import document
from .gpu_cases import LOOPS, NEVER, OURS, VARIANTS, Bench, Case, Part
from .grid import table_of
from .timing import (
    WARM_UP,
    Clock,
    Steps,
    Turn,
    alternate,
    compilations,
    first_line,
    memory_of,
    ratios,
    spread,
    synchronize,
    warmed_up,
)
from .watching import waits

LONGEST_WARM_UP = 0.6
"""Share of a part's time after which no further variant is prepared."""
LISTED = 12
"""Kernels that are listed by name."""
PROFILED = (OURS, "ours, TF32", "loop, TF32")


def step_part(bench: Bench) -> Iterator[str]:
    """Time of a step: ours against the published loop's."""
    flop = bench.flop
    yield (
        f"{bench}; {flop / 1e12:.3g} TFLOP a step. A block of {bench.size.block} steps of each "
        "variant in turn, there and back, in one process; medians and quartiles over rounds, "
        f"ratios within rounds. Ours: the iteration of `{bench.case.command}`, guard, log folder "
        "and record included, without evaluations and checkpoints; on a GPU its Langevin steps are "
        f"one CUDA graph. The loop: `{bench.case.loop.__name__}` in `benchmarks/contenders.py`, "
        "eager; PyTorch's default for convolutions on today's GPUs is TF32.\n\n"
    )
    yield (
        f"The first {WARM_UP} steps (compilation, capture, cuDNN's choices), not counted below:\n\n"
        "| variant | seconds |\n|---|---:|\n"
    )
    with ExitStack() as open_ones:
        made: dict[str, Steps] = {}
        for name in VARIANTS:
            if len(made) > len(LOOPS) and bench.clock.used > LONGEST_WARM_UP:
                yield f"| {name} | left out: no time |\n"
                continue
            try:
                made[name], seconds = warmed_up(partial(bench.made, name), bench.device)
            except RuntimeError as error:  # out of memory, or the compiler failed
                traceback.print_exc()
                yield f"| {name} | failed: {first_line(error)} |\n"
            else:
                open_ones.callback(made[name].close)
                yield f"| {name} | {seconds:.1f} |\n"
        compiled = compilations()
        turns = {
            name: Turn(each.step, bench.size.block, partial(set_precision, each.precision))
            for name, each in made.items()
        }
        found = alternate(turns, bench.clock, bench.device)
    lines = []
    for name, own in found.items():
        wall = [x.wall for x in own]
        rate = f"{flop / statistics.median(wall) / 1e12:.1f}"
        line = {"variant": name, "step, ms": spread([1e3 * x for x in wall]), "TFLOP/s": rate}
        lines.append(line | {f"{x} / it": ratios(found[x], own) for x in LOOPS if x in found})
    yield f"\n{table_of(lines)}\n\n{len(next(iter(found.values())))} rounds.\n"
    if (again := compilations() - compiled) > 0:
        yield f"\n**{again} functions were compiled during the measurement: do not use it.**\n"
    yield f"\nAim: {OURS} at least {bench.case.aim:g} times as fast as either loop.\n"


def floor_part(bench: Bench) -> Iterator[str]:
    """The step against what a matrix product allows."""
    n, device, flop = bench.size.matrix, bench.device, bench.flop
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    made, seconds = warmed_up(partial(bench.made, OURS), device)
    turns = {
        "product": Turn(lambda: torch.matmul(a, b, out=out), bench.size.products),
        "step": Turn(made.step, bench.size.block),
    }
    turns["product"].call()
    found = alternate(turns, bench.clock, device)
    made.close()
    products, steps = ([x.wall for x in found[name]] for name in turns)
    rates = [2 * n**3 / x / 1e12 for x in products]
    floors = [flop / 1e12 / rate for rate in rates]
    over = [step / floor for step, floor in zip(steps, floors, strict=True)]
    yield (
        f"{bench}; {flop / 1e12:.4g} TFLOP a step in its convolutions and products (a "
        "multiplication with its addition is two). The floor is the time that they would take at "
        f"the rate of a {n} x {n} bfloat16 product of random numbers, measured in turn with steps "
        f'of "{OURS}" ({len(rates)} rounds; first steps {seconds:.1f} s). Medians and '
        "quartiles.\n\n"
        "| product, TFLOP/s | floor, ms | step, ms | step / floor | fraction reached |\n"
        "|---:|---:|---:|---:|---:|\n"
        f"| {spread(rates)} | {spread([1e3 * x for x in floors])} "
        f"| {spread([1e3 * x for x in steps])} | {spread(over, '.2f')} "
        f"| {spread([1 / x for x in over], '.3f')} |\n"
    )


def kernels_part(bench: Bench) -> Iterator[str]:
    """Where the time of a step goes on the device."""
    steps = bench.size.profiled
    what = "kernels" if bench.device.type == "cuda" else "operations of the CPU"
    yield (
        f"{bench}. {steps} steps under PyTorch's profiler, after {WARM_UP} others: the number of "
        f"{what} in a step, their time, and those that take the longest. The time is without the "
        "gaps between kernels: a step that takes much longer waits for the host, or for "
        "launches.\n"
    )
    for i, name in enumerate(PROFILED):
        if i and bench.clock.left <= 0:
            yield f"\n{name}: left out, no time.\n"
            continue
        counts, seconds = profiled(bench, name)
        total = sum(seconds.values())
        yield (
            f"\n{name}: {counts.total() / steps:.0f} {what}, {1e3 * total / steps:.2f} ms.\n\n"
            "| ms | share | number | each, us | name |\n|---:|---:|---:|---:|---|\n"
        )
        for key, own in seconds.most_common(LISTED):
            yield (
                f"| {1e3 * own / steps:.3f} | {own / total:.1%} | {counts[key] / steps:.0f} "
                f"| {1e6 * own / counts[key]:.1f} | `{key[:90].replace('|', '/')}` |\n"
            )


def profiled(bench: Bench, name: str) -> tuple[Counter[str], Counter[str]]:
    """Numbers of kernels, and their seconds, by name, of a few steps of a variant."""
    cuda = bench.device.type == "cuda"
    made, _ = warmed_up(partial(bench.made, name), bench.device)
    # Without the wait at the end the host would be ahead of the device, by a part of a step.
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as watch:
        for _ in range(bench.size.profiled):
            made.step()
        synchronize(bench.device)
    made.close()
    counts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for event in watch.events() or []:
        if (event.device_type.name == "CUDA") != cuda or event.is_user_annotation:
            continue
        micros = event.device_time_total if cuda else event.self_cpu_time_total
        counts[event.name] += 1
        seconds[event.name] += micros / 1e6
    return counts, seconds


def sync_part(bench: Bench) -> Iterator[str]:
    """No call in an iteration of the trainer waits for the GPU, but for the event waits."""
    watched = bench.size.watched
    # Evaluations and checkpoints wait, as they must.
    quiet = {**bench.case.quiet, "iterations": 2 * watched + 1, "checkpoint_every": NEVER}
    config = bench.config(bench.scratch / "sync", **quiet)
    run = partial(bench.case.train, *config.open())
    yield from waits(run, watched, bench.device, bench.case.command)


def memory_part(bench: Bench) -> Iterator[str]:
    """Peak memory of each variant, the most important first."""
    yield (
        f"{bench}. Each variant in a process of its own; GiB at the peak of the first {WARM_UP} "
        f"steps (compilation, capture, cuDNN's trials) and of the {WARM_UP} after them. What a "
        "CUDA graph works in is reserved, and allocated only while it is captured.\n\n"
    )
    lines = []
    for i, name in enumerate(VARIANTS):
        if i and bench.clock.left <= 0:
            yield f"{name}: left out, no time.\n\n"
            continue
        words = [*bench.words, "--memory-of", name]
        run = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode:
            yield f"{name}: failed with status {run.returncode}.\n\n"
            continue
        found = json.loads(run.stdout.splitlines()[-1])
        lines.append({"variant": name, **{peak: f"{x:.2f}" for peak, x in found.items()}})
    yield f"{table_of(lines)}\n"


PARTS: Mapping[str, Part] = {
    "step": Part("Time of a step", 3, step_part),
    "floor": Part("Against the floor of a matrix product", 1, floor_part),
    "kernels": Part("Where the time goes", 1, kernels_part),
    "sync": Part("Waiting for the GPU", 1, sync_part),
    "memory": Part("Peak memory", 2, memory_part),
}
"""Of every trainer."""


def parser(case: Case) -> argparse.ArgumentParser:
    """The command line."""
    name, parts = case.module.rpartition(".")[2], [*PARTS, *case.parts]
    made = argparse.ArgumentParser(description=case.title)
    made.add_argument("--part", choices=[*parts, "all"], default="all")
    made.add_argument("--device", default="cuda", help="a GPU, such as cuda; cpu with --size toy")
    made.add_argument("--size", choices=list(case.sizes), default="full", help="toy: to try it")
    made.add_argument("--minutes", type=float, default=9, help="time of the command")
    made.add_argument("--out", type=Path, default=Path(f"docs/results/{name}.md"))
    made.add_argument("--runs", type=Path, default=Path(f"runs/{name}"), help="folder of the runs")
    made.add_argument("--measure", choices=parts, help="print this part, in this process")
    made.add_argument("--memory-of", choices=list(VARIANTS), help=argparse.SUPPRESS)
    if "train" in case.parts:
        made.add_argument(
            "--features",
            action="append",
            default=[],
            help="judges samples: the folder of a JEM run on the same data, or inception:FILE; can "
            "be given several times. Without it a classifier is trained first",
        )
    return made


def main(case: Case, words: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 where a part failed."""
    given = parser(case).parse_args(words)
    try:
        device = find_device(given.device)
    except ConfigError as error:
        print(f"error: {error}\nTo try the parts without a GPU: --device cpu --size toy")
        return 2
    parts, features = {**PARTS, **case.parts}, getattr(given, "features", [])
    same = [case.module, "--device", given.device, "--size", given.size, "--runs", str(given.runs)]
    same += [word for each in features for word in ("--features", each)]
    if not (given.measure or given.memory_of):

        def commands(name: str, minutes: float) -> list[list[str]]:
            return [[*same, "--measure", name, "--minutes", f"{minutes:.3g}"]]

        sections = {
            name: document.Part(part.title, partial(commands, name), part.share)
            for name, part in parts.items()
        }
        header = f"# {case.title}"
        return document.run_parts(sections, given, given.minutes, header, case.module)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as scratch:
        clock, command = Clock(given.minutes), [sys.executable, "-m", *same]
        size, folder = case.sizes[given.size], Path(scratch)
        bench = Bench(case, size, device, clock, given.runs, folder, features, command)
        if given.memory_of:
            print(json.dumps(memory_of(partial(bench.made, given.memory_of), device)))
            return 0
        for text in parts[given.measure].text(bench):
            print(text, end="", flush=True)
    return 0
