"""Runs of toy figures: which they need, how they are read or trained, and their numbers in rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from ebmguard.errors import ConfigError

from ..engine.run_folder import CONFIG, RESULTS, open_file, read_json, read_rows
from ..plots.numbers import mean, number
from ..toy.config import ToyConfig
from ..toy.distributions import DISTRIBUTIONS
from ..toy.evaluate import log_masses
from ..toy.grid import Grid, bandwidth, kde
from ..toy.members import VARIANTS
from ..toy.scenario import GOOD
from ..toy.train import GRIDS, MEMBERS, train_run
from .config import ToyFigure
from .study import ABOUT, frame_of

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
        band: words beside a band, of a setting or of data, variant and who (draws the negatives).
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
    "9": Spec(FIXED, SIX),
    "10": Spec(("gmm-restricted",), SIX, variants=VARIANTS, band="{variant}"),
    "11": Spec(("circles-restricted",), SIX, variants=VARIANTS, band="{variant}"),
    "1d": Spec(("mixture1d-default",), FOUR, 3),
    "mixture": Spec(EXPLODING, FOUR, band="{data}\n{who}"),
    "broken": Spec(OTHERS, FOUR, band="{data}\n{who}"),
}


@dataclass(frozen=True)
class ToyRun:
    """What the folder of a finished toy run of G members holds."""

    scenario: str
    settings: dict[str, Any]  # of the scenario, as they were resolved
    members: pd.DataFrame  # a row each: beta, variant, seed, metrics, diverged_at
    evaluations: pd.DataFrame  # a row for every one of every member: step, member, kl and more
    alerts: list[dict[str, Any]]  # the guard's, oldest first
    axis: np.ndarray  # (n,) coordinates of the grid, the same on each axis
    negative_energy: np.ndarray  # (G, n, n) by [member, y, x], or (G, n): log density + constant
    samples: np.ndarray  # (G, samples, dim): what the training's SGLD makes of each final model


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
    alerts = read_rows(path, "alerts.jsonl")
    return ToyRun(config["scenario"], config["settings"], members, evaluations, alerts, **arrays)


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
        evaluations=min(most, config.iterations or most),
        device=config.device,
        threads=config.threads,
    )


def opened(config: ToyFigure) -> list[ToyRun] | None:
    """The finished runs of a figure, trained where they are missing; None after Ctrl-C."""
    wanted = [training(config, scenario) for scenario in FIGURES[config.name].scenarios]
    for own in wanted:  # all, before anything is trained
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
    both = read_json(own.out / CONFIG), own.to_json()
    # Of what a scenario sets, the resolved values count.
    there, here = (of | of.get("settings", {}) for of in both)
    names = ("scenario", "betas", "variants", "seed", "seeds", *here["settings"])
    clashes = [n for n in names if there.get(n) != here[n]]
    if clashes:
        lines = "\n  ".join(f"{n}: {there.get(n)} there, {here[n]} here" for n in clashes)
        raise ConfigError(
            f"{own.out} holds a run with other settings than this figure's; give the options "
            f"that it was made with, or choose another --out:\n  {lines}"
        )


COLUMNS = {
    "kl": "KL(p_d‖p_θ)",
    "tv": "TV",
    "kl_sgld": "KL of SGLD(p_θ)",
    "mode_mass_error": "mode mass error",
    "energy_scale": "energy scale",
}
"""Metrics of every run, and their heads."""
GOOD_WEIGHT = f"mixture/{GOOD}/weight"
"""Share of the whole weight that the negatives of the good sampler carry; of mixtures only."""
OF_SOME = ("oracle_r2", GOOD_WEIGHT)
"""Metrics of runs without SGLD, and of mixtures."""
FLOOR = 1e-10
"""Added to a density before its logarithm is taken, as in the code of Nijkamp et al. (2020)."""
DATA = {"gmm": "GMM", "circles": "circles", "mixture1d": "1D mixture"}
VARIANT = {"default": "default", "no_pos": "no pos", "batch": "batch corr", "true": "true obj"}
"""Variants by the names that the paper's figures give them."""


