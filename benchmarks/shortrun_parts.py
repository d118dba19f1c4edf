"""The parts of the short-run benchmark: each yields Markdown as soon as it knows something."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ebmguard.reference_training.data import ROOT_VARIABLE
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.train import train as train_classifier
from ebmguard.reference_training.judge.features import load_features
from ebmguard.reference_training.judge.shortrun import judged, table
from ebmguard.reference_training.precision import set_precision
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.train import train
from ebmguard.reference_training.shortrun.trained import load_run
from ebmguard.sinks import read_jsonl

from .gpu_timing import WARM_UP, Clock, Steps, memory_table, step_tables
from .gpu_watching import Deadline, Window, waits
from .shortrun_loop import OurRun, PublishedLoop, Size, config_of, lacks_data, step_flop
from .toy import synchronize

AIM = 4
LISTED = 12
"""Kernels that are listed by name."""
ROWS = 12
"""Rows, at most, of the table of a run's course."""
JUDGING = 0.25
"""Share of a training's time that is kept for judging its samples."""
LEARNING = 0.15
"""Share that the classifier has, where there is none yet."""


class Variant(NamedTuple):
    """A way to train: ours, or the published loop."""

    is_ours: bool
    options: Mapping[str, Any]


def _ours(precision: str, *, compile: bool) -> Variant:
    return Variant(True, {"precision": precision, "compile": "yes" if compile else "no"})


# The most important first: what finds no time is left out.
VARIANTS = {
    "ours, bfloat16, compiled": _ours("bfloat16", compile=True),
    "loop, TF32": Variant(False, {"precision": "tf32"}),
    "loop, float32": Variant(False, {"precision": "float32"}),
    "ours, TF32, compiled": _ours("tf32", compile=True),
    "ours, bfloat16": _ours("bfloat16", compile=False),
    "ours, TF32": _ours("tf32", compile=False),
    "ours, float32": _ours("float32", compile=False),
    "ours, float32, compiled": _ours("float32", compile=True),
}
OURS, LOOPS = "ours, bfloat16, compiled", ("loop, TF32", "loop, float32")
PROFILED = (OURS, "ours, TF32", "loop, TF32")


@dataclass
class Bench:
    """What all parts are given.

    Attributes:
        size: how large everything is.
        device: where.
        clock: how long.
        runs: where the run that is trained is kept, so that a second command goes on with it.
        scratch: for everything else.
        features: networks that judge samples, as `ebmguard evaluate shortrun` takes them.
    """

    size: Size
    device: torch.device
    clock: Clock
    runs: Path
    scratch: Path
    features: Sequence[str] = ()

    def config(self, name: str, variant: str, **options: Any) -> ShortRunConfig:
        """Settings of a run in the scratch folder."""
        own = dict(VARIANTS[variant].options)
        if not self.size.compile:
            own["compile"] = "no"
        return config_of(self.size, self.device, self.scratch / name, **own, **options)

    def made(self, name: str) -> Steps:
        """A variant; with its guard at the trainer's own beta_star, if it is ours."""
        config = self.config(name.replace(", ", "-"), name)
        return OurRun(config) if VARIANTS[name].is_ours else PublishedLoop(config, self.device)

    def makers(self) -> dict[str, Callable[[], Steps]]:
        """What makes each variant."""
        return {name: partial(self.made, name) for name in VARIANTS}

    def words(self) -> str:
        """What is trained, in words."""
        settings = self.config("words", OURS).settings
        images = "random bytes instead of CIFAR-10" if lacks_data(self.size) else self.size.data
        return f"nf = {settings.nf}, batch {settings.batch}, K = {settings.sgld_steps}, on {images}"


def step_part(bench: Bench) -> Iterator[str]:
    """Time of an update: ours against the published loop's."""
    config = bench.config("flop", OURS)
    flop = step_flop(config.settings, config.load_data().sample_shape)
    yield (
        f"{bench.words()}; {flop / 1e12:.3g} TFLOP an update. A block of {bench.size.block} "
        "updates of each variant in turn, there and back, in one process; medians and quartiles "
        "over rounds, ratios within rounds. Ours: the whole iteration of `ebmguard train "
        "shortrun`, guard, log folder and record included; on a GPU its Langevin steps are one "
        "CUDA graph. The loop: `PublishedLoop` in `benchmarks/shortrun_loop.py`, eager; the "
        "published arithmetic is float32, and PyTorch's default for convolutions on today's GPUs "
        "is TF32.\n\n"
    )
    yield from step_tables(
        bench.makers(),
        LOOPS,
        block=bench.size.block,
        flop=flop,
        clock=bench.clock,
        device=bench.device,
    )
    yield f"\nAim: {OURS} at least {AIM} times as fast as the loop.\n"


