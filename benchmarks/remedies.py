"""What holds a diverging JEM on digits together, at equal compute: the field's remedies and β*.

    python -m benchmarks.remedies                # the whole grid, two runs at a time
    python -m benchmarks.remedies --table-only   # the table of what has been run

A run in the middle of a cell is resumed from its checkpoint.
"""

from __future__ import annotations

import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ebmguard.reference_training.engine.progress import Reporter
from ebmguard.reference_training.engine.run_folder import read_json
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.reference_training.jem.scenarios import DIGITS
from ebmguard.reference_training.jem.train import train
from ebmguard.reference_training.judge.features import Features, classifier_features
from ebmguard.reference_training.judge.quality import SampleQuality
from ebmguard.reference_training.judge.stored import load_network, read_last
from ebmguard.reference_training.plots.images import load_samples

from .grid import Grid, Rows, number, percent, table_of

SEEDS = range(20, 25)
CLIP_NORM = 3.0
"""The median norm of the gradient in healthy steps: 2.5 to 3.5 in each hundred of 900 steps, at
β* = 0 with two seeds and at β* = 2 with one. Adam undoes a factor that all gradients have, so that
a bound acts by the steps that exceed it and those that do not."""
REMEDIES: dict[str, dict[str, Any]] = {
    "none": {},
    "L2 on energies, 0.1": {"energy_l2": 0.1},
    "learning rate / 3": {"lr": DIGITS.lr / 3},
    "SGLD steps x 2": {"sgld_steps": 2 * DIGITS.sgld_steps},
    "SiLU": {"activation": "silu"},
    f"gradient norm <= {CLIP_NORM:g}": {"clip_norm": CLIP_NORM},
    "β* = 0.5": {"beta_star": 0.5},
    "β* = 2": {"beta_star": 2.0},
}
STEPS = 2000
"""Training steps of the default setting, whose compute all have."""
LONGER = {
    "SGLD steps x 2": (4000, SEEDS),
    "β* = 2": (3 * STEPS, SEEDS[:2]),
    "learning rate / 3": (3 * STEPS, SEEDS[:2]),
}
"""What survives is run for longer too, for so many training steps and with these seeds, at three
times the compute and more: it may only take longer to die."""
JUDGE = "judge"
JUDGE_SEED, JUDGE_STEPS = 1000, 1000
POOLED = 5
"""Looks at 64 samples, one every 50 steps, that have enough for a FID together."""
Measure = Callable[[torch.Tensor], dict[str, Any]]
"""Scores samples (N, C, H, W): FID, IS and their number."""


