"""The parts of the GPU benchmark: each yields Markdown as soon as it knows something."""

from __future__ import annotations

import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ebmguard.reference_training.data import ROOT_VARIABLE
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.runs import so_far
from ebmguard.reference_training.jem.train import train
from ebmguard.reference_training.jem.trainer import make_network
from ebmguard.reference_training.precision import set_precision
from ebmguard.sinks import read_jsonl

from .gpu_timing import (
    WARM_UP,
    Clock,
    Steps,
    Turn,
    alternate,
    first_line,
    memory_table,
    spread,
    step_tables,
    warmed_up,
)
from .gpu_watching import Deadline, waits
from .jem_loop import Engine, PublishedLoop, Size, config_of, step_flop

TARGET = 3
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
    "ours, bfloat16, not compiled": Variant(True, {"precision": "bfloat16", "compile": "no"}),
    "ours, float32": Variant(True, {"precision": "float32"}),
}
OURS, LOOPS = "ours, bfloat16", ("loop, TF32", "loop, float32")
RUNS = (("2", 0.0), ("2", 2.0), ("6", 0.0), ("6", 2.0))
"""Scenario and beta_star of the runs that may diverge."""


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
            options["compile"] = "no"
        config = self.config(name.replace(", ", "-").replace(" ", "-"), **options)
        return (Engine if variant.is_ours else PublishedLoop)(config, self.device)

    def makers(self) -> dict[str, Callable[[], Steps]]:
        """What makes each variant."""
        return {name: partial(self.made, name) for name in VARIANTS}

    @property
    def lacks_data(self) -> bool:
        """Whether CIFAR-10 is needed and not there."""
        return self.size.real and not os.environ.get(ROOT_VARIABLE)

    def images(self) -> str:
        """The images in words."""
        is_real = self.size.real and not self.lacks_data
        return "CIFAR-10" if is_real else "random bytes instead of CIFAR-10"


# -- time --------------------------------------------------------------------------------------


def step_part(bench: Bench) -> Iterator[str]:
    """(a) Our step against the loop's."""
    yield (
        f"Scenario 1, {bench.size.network}, {bench.images()}. A block of {bench.size.block} steps "
        "of each variant in turn, there and back, in one process; medians and quartiles over "
        "rounds, ratios within rounds. Ours: the trainer's step with its guard and log folder, "
        f"{'compiled unless said, ' if bench.size.compile else ''}on a GPU with the Langevin steps "
        "as one CUDA graph. The loop: `PublishedLoop` in `benchmarks/jem_loop.py`, eager.\n\n"
    )
    yield from step_tables(
        bench.makers(),
        LOOPS,
        block=bench.size.block,
        flop=step_flop(bench.config("flop").settings),
        clock=bench.clock,
        device=bench.device,
    )
    yield f"\nTarget: {OURS} at least {TARGET} times as fast as either loop.\n"


def floor_part(bench: Bench) -> Iterator[str]:
    """The step against what a matrix product allows."""
    n, device = bench.size.matrix, bench.device
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    flop = step_flop(bench.config("flop").settings)
    made, seconds = warmed_up(partial(bench.made, OURS), device)
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


def memory_part(bench: Bench, command: Sequence[str]) -> Iterator[str]:
    """(e) Peak memory of each variant."""
    yield f"Scenario 1, {bench.size.network}. "
    yield from memory_table(list(VARIANTS), command, bench.clock)


# -- host synchronisation ----------------------------------------------------------------------


def sync_part(bench: Bench) -> Iterator[str]:
    """No call in an iteration of the trainer waits for the GPU, but for the event waits."""
    watched = bench.size.watched
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
    yield from waits(
        partial(train, config, folder), watched, bench.device, "ebmguard train jem --scenario 2"
    )


# -- divergence --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a run went, from its files.

    Attributes:
        gaps: energy gap of every step.
        steps: updates done.
        diverged_at: the first that was lost, or None.
        alerts: the first WARN and the first ERROR, in words, whichever there were.
    """

    gaps: list[float]
    steps: int
    diverged_at: int | None
    alerts: list[str]

    @classmethod
    def of(cls, folder: Path) -> Outcome:
        """Read a run that is over, or was stopped."""
        gaps = [float(row["energy_gap"]) for row in read_jsonl(folder / "training.jsonl")]
        first: dict[str, str] = {}
        file = folder / "alerts.jsonl"
        for row in read_jsonl(file) if file.is_file() else []:
            words = f"{row['level']} {row['rule']} ({row['tag']}) at {row['step']}"
            if row["level"] in ("WARN", "ERROR"):
                first.setdefault(row["level"], words)
        steps, lost = so_far(folder)
        return cls(gaps, steps, lost, list(first.values()))

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
        lost = found.diverged_at
        yield (
            f"| {scenario} | {beta_star:g} | {found.steps} "
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
        own = replace(config, precision=precision, compile="no")
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
