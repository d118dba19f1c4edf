"""Toy runs in rows: what the seeds of each β and variant came to, and densities of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import pandas as pd
import torch

from ..plots.numbers import mean, number
from ..toy.broken import GOOD
from ..toy.distributions import DISTRIBUTIONS
from ..toy.grid import Grid
from ..toy.kde import bandwidth, kde
from ..toy.metrics import log_masses
from ..toy.tabular import oracle_r2
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
TABULAR = ("0.3", "0.5", "0.9")
"""β at which the optimum of a table is found, where that of the networks is known."""
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
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        ranked = sorted(values, key=lambda value: (math.isnan(value), value))
        half = len(ranked) // 2
        middle = ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2
        return cls(middle, ranked[0], ranked[-1])

    def overlaps(self, other: Spread) -> bool:
        """Whether the two ranges share a value; an undefined end is worse than every number."""
        ends = [
            math.inf if math.isnan(x) else x for x in (self.low, other.high, other.low, self.high)
        ]
        return ends[0] <= ends[1] and ends[2] <= ends[3]

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
    known, settings = not run.settings["sgld_steps"], run.settings
    names = [
        *COLUMNS,
        *(["oracle_r2"] if known else []),
        *(["grad_scale"] if spec.samplers else []),
    ]
    names += [GOOD_WEIGHT] if len(run.samplers) > 1 else []
    for variant in spec.variants:
        for beta in spec.betas:
            own = run.of(beta, variant)
            seeds = len(own)
            words = f"{run.scenario}: {settings['iterations']:,} updates, {seeds} seed"
            words += "s" * (seeds > 1)
            row: dict[str, Any] = {ABOUT: words, "scenario": run.scenario}
            row |= {"variant": VARIANT[variant], "beta": beta, "seeds": seeds}
            row |= {name: _spread(own, name) for name in names}
            if OFF in spec.betas and beta != OFF and variant == "default" and not spec.samplers:
                row |= trade_off(run.of(OFF, variant), own)
            if spec.samplers and run is not first:
                row |= over_first(first.of(beta, variant), own)
            if len(run.samplers) > 1:
                seen = [e for e in run.evaluations if e["member"] in own]
                row["weight of the whole training"] = mean([value(e, GOOD_WEIGHT) for e in seen])
            if spec.band == "negatives" and beta in TABULAR:
                row["r2 of a table"] = r2_of_a_table(str(settings["data"]), float(beta))
            lost = [m["diverged_at"] for m in own.values() if m["diverged_at"] is not None]
            row["diverged"] = len(lost)
            if lost:
                alerts = [alert for i in own if (alert := first_alert(run, i))]
                row |= {"first lost at": min(lost), "alerted": len(alerts)}
                row["first alert at"] = min((int(a["step"]) for a in alerts), default=None)
            yield row | _pictured(spec, run, own, variant)


@cache
def r2_of_a_table(data: str, beta: float) -> float:
    """R² of the optimal table of 40 cells a side, which takes seconds and knows no run."""
    return oracle_r2(DISTRIBUTIONS[data], beta, 40)


def value(record: Mapping[str, Any], name: str) -> float:
    """A stored number; not finite ones are stored as strings, undefined ones may be null."""
    found = record.get(name)
    return math.nan if found is None else float(found)


def _spread(own: Mapping[int, Mapping[str, Any]], name: str) -> Spread:
    return Spread.of(value(member, name) for member in own.values())


def trade_off(at_zero: Mapping[int, Any], own: Mapping[int, Any]) -> dict[str, float]:
    """How much nearer p_θ comes to the data than at β = 0, and what SGLD(p_θ) pays for it.

    "gain" is the KL at β = 0 over that at β, "price" the KL of SGLD(p_θ) at β over that at β = 0:
    medians over seeds of a seed's two values.
    """
    pairs = [*zip(at_zero.values(), own.values(), strict=True)]
    kl = [(value(zero, "kl"), value(m, "kl")) for zero, m in pairs]
    # A seed that is lost at β has gained nothing, whatever it was at β = 0.
    gain = Spread.of(zero / x if math.isfinite(x) else 0.0 for zero, x in kl).median
    price = Spread.of(value(m, "kl_sgld") / value(zero, "kl_sgld") for zero, m in pairs).median
    return {"gain": math.nan if math.isnan(_spread(at_zero, "kl").median) else gain, "price": price}


def over_first(first: Mapping[int, Any], own: Mapping[int, Any]) -> dict[str, float]:
    """KL over the first run's: the ratio of the means, and the median of seeds' own ratios."""
    base, kl = ([value(m, "kl") for m in each.values()] for each in (first, own))
    ratio = Spread.of(a / b for a, b in zip(kl, base, strict=True)).median
    return {"kl over the first's": mean(kl) / mean(base), "of seeds": ratio}


def first_alert(run: ToyRun, member: int) -> dict[str, Any] | None:
    """The first WARN or ERROR that the guard raised on a member."""
    own = (a for a in run.alerts if a["level"] in ("WARN", "ERROR") and a.get("member") == member)
    return next(own, None)


def _pictured(spec: Spec, run: ToyRun, own: Mapping[int, Any], variant: str) -> dict[str, Any]:
    """What the pictures show: densities of the first seed on the grid, None if not finite."""
    grid = Grid.of(run.distribution, resolution=len(run.axis))
    index, member = next(iter(own.items()))
    energy = torch.from_numpy(run.negative_energy[index]).double().flatten()
    samples = torch.from_numpy(run.samples[index]).double()
    densities = {
        "truth": run.distribution.pictured_log_density(grid.points).exp(),
        "learned": (log_masses(energy) - math.log(grid.cell)).exp(),
        "sampled": kde(samples, grid, bandwidth(run.distribution, grid)),
    }
    shown = {n: x.reshape(grid.shape) for n, x in densities.items() if bool(x.isfinite().all())}
    captions = {name: _caption(own, member, name) for name in ("kl", "tv", "kl_sgld", "tv_sgld")}
    if member["diverged_at"] is not None:
        alert, at = first_alert(run, index), f"{member['diverged_at']:,}"
        captions["kl"] = (f"diverged at {at}", *captions["kl"][1:])
        captions["tv"] = (
            (f"{alert['level']} at {alert['step']:,}:", alert["rule"]) if alert else ("no alert",)
        )
        captions["instead"] = (f"diverged at\nupdate {at}",)
    row: dict[str, Any] = {**shown, "axis": torch.from_numpy(run.axis), "captions": captions}
    row["picture"] = {"data": run.settings["data"], "band": band(spec, run, variant)}
    if spec.samplers:
        row["picture"]["course"] = {name: _course(run, own, name) for name in ("kl", GOOD_WEIGHT)}
        row["picture"] |= {"samplers": run.samplers, "n_neg": run.settings["n_neg"]}
    return row


def _caption(own: Mapping[int, Any], member: Mapping[str, Any], metric: str) -> tuple[str, ...]:
    words = f"{metric[:2].upper()} {number(value(member, metric), 2)}"
    if len(own) == 1:
        return (words,)
    median = _spread(own, metric).median
    told = (
        "median undefined" if math.isnan(median) else f"median of {len(own)}: {number(median, 2)}"
    )
    return words, told


def band(spec: Spec, run: ToyRun, variant: str) -> str:
    """What tells a band of a figure from the others."""
    data, settings = DATA[str(run.settings["data"])], run.settings
    count = settings["n_neg"]
    decays = ", decaying rate" * (settings["lr_end"] < settings["lr"])
    return {
        "data": data,
        "updates": f"{data}, {settings['iterations']:,} updates",
        "variant": VARIANT[variant],
        "negatives": f"{data}\n{count} negative{'s' * (count > 1)}{decays}",
        "samplers": f"{data}\n{who_draws(run.samplers, count)}",
    }[spec.band]


def who_draws(samplers: Sequence[str], count: int) -> str:
    """Samplers, and how many negatives each of them draws."""
    return f"{' + '.join(samplers)}: {count}{' each' * (len(samplers) > 1)}"


def _course(run: ToyRun, own: Mapping[int, Any], name: str) -> dict[int, Spread]:
    """A metric over the updates."""
    found: dict[int, list[float]] = {}
    for evaluation in run.evaluations:
        if evaluation["member"] in own:
            found.setdefault(int(evaluation["step"]), []).append(value(evaluation, name))
    return {step: Spread.of(values) for step, values in found.items()}


Rows = list[dict[str, Any]]


def bands_of(spec: Spec, runs: Sequence[Rows]) -> list[Rows]:
    """The members of each band in the order of the columns."""
    line = "variant" if spec.across == "beta" else "beta"
    return [
        own.to_dict("records")
        for rows in runs
        for _, own in pd.DataFrame(rows).groupby(line, sort=False)
    ]


def heading(spec: Spec, row: dict[str, Any]) -> str:
    """What stands above a column of a figure: its β, or its variant."""
    return f"β = {row['beta']}" if spec.across == "beta" else str(row["variant"])


def default_is_best(frame: pd.DataFrame) -> bool | None:
    """Whether no variant's median KL is below the default's by more than the spread of seeds.

    Of the medians that are defined; None where none is, and of one seed.
    """
    said = set()
    for (_, beta), rows in frame.groupby(["scenario", "beta"], sort=False):
        if beta != OFF and rows["seeds"].min() > 1:
            own, *others = (
                (math.inf if math.isnan(spread.median) else spread.median, spread)
                for spread in rows.set_index("variant")["kl"]
            )
            beyond = any(o[0] < own[0] and not own[1].overlaps(o[1]) for o in others)
            said.add(False if beyond else True if own[0] < math.inf else None)
    return False if False in said else True if True in said else None


def nearer_with_beta(frame: pd.DataFrame) -> bool | None:
    """Whether the median KL at every β is below that at β = 0, of the runs that have one."""
    gains = [gain for gain in frame["gain"] if gain is not None]
    return None if any(map(math.isnan, gains)) else all(gain > 1 for gain in gains)


def one_good_is_enough(frame: pd.DataFrame) -> bool | None:
    """Whether mean KLs of mixtures are at most a fifth above those of the good sampler alone."""
    ratios = frame.loc[frame["weight of the whole training"].notna(), "kl over the first's"]
    return None if ratios.isna().any() else bool((ratios <= 1.2).all())
