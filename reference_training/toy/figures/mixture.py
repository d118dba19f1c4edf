"""Sentences on runs that differ in who draws the negatives."""

from __future__ import annotations

import math

from ...plots.numbers import mean, number
from .runs import GOOD_WEIGHT, ToyRun
from .specs import FigureSpec
from .spread import Spread
from .words import listed

AS_WELL = 1.2
"""A run trains as well as another one if its KL is at most so many times that one's."""


def compare_samplers(spec: FigureSpec, first: ToyRun, run: ToyRun) -> str:
    """How far a run's density is from the data, beside that of the first run of the figure."""
    ratios = {beta: _ratio_of_means(first, run, beta) for beta in spec.betas}
    as_well = [beta for beta, ratio in ratios.items() if ratio <= AS_WELL]
    worse = [beta for beta in spec.betas if beta not in as_well]
    pairs = [f"{_median_of_ratios(first, run, beta)} at {beta}" for beta in spec.betas]
    verdict = "; ".join(
        f"{which} β = {listed(betas)}"
        for which, betas in (
            (f"at most {AS_WELL - 1:.0%} above it at", as_well),
            ("further above at", worse),
        )
        if betas
    )
    means = listed([f"{number(ratio)} at {beta}" for beta, ratio in ratios.items()])
    return (
        f"{run.scenario}: KL(p_d‖p_θ) over the one of {first.scenario}, ratio of the means over "
        f"seeds: {means}; median of the seeds' own ratios: {listed(pairs)}. "
        f"The means are {verdict}."
    )


def weight_on_the_good(spec: FigureSpec, run: ToyRun) -> str:
    """How much of the weight the good sampler's negatives carry, over the whole training."""
    shares = [f"{number(_share(run, beta))} at {beta}" for beta in spec.betas]
    return (
        f"{run.scenario}: share of the weight on the good sampler's negatives, mean over all "
        f"evaluations and seeds: {listed(shares)}."
    )


def _ratio_of_means(first: ToyRun, run: ToyRun, beta: str) -> float:
    own, base = (mean([m.metrics["kl"] for m in of.of(beta, "default")]) for of in (run, first))
    return own / base


def _median_of_ratios(first: ToyRun, run: ToyRun, beta: str) -> str:
    pairs = zip(run.of(beta, "default"), first.of(beta, "default"), strict=True)
    return number(Spread.of(a.metrics["kl"] / b.metrics["kl"] for a, b in pairs).median)


def _share(run: ToyRun, beta: str) -> float:
    indices = {member.index for member in run.of(beta, "default")}
    mine = [e for e in run.evaluations if e["member"] in indices]
    return mean([float(e.get(GOOD_WEIGHT, math.nan)) for e in mine])
