"""The parts of the GPU benchmark: each yields Markdown as soon as it knows something."""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import subprocess
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ebmguard.reference_training.data import ROOT_VARIABLE
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.record import RunRecord
from ebmguard.reference_training.jem.train import train
from ebmguard.reference_training.jem.trainer import make_network
from ebmguard.reference_training.precision import set_precision
from ebmguard.reference_training.progress import LineReporter, SilentReporter
from ebmguard.sinks import read_jsonl

from .jem_loop import Engine, PublishedLoop, Size, Steps, config_of, step_flop
from .overhead import peak_resident_kib
from .toy import synchronize

WARM_UP = 3
MIN_ROUNDS, MAX_ROUNDS = 3, 40
LONGEST_WARM_UP = 0.6
"""Share of a part's time after which no further variant is prepared."""
TARGET = 3
SYNCHRONISES = "synchronizing CUDA operation"
PROJECT = ("reference_training", "ebmguard")
BATCHES_AT_ONCE = 8


class Variant(NamedTuple):
    """A way to train: ours, or the published loop."""

    is_ours: bool
    options: Mapping[str, Any]


# The most important first: what finds no time is left out.
VARIANTS = {
    "ours, bfloat16": Variant(True, {"precision": "bfloat16"}),
    "loop, TF32": Variant(False, {"precision": "tf32"}),
    "loop, float32": Variant(False, {"precision": "float32"}),
    "ours, TF32": Variant(True, {"precision": "tf32"}),
    "ours, bfloat16, not compiled": Variant(True, {"precision": "bfloat16", "compile": False}),
    "ours, float32": Variant(True, {"precision": "float32"}),
}
OURS, LOOPS = "ours, bfloat16", ("loop, TF32", "loop, float32")
RUNS = (("2", 0.0), ("2", 2.0), ("6", 0.0), ("6", 2.0))
"""Scenario and beta_star of the runs that may diverge."""


class Clock:
    """The time that a part may take."""

    def __init__(self, minutes: float) -> None:
        self._start = time.monotonic()
        self._seconds = 60 * minutes

    @property
    def left(self) -> float:
        """Seconds; below 0 when it is over."""
        return self._start + self._seconds - time.monotonic()

    @property
    def used(self) -> float:
        """Share of the time, 1 when it is over."""
        return 1 - self.left / self._seconds if self._seconds else 1.0


@dataclass
class Bench:
    """What all parts are given.

    Attributes:
        size: how large everything is.
        device: where.
        clock: how long.
        runs: where runs that may diverge are kept, so that a second command goes on with them.
        scratch: for everything else.
    """

    size: Size
    device: torch.device
    clock: Clock
    runs: Path
    scratch: Path

    def config(self, name: str, scenario: str = "1", **options: Any) -> JemConfig:
        """Settings of a run in the scratch folder."""
        return config_of(self.size, self.device, self.scratch / name, scenario=scenario, **options)

    def made(self, name: str) -> Steps:
        """A variant, at scenario 1."""
        variant = VARIANTS[name]
        options = dict(variant.options)
        if not self.size.compile:
            options["compile"] = False
        config = self.config(name.replace(", ", "-").replace(" ", "-"), **options)
        return (Engine if variant.is_ours else PublishedLoop)(config, self.device)

    @property
    def lacks_data(self) -> bool:
        """Whether CIFAR-10 is needed and not there."""
        return self.size.real and not os.environ.get(ROOT_VARIABLE)

    def images(self) -> str:
        """The images in words."""
        is_real = self.size.real and not self.lacks_data
        return "CIFAR-10" if is_real else "random bytes in the place of CIFAR-10"


# -- time --------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """What is done in one turn: so many calls, after what is not timed."""

    call: Callable[[], object]
    calls: int
    before: Callable[[], object] = lambda: None