def iterations(settings: Mapping[str, Any]) -> int:
    """Training steps for the compute of the default's.

    Of batches of 64 energies with a gradient: each step of the chains, positives and negatives.
    """
    own = settings.get("sgld_steps", DIGITS.sgld_steps) + 2
    return int(STEPS * (DIGITS.sgld_steps + 2) // own)


def name_of(remedy: str, seed: int, *, longer: bool = False) -> str:
    """Of a cell: words and numbers alone."""
    words = re.findall(r"[\w.]+", remedy.replace("β", "beta"))
    return "_".join([*words, f"s{seed}", *(["longer"] if longer else [])])


CELLS: dict[str, dict[str, Any]] = {  # every remedy of a seed before the next seed
    name_of(remedy, seed): {"remedy": remedy, "seed": seed, "longer": False}
    for seed in SEEDS
    for remedy in REMEDIES
}
CELLS |= {
    name_of(remedy, seed, longer=True): {"remedy": remedy, "seed": seed, "longer": True}
    for remedy, (_, seeds) in LONGER.items()
    for seed in seeds
}


def config_of(folder: Path, remedy: str | None, seed: int, longer: bool) -> JemConfig:
    """The settings of a cell; of the classifier that judges samples, which has no remedy."""
    if (folder / "config.json").is_file():
        return JemConfig(out=folder, resume=True)
    own: dict[str, Any] = {"out": folder, "seed": seed, "device": "cpu"}
    if remedy is None:
        return JemConfig(iterations=JUDGE_STEPS, p_x_weight=0.0, **own)
    settings = {"beta_star": 0.0, **REMEDIES[remedy]}
    steps = LONGER[remedy][0] if longer else iterations(settings)
    return JemConfig(iterations=steps, **own, **settings)


class Clock(Reporter):  # type: ignore[misc]
    """Takes the CPU time of every step, in which other processes have no part."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start(self, name: str, done: int, total: int) -> None:
        """Of the first step."""
        self.times.append(time.process_time())

    def step(self, done: int, state: Mapping[str, float | str]) -> None:
        """Between two steps."""
        self.times.append(time.process_time())

    def note(self, text: str) -> None:
        """Into the cell's log."""
        print(text, flush=True)


def measure(folder: Path, remedy: str | None, seed: int, longer: bool) -> dict[str, Any]:
    """Train, and judge the chains that the run ended with; or train the judge."""
    config, run = config_of(folder, remedy, seed, longer).open()
    clock, root = Clock(), folder.parent
    results: dict[str, Any] | None = train(config, run, clock)
    if results is None:
        raise SystemExit(130)
    scored = judge(root)
    if remedy is None:
        return results | {"judge": {"accuracy": results["accuracy"], **yardsticks(root, scored)}}
    _, _, chains = read_last(run.path)
    said = {"judge": read_json(root / f"{JUDGE}.json")["judge"]}
    # Of the steps since it was resumed, where it was.
    seconds = [after - before for before, after in itertools.pairwise(clock.times)]
    timed = {"seconds_per_step": statistics.median(seconds) if seconds else None}
    return {**results, **scored(chains), **said, **best(run.path, scored), **timed}


def judge(root: Path) -> Measure:
    """Inception score and Fréchet distance by the features of the shared classifier."""
    network, step = load_network(root / JUDGE, "last", torch.device("cpu"))
    label = f"a plain classifier after {step:,} steps"
    features = Features(classifier_features(network), label, comparable=False, fixed=True)
    data = JemConfig(out=root).load_data()
    quality = SampleQuality(features, data)
    measure: Measure = quality.measure
    return measure


def best(folder: Path, measure: Measure) -> dict[str, Any]:
    """The best FID and IS that POOLED looks in a row at a run's negatives ever had."""
    files = sorted((folder / "samples").glob("*.npy"))
    looks = [load_samples(file) for file in files]
    parts = [torch.cat(looks[at : at + POOLED]) for at in range(len(looks) - POOLED + 1)]
    scores = list(map(measure, parts))
    return {
        "best_fid": min((score["fid"] for score in scores), default=None),
        "best_is": max((score["is"] for score in scores), default=None),
    }


def yardsticks(root: Path, measure: Measure) -> dict[str, dict[str, Any]]:
    """What the judge says of real images that nobody trained on, and of noise."""
    data = JemConfig(out=root).load_data()
    rng = torch.Generator().manual_seed(0)
    noise = torch.rand(DIGITS.buffer_size, *data.sample_shape, generator=rng) * 2 - 1
    return {"test images": measure(data.scale(data.test_x)), "uniform noise": measure(noise)}


FIT_GAP, FIT_GRAD_SCALE, FIT_ACCURACY = 20.0, 0.5, 0.97
"""A run ends fit with a median |gap| under the first, a GradScale at the reference exponent of at
least the second, both of the last 100 steps, and a final accuracy of at least the third."""
GAP, GRAD_SCALE = "median_abs_gap_last_100", "reference_grad_scale_median_last_100"


def fit(runs: pd.DataFrame) -> pd.Series[bool]:
    """Which runs ended in a state worth having, and not merely without divergence."""
    held = runs["diverged_at"].isna() & (runs[GAP] < FIT_GAP)
    return held & (runs[GRAD_SCALE] >= FIT_GRAD_SCALE) & (runs["accuracy"] >= FIT_ACCURACY)


def summed_up(remedy: str, own: pd.DataFrame) -> dict[str, str]:
    """Of a remedy's runs, one line."""
    middle, alive = own.median(numeric_only=True), own[own["diverged_at"].isna()]
    living, steps = alive.median(numeric_only=True), own["iterations"].iloc[0]
    cost = middle["seconds_per_step"]
    final = f"{percent(middle['accuracy'])}, {percent(own['accuracy'].min())}"
    return {
        "remedy": remedy,
        "steps": f"{steps:,}",
        "survived": f"{len(alive)} of {len(own)}",
        "ended fit": f"{fit(own).sum()} of {len(own)}",
        "final accuracy: median, worst": final,
        "best accuracy": percent(middle["best_accuracy"]),
        "median gap": number(living[GAP]),
        "GradScale": number(living[GRAD_SCALE]),
        "FID": number(living["fid"]),
        "IS": number(living["is"]),
        "best FID": number(middle["best_fid"]),
        "best IS": number(middle["best_is"]),
        "ms a step": number(1000 * cost, ".1f"),
        "s in all": number(cost * steps, ".0f"),
    }


def scale(judge: Mapping[str, Any]) -> str:
    """How well the judge classifies, and what it says of images and of noise."""
    said = [
        f"{name}: FID {scores['fid']:.3g}, IS {scores['is']:.3g} ({scores['samples']:,} images)"
        for name, scores in judge.items()
        if name != "accuracy"
    ]
    return "; ".join([f"test accuracy {percent(judge['accuracy'])}", *said])


def slots(rows: Rows) -> dict[str, str]:
    frame = pd.DataFrame(rows).infer_objects()
    of = dict(iter(frame[~frame["longer"]].groupby("remedy")))
    return {
        "judge": "; or ".join(sorted({scale(run["judge"]) for run in rows})),
        "summary": table_of([summed_up(name, of[name]) for name in REMEDIES if name in of]),
    }


CLASSIFIER = {JUDGE: {"remedy": None, "seed": JUDGE_SEED, "longer": False}}
GRID = Grid("remedies", CELLS, measure, slots, CLASSIFIER)

if __name__ == "__main__":
    sys.exit(GRID.main())
