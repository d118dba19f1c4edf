"""Figures 3, 16 and 20 to 25: a training's progress, one colour for each β*."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ebmguard.errors import ConfigError

from ...engine.run_folder import series
from ...engine.task import DIVERGED_GAP
from ...plots.canvas import CONTRASTS, DARK, Canvas, unframed
from ...plots.markdown import NONE, markdown_table
from ..paper import DIVERGED, TABLE_2
from ..runs import Evaluation, JemRun
from ..table.scores import number, run_scores
from .bundles import LINTHRESH, Bundles, bundle, bundle_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All in inches.
WIDTH, HEIGHT = 4.5, 2.6
LEFT, RIGHT, BETWEEN, BELOW = 0.95, 0.25, 0.85, 0.95
LEGEND_LINE = 0.24
COLUMNS, LEGEND_COLUMNS = 2, 4

NARROWEST = 0.02
"""The least that an axis of an evaluation spans, as a share of its largest value."""
HIGHEST = 10_000
"""Above it the axis of an evaluation is logarithmic: so is the FID of a lost run by its own
classifier, beside which the others would be one line."""

PANELS: dict[str, Callable[[Evaluation], float | None]] = {
    "test accuracy (%)": lambda row: None if row.test_accuracy is None else 100 * row.test_accuracy,
    "IS": lambda row: row.inception,
    "FID": lambda row: row.fid,
}
"""The panels beside the gap's."""


@dataclass(frozen=True)
class Curve:
    """A run as it is drawn.

    Attributes:
        run: the run.
        gaps: mean f⁺ − mean f⁻, bundled.
        not_finite: how many gaps are not finite.
        size: values a bundle.
    """

    run: JemRun
    gaps: Bundles
    not_finite: int
    size: int


def curves(runs: Sequence[JemRun]) -> list[Curve]:
    """The runs of one figure, their gaps bundled alike.

    Raises:
        ConfigError: none of them has a recorded gap, or there are more β* than colours.
    """
    strengths = sorted({run.beta_star for run in runs})
    if len(strengths) > len(CONTRASTS):
        raise ConfigError(
            f"a figure has room for {len(CONTRASTS)} β*; the runs have {len(strengths)}: "
            f"{', '.join(f'{value:g}' for value in strengths)}. Give fewer of them."
        )
    gaps = {}
    for run in runs:
        steps, values = series(run.path, ["energy_gap"])
        gaps[run.path] = steps, values["energy_gap"]
    longest = max(len(steps) for steps, _ in gaps.values())
    if not longest:
        raise ConfigError(
            "no energy gap is recorded in metrics.jsonl yet. Go on with a run by "
            f"`ebmguard train jem --out {runs[0].path} --resume`."
        )
    size = bundle_size(longest)
    return [_curve(run, *gaps[run.path], size) for run in runs]


def _curve(run: JemRun, steps: NDArray[np.int64], gaps: NDArray[np.float64], size: int) -> Curve:
    return Curve(run, bundle(steps, gaps, size), int((~np.isfinite(gaps)).sum()), size)