def alternate(turns: Mapping[str, Turn], clock: Clock, device: torch.device) -> dict[str, Any]:
    """Seconds of one call by name, a list over rounds; there and back until the time is over."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    longest, rounds = 0.0, 0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and clock.left > 1.5 * longest):
        began = time.monotonic()
        for name in list(turns)[:: -1 if rounds % 2 else 1]:
            call, calls, before = turns[name]
            before()
            synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            synchronize(device)
            found[name].append((time.perf_counter() - start) / calls)
        longest = max(longest, time.monotonic() - began)
        rounds += 1
    return found


def spread(values: Sequence[float], digits: str = ".1f") -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{digits}} ({low:{digits}} to {high:{digits}})"


def warmed_up(bench: Bench, name: str) -> tuple[Steps, float]:
    """A variant after its first steps, and the seconds that these took."""
    start = time.perf_counter()
    made = bench.made(name)
    for _ in range(WARM_UP):
        made.step()
    synchronize(bench.device)
    return made, time.perf_counter() - start


def first_line(error: Exception) -> str:
    """What an error says, short enough for a table."""
    return str(error).strip().partition("\n")[0].replace("|", "\\|")


def compilations() -> int:
    """Frames that torch.compile has compiled in this process so far."""
    return int(counters["frames"]["ok"])


def step_part(bench: Bench) -> Iterator[str]:
    """(a) Our step against the loop's."""
    yield (
        f"Scenario 1, {bench.size.network}, {bench.images()}. A block of {bench.size.block} steps "
        "of each variant in turn, there and back, in one process; medians and quartiles over "
        "rounds, ratios within rounds. Ours: the trainer's step with its guard and log folder, "
        f"{'compiled unless said, ' if bench.size.compile else ''}on a GPU with the Langevin steps "
        "as one CUDA graph. The loop: `PublishedLoop` in `benchmarks/jem_loop.py`, eager.\n\n"
        f"The first {WARM_UP} steps (compilation, capture, cuDNN's choices), not counted below:\n\n"
        "| variant | seconds |\n|---|---:|\n"
    )
    made: dict[str, Steps] = {}
    for name in VARIANTS:
        if len(made) > len(LOOPS) and bench.clock.used > LONGEST_WARM_UP:
            yield f"| {name} | left out: no time |\n"
            continue
        try:
            made[name], seconds = warmed_up(bench, name)
        except RuntimeError as error:  # out of memory, or the compiler failed
            traceback.print_exc()
            yield f"| {name} | failed: {first_line(error)} |\n"
        else:
            yield f"| {name} | {seconds:.1f} |\n"
    compiled = compilations()
    turns = {
        name: Turn(each.step, bench.size.block, partial(set_precision, each.config.precision))
        for name, each in made.items()
    }
    found = alternate(turns, bench.clock, bench.device)
    for each in made.values():
        each.close()
    loops = [name for name in LOOPS if name in found]
    flop = step_flop(bench.config("flop").settings)
    yield "\n| variant | step, ms | TFLOP/s |" + "".join(f" {x} / it |" for x in loops)
    yield "\n|---|---:|---:|" + len(loops) * "---:|" + "\n"
    for name, own in found.items():
        ratios = [
            spread([a / b for a, b in zip(found[loop], own, strict=True)], ".2f") for loop in loops
        ]
        rate = flop / statistics.median(own) / 1e12
        cells = (spread([1e3 * x for x in own]), f"{rate:.1f}", *ratios)
        yield f"| {name} | {' | '.join(cells)} |\n"
    rounds = len(next(iter(found.values())))
    yield f"\n{rounds} rounds. Target: {OURS} at least {TARGET} times as fast as either loop.\n"
    if (again := compilations() - compiled) > 0:
        yield f"\n**{again} functions were compiled during the measurement: do not use it.**\n"


def floor_part(bench: Bench) -> Iterator[str]:
    """The step against what a matrix product allows."""
    n, device = bench.size.matrix, bench.device
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    flop = step_flop(bench.config("flop").settings)
    made, seconds = warmed_up(bench, OURS)
    turns = {
        "product": Turn(lambda: torch.matmul(a, b, out=out), bench.size.products),
        "step": Turn(made.step, bench.size.block),
    }
    turns["product"].call()
    found = alternate(turns, bench.clock, device)
    made.close()
    rates = [2 * n**3 / x / 1e12 for x in found["product"]]
    floors = [flop / 1e12 / rate for rate in rates]
    over = [step / floor for step, floor in zip(found["step"], floors, strict=True)]
    yield (
        f"An iteration of scenario 1 on {bench.size.network} has {flop / 1e12:.4g} TFLOP in its "
        "convolutions and products (a multiplication with its addition is two). The floor is the "
        f"time that they would take at the rate of a {n} x {n} bfloat16 product of random numbers, "
        f'measured in turn with steps of "{OURS}" ({len(rates)} rounds; first steps '
        f"{seconds:.1f} s). Medians and quartiles.\n\n"
        "| product, TFLOP/s | floor, ms | step, ms | step / floor | fraction reached |\n"
        "|---:|---:|---:|---:|---:|\n"
        f"| {spread(rates)} | {spread([1e3 * x for x in floors])} "
        f"| {spread([1e3 * x for x in found['step']])} | {spread(over, '.2f')} "
        f"| {spread([1 / x for x in over], '.3f')} |\n"
    )


# -- memory ------------------------------------------------------------------------------------


