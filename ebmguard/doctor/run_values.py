"""What the last rows of a run say: weights, sampler, optimizer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from itertools import groupby

from ..alerts import Level
from ..check import Problem
from ..check.exponents import implied_scale
from .run import LATE, FinishedRun

__all__ = ["of_optimizer", "of_sampler", "of_weights"]

_LOW_ESS = 0.1
_LOW_SCALE = 0.1
# Steps for which GradScale may stay low before the generative part counts as lost, as the rule
# sampler_failing has it.
_LONG = 200
_TOLERANCE = 0.02
_OVERSHOOT = 0.9
_SATURATED = 0.5
_REPEATED = 0.5
_REJECTED = 0.1
_AMPLIFIED = 10.0
# Of the drift to the noise: outside, one of them hardly matters.
_DRIFT = (0.03, 30.0)
# Tag, the side of the limit that is bad, the limit, and the words.
_LIMITS = (
    (
        "sampler/clamped",
        1,
        _SATURATED,
        "saturated",
        "{:.0%} of the samples' entries lie at an end of the clamp.",
        "a wider clamp or none; a smaller step; L2 on the energies.",
    ),
    (
        "sampler/acceptance",
        -1,
        _REJECTED,
        "step_size",
        "A Metropolis test would accept {:.1%} of the steps: they are too long for the density "
        "that the output scale speaks of.",
        "a smaller step size with noise to match; nothing, where step and noise are set apart on "
        "purpose, as in JEM.",
    ),
    (
        "sampler/repeated",
        1,
        _REPEATED,
        "stale_chains",
        "{:.0%} of the samples are those of the call before, to the last bit.",
        "look for a sampler that returns what it kept, or takes steps of size 0.",
    ),
)


def of_weights(run: FinishedRun) -> Iterator[Problem]:
    """Weights that a few negatives carry, and a GradScale that stays low."""
    beta_star = run.late("beta_star")
    tag = run.weight("ess")
    ess = run.late(tag)
    if beta_star and ess is not None and ess < _LOW_ESS:
        spread = run.late("f_neg/std")
        lower = "a lower beta_star"
        if spread:
            lower = f"beta_star of about {1 / spread:.2g} (one over the spread of f_neg)"
        yield Problem(
            Level.WARN,
            "weights_collapse",
            tag,
            f"At beta_star = {beta_star:g} the effective sample size of the last {LATE} steps is "
            f"{ess:.1%} of the negatives: a few of them carry the batch.",
            f"{lower}, or more negatives per step.",
        )
    scale_tag = run.weight("grad_scale")
    low = _longest(run.series(scale_tag), lambda value: value < _LOW_SCALE)
    if low is not None and low[1] >= _LONG:
        now = run.late(scale_tag)
        still = now is not None and now < _LOW_SCALE
        yield Problem(
            Level.ERROR if still and beta_star else Level.WARN,
            "sampler_lost",
            f"step {low[0]:,}",
            f"{scale_tag} stayed under {_LOW_SCALE:g} for {low[1]:,} steps"
            + (", to the end" if still else "")
            + ": no negative was competitive, and the generative part stood still.",
            "more SGLD steps (sgld_steps=..., or the adaptive sampler), a smaller step size, a "
            "lower learning rate.",
        )
    overlap = run.late("energy_overlap")
    if overlap is not None and overlap > _OVERSHOOT:
        yield Problem(
            Level.WARN,
            "overshoot",
            "energy_overlap",
            f"In the last {LATE} steps {overlap:.0%} of the pairs had a negative likelier than the "
            "data.",
            "fewer SGLD steps, or a smaller step size.",
        )


def _longest(
    series: list[tuple[int, float]], holds: Callable[[float], bool]
) -> tuple[int, int] | None:
    """First step and length of the longest stretch."""
    best: tuple[int, int] | None = None
    for is_in, group in groupby(series, lambda pair: holds(pair[1])):
        stretch = list(group)
        if is_in and (best is None or len(stretch) > best[1]):
            best = stretch[0][0], len(stretch)
    return best


def of_sampler(run: FinishedRun) -> Iterator[Problem]:
    """Step, noise, clamp and chains."""
    step, noise = run.setting("step_size"), run.setting("noise_std")
    used = _output_scale(run)
    if step and noise and used is not None:
        implied = implied_scale(step, noise)
        if abs(used / implied - 1) > _TOLERANCE:
            yield Problem(
                Level.ERROR,
                "output_scale",
                "config.json",
                f"The guard ran with output_scale = {used:.6g}, but step {step:g} and noise "
                f"{noise:g} mean 2 * step / noise**2 = {implied:g}.",
                f"output_scale={implied:g}.",
            )
    drift = run.late("sampler/drift_to_noise")
    if drift is not None and not _DRIFT[0] <= drift <= _DRIFT[1]:
        yield Problem(
            Level.WARN,
            "step_size",
            "sampler/drift_to_noise",
            f"The drift is {drift:.3g} times the noise: the sampler is "
            + ("gradient ascent." if drift > 1 else "a random walk."),
            "a smaller step or more noise." if drift > 1 else "a larger step or less noise.",
        )
    for tag, sign, limit, name, what, fix in _LIMITS:
        value = run.late(tag)
        if value is not None and sign * (value - limit) > 0:
            level = Level.INFO if tag == "sampler/acceptance" else Level.WARN
            yield Problem(level, name, tag, what.format(value), fix)
    reinit = run.series("buffer/reinit")
    if len(reinit) >= LATE and not any(value for _, value in reinit):
        yield Problem(
            Level.WARN,
            "stale_chains",
            "buffer/reinit",
            "No chain has started afresh in the whole run.",
            "a re-initialisation rate of 0.05, as JEM.",
        )
    if not run.series("sampler/drift_to_noise"):
        yield Problem(
            Level.INFO,
            "unknown",
            "sampler/drift_to_noise",
            "Step and noise of the sampler were not attached, so that drift, clamp and acceptance "
            "are not known.",
            "g.attach(step_size=..., noise_std=..., clamp=...).",
        )


def _output_scale(run: FinishedRun) -> float | None:
    """o as the guard used it: of the gap in both units."""
    ratios = [
        row["energy_gap_scaled"] / row["energy_gap"]
        for row in run.rows
        if "energy_gap_scaled" in row
        and all(isinstance(row[tag], float) for tag in ("energy_gap", "energy_gap_scaled"))
        and row["energy_gap"]
        and math.isfinite(row["energy_gap_scaled"])
    ]
    return statistics.median(ratios) if ratios else None


def of_optimizer(run: FinishedRun) -> Iterator[Problem]:
    """An adaptive optimizer that undoes GradScale."""
    series = [value for _, value in run.series("optim/amplification") if math.isfinite(value)]
    quarter = len(series) // 4
    if quarter >= 2:
        first, last = statistics.median(series[:quarter]), statistics.median(series[-quarter:])
        if first > 0 and last > _AMPLIFIED * first:
            yield Problem(
                Level.WARN,
                "amplification",
                "optim/amplification",
                f"Updates per learning rate and GradScale grew from {first:.3g} to {last:.3g}: the "
                "adaptive optimizer undoes what GradScale takes away (Appendix H of the paper).",
                "help the sampler, so that GradScale comes back: more SGLD steps, a lower learning "
                "rate.",
            )