def draw_progress(found: Sequence[Curve], title: str, panels: Sequence[str]) -> Figure:
    """The gap, and some panels of the evaluations.

    Args:
        found: the runs.
        title: of the picture.
        panels: names from :data:`PANELS`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    strengths = sorted({curve.run.beta_star for curve in found})
    colours = dict(zip(strengths, CONTRASTS, strict=False))
    by_epoch = all(curve.run.steps_per_epoch for curve in found)
    said, handles = _subtitle(found), _legend(found, colours)
    top = 1.1 + 0.17 * len(said)
    rows = math.ceil((1 + len(panels)) / COLUMNS)
    canvas = Canvas(
        LEFT + COLUMNS * (WIDTH + BETWEEN) - BETWEEN + RIGHT,
        top + rows * (HEIGHT + BELOW) + LEGEND_LINE * math.ceil(len(handles) / LEGEND_COLUMNS),
    )
    canvas.write(canvas.width / 2, 0.25, title, fontsize=12)
    for i, line in enumerate(said):
        canvas.write(canvas.width / 2, 0.5 + 0.17 * i, line, fontsize=9, color=DARK)
    gap, *others = (
        canvas.axes(
            LEFT + i % COLUMNS * (WIDTH + BETWEEN),
            top + i // COLUMNS * (HEIGHT + BELOW),
            WIDTH,
            HEIGHT,
        )
        for i in range(1 + len(panels))
    )
    _draw_gap(gap, found, colours, by_epoch)
    for axes, name in zip(others, panels, strict=True):
        _draw_panel(axes, name, found, colours, by_epoch)
    right = max(axes.get_xlim()[1] for axes in (gap, *others))
    for axes in (gap, *others):
        for curve in found:
            if curve.run.diverged_at is not None:
                place = _places(curve.run, np.array([curve.run.diverged_at]), by_epoch)[0]
                colour = colours[curve.run.beta_star]
                axes.axvline(place, color=colour, lw=0.9, ls="--", alpha=0.8)
        axes.set_xlim(0, right)
        axes.set_xlabel("epoch" if by_epoch else "iteration")
        axes.tick_params(labelsize=9)
        unframed(axes)
    canvas.figure.legend(
        handles=handles, loc="lower center", ncols=LEGEND_COLUMNS, frameon=False, fontsize=10
    )
    return canvas.figure


def _draw_gap(
    axes: Axes, found: Sequence[Curve], colours: dict[float, str], by_epoch: bool
) -> None:
    for curve in found:
        gaps, colour = curve.gaps, colours[curve.run.beta_star]
        x = _places(curve.run, gaps.steps, by_epoch)
        axes.fill_between(x, gaps.low, gaps.high, color=colour, alpha=0.2, lw=0)
        few = np.isfinite(gaps.centre).sum() < 8
        axes.plot(x, gaps.centre, color=colour, lw=1.2, marker="o" if few else "", ms=3)
    axes.set_yscale("symlog", linthresh=LINTHRESH)
    bottom, top = axes.get_ylim()
    bottom = max(min(bottom, -LINTHRESH), -DIVERGED_GAP)
    top = min(max(top, LINTHRESH), DIVERGED_GAP)
    axes.set_ylim(bottom, top)
    axes.axhline(0, color="black", lw=0.6)
    for curve in found:
        gaps, colour = curve.gaps, colours[curve.run.beta_star]
        bad = gaps.lost > 0
        x = _places(curve.run, gaps.steps[bad], by_epoch)
        # On the upper edge: a gap that is not finite has no place on the axis.
        edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(x, np.ones(len(x)), "x", color=colour, ms=4, mew=0.9, **edge)
        if curve.run.diverged_at is not None:
            place = _places(curve.run, np.array([curve.run.diverged_at]), by_epoch)
            axes.plot(place, [1.0], "X", color=colour, mec="black", ms=9, zorder=5, **edge)
    axes.set_ylabel(f"mean f(x⁺) − mean f(x⁻)\nsymlog, linear up to ±{LINTHRESH:g}")
    size = found[0].size
    words = f"each point {size} values: minimum, maximum, centre of gravity"
    if size == 1:
        words = "every value"
    if top == DIVERGED_GAP or bottom == -DIVERGED_GAP:
        words += f"\nthe axis ends at ±{DIVERGED_GAP:g}, where a run counts as lost"
    axes.set_title(words, fontsize=9, color=DARK, pad=10)


def _draw_panel(
    axes: Axes, name: str, found: Sequence[Curve], colours: dict[float, str], by_epoch: bool
) -> None:
    rows_of = {
        curve.run.path: [row for row in curve.run.evaluations if PANELS[name](row) is not None]
        for curve in found
    }
    longest = max(len(rows) for rows in rows_of.values())
    for curve in found:
        rows = rows_of[curve.run.path]
        x = _places(curve.run, np.array([row.step for row in rows], dtype=float), by_epoch)
        y = np.array([PANELS[name](row) for row in rows], dtype=float)
        axes.plot(
            x,
            y,
            color=colours[curve.run.beta_star],
            lw=1.2,
            marker="o" if longest < 60 else "",
            ms=2.5,
        )
    bottom, top = axes.get_ylim()
    if top > HIGHEST:
        axes.set_yscale("log")
    else:
        # Values that are all but equal are drawn so: ticks a millionth apart show noise alone.
        short = max(0.0, NARROWEST * max(abs(bottom), abs(top)) - (top - bottom)) / 2
        axes.set_ylim(bottom - short, top + short)
    shown = [row for rows in rows_of.values() for row in rows]
    axes.set_ylabel(name)
    if not shown:
        axes.text(0.5, 0.5, f"no run has it: {name}", transform=axes.transAxes, ha="center")
    elif name in ("IS", "FID"):
        labels = sorted({f"{row.features}, {row.samples or 0:,} samples" for row in shown})
        same = all(row.published_measure for row in shown)
        words = textwrap.wrap(
            f"features{'' if same else ' (≠ the paper’s)'}: {'; '.join(labels)}",
            66,
            max_lines=3,
            placeholder=" …",
        )
        axes.set_title("\n".join(words), fontsize=9, color=DARK)


def _legend(found: Sequence[Curve], colours: dict[float, str]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = []
    for beta_star, colour in colours.items():
        own = [curve for curve in found if curve.run.beta_star == beta_star]
        words = [f"{len(own)} seeds"] if len(own) > 1 else []
        lost = sum(curve.run.diverged_at is not None for curve in own)
        if lost:
            words.append(f"{lost} lost" if len(own) > 1 else "lost")
        if not all(curve.run.complete for curve in own):
            words.append("not over")
        label = f"β* = {beta_star:g}" + (f" ({', '.join(words)})" if words else "")
        handles.append(Line2D([], [], color=colour, lw=2, label=label))
    if any(curve.run.diverged_at is not None for curve in found):
        style: dict[str, Any] = {"color": "white", "mec": "black", "ls": ""}
        handles.append(Line2D([], [], marker="X", ms=8, label="lost", **style))
    if any(curve.not_finite for curve in found):
        handles.append(Line2D([], [], marker="x", color=DARK, ls="", label="gap not finite"))
    return handles


def _subtitle(found: Sequence[Curve]) -> list[str]:
    run = found[0].run
    words = f"{run.network}, {run.config['data']}, {run.iterations:,} iterations"
    deviations = run.deviations()
    if deviations:
        words += ". NOT the published setup: " + "; ".join(map(str, deviations))
    return textwrap.wrap(words, 130)


def _places(run: JemRun, steps: NDArray[Any], by_epoch: bool) -> NDArray[np.float64]:
    scale = float(run.steps_per_epoch or 1) if by_epoch else 1.0
    return np.asarray(steps, dtype=np.float64) / scale


def progress_table(found: Sequence[Curve], scenario: str) -> str:
    """The figure's numbers: a line for each run, and what the paper says."""
    head = ["run", "β*", "seed", "iterations", "lost at", "epoch", "gap, first", "gap, last"]
    head += ["not finite", "ACC (%)", "IS", "FID"]
    rows = []
    for curve in found:
        run, scores = curve.run, run_scores(curve.run)
        known = curve.gaps.centre[np.isfinite(curve.gaps.centre)]
        ends = [f"{known[0]:.3g}", f"{known[-1]:.3g}"] if len(known) else [NONE, NONE]
        epoch = math.nan if curve.run.diverged_at is None else run.epoch(curve.run.diverged_at)
        row = [
            f"`{run.path.name}`",
            f"{run.beta_star:g}",
            str(run.seed),
            f"{run.steps:,} of {run.iterations:,}",
            NONE if curve.run.diverged_at is None else f"{curve.run.diverged_at:,}",
            NONE if math.isnan(epoch) else f"{epoch:.3g}",
            *ends,
            f"{curve.not_finite:,}",
        ]
        for metric in ("accuracy", "inception", "fid"):
            value = scores.value(metric)
            row.append(NONE if value is None else number(metric, value) + scores.marked(metric))
        rows.append(row)
    said = DIVERGED.get(scenario)
    setup = TABLE_2[scenario].setup
    paper = f"Paper, scenario {scenario} ({setup}): " + (said or "no word on when runs diverged")
    return f"{markdown_table(head, rows)}\n\n{paper}."
