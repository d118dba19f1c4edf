"""Which runs the toy figures need, and how they are read, or trained where they are missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ebmguard.errors import ConfigError

from ..engine.run_folder import CONFIG, RESULTS, open_file, read_json, read_rows
from ..toy.config import ToyConfig
from ..toy.course import GRIDS, MEMBERS
from ..toy.distributions import DISTRIBUTIONS, Distribution
from ..toy.members import VARIANTS
from ..toy.train import train_run
from .config import ToyFigure

OFF = "0"
"""β of the standard trainer, at which all variants are the same loss."""
SIX = (OFF, "0.1", "0.3", "0.5", "0.7", "0.9")
FOUR = (OFF, "0.1", "0.5", "0.9")
SOME = ("0.1", "0.5", "0.9")
FIXED = ("gmm-degenerate", "circles-degenerate")
EXPLODING = ("gmm-default", "gmm-good+exploding", "gmm-exploding")
HALVED = ("gmm-good+exploding-halved", "gmm-halved")
OTHERS = ("gmm-default", "gmm-good+lost", "gmm-lost", "gmm-good+stuck", "gmm-stuck", *HALVED)


@dataclass(frozen=True)
class Spec:
    """Which runs a figure needs, and how its panels are laid out.

    Attributes:
        scenarios: one run each.
        betas, variants: of every run.
        seeds: models of each β and variant.
        across: what the pairs of columns are; each of the others is a band of two rows.
        band: what tells the bands apart.
        split: whether each scenario gets a picture of its own.
        samplers: whether the runs differ in who draws the negatives, and are compared with the
            first one.
    """

    scenarios: tuple[str, ...]
    betas: tuple[str, ...]
    seeds: int = 5
    variants: tuple[str, ...] = ("default",)
    across: Literal["beta", "variant"] = "beta"
    band: Literal["data", "updates", "variant", "negatives", "samplers"] = "data"
    split: bool = False
    samplers: bool = False


FIGURES = {
    "2": Spec(("gmm-default", "circles-default"), SIX, 3),
    "5": Spec(("circles-default", "circles-long"), FOUR, 3, band="updates"),
    "6": Spec(("gmm-shifted", "circles-shifted"), FOUR),
    # At β = 0 the variants are one and the same loss.
    "7": Spec(("gmm-default", "circles-default"), SOME, 5, VARIANTS, band="variant", split=True),
    "8": Spec(FIXED, ("0.5",), 5, VARIANTS, "variant"),
    # The last two are not in the paper: they show how far the optimum can be reached.
    "9": Spec((*FIXED, "gmm-proposal", "circles-proposal"), SIX, band="negatives"),
    "10": Spec(("gmm-restricted",), SIX, 5, VARIANTS, band="variant"),
    "11": Spec(("circles-restricted",), SIX, 5, VARIANTS, band="variant"),
    "1d": Spec(("mixture1d-default",), FOUR, 3),
    "mixture": Spec(EXPLODING, FOUR, band="samplers", samplers=True),
    "broken": Spec(OTHERS, FOUR, band="samplers", samplers=True),
}


@dataclass(frozen=True)
class ToyRun:
    """What the folder of a finished toy run holds.

    Attributes:
        path: the folder.
        config, results: of config.json and results.json, members in the order of the ensemble.
        axis: (n,) coordinates of the grid, the same on each axis.
        negative_energy: (G, n, n), index [member, y, x], or (G, n) in 1D: the log density on the
            grid up to a constant.
        samples: (G, samples, dim) what the training's SGLD makes of each final model.
        evaluations: every evaluation of every member, {"step", "member", "kl", ...}.
        alerts: the guard's alerts as records, oldest first.
    """

    path: Path
    config: dict[str, Any]
    results: dict[str, Any]
    axis: np.ndarray
    negative_energy: np.ndarray
    samples: np.ndarray
    evaluations: list[dict[str, Any]]
    alerts: list[dict[str, Any]]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The scenario's settings as they were resolved."""
        settings: dict[str, Any] = self.config["settings"]
        return settings

    @property
    def scenario(self) -> str:
        """Name of the scenario."""
        return str(self.config["scenario"])

    @property
    def distribution(self) -> Distribution:
        """The distribution of the data."""
        return DISTRIBUTIONS[str(self.settings["data"])]

    @property
    def samplers(self) -> tuple[str, ...]:
        """Who draws the negatives."""
        return tuple(str(self.settings["samplers"]).split("+"))

    def of(self, beta: str, variant: str) -> dict[int, dict[str, Any]]:
        """The members of a β and a variant by their place, first seed first."""
        own = enumerate(self.results["members"])
        found = {i: m for i, m in own if (str(m["beta"]), m["variant"]) == (beta, variant)}
        if not found:
            there = dict.fromkeys(f"{m['beta']} {m['variant']}" for m in self.results["members"])
            raise ConfigError(
                f"{self.path} has no member with beta {beta} and variant {variant}; it has "
                + ", ".join(there)
            )
        return dict(sorted(found.items(), key=lambda item: item[1]["seed"]))


