"""A training by its rows: mean f on data and on negatives, the gap between them, and its end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ebmguard import tags
from ebmguard.errors import ConfigError

from ...engine.run_folder import METRICS, series
from ..trained import TrainedRun

PAPERS_EVERY = 100
"""Updates between the single batches that the paper shows."""
LEAST_POINTS = 100
"""Short runs are shown more finely, so that a curve has about so many points."""
END = 10
"""The end of a run, in the table, is the last one of so many parts."""
WINDOWS = 50
"""Points of a curve of the gap, each the quartiles of as many updates."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Course:
    """A training by its rows.

    Attributes:
        label: of the run.
        beta_star: exponent of the weights on raw outputs.
        beta: the same in the units of the energy that SGLD samples: β* over the output scale.
        steps: (T,) ascending.
        f_pos, f_neg: (T,) means over a batch.
        grad_scale, ess: (T,) of the weights; at β* = 0, of those of the guard's reference exponent.
    """

    label: str
    beta_star: float
    beta: float
    steps: NDArray[np.int64]
    f_pos: Floats
    f_neg: Floats
    grad_scale: Floats
    ess: Floats

    @property
    def gap(self) -> Floats:
        """(T,) mean f⁺ − mean f⁻."""
        return self.f_pos - self.f_neg


@dataclass(frozen=True)
class Ending:
    """The last tenth of a training.

    Attributes:
        gap: median of mean f⁺ − mean f⁻; NaN where one of them is not finite.
        low, high: its quartiles.
        grad_scale, ess: medians; NaN likewise.
        not_finite: gaps of the whole training that are not finite.
    """

    gap: float
    low: float
    high: float
    grad_scale: float
    ess: float
    not_finite: int


def read(run: TrainedRun, label: str) -> Course:
    """The rows of a run; of a step that was written twice, the later one.

    Raises:
        ConfigError: there are none.
    """
    file = run.path / METRICS
    if not file.is_file():
        raise ConfigError(
            f"{file} is missing: Figure 12 is drawn from the guard's rows, which `ebmguard train "
            f"shortrun` writes there"
        )
    beta_star = float(run.config.beta_star)
    weights = (tags.weight_tag(name, beta_star) for name in (tags.GRAD_SCALE, tags.ESS))
    steps, values = series(run.path, ["f_pos/mean", "f_neg/mean", *weights])
    if not len(steps):
        raise ConfigError(f"{file} has no rows yet; wait for the run, or go on with it by --resume")
    beta = beta_star / run.settings.output_scale
    return Course(label, beta_star, beta, steps, *values.values())


def ending(course: Course) -> Ending:
    """What the last tenth of a training came to."""
    last = slice(-max(1, len(course.steps) // END), None)
    low, gap, high = quartiles(course.gap[last])
    return Ending(
        gap=gap,
        low=low,
        high=high,
        grad_scale=quartiles(course.grad_scale[last])[1],
        ess=quartiles(course.ess[last])[1],
        not_finite=int((~np.isfinite(course.gap)).sum()),
    )


def quartiles(values: Floats) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; NaN where a value is not finite."""
    if not np.isfinite(values).all():
        return math.nan, math.nan, math.nan
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def medians(courses: Sequence[Course], endings: Sequence[Ending]) -> dict[float, float]:
    """The final gap by β*, smallest β* first; of several seeds their median, NaN where one is."""
    own: dict[float, list[float]] = {}
    for course, end in sorted(zip(courses, endings, strict=True), key=lambda x: x[0].beta_star):
        own.setdefault(course.beta_star, []).append(end.gap)
    return {
        beta_star: math.nan if any(map(math.isnan, gaps)) else statistics.median(gaps)
        for beta_star, gaps in own.items()
    }


def widening(
    course: Course, end: Ending, courses: Sequence[Course], endings: Sequence[Ending]
) -> float | None:
    """How much wider a final gap is than at β* = 0, in interquartile ranges of the gap there.

    Not a ratio: the gap of a short-run model at β* = 0 changes its sign from update to update.

    Returns:
        of several seeds of β* = 0 by the medians of both; NaN where a gap is undefined; None for
        β* = 0 itself, where there is no such run, or where its gap does not vary.
    """
    plain = [e for c, e in zip(courses, endings, strict=True) if c.beta_star == 0]
    if not plain or course.beta_star == 0:
        return None
    ranges = [e.high - e.low for e in plain]
    gap = medians(courses, endings)[0.0]
    if math.isnan(gap):
        return math.nan
    varies = statistics.median(ranges)
    return (end.gap - gap) / varies if varies > 0 else None


def monotone(courses: Sequence[Course], endings: Sequence[Ending]) -> bool | None:
    """Whether every larger β* ends with a wider gap; None of one β*, or of an undefined gap."""
    gaps = list(medians(courses, endings).values())
    if len(gaps) < 2 or any(map(math.isnan, gaps)):
        return None
    return all(a < b for a, b in pairwise(gaps))


def sampled(course: Course, every: int) -> NDArray[np.bool_]:
    """Which updates are shown: one in so many, from the first on."""
    shown: NDArray[np.bool_] = course.steps % every == 0
    return shown


def spacing(courses: Sequence[Course]) -> int:
    """Updates between two points: the paper's, or fewer where the longest run is short."""
    longest = max(len(course.steps) for course in courses)
    return max(1, min(PAPERS_EVERY, longest // LEAST_POINTS))


def windows(course: Course) -> tuple[Floats, Floats]:
    """The gap over time.

    Returns:
        (W,) mean steps of consecutive windows, and (3, W) the quartiles of the gaps there;
        NaN where one is not finite.
    """
    size = max(1, len(course.steps) // WINDOWS)
    parts = [slice(start, start + size) for start in range(0, len(course.steps), size)]
    gaps = np.array([quartiles(course.gap[part]) for part in parts]).T
    return np.array([course.steps[part].mean() for part in parts]), gaps
