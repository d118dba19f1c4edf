"""β* on short-run training: how far it can go up, and what the adaptive sampler changes.

    python -m benchmarks.shortrun_beta                # all runs, two at a time: an hour
    python -m benchmarks.shortrun_beta --table-only   # the tables of what has been run

Runs that are done are kept, so that an interrupted grid goes on where it was. The page of results
is written anew after each run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ebmguard.reference_training.judge.evaluate import EVALUATION
from ebmguard.reference_training.judge.features import load_features
from ebmguard.reference_training.judge.shortrun import judged
from ebmguard.reference_training.plots.markdown import markdown_table
from ebmguard.reference_training.shortrun.trained import load_run
from ebmguard.sinks import read_jsonl, to_json

from .cells import commits, is_done, number, read_json, rules, run_cells, write_json, write_page

WORDS = ("python", "-m", "benchmarks.shortrun_beta")
BETA_STARS = (0.0, 0.02, 0.2, 2.0, 20.0, 200.0, 2000.0)
ADAPTIVE = (20.0, 200.0)
"""β* that are also run with up to MOST times the steps, each as much finer."""
MOST = 4
DATA: Mapping[str, tuple[str, ...]] = {
    "digits": ("--iterations", "700"),
    "mnist": ("--iterations", "400"),
}
"""Options of the runs on each data set."""
JUDGE: Mapping[str, tuple[str, ...]] = {
    "digits": ("--iterations", "2000", "--valid-images", "200"),
    # The small network of the digits, on 14x14 pixels.
    "mnist": (
        "--iterations",
        "1000",
        "--image-size",
        "14",
        "--scenario",
        "digits",
        "--valid-images",
        "1000",
        "--test-images",
        "1000",
        "--eval-every",
        "200",
    ),
}
"""Options of the classifier whose features the FID is taken of."""
SAMPLES = 1000
LAST = 100
"""Updates whose medians are shown."""


@dataclass(frozen=True)
class Cell:
    """A run of the grid; without a β* the classifier that judges the others."""

    data: str
    beta_star: float | None = None
    most_steps: int = 1

    @property
    def name(self) -> str:
        if self.beta_star is None:
            return f"{self.data}-judge"
        adaptive = f"-most{self.most_steps}" if self.most_steps > 1 else ""
        return f"{self.data}-b{self.beta_star:g}{adaptive}"

    def command(self, folder: Path) -> Sequence[str]:
        out = [sys.executable, "-m", "ebmguard", "train"]
        if (folder / "config.json").is_file():
            name = "jem" if self.beta_star is None else "shortrun"
            return [*out, name, "--out", str(folder), "--resume"]
        if self.beta_star is None:
            plain = ("--p-x-weight", "0", "--n-labelled", "0", "--data", self.data)
            return [*out, "jem", "--out", str(folder), *plain, *JUDGE[self.data]]
        words = ("--data", self.data, "--beta-star", f"{self.beta_star:g}")
        steps = ("--most-steps", str(self.most_steps))
        return [*out, "shortrun", "--out", str(folder), *words, *steps, *DATA[self.data]]


GRID = [
    cell
    for data in DATA
    for cell in (
        Cell(data),
        *(Cell(data, beta_star) for beta_star in BETA_STARS),
        *(Cell(data, beta_star, MOST) for beta_star in ADAPTIVE),
    )
]


def measure(folder: Path, judge: Path) -> dict[str, Any]:
    """FID and Inception score of fresh samples, of held-out images and of noise.

    Kept in the run folder: the scores of a finished run do not change.
    """
    file = folder / EVALUATION
    if not file.is_file():
        device = torch.device("cpu")
        features = load_features(str(judge), device)
        write_json(file, to_json(judged(load_run(folder, device), features, SAMPLES)))
    scores: dict[str, Any] = read_json(file)["scores"]
    return scores


def page(root: Path) -> list[str]:
    """The page of results, of the runs that are done."""
    lines = [
        "# β\\* on short-run training",
        "",
        "How far β* can go up before training stops, on two small data sets. Written by",
        f"`{' '.join(WORDS)}`, commits {', '.join(commits(root)) or 'none yet'}.",
        "",
        rules(root),
        "",
        f"β = β*/20,000. Medians over the last {LAST} updates; at β* = 0, where weights are",
        "uniform, GradScale and ESS are those of the reference exponent 0.5. FID: of",
        f"{SAMPLES} fresh samples against the training images, by the features of a classifier",
        "trained here: comparable within a table alone. K is the mean number of Langevin steps of",
        f"an update; the lines that end in `adaptive` may run up to {MOST} times the steps, each",
        "as much finer.",
    ]
    for data in DATA:
        done = [cell for cell in GRID if cell.data == data and is_done(cell, root)]
        runs = [cell for cell in done if cell.beta_star is not None]
        judge = root / Cell(data).name
        if Cell(data) not in done or not runs:
            continue
        lines += ["", f"## {data}", "", table(root, runs, judge)]
    return lines


def table(root: Path, runs: Sequence[Cell], judge: Path) -> str:
    """One line for each run, and the FID of held-out images and of noise below."""
    head = ["β*", "β", "K", "gap", "β* · gap", "GradScale", "ESS", "‖∇f‖", "FID", "IS", "alerts"]
    rows = []
    scores: dict[str, Any] = {}
    for cell in runs:
        assert cell.beta_star is not None
        folder = root / cell.name
        results, scores = read_json(folder / "results.json"), measure(folder, judge)
        last = results["median_last_100"]
        steps = [row["sgld_steps"] for row in read_jsonl(folder / "training.jsonl")]
        prefix = "" if cell.beta_star else "ref/"
        gap = last["energy_gap"]
        alerts = [results[level] for level in ("first_warn", "first_error")]
        said = [f"{a['level']} {a['rule']} @{a['step']}" for a in alerts if a is not None]
        rows.append(
            [
                f"{cell.beta_star:g}" + (" adaptive" if cell.most_steps > 1 else ""),
                f"{results['beta']:.0e}" if cell.beta_star else "0",
                f"{sum(steps) / len(steps):.0f}",
                number(gap),
                number(None if gap is None else gap * cell.beta_star),
                number(last[f"{prefix}grad_scale"]),
                number(last[f"{prefix}ess"]),
                number(last["sampler/grad_norm"]),
                number(scores["samples"]["fid"]),
                number(scores["samples"]["is"]),
                ", ".join(dict.fromkeys(said)) or "none",
            ]
        )
    floor = " and ".join(
        f"{words} {number(scores[name]['fid'])} (IS {number(scores[name]['is'])})"
        for name, words in (("held_out", "held-out images"), ("noise", "the noise at the start"))
    )
    return f"{markdown_table(head, rows)}\n\nFID of {floor}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/shortrun-beta"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/shortrun-beta.md"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table-only", action="store_true")
    given = parser.parse_args()

    def write() -> None:
        write_page(given.out, page(given.runs))

    if not given.table_only:
        run_cells(GRID, given.runs, workers=given.workers, after=write)
    write()


if __name__ == "__main__":
    main()
