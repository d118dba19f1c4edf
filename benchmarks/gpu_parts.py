"""A trainer on a GPU against an eager loop of the published structure: what all trainers share.

What is measured of a trainer is a :class:`Case`. Every part is a section of its file, written as
soon as something is known, instead of what an earlier command wrote there; other sections stay. So
a command that is cut short loses little, and the parts can be run by several commands.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import ROOT_VARIABLE, ImageData
from ebmguard.reference_training.device import find_device

from .contenders import Iterations, PublishedLoop, Shape, step_flop
from .document import Document, provenance, run_all, write_part
from .timing import (
    WARM_UP,
    Clock,
    Steps,
    Turn,
    alternate,
    memory_of,
    memory_table,
    spread,
    step_tables,
    synchronize,
    warmed_up,
)
from .watching import Deadline, waits

SHAPE, CLASSES = (3, 32, 32), 10
NEVER = 10**6
LISTED = 12
"""Kernels that are listed by name."""

# The most important first: what finds no time is left out.
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "ours, bfloat16, compiled": {"precision": "bfloat16", "compile": "yes"},
    "loop, TF32": {"precision": "tf32"},
    "loop, float32": {"precision": "float32"},
    "ours, TF32, compiled": {"precision": "tf32", "compile": "yes"},
    "ours, bfloat16": {"precision": "bfloat16"},
    "ours, TF32": {"precision": "tf32"},
    "ours, float32": {"precision": "float32"},
    "ours, float32, compiled": {"precision": "float32", "compile": "yes"},
}
OURS, LOOPS = "ours, bfloat16, compiled", ("loop, TF32", "loop, float32")
PROFILED = (OURS, "ours, TF32", "loop, TF32")


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Attributes:
        options: settings over those of the trainer.
        data: the data set; of other ones than the digits, random bytes serve where there are none.
        compile: the variants that are said to be compiled are.
        block: steps of a variant before the next one has its turn.
        matrix: rows and columns of the matrix product that gives the floor.
        products: how many of them are measured at once.
        watched: iterations in which synchronising calls are looked for, after as many others.
        profiled: iterations whose kernels are counted.
        more: what the parts of one trainer alone need.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    data: str = "cifar10"
    compile: bool = True
    block: int = 5
    matrix: int = 16384
    products: int = 20
    watched: int = 120
    profiled: int = 2
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lacks_data(self) -> bool:
        """Whether the data are ones that the user has to name, and has not."""
        return self.data != "digits" and not os.environ.get(ROOT_VARIABLE)

    @property
    def images(self) -> str:
        """The images in words."""
        return f"random bytes instead of {self.data}" if self.lacks_data else self.data


# To try all parts on a CPU. Its numbers say nothing.
TOY = Size({}, "digits", False, block=1, matrix=64, products=2, watched=2, profiled=1)


class Part(NamedTuple):
    """A section of the file.

    Attributes:
        title: of the section.
        share: of the time that is left to it and those after it.
        text: yields Markdown as soon as it knows something.
    """

    title: str
    share: float
    text: Callable[[Bench], Iterator[str]]


@dataclass(frozen=True)
class Case:
    """One trainer.

    Attributes:
        command: words of `ebmguard` that train it.
        module: of its benchmark.
        title: of the file.
        config: its settings; those of a run on random bytes are another class of them.
        random: that class.
        task: what trains, step by step.
        train: the command as a function.
        loop: of the published structure.
        words: what is trained, from its resolved settings.
        quiet: settings of a run without evaluations.
        aim: how many times as fast as the loop it is to be.
        sizes: "full" and "toy".
        parts: those of this trainer alone.
    """

    command: str
    module: str
    title: str
    config: Callable[..., Any]
    random: Callable[..., Any]
    task: Callable[..., Any]
    train: Callable[..., Any]
    loop: type[PublishedLoop]
    words: Callable[[Any], str]
    quiet: Mapping[str, Any]
    aim: float
    sizes: Mapping[str, Size]
    parts: Mapping[str, Part]

    @property
    def all_parts(self) -> dict[str, Part]:
        """In the order of the file."""
        return {**PARTS, **self.parts}


class RandomImages:
    """Settings of a run on random bytes, where only time and memory are measured."""

    settings: Any

    def load_data(self) -> ImageData:
        """As many images as CIFAR-10 has, or as the settings ask for."""
        valid = getattr(self.settings, "valid_images", 0)
        counts = self.settings.train_images, valid, self.settings.test_images
        sizes = zip(counts, (45_000, 5_000, 10_000), strict=True)
        return random_images(*(size if count is None else count for count, size in sizes))


@functools.lru_cache(maxsize=1)
def random_images(*counts: int) -> ImageData:
    """So many training, validation and test images of random bytes, with random labels."""
    generator = torch.Generator().manual_seed(0)
    images = (torch.randint(256, (n, *SHAPE), generator=generator).byte() for n in counts)
    labels = (torch.randint(CLASSES, (n,), generator=generator) for n in counts)
    parts = [tensor for pair in zip(images, labels, strict=True) for tensor in pair]
    return ImageData("random", *parts, classes=CLASSES, levels=255, pad=4, flip=True)


@dataclass
class Bench:
    """What all parts are given.

    Attributes:
        case: the trainer.
        size: how large everything is.
        device: where.
        clock: how long.
        runs: where runs are kept with which a second command goes on.
        scratch: for everything else.
        features: networks that judge samples, as `ebmguard evaluate shortrun` takes them.
        words: the command of this part.
    """

    case: Case
    size: Size
    device: torch.device
    clock: Clock
    runs: Path
    scratch: Path
    features: Sequence[str] = ()
    words: Sequence[str] = ()

    def config(self, out: Path, variant: str = OURS, **options: Any) -> Any:
        """Settings of a run, on random images where there are no others."""
        own = dict(VARIANTS[variant])
        if not self.size.compile:
            own["compile"] = "no"
        make = self.case.random if self.size.lacks_data else self.case.config
        fixed = {"out": out, "data": self.size.data, "device": str(self.device)}
        return make(**fixed, **{**self.size.options, **own, **options})

    def made(self, name: str) -> Steps:
        """A variant; with its guard at the trainer's own beta_star, if it is ours."""
        out = Path(tempfile.mkdtemp(dir=self.scratch)) / "run"
        if name.startswith("loop"):
            return self.case.loop(self.config(out, name), self.device)
        return Iterations(self.case.task, self.config(out, name, **self.case.quiet))

    @property
    def flop(self) -> int:
        """Floating-point operations of a step."""
        config = self.config(self.scratch)
        shape: Shape = SHAPE
        classes = CLASSES
        if self.size.data == "digits":
            data = config.load_data()
            shape, classes = data.sample_shape, data.classes
        return step_flop(self.case.loop, config.settings, shape, classes)

    def __str__(self) -> str:
        """What is trained, in words."""
        return f"{self.case.words(self.config(self.scratch).settings)}, on {self.size.images}"

    def trained(self, out: Path, seconds: float, **options: Any) -> float:
        """Train a run of our first variant, or go on with it, until it or the time is over.

        Returns:
            the seconds that it took.
        """
        clock = Clock(seconds / 60)
        if not (out / "results.json").is_file():
            resume = (out / "config.json").is_file()
            config = replace(self.config(out, **options), resume=resume)
            self.case.train(*config.open(), Deadline(seconds))
        return seconds - clock.left


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
    yield from step_tables(
        {name: partial(bench.made, name) for name in VARIANTS},
        LOOPS,
        block=bench.size.block,
        flop=flop,
        clock=bench.clock,
        device=bench.device,
    )
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
    """Peak memory of each variant."""
    yield f"{bench}. "
    yield from memory_table(list(VARIANTS), bench.words, bench.clock)