def memory_part(bench: Bench, command: Sequence[str]) -> Iterator[str]:
    """Peak memory of each variant."""
    yield f"{bench.words()}. "
    yield from memory_table(list(VARIANTS), command, bench.clock)


def sync_part(bench: Bench) -> Iterator[str]:
    """No call in an update waits for the GPU, but for the event waits."""
    watched = bench.size.watched
    config = bench.config(
        "sync",
        OURS,
        # Samples are kept and checkpoints written by waiting, as they must.
        iterations=2 * watched + 1,
        sample_every=10 * watched,
        checkpoint_every=10 * watched,
    )
    run = partial(train, *config.open())
    yield from waits(run, watched, bench.device, "ebmguard train shortrun")


# -- kernels -----------------------------------------------------------------------------------


def kernels_part(bench: Bench) -> Iterator[str]:
    """Where the time of an update goes on the device."""
    updates = bench.size.profiled
    what = "kernels" if bench.device.type == "cuda" else "operations of the CPU"
    yield (
        f"{bench.words()}. {updates} updates under PyTorch's profiler, after {WARM_UP} others: the "
        f"number of {what} in an update, their time, and those that take the longest. The "
        "time is without the gaps between kernels: an update that takes much longer waits for the "
        "host, or for launches.\n"
    )
    for i, name in enumerate(PROFILED):
        if i and bench.clock.left <= 0:
            yield f"\n{name}: left out, no time.\n"
            continue
        counts, seconds = profiled(bench, name)
        total = sum(seconds.values())
        yield (
            f"\n{name}: {counts.total() / updates:.0f} {what}, {1e3 * total / updates:.2f} ms.\n\n"
            "| ms | share | number | each, us | name |\n|---:|---:|---:|---:|---|\n"
        )
        for key, own in seconds.most_common(LISTED):
            cells = (
                f"{1e3 * own / updates:.3f}",
                f"{own / total:.1%}",
                f"{counts[key] / updates:.0f}",
                f"{1e6 * own / counts[key]:.1f}",
                f"`{key[:90].replace('|', '/')}`",
            )
            yield f"| {' | '.join(cells)} |\n"


def profiled(bench: Bench, name: str) -> tuple[Counter[str], Counter[str]]:
    """Numbers of kernels, and their seconds, by name, of a few updates of a variant."""
    cuda, updates = bench.device.type == "cuda", bench.size.profiled
    watch = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])

    def start() -> None:
        synchronize(bench.device)  # the host is ahead of the device, by a part of an update
        watch.start()

    def stop() -> None:
        synchronize(bench.device)
        watch.stop()

    if VARIANTS[name].is_ours:
        config = bench.config("kernels", name, iterations=WARM_UP + updates + 1)
        config = replace(config, out=config.out / name.replace(", ", "-"))
        # In the main thread: on a CPU the profiler sees no other.
        train(*config.open(), Window(WARM_UP, updates, start, stop))
    else:
        loop = bench.made(name)
        for _ in range(WARM_UP):
            loop.step()
        start()
        for _ in range(updates):
            loop.step()
        stop()
        loop.close()
    counts: Counter[str] = Counter()
    micros: dict[str, float] = {}
    for event in watch.events() or []:
        if (event.device_type.name == "CUDA") != cuda or event.is_user_annotation:
            continue
        own = event.device_time_total if cuda else event.self_cpu_time_total
        counts[event.name] += 1
        micros[event.name] = micros.get(event.name, 0.0) + own
    seconds: Counter[str] = Counter()
    seconds.update({key: value / 1e6 for key, value in micros.items()})
    return counts, seconds


# -- training ----------------------------------------------------------------------------------


