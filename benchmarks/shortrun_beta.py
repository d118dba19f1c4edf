"""β* on short-run training: how far it can go up, and what the adaptive sampler changes.

python -m benchmarks.shortrun_beta                # all runs, two at a time: an hour
python -m benchmarks.shortrun_beta --table-only   # the tables of what has been run

"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ebmguard.reference_training.judge.evaluate import EVALUATION
from ebmguard.reference_training.judge.features import load_features
from ebmguard.reference_training.judge.shortrun import judged
from ebmguard.reference_training.shortrun.trained import load_run
from ebmguard.sinks import read_jsonl, to_json

from .cells import Grid, load, number, read_json, table, train_command, write_json

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
        if self.beta_star is None:
            plain = ("--p-x-weight", "0", "--n-labelled", "0", "--data", self.data)
            return train_command("jem", folder, *plain, *JUDGE[self.data])
        words = ("--data", self.data, "--beta-star", f"{self.beta_star:g}")
        steps = ("--most-steps", str(self.most_steps))
        return train_command("shortrun", folder, *words, *steps, *DATA[self.data])


CELLS = [
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
        "How far β* can go up before training stops, on two small data sets.",
        "",
        *GRID.source(root),
        f"β = β*/20,000. Medians over the last {LAST} updates; at β* = 0, where weights are",
        "uniform, GradScale and ESS are those of the reference exponent 0.5. FID: of",
        f"{SAMPLES} fresh samples against the training images, by the features of a classifier",
        "trained here: comparable within a table alone. K is the mean number of Langevin steps of",
        f"an update; the lines that end in `adaptive` may run up to {MOST} times the steps, each",
        "as much finer.",
    ]
    for data in DATA:
        done = load((cell for cell in CELLS if cell.data == data), root)
        judges = [run["cell"] for run in done if run["cell"].beta_star is None]
        runs = [run for run in done if run["cell"].beta_star is not None]
        if judges and runs:
            lines += ["", f"## {data}", "", table_of(root, runs, root / judges[0].name)]
    return lines


def table_of(root: Path, runs: Sequence[dict[str, Any]], judge: Path) -> str:
    """One line for each run, and the FID of held-out images and of noise below."""
    for run in runs:
        folder, last = root / run["cell"].name, run["median_last_100"]
        prefix = "" if run["beta_star"] else "ref/"
        steps = [row["sgld_steps"] for row in read_jsonl(folder / "metrics.jsonl")]
        alerts = [alert for alert in (run["first_warn"], run["first_error"]) if alert]
        run |= {
            "gap": last["energy_gap"],
            "weights": [last[f"{prefix}{name}"] for name in ("grad_scale", "ess")],
            "K": sum(steps) / len(steps),
            "said": [f"{a['level']} {a['rule']} @{a['step']}" for a in alerts],
            "scores": measure(folder, judge),
        }
    scores = runs[-1]["scores"]
    floor = " and ".join(
        f"{words} {number(scores[name]['fid'])} (IS {number(scores[name]['is'])})"
        for name, words in (("held_out", "held-out images"), ("noise", "the noise at the start"))
    )
    return f"{table(runs, COLUMNS)}\n\nFID of {floor}."


COLUMNS = {
    "β*": lambda run: f"{run['beta_star']:g}" + " adaptive" * (run["most_steps"] > 1),
    "β": lambda run: f"{run['beta']:.0e}" if run["beta_star"] else "0",
    "K": lambda run: f"{run['K']:.0f}",
    "gap": lambda run: number(run["gap"]),
    "β* · gap": lambda run: number(None if run["gap"] is None else run["gap"] * run["beta_star"]),
    "GradScale": lambda run: number(run["weights"][0]),
    "ESS": lambda run: number(run["weights"][1]),
    "‖∇f‖": lambda run: number(run["median_last_100"]["sampler/grad_norm"]),
    "FID": lambda run: number(run["scores"]["samples"]["fid"]),
    "IS": lambda run: number(run["scores"]["samples"]["is"]),
    "alerts": lambda run: ", ".join(dict.fromkeys(run["said"])) or "none",
}
GRID = Grid(
    "shortrun_beta", CELLS, page, Path("docs/results/shortrun-beta.md"), Path("runs/shortrun-beta")
)

if __name__ == "__main__":
    GRID.main()