PARTS = {
    "step": Part("Time of a step", 3, step_part),
    "floor": Part("Against the floor of a matrix product", 1, floor_part),
    "kernels": Part("Where the time goes", 1, kernels_part),
    "sync": Part("Waiting for the GPU", 1, sync_part),
    "memory": Part("Peak memory", 2, memory_part),
}
"""Of every trainer."""


def parser(case: Case) -> argparse.ArgumentParser:
    """The command line."""
    name = case.module.rpartition(".")[2]
    made = argparse.ArgumentParser(description=case.title)
    made.add_argument("--part", choices=[*case.all_parts, "all"], default="all")
    made.add_argument("--device", default="cuda", help="a GPU, such as cuda; cpu with --size toy")
    made.add_argument("--size", choices=list(case.sizes), default="full", help="toy: to try it")
    made.add_argument("--minutes", type=float, default=9, help="time of the command")
    made.add_argument("--out", type=Path, default=Path(f"docs/results/{name}.md"))
    made.add_argument("--runs", type=Path, default=Path(f"runs/{name}"), help="folder of the runs")
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

    def command(part: str, minutes: float) -> list[str]:
        options = {**vars(given), "part": part, "minutes": f"{minutes:.3g}", "memory_of": None}
        made = [sys.executable, "-m", case.module]
        for name, value in options.items():
            for each in value if isinstance(value, list) else [value]:
                made += [f"--{name}", str(each)] if each is not None else []
        return made

    parts = case.all_parts
    if given.part == "all":
        shares = {name: part.share for name, part in parts.items()}
        failed = list(run_all(shares, command, given.minutes))
        print("\n".join(failed))
        return 1 if failed else 0
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as scratch:
        own = command(given.part, given.minutes)
        bench = Bench(
            case,
            case.sizes[given.size],
            device,
            Clock(given.minutes),
            given.runs,
            Path(scratch),
            getattr(given, "features", ()),
            own,
        )
        if given.memory_of:
            print(json.dumps(memory_of(partial(bench.made, given.memory_of), device)))
            return 0
        part = parts[given.part]
        document = Document(given.out, f"# {case.title}\n", [x.title for x in parts.values()])
        source = provenance(device, ["python", *own[1:]])
        write_part(document, part.title, source, part.text(bench))
    return 0
