"""Which runs the toy figures need, and how they are read, or trained where they are missing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ebmguard.errors import ConfigError

from ..engine.run_folder import CONFIG, RESULTS, open_file, read_json, read_rows
from ..toy.config import ToyConfig
from ..toy.members import VARIANTS
from ..toy.train import GRIDS, MEMBERS, train_run
from .config import ToyFigure

OFF = "0"
"""β of the standard trainer, at which all variants are the same loss."""
SIX = (OFF, "0.1", "0.3", "0.5", "0.7", "0.9")
FOUR = (OFF, "0.1", "0.5", "0.9")
FIXED = ("gmm-degenerate", "circles-degenerate")
EXPLODING = ("gmm-default", "gmm-good+exploding", "gmm-exploding")
HALVED = ("gmm-good+exploding-halved", "gmm-halved")
OTHERS = ("gmm-default", "gmm-good+lost", "gmm-lost", "gmm-good+stuck", "gmm-stuck", *HALVED)


@dataclass(frozen=True)
class Spec:
    """Which runs a figure needs, and how its panels are laid out.

    Attributes:
        scenarios: one run each. Where some are mixtures, all are compared with the first one.
        betas, variants: of every run; each β has a pair of columns, or each variant of a single β.
        seeds: models of each β and variant.
        band: words beside a band, of a setting or of data, variant, negatives and who (draws them).
        split: whether each scenario gets a picture of its own.
    """

    scenarios: tuple[str, ...]
    betas: tuple[str, ...]
    seeds: int = 5
    variants: tuple[str, ...] = ("default",)
    band: str = "{data}"
    split: bool = False

    @property
    def down(self) -> str:
        """What the bands of a run are; the pairs of columns are the other one."""
        return "variant" if len(self.betas) > 1 else "beta"

    @property
    def has_mixtures(self) -> bool:
        """Whether the runs differ in who draws the negatives."""
        return any("+" in scenario for scenario in self.scenarios)


BOTH = ("gmm-default", "circles-default")
FIGURES = {
    "2": Spec(BOTH, SIX, 3),
    "5": Spec(("circles-default", "circles-long"), FOUR, 3, band="{data}, {iterations:,} updates"),
    "6": Spec(("gmm-shifted", "circles-shifted"), FOUR),
    # At β = 0 the variants are one and the same loss.
    "7": Spec(BOTH, FOUR[1:], variants=VARIANTS, band="{variant}", split=True),
    "8": Spec(FIXED, ("0.5",), variants=VARIANTS),
    # The last two are not in the paper: they show how far the optimum can be reached.
    "9": Spec((*FIXED, "gmm-proposal", "circles-proposal"), SIX, band="{data}\n{negatives}"),
    "10": Spec(("gmm-restricted",), SIX, variants=VARIANTS, band="{variant}"),
    "11": Spec(("circles-restricted",), SIX, variants=VARIANTS, band="{variant}"),
    "1d": Spec(("mixture1d-default",), FOUR, 3),
    "mixture": Spec(EXPLODING, FOUR, band="{data}\n{who}"),
    "broken": Spec(OTHERS, FOUR, band="{data}\n{who}"),
}


@dataclass(frozen=True)
class ToyRun:
    """What the folder of a finished toy run holds.

    Attributes:
        scenario: its name.
        settings: those of the scenario as they were resolved.
        members: a row for each member: beta, variant, seed, its metrics, diverged_at.
        axis: (n,) coordinates of the grid, the same on each axis.
        negative_energy: (G, n, n), index [member, y, x], or (G, n) in 1D: the log density on the
            grid up to a constant.
        samples: (G, samples, dim) what the training's SGLD makes of each final model.
        evaluations: a row for every evaluation of every member: step, member, kl and more.
        alerts: the guard's alerts as records, oldest first.
    """

    scenario: str
    settings: dict[str, Any]
    members: pd.DataFrame
    axis: np.ndarray
    negative_energy: np.ndarray
    samples: np.ndarray
    evaluations: pd.DataFrame
    alerts: list[dict[str, Any]]


def load_run(path: Path) -> ToyRun:
    """Read a finished folder of `ebmguard train toy`; raises ConfigError where a file is missing.

    Numbers that are not finite are stored as words, undefined ones may be null.
    """
    config, results = (read_json(path / name) for name in (CONFIG, RESULTS))
    with open_file(path / "figures" / GRIDS) as stream, np.load(stream) as stored:
        arrays = {name: stored[name] for name in ("axis", "negative_energy", "samples")}
    members, evaluations = (
        rows.astype({name: float for name in rows if name not in ("beta", "variant")})
        for rows in (pd.DataFrame(results["members"]), pd.DataFrame(read_rows(path, MEMBERS)))
    )
    own = {
        "members": members,
        "evaluations": evaluations,
        "alerts": read_rows(path, "alerts.jsonl"),
    }
    return ToyRun(config["scenario"], config["settings"], **own, **arrays)


def training(config: ToyFigure, scenario: str) -> ToyConfig:
    """The run of one of a figure's scenarios."""
    spec, most = FIGURES[config.name], ToyConfig.evaluations
    return ToyConfig(
        out=config.folder / scenario,
        scenario=scenario,
        betas=spec.betas,
        variants=spec.variants,
        seeds=spec.seeds if config.seeds is None else config.seeds,
        iterations=config.iterations,
        # A run of a few updates cannot be evaluated more often than it is updated.
        evaluations=most if config.iterations is None else max(1, min(most, config.iterations)),
        device=config.device,
        threads=config.threads,
    )


def opened(config: ToyFigure) -> list[ToyRun] | None:
    """The finished runs of a figure, trained where they are not there yet.

    All folders are looked at before anything is trained. None where Ctrl-C stopped a training.
    """
    wanted = [training(config, scenario) for scenario in FIGURES[config.name].scenarios]
    for own in wanted:
        own.check()
        _refuse_other_run(own)
    for place, own in enumerate(wanted, start=1):
        done = own.out / RESULTS
        # A run that is being made longer has the results of the shorter one.
        if done.is_file() and read_json(done)["iterations"] == own.settings.iterations:
            continue
        begun = (own.out / CONFIG).is_file()
        doing = "resuming" if begun else "training"
        print(f"{doing} {own.scenario} in {own.out} ({place} of {len(wanted)})", flush=True)
        if train_run(replace(own, resume=begun)) is None:
            return None
    return [load_run(own.out) for own in wanted]


def _refuse_other_run(own: ToyConfig) -> None:
    if not (own.out / CONFIG).is_file():
        return
    names = ("scenario", "betas", "variants", "seed", "seeds")
    there, here = (
        {name: found.get(name) for name in names} | found.get("settings", {})
        for found in (read_json(own.out / CONFIG), own.to_json())
    )
    clashes = [
        f"{name}: {there.get(name)} there, {value} here"
        for name, value in here.items()
        if there.get(name) != value
    ]
    if clashes:
        raise ConfigError(
            f"{own.out} holds a run with other settings than this figure's; give the options "
            "that it was made with, or choose another --out:\n  " + "\n  ".join(clashes)
        )