def load_run(path: Path) -> ToyRun:
    """Read a folder that `ebmguard train toy` has written."""
    files = {name: path / name for name in (CONFIG, RESULTS, f"figures/{GRIDS}")}
    missing = [name for name, file in files.items() if not file.is_file()]
    if missing:
        raise ConfigError(
            f"{path} is not the folder of a finished toy run: {', '.join(missing)} missing. Finish "
            "it with `ebmguard train toy --resume`, or name another folder."
        )
    config, results = (read_json(files[name]) for name in (CONFIG, RESULTS))
    with open_file(files[f"figures/{GRIDS}"]) as stream, np.load(stream) as stored:
        axis, energies, samples = (stored[k] for k in ("axis", "negative_energy", "samples"))
    members = results["members"]
    if not len(members) == len(energies) == len(samples):
        raise ConfigError(
            f"the files in {path} are of different runs: {len(members)} members in results.json, "
            f"{len(energies)} energies and {len(samples)} sets of samples in {GRIDS}. Train it "
            "again in a new folder."
        )
    evaluations, alerts = (read_rows(path, name) for name in (MEMBERS, "alerts.jsonl"))
    return ToyRun(path, config, results, axis, energies, samples, evaluations, alerts)


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
    wanted = {scenario: training(config, scenario) for scenario in FIGURES[config.name].scenarios}
    for own in wanted.values():
        own.check()
        _refuse_other_run(own)
    for place, (scenario, own) in enumerate(wanted.items(), start=1):
        done = own.out / RESULTS
        # A run that is being made longer has the results of the shorter one.
        if done.is_file() and read_json(done)["iterations"] == own.settings.iterations:
            continue
        begun = (own.out / CONFIG).is_file()
        doing = "resuming" if begun else "training"
        print(f"{doing} {scenario} in {own.out} ({place} of {len(wanted)})", flush=True)
        if train_run(dataclasses.replace(own, resume=begun)) is None:
            return None
    return [load_run(own.out) for own in wanted.values()]


def _refuse_other_run(own: ToyConfig) -> None:
    file = own.out / CONFIG
    if not file.is_file():
        return
    stored, asked = read_json(file), own.to_json()
    names = ("scenario", "betas", "variants", "seed", "seeds")
    pairs = [(name, stored.get(name), asked[name]) for name in names]
    there = stored.get("settings", {})
    pairs += [(name, there.get(name), value) for name, value in asked["settings"].items()]
    clashes = [f"{name}: {old} there, {new} here" for name, old, new in pairs if old != new]
    if clashes:
        raise ConfigError(
            f"{own.out} holds a run with other settings than this figure's; give the options "
            "that it was made with, or choose another --out:\n  " + "\n  ".join(clashes)
        )