def train_part(bench: Bench) -> Iterator[str]:
    """As many updates as there is time for, and what its samples are worth."""
    if lacks_data(bench.size):
        yield f"Left out: {ROOT_VARIABLE} does not name the folder of CIFAR-10.\n"
        return
    # Before the training, which would be lost on features that are none.
    judges = [
        load_features(spec, bench.device) for spec in bench.features or [str(classifier(bench))]
    ]
    out = bench.runs / "model"
    before = updates_of(out)
    start = time.monotonic()
    options = dict(VARIANTS[OURS].options)
    if not bench.size.compile:
        options["compile"] = "no"
    config = config_of(bench.size, bench.device, out, **options)
    if not (out / "results.json").is_file():
        resume = (out / "config.json").is_file()
        config, folder = replace(config, resume=resume).open()
        train(config, folder, Deadline((1 - JUDGING) * bench.clock.left))
    seconds = time.monotonic() - start
    done, wanted = updates_of(out), config.total_steps
    settings = config.settings
    compiled = ", compiled" if config.compile == "yes" else ""
    yield (
        f"`ebmguard train shortrun`, {bench.words()}, β* = {config.beta_star:g}, "
        f"{config.precision}{compiled}, seed {config.seed}: {done:,} of {wanted:,} updates, "
        f"{done - before:,} of them by this command in {seconds:.0f} s, "
        "start, compilation and checkpoints included.\n\n"
    )
    if done == before:
        yield "Nothing was left to train.\n\n"
    else:
        hours = seconds / (done - before) * wanted / 3600
        yield f"At this pace all updates take {hours:.2f} hours.\n\n"
    yield course(out)
    trained = load_run(out, bench.device)
    set_precision(trained.config.precision)
    for features in judges:
        results = judged(trained, features, bench.size.samples)
        yield f"\n{table(results)}\n"
    yield (
        f"\nSamples of the training, every {settings.sample_every} updates: `{out / 'samples'}`.\n"
    )


def updates_of(run: Path) -> int:
    """Updates that a run folder has rows of."""
    file = run / "training.jsonl"
    return sum(1 for _ in read_jsonl(file)) if file.is_file() else 0


def course(run: Path) -> str:
    """A table of the course of a run: medians of equally many updates a row."""
    rows = {int(row["step"]): dict(row) for row in read_jsonl(run / "training.jsonl")}
    for row in read_jsonl(run / "metrics.jsonl"):
        if int(row["step"]) in rows:
            rows[int(row["step"])].update(row)
    tags = ("energy_gap", "grad_scale", "ess", "sampler/grad_norm", "contrast", "outside")
    each = next(x for x in (1, 10, 100, 500, 1000, 2000, 5000, 10_000) if ROWS * x >= len(rows))
    lines = [
        f"Medians of {each} updates a row; the largest |gap| of them.\n",
        f"| from update | {' | '.join(tags)} | largest gap |",
        f"|---:|{len(tags) * '---:|'}---:|",
    ]
    steps = sorted(rows)
    for start in range(0, len(steps), each):
        some = [rows[step] for step in steps[start : start + each]]
        cells = [
            f"{statistics.median(values):.3g}" if values else ""
            for values in ([float(row[tag]) for row in some if tag in row] for tag in tags)
        ]
        gaps = [abs(float(row["energy_gap"])) for row in some if "energy_gap" in row]
        largest = f"{max(gaps):.3g}" if gaps else ""
        lines.append(f"| {steps[start]:,} | {' | '.join(cells)} | {largest} |")
    alerts = run / "alerts.jsonl"
    found = Counter(row["level"] for row in read_jsonl(alerts)) if alerts.is_file() else Counter()
    said = ", ".join(f"{times} {level}" for level, times in found.most_common()) or "none"
    return "\n".join(lines) + f"\n\nAlerts: {said}.\n"


def classifier(bench: Bench) -> Path:
    """The run folder of a plain classifier of the same images; trained where there is none yet."""
    out = bench.runs / "classifier"
    if (out / "checkpoints" / "best.pt").is_file():
        return out
    config = JemConfig(
        out=out,
        data=bench.size.data,
        device=str(bench.device),
        p_x_weight=0.0,
        beta_star=0.0,
        resume=(out / "config.json").is_file(),
        **bench.size.classifier,
    )
    train_classifier(*config.open(), Deadline(LEARNING * bench.clock.left))
    return out