class Spread(NamedTuple):
    """Median, minimum and maximum over seeds.

    NaN, of a member that diverged, ranks last: the median of half-lost seeds is undefined.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Any) -> Spread:
        """The spread of at least one value."""
        ranked = np.sort(np.asarray(values, dtype=float)).tolist()
        count = len(ranked)
        return cls((ranked[(count - 1) // 2] + ranked[count // 2]) / 2, ranked[0], ranked[-1])

    def __str__(self) -> str:
        if math.isnan(self.low) or self.low == self.high:
            return number(self.low)
        return f"{number(self.median)} [{number(self.low)}, {number(self.high)}]"


def members(runs: Sequence[ToyRun], config: ToyFigure) -> pd.DataFrame:
    """A row for each run, variant and β: spreads over seeds, and densities of the first seed."""
    spec = FIGURES[config.name]
    frame = frame_of([row for run in runs for row in _rows(spec, run, runs[0])])
    frame.attrs["spec"] = config.name
    return frame


def _rows(spec: Spec, run: ToyRun, first: ToyRun) -> Iterator[dict[str, Any]]:
    settings, seen = run.settings, run.evaluations
    names = [*COLUMNS, *(name for name in OF_SOME if name in run.members)]
    names += ["grad_scale"] if spec.has_mixtures else []
    for (variant, beta), own in run.members.groupby(["variant", "beta"], sort=False):
        seeds = f"{len(own)} seed{'s' * (len(own) > 1)}"
        row: dict[str, Any] = {
            ABOUT: f"{run.scenario}: {settings['iterations']:,} updates, {seeds}"
        }
        row |= {"scenario": run.scenario, "variant": VARIANT[variant], "beta": beta}
        row |= {"seeds": len(own), **{name: Spread.of(own[name]) for name in names}}
        # What it is compared with: the first run, or β = 0.
        of, at = (first, beta) if spec.has_mixtures else (run, OFF)
        base = of.members[(of.members["beta"] == at) & (of.members["variant"] == variant)]
        if len(base) and (of is not run or at != beta):
            row |= over(base[["kl", "kl_sgld"]], own[["kl", "kl_sgld"]])
        if GOOD_WEIGHT in run.members:
            weights = seen.loc[seen["member"].isin(own.index), GOOD_WEIGHT]
            row["weight of the whole training"] = mean(weights.tolist())
        lost = own["diverged_at"].dropna()
        row["diverged"] = len(lost)
        if len(lost):
            alerts = [alert for i in own.index if (alert := first_alert(run, i))]
            row |= {"first lost at": int(lost.min()), "alerted": len(alerts)}
            row["first alert at"] = min((int(a["step"]) for a in alerts), default=None)
        yield row | {"picture": _picture(spec, run, own)}


def over(base: pd.DataFrame, own: pd.DataFrame) -> dict[str, float]:
    """KL over that of the same seeds elsewhere: the ratio of the means, and medians of ratios.

    The ratio of a seed that is lost is infinite, or undefined where it is lost there too.
    """
    ratios = own.fillna(math.inf).reset_index(drop=True) / base.reset_index(drop=True)
    found = {"kl over": mean(own["kl"].tolist()) / mean(base["kl"].tolist())}
    return found | {f"{name} of seeds": Spread.of(ratios[name]).median for name in base}


def first_alert(run: ToyRun, member: int) -> dict[str, Any] | None:
    """The first WARN or ERROR that the guard raised on a member."""
    own = (a for a in run.alerts if a["level"] in ("WARN", "ERROR") and a.get("member") == member)
    return next(own, None)


def _picture(spec: Spec, run: ToyRun, own: pd.DataFrame) -> dict[str, Any]:
    """What is drawn: of the first seed densities and their logarithms with words below; courses."""
    settings, index, lost = run.settings, own.index[0], own["diverged_at"].iloc[0]
    distribution, count = DISTRIBUTIONS[settings["data"]], settings["n_neg"]
    grid = Grid.of(distribution, resolution=len(run.axis))
    energy, samples = (torch.from_numpy(x[index]) for x in (run.negative_energy, run.samples))
    densities = {
        "truth": distribution.pictured_log_density(grid.points).exp(),
        "learned": (log_masses(energy.flatten()) - math.log(grid.cell)).exp(),
        "sampled": kde(samples, grid, bandwidth(distribution, grid)),
    }
    panels: dict[str, Any] = {}
    ends = {"learned": "", "sampled": "_sgld"}
    for name, density in densities.items():
        shown = density.reshape(grid.shape).numpy() if density.isfinite().all() else None
        both = shown, None if shown is None else np.log(shown + FLOOR)
        words = [
            _words(own[metric + ends[name]]) if name in ends else "" for metric in ("kl", "tv")
        ]
        panels[name] = [*zip(both, words, strict=True)]
    instead = "not finite" if math.isnan(lost) else f"diverged at\nupdate {lost:,.0f}"
    if alert := first_alert(run, index):
        instead += f"\n{alert['level']} at {alert['step']:,}:\n{alert['rule']}"
    known = {"data": DATA[settings["data"]], "variant": VARIANT[own["variant"].iloc[0]]}
    band = spec.band.format(**settings | known, who=who_draws(settings["samplers"], count))
    seen = run.evaluations[run.evaluations["member"].isin(own.index)].groupby("step")
    course = {
        name: [(step, *Spread.of(values)) for step, values in seen[name]]
        for name in ("kl", GOOD_WEIGHT)
        if name in run.evaluations
    }
    panels |= {"settings": settings, "band": band, "instead": instead}
    return {**panels, "axis": run.axis, "course": course}


def _words(values: pd.Series[float]) -> str:
    """A metric of the first seed, and the median below it."""
    words = f"{str(values.name)[:2].upper()} {number(values.iloc[0], 2)}"
    median = number(Spread.of(values).median, 2)
    of = median if median == "undefined" else f"of {len(values)}: {median}"
    return words if len(values) == 1 else f"{words}\nmedian {of}"


def who_draws(samplers: str, count: int) -> str:
    """Samplers, and how many negatives each of them draws."""
    return f"{samplers.replace('+', ' + ')}: {count}{' each' * ('+' in samplers)}"


def default_is_best(frame: pd.DataFrame) -> bool | None:
    """Whether no variant is nearer than the default in all seeds, of those with several.

    None where the default's medians are all undefined, or there is one seed.
    """
    said = set()
    several = frame[(frame["beta"] != OFF) & (frame["seeds"] > 1)]
    for _, kl in several.groupby(["scenario", "beta"], sort=False)["kl"]:
        own, *others = kl
        lost = math.isnan(own.low)
        nearer = any(o.high < own.low or (lost and not math.isnan(o.high)) for o in others)
        said.add(False if nearer else None if math.isnan(own.median) else True)
    return False if False in said else True if True in said else None


def nearer_with_beta(frame: pd.DataFrame) -> bool | None:
    """Whether KL falls from β = 0 to every β, by the median seed, of the runs that have one."""
    ratios = [ratio for ratio in frame["kl of seeds"] if ratio is not None]
    return None if any(map(math.isnan, ratios)) else all(ratio < 1 for ratio in ratios)


def one_good_is_enough(frame: pd.DataFrame) -> bool | None:
    """Whether mean KLs of mixtures are at most a fifth above those of the good sampler alone."""
    ratios = frame.loc[frame["weight of the whole training"].notna(), "kl over"]
    return None if ratios.isna().any() else bool((ratios <= 1.2).all())


CLAIMS = (
    ("at every β > 0 the median seed's KL(p_d‖p_θ) is below its own at β = 0", nearer_with_beta),
    ("no other variant is nearer to the data than the default in all seeds", default_is_best),
    ("one good sampler in a mixture: mean KL at most a fifth above its own", one_good_is_enough),
)
