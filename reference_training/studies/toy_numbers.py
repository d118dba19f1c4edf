"""Toy runs in rows: what the seeds of each β and variant came to, and densities of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from ..plots.numbers import mean, number
from ..toy.distributions import DISTRIBUTIONS
from ..toy.evaluate import log_masses
from ..toy.grid import Grid, bandwidth, kde
from ..toy.scenario import GOOD
from .config import ToyFigure
from .study import ABOUT, frame_of
from .toy import FIGURES, OFF, Spec, ToyRun

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

    An undefined value (NaN, of a member that diverged) is never dropped: it ranks last, so that
    the median is undefined when half of the seeds are lost.
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
            ABOUT: f"{run.scenario}: {settings['iterations']:,} updates, {seeds}",
            "scenario": run.scenario,
            "variant": VARIANT[variant],
            "beta": beta,
            "seeds": len(own),
            **{name: Spread.of(own[name]) for name in names},
        }
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
    panels = {}
    for name, density in densities.items():
        shown = density.reshape(grid.shape).numpy() if density.isfinite().all() else None
        both = shown, None if shown is None else np.log(shown + FLOOR)
        metrics = [metric + "_sgld" * (name == "sampled") for metric in ("kl", "tv")]
        words = ["" if name == "truth" else _words(own[metric]) for metric in metrics]
        panels[name] = [*zip(both, words, strict=True)]
    instead = "not finite" if math.isnan(lost) else f"diverged at\nupdate {lost:,.0f}"
    if alert := first_alert(run, index):
        instead += f"\n{alert['level']} at {alert['step']:,}:\n{alert['rule']}"
    known = {
        "data": DATA[settings["data"]],
        "variant": VARIANT[own["variant"].iloc[0]],
        "who": who_draws(settings["samplers"], count),
        "negatives": f"{count} negative{'s' * (count > 1)}"
        + ", decaying rate" * (settings["lr_end"] < settings["lr"]),
    }
    band = spec.band.format(**{**settings, **known})
    seen = run.evaluations[run.evaluations["member"].isin(own.index)].groupby("step")
    course = {
        name: [(step, *Spread.of(values)) for step, values in seen[name]]
        for name in ("kl", GOOD_WEIGHT)
        if name in run.evaluations
    }
    about = {"settings": settings, "band": band, "instead": instead}
    return {**panels, **about, "axis": run.axis, "course": course}


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