def memory_of(bench: Bench, name: str) -> dict[str, float]:
    """GiB at the peak of the first steps, and of later ones, of a process of its own."""
    device, cuda = bench.device, bench.device.type == "cuda"

    def peaks(when: str) -> dict[str, float]:
        if not cuda:
            # Of the whole process, since it began.
            return {f"{when}, resident": peak_resident_kib() / 2**20}
        found = {
            f"{when}, allocated": torch.cuda.max_memory_allocated(device) / 2**30,
            f"{when}, reserved": torch.cuda.max_memory_reserved(device) / 2**30,
        }
        torch.cuda.reset_peak_memory_stats(device)
        return found

    made, _ = warmed_up(bench, name)
    found = peaks("first steps")
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        peaks("")
    for _ in range(WARM_UP):
        made.step()
    synchronize(device)
    found |= peaks("later steps")
    made.close()
    return found


def memory_part(bench: Bench, command: Sequence[str]) -> Iterator[str]:
    """(e) Peak memory of each variant."""
    yield (
        f"Scenario 1, {bench.size.network}; each variant in a process of its own; GiB at the peak "
        f"of the first {WARM_UP} steps (compilation, capture, cuDNN's trials) and of the "
        f"{WARM_UP} after them. What a CUDA graph works in is reserved, and allocated only while "
        "it is captured.\n\n"
    )
    header = ""
    for i, name in enumerate(VARIANTS):
        if i and bench.clock.left <= 0:
            yield f"\n{name}: left out, no time.\n"
            continue
        words = [*command, "--memory-of", name]
        run = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode:
            yield f"\n{name}: failed with status {run.returncode}.\n\n"
            header = ""
            continue
        found = json.loads(run.stdout.splitlines()[-1])
        cells = f"| {name} | " + " | ".join(f"{x:.2f}" for x in found.values()) + " |\n"
        if not header:
            header = f"| variant | {' | '.join(found)} |\n|---|{len(found) * '---:|'}\n"
            cells = header + cells
        yield cells


# -- host synchronisation ----------------------------------------------------------------------


class SyncWatch(SilentReporter):  # type: ignore[misc]
    """Has PyTorch warn of synchronising calls in whole iterations of a run.

    Args:
        after: iterations before the first one that is watched.
        watched: how many are.
        set_mode: sets PyTorch's mode, "warn" or "default".
    """

    def __init__(self, after: int, watched: int, set_mode: Callable[[str], object]) -> None:
        self._modes = {after: "warn", after + watched: "default"}
        self._set_mode = set_mode

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """Called at the end of an iteration, which is in the midst of the loop."""
        if done in self._modes:
            self._set_mode(self._modes[done])


def is_ours(parts: Sequence[str]) -> bool:
    """Whether a file is the project's, by the parts of its path, wherever PyTorch lies."""
    return "torch" not in parts and any(name in parts for name in PROJECT)


