"""The short-run trainer on a GPU: its speed, its memory, and what it learns in minutes.

    python -m benchmarks.shortrun_gpu --part all --device cuda --minutes 9
    python -m benchmarks.shortrun_gpu --part train --minutes 9 --features inception:FILE

CIFAR-10 at the published settings, guarded, against an eager loop of the published structure. A
training is gone on with by the next command, as long as its folder is kept. Without EBMGUARD_DATA
only time, memory and waiting are measured, on random images.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd

from ebmguard import runs
from ebmguard.reference_training.data import ROOT_VARIABLE
from ebmguard.reference_training.engine.run_folder import METRICS, read_rows
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.train import train as train_classifier
from ebmguard.reference_training.judge.features import load_features
from ebmguard.reference_training.judge.shortrun import judged, table
from ebmguard.reference_training.precision import set_precision
from ebmguard.reference_training.shortrun.config import ShortRunConfig
from ebmguard.reference_training.shortrun.train import ShortRun, train
from ebmguard.reference_training.shortrun.trained import load_run

from .contenders import ShortRunLoop
from .gpu_cases import NEVER, TOY, Bench, Case, Part, Size
from .gpu_parts import main
from .grid import table_of
from .watching import Deadline

ROWS = 12
"""Rows, at most, of the table of a run's course."""
JUDGING = 0.25
"""Share of a training's time that is kept for judging its samples."""
LEARNING = 0.15
"""Share that the classifier has, where there is none yet."""
COURSE = ["energy_gap", "grad_scale", "ess", "sampler/grad_norm", "contrast", "outside"]


def train_part(bench: Bench) -> Iterator[str]:
    """As many updates as there is time for, and what its samples are worth."""
    if bench.size.lacks_data:
        yield f"Left out: {ROOT_VARIABLE} does not name the folder of CIFAR-10.\n"
        return
    # Before the training, which would be lost on features that are none.
    judges = [
        load_features(spec, bench.device) for spec in bench.features or [str(classifier(bench))]
    ]
    out = bench.runs / "model"
    before = updates_of(out)
    seconds = bench.trained(out, (1 - JUDGING) * bench.clock.left)
    config = bench.config(out)
    done, wanted, settings = updates_of(out), config.total_steps, config.settings
    compiled = ", compiled" if config.compile == "yes" else ""
    yield (
        f"`ebmguard train shortrun`, {bench}, β* = {config.beta_star:g}, "
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
        yield f"\n{table(judged(trained, features, bench.size.more['samples']))}\n"
    yield (
        f"\nSamples of the training, every {settings.sample_every} updates: `{out / 'samples'}`.\n"
    )


def updates_of(run: Path) -> int:
    """Updates that a run folder has rows of."""
    return len(read_rows(run, METRICS))


def course(run: Path) -> str:
    """A table of the course of a run: medians of equally many updates a row."""
    found = runs.load(run)
    rows = found.rows.droplevel("run").reindex(columns=COURSE)
    each = next(x for x in (1, 10, 100, 500, 1000, 2000, 5000, 10_000) if ROWS * x >= len(rows))
    groups = rows.groupby(rows.index // each * each)
    largest = groups["energy_gap"].agg(lambda gap: gap.abs().max())
    shown = groups.median().assign(**{"largest gap": largest})
    lines = [
        {
            "from update": f"{start:,}",
            **{tag: "" if pd.isna(x) else f"{x:.3g}" for tag, x in row.items()},
        }
        for start, row in shown.iterrows()
    ]
    levels = found.alerts["level"].value_counts() if len(found.alerts) else {}
    said = ", ".join(f"{times} {level}" for level, times in levels.items()) or "none"
    head = f"Medians of {each} updates a row; the largest |gap| of them."
    return f"{head}\n\n{table_of(lines)}\n\nAlerts: {said}.\n"


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
        **bench.size.more["classifier"],
    )
    train_classifier(*config.open(), Deadline(LEARNING * bench.clock.left))
    return out


FULL_CLASSIFIER = {
    "depth": 16,
    "width": 4,
    "lr": 3e-4,
    "warmup": 200,
    "precision": "bfloat16",
    "iterations": 6000,
    "valid_images": 1000,
    "eval_every": 500,
    "checkpoint_every": 500,
}
TOY_CLASSIFIER = {
    "depth": 10,
    "width": 1,
    "n_pos": 8,
    "train_images": 64,
    "valid_images": 16,
    "test_images": 32,
    "iterations": 2,
    "eval_every": 1,
}
TOY_OPTIONS = {
    "nf": 4,
    "activation": "leaky_relu",
    "batch": 8,
    "sgld_steps": 2,
    "train_images": 64,
    "test_images": 32,
    "iterations": 40,
}
SHORTRUN = Case(
    command="ebmguard train shortrun",
    module="benchmarks.shortrun_gpu",
    title="The short-run trainer on a GPU",
    config=ShortRunConfig,
    task=ShortRun,
    train=train,
    loop=ShortRunLoop,
    words=lambda own: f"nf = {own.nf}, batch {own.batch}, K = {own.sgld_steps}",
    quiet={"sample_every": NEVER},
    aim=4,
    sizes={
        # The published script's settings, which are the preset's. None: as many samples as there
        # are held-out images.
        "full": Size(more={"classifier": FULL_CLASSIFIER, "samples": None}),
        "toy": replace(
            TOY, options=TOY_OPTIONS, more={"classifier": TOY_CLASSIFIER, "samples": 16}
        ),
    },
    parts={"train": Part("A training of minutes", 5, train_part)},
)

if __name__ == "__main__":
    sys.exit(main(SHORTRUN))
