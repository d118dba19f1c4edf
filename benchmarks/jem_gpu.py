"""The JEM trainer on a GPU: its speed, who diverges, what bfloat16 costs, and its memory.

    python -m benchmarks.jem_gpu --part all --device cuda --minutes 9 --out docs/results/jem_gpu.md

Runs that may diverge are gone on with by the next command. Without EBMGUARD_DATA only time, memory
and waiting are measured, on random images.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from ebmguard.reference_training.data import ROOT_VARIABLE
from ebmguard.reference_training.engine.run_folder import METRICS, read_rows
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.runs import so_far
from ebmguard.reference_training.jem.train import Jem, train
from ebmguard.reference_training.jem.trainer import make_network
from ebmguard.reference_training.precision import set_precision

from .contenders import Iterations, JemLoop
from .gpu_cases import NEVER, TOY, Bench, Case, Part, Size
from .gpu_parts import main
from .timing import WARM_UP, first_line

BATCHES_AT_ONCE = 8
RUNS = (("2", 0.0), ("2", 2.0), ("6", 0.0), ("6", 2.0))
"""Scenario and beta_star of the runs that may diverge."""


def first_alerts(run: Path) -> str:
    """The first WARN and the first ERROR of a run, in words, whichever there were."""
    first = {row["level"]: row for row in reversed(read_rows(run, "alerts.jsonl"))}
    said = [
        f"{level} {first[level]['rule']} ({first[level]['tag']}) at {first[level]['step']}"
        for level in ("WARN", "ERROR")
        if level in first
    ]
    return "; ".join(said) or "none"


def gaps_by_hundred(run: Path) -> pd.Series:
    """Median and largest |gap| of every hundred steps, in words, by the first of them."""
    gaps = pd.Series([float(row["energy_gap"]) for row in read_rows(run, METRICS)])
    hundreds = gaps.groupby(gaps.index // 100 * 100)
    return hundreds.agg(lambda gap: f"{gap.median():.3g} ({gap.abs().max():.3g})")


def diverge_part(bench: Bench) -> Iterator[str]:
    """Who diverges, in the trainer itself."""
    if bench.size.lacks_data:
        yield f"Left out: {ROOT_VARIABLE} does not name the folder of CIFAR-10.\n"
        return
    wanted = bench.size.more["iterations"]
    yield (
        f"`{bench.case.command}`, {bench}, bfloat16, seed 0, {wanted} iterations (an epoch of the "
        "published split has 703). Diverged: the first iteration whose |energy gap| exceeds 10,000 "
        "or is not finite.\n\n"
        "| scenario | β* | iterations | diverged at | first alerts | seconds |\n"
        "|---|---:|---:|---:|---|---:|\n"
    )
    gaps: dict[str, pd.Series] = {}
    for i, (scenario, beta_star) in enumerate(RUNS):
        if i and bench.clock.left <= 0:
            yield f"| {scenario} | {beta_star:g} | left out: no time | | | |\n"
            continue
        later = sum(other == scenario for other, _ in RUNS[i + 1 :])
        out = bench.runs / f"scenario-{scenario}-beta-star-{beta_star:g}"
        options = {"scenario": scenario, "beta_star": beta_star, "iterations": wanted}
        share = bench.clock.left / (1 + later)
        try:
            seconds = bench.trained(out, share, quality_samples=0, checkpoint_every=100, **options)
        except RuntimeError as error:  # out of memory, or the compiler or the capture failed
            traceback.print_exc()
            yield f"| {scenario} | {beta_star:g} | failed: {first_line(error)} | | | |\n"
            continue
        gaps[f"{scenario}, β* = {beta_star:g}"] = gaps_by_hundred(out)
        steps, lost = so_far(out)
        yield (
            f"| {scenario} | {beta_star:g} | {steps} | {'not' if lost is None else lost} "
            f"| {first_alerts(out)} | {seconds:.0f} |\n"
        )
    if not gaps:
        return
    yield "\nMedian energy gap of every hundred iterations, and its largest |value|:\n\n"
    yield f"| from iteration | {' | '.join(gaps)} |\n|---:|{len(gaps) * '---:|'}\n"
    for start, cells in pd.DataFrame(gaps).fillna("").iterrows():
        yield f"| {start} | {' | '.join(cells)} |\n"


def energies_part(bench: Bench) -> Iterator[str]:
    """The same weights in three kinds of arithmetic."""
    if bench.size.lacks_data:
        yield f"Left out: {ROOT_VARIABLE} does not name the folder of CIFAR-10.\n"
        return
    options = {**bench.case.quiet, "scenario": "2", "test_images": None}
    config = bench.config(bench.scratch / "energies", **options)
    made = Iterations(Jem, config)
    batch, images = config.settings.n_pos, config.load_data().test_x
    count = min(len(images), len(made.task.trainer.buffer)) // batch * batch
    yield (
        f"f of {count} test images and of as many chains of the replay buffer, {bench}, under the "
        "same weights: as initialised, where the chains are uniform noise, and after training in "
        "scenario 2 with β* = 2. Rank correlations (Spearman) are with float32's f. Gaps are mean "
        f"f⁺ - mean f⁻ with the standard error that batches of {batch} give; the difference to "
        "float32 is paired. Noise is the standard deviation of the gap from batch to batch, which "
        "is what training sees.\n\n"
        "| weights | arithmetic | rank, images | rank, chains | std f⁺ | std f⁻ | largest abs "
        "difference of f | gap | difference of gaps | difference / noise |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"
    )
    yield from compared(made.task, "as initialised", batch, count)
    done, wanted = 0, bench.size.more["trained"]
    while done < wanted and (done < WARM_UP or bench.clock.left > 60):
        made.step()
        done += 1
    made.close()
    yield from compared(made.task, f"after {done} updates", batch, count)


def compared(task: Jem, title: str, batch: int, count: int) -> Iterator[str]:
    """Rows of the table of energies."""
    config, trainer = task.config, task.trainer
    data = config.load_data().to(task.record.device)
    images, chains = data.scale(data.test_x[:count]), trainer.chains(count)
    sides: dict[str, tuple[Tensor, Tensor]] = {}
    for precision in ("float32", "tf32", "bfloat16"):
        own = replace(config, precision=precision, compile="no")
        set_precision(own.precision)
        network = make_network(own, data)
        network.load_state_dict(trainer.network.state_dict())
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
    first, second = (pd.Series(each.numpy()).rank() for each in (x, y))
    return float(first.corr(second))


TOY_OPTIONS = {
    "depth": 10,
    "width": 1,
    "n_pos": 8,
    "n_neg": 8,
    "n_labelled": 8,
    "sgld_steps": 2,
    "buffer_size": 64,
    "train_images": 64,
    "valid_images": 16,
    "test_images": 32,
}
JEM = Case(
    command="ebmguard train jem",
    module="benchmarks.jem_gpu",
    title="The JEM trainer on a GPU",
    config=JemConfig,
    task=Jem,
    train=train,
    loop=JemLoop,
    words=lambda own: f"WRN-{own.depth}-{own.width}, K = {own.sgld_steps}",
    quiet={
        "eval_every": NEVER,
        "quality_samples": 0,
        "alert_context": 0,
        "alert_window": 0,
        # Step 0 is evaluated all the same: on less than a batch.
        "valid_images": 32,
        "test_images": 32,
    },
    aim=3,
    sizes={
        # An epoch of CIFAR-10 has 703 updates; energies are compared before and after `trained`.
        "full": Size({"scenario": "1"}, more={"iterations": 703, "trained": 300}),
        "toy": replace(
            TOY,
            options={"scenario": "1", **TOY_OPTIONS},
            more={"iterations": 4, "trained": 2},
        ),
    },
    parts={
        "diverge": Part("Who diverges in the first epoch", 4, diverge_part),
        "energies": Part("Energies in bfloat16 and in float32", 1, energies_part),
    },
)

if __name__ == "__main__":
    sys.exit(main(JEM))