@contextmanager
def synchronising_calls() -> Iterator[Counter[str]]:
    """Where PyTorch has warned of a synchronising call inside the block, and how often."""
    places: Counter[str] = Counter()
    shown = warnings.showwarning

    def note(message: Warning | str, *others: Any) -> None:
        if SYNCHRONISES not in str(message):
            shown(message, *others)
            return
        frames = [x for x in traceback.extract_stack()[:-1] if x.filename != warnings.__file__]
        own = [x for x in frames if is_ours(Path(x.filename).parts)]
        frame = (own or frames)[-1]
        place = f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"
        places[f"`{frame.line}` ({place})"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        yield places


def sync_part(bench: Bench) -> Iterator[str]:
    """No call in an iteration of the trainer waits for the GPU, but for the event waits."""
    cuda, watched = bench.device.type == "cuda", bench.size.watched

    def set_mode(mode: str) -> None:
        if cuda:
            torch.cuda.set_sync_debug_mode(mode)

    config = bench.config(
        "sync",
        "2",
        iterations=2 * watched + 1,
        # Evaluations and checkpoints wait, as they must.
        eval_every=10 * watched,
        checkpoint_every=10 * watched,
        quality_samples=0,
    )
    config, folder = config.open()
    try:
        with synchronising_calls() as places:
            train(config, folder, SyncWatch(watched, watched, set_mode))
    finally:
        set_mode("default")
    if not cuda:
        yield "Not on a GPU: PyTorch looks for synchronising calls there alone.\n"
    yield (
        f"Iterations {watched} to {2 * watched} of `ebmguard train jem --scenario 2`, all of them "
        "(step, guard, trainer's log), with PyTorch looking for synchronising calls. Waits for "
        "the event of a row of two steps ago are none.\n\n"
    )
    yield f"Found: {sum(places.values()) or 'none'}.\n"
    for place, times in places.most_common():
        yield f"- {times} times {place}\n"


# -- divergence --------------------------------------------------------------------------------


class Deadline(LineReporter):  # type: ignore[misc]
    """Stops a run as Ctrl-C does when its time is over; it can be resumed.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._clock = Clock(seconds / 60)
        self._rang = False

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """Log, and look at the clock."""
        super().step(done, state)
        if self._clock.left <= 0 and not self._rang:
            self._rang = True
            signal.raise_signal(signal.SIGINT)


@dataclass(frozen=True)
class Outcome:
    """How a run went, from its files.

    Attributes:
        gaps: energy gap of every step.
        record: of these steps.
        alerts: the first WARN and the first ERROR, in words, whichever there were.
    """

    gaps: list[float]
    record: RunRecord
    alerts: list[str]

    @classmethod
    def of(cls, folder: Path) -> Outcome:
        """Read a run that is over, or was stopped."""
        record, gaps = RunRecord(), []
        for row in read_jsonl(folder / "training.jsonl"):
            record.see_step(row["step"], row["cross_entropy"], row["energy_gap"])
            record.next_step = row["step"] + 1
            gaps.append(float(row["energy_gap"]))
        first: dict[str, str] = {}
        file = folder / "alerts.jsonl"
        for row in read_jsonl(file) if file.is_file() else []:
            words = f"{row['level']} {row['rule']} ({row['tag']}) at {row['step']}"
            if row["level"] in ("WARN", "ERROR"):
                first.setdefault(row["level"], words)
        return cls(gaps, record, list(first.values()))

    def by_hundred(self) -> list[str]:
        """Median and largest |gap| of every hundred steps."""
        hundreds = (self.gaps[i : i + 100] for i in range(0, len(self.gaps), 100))
        return [f"{statistics.median(x):.3g} ({max(map(abs, x)):.3g})" for x in hundreds]


def diverge_part(bench: Bench) -> Iterator[str]:
    """(b, c) Who diverges, in the trainer itself."""
    if bench.lacks_data:
        yield f"Left out: {ROOT_VARIABLE} does not name the folder of CIFAR-10.\n"
        return
    wanted = bench.size.iterations
    yield (
        f"`ebmguard train jem`, {bench.size.network}, bfloat16, seed 0, {bench.images()}, "
        f"{wanted} iterations (an epoch of the published split has 703). Diverged: the first "
        "iteration whose |energy gap| exceeds 10,000 or is not finite.\n\n"
        "| scenario | β* | iterations | diverged at | first alerts | seconds |\n"
        "|---|---:|---:|---:|---|---:|\n"
    )
    outcomes: dict[str, Outcome] = {}
    for i, (scenario, beta_star) in enumerate(RUNS):
        title = f"{scenario}, β* = {beta_star:g}"
        if i and bench.clock.left <= 0:
            yield f"| {scenario} | {beta_star:g} | left out: no time | | | |\n"
            continue
        later = sum(other == scenario for other, _ in RUNS[i + 1 :])
        out = bench.runs / f"scenario-{scenario}-beta-star-{beta_star:g}"
        start = time.monotonic()
        try:
            run_until(bench, out, scenario, beta_star, bench.clock.left / (1 + later))
        except RuntimeError as error:  # out of memory, or the compiler or the capture failed
            traceback.print_exc()
            yield f"| {scenario} | {beta_star:g} | failed: {first_line(error)} | | | |\n"
            continue
        seconds = time.monotonic() - start
        found = outcomes[title] = Outcome.of(out)
        lost = found.record.diverged_at
        yield (
            f"| {scenario} | {beta_star:g} | {found.record.next_step} "
            f"| {'not' if lost is None else lost} | {'; '.join(found.alerts) or 'none'} "
            f"| {seconds:.0f} |\n"
        )
    if not outcomes:
        return
    yield "\nMedian energy gap of every hundred iterations, and its largest |value|:\n\n"
    yield f"| from iteration | {' | '.join(outcomes)} |\n|---:|{len(outcomes) * '---:|'}\n"
    columns = [found.by_hundred() for found in outcomes.values()]
    for row in range(max(map(len, columns))):
        cells = (column[row] if row < len(column) else "" for column in columns)
        yield f"| {100 * row} | {' | '.join(cells)} |\n"


def run_until(bench: Bench, out: Path, scenario: str, beta_star: float, seconds: float) -> None:
    """Run, or go on with, a training run until it or the time is over."""
    config = config_of(
        bench.size,
        bench.device,
        out,
        scenario=scenario,
        beta_star=beta_star,
        iterations=bench.size.iterations,
        quality_samples=0,
        checkpoint_every=100,
    )
    if (out / "results.json").is_file():
        return
    config, folder = replace(config, resume=(out / "config.json").is_file()).open()
    train(config, folder, Deadline(seconds))


# -- energies ----------------------------------------------------------------------------------


def energies_part(bench: Bench) -> Iterator[str]:
    """(d) The same weights in three kinds of arithmetic."""
    if bench.lacks_data:
        yield f"Left out: {ROOT_VARIABLE} does not name the folder of CIFAR-10.\n"
        return
    engine = Engine(bench.config("energies", "2"), bench.device)
    batch = engine.config.settings.n_pos
    count = min(len(engine.data.test_x), len(engine.trainer.buffer)) // batch * batch
    yield (
        f"f of {count} test images and of as many chains of the replay buffer, "
        f"{bench.size.network}, {bench.images()}, under the same weights: as initialised, where "
        "the chains are uniform noise, and after training in scenario 2 with β* = 2. Rank "
        "correlations (Spearman) are with float32's f. Gaps are mean f⁺ - mean f⁻ with the "
        f"standard error that batches of {batch} give; the difference to float32 is paired. Noise "
        "is the standard deviation of the gap from batch to batch, which is what training sees.\n\n"
        "| weights | arithmetic | rank, images | rank, chains | std f⁺ | std f⁻ | largest abs "
        "difference of f | gap | difference of gaps | difference / noise |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"
    )
    yield from compared(engine, "as initialised", batch, count)
    while engine.steps < bench.size.trained and (engine.steps < WARM_UP or bench.clock.left > 60):
        engine.step()
    engine.close()
    yield from compared(engine, f"after {engine.steps} updates", batch, count)


def compared(engine: Engine, title: str, batch: int, count: int) -> Iterator[str]:
    """Rows of the table of energies."""
    data, config = engine.data, engine.config
    images, chains = data.scale(data.test_x[:count]), engine.trainer.chains(count)
    sides: dict[str, tuple[Tensor, Tensor]] = {}
    for precision in ("float32", "tf32", "bfloat16"):
        own = replace(config, precision=precision, compile=False)
        set_precision(own.precision)
        network = make_network(own, data)
        network.load_state_dict(engine.trainer.network.state_dict())
        with torch.no_grad():
            f = [
                torch.cat([network(x) for x in side.split(BATCHES_AT_ONCE * batch)])
                for side in (images, chains)
            ]
        sides[precision] = f[0].double().cpu(), f[1].double().cpu()
    set_precision(config.precision)
    exact = sides["float32"]
    for precision, (f_pos, f_neg) in sides.items():
        row = agreement((f_pos, f_neg), exact, batch)
        yield f"| {title} | {precision} | {' | '.join(row)} |\n"


def agreement(
    own: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], batch: int
) -> Iterator[str]:
    """Cells of a row: how far energies (n,) of both sides agree with more exact ones."""
    gaps, exact_gaps = batch_gaps(*own, batch), batch_gaps(*exact, batch)
    apart, noise = gaps - exact_gaps, exact_gaps.std()
    for mine, other in zip(own, exact, strict=True):
        yield f"{rank_correlation(mine, other):.6f}"
    for mine in own:
        yield f"{mine.std():.4g}"
    yield f"{max((a - b).abs().max() for a, b in zip(own, exact, strict=True)):.2g}"
    yield f"{gaps.mean():.5g} ± {standard_error(gaps):.2g}"
    yield f"{apart.mean():.2g} ± {standard_error(apart):.2g}"
    yield f"{apart.mean().abs() / noise:.2g}"


def batch_gaps(f_pos: Tensor, f_neg: Tensor, batch: int) -> Tensor:
    """mean f⁺ - mean f⁻ of every batch: (n,), (n,) -> (n / batch,)."""
    gaps: Tensor = f_pos.view(-1, batch).mean(1) - f_neg.view(-1, batch).mean(1)
    return gaps


def standard_error(x: Tensor) -> Tensor:
    """Of the mean of independent numbers (n,)."""
    error: Tensor = x.std() / len(x) ** 0.5
    return error


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's: Pearson's of the ranks, ties sharing theirs. (n,), (n,)."""

    def ranks(x: Tensor) -> Tensor:
        _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
        last = counts.cumsum(0).double()
        shared: Tensor = last - (counts.double() - 1) / 2
        return shared[inverse]

    return float(torch.corrcoef(torch.stack((ranks(x), ranks(y))))[0, 1])
