"""Figures 3, 16 and 20 to 25: a JEM training's progress, one colour for each β*."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.scale import SymmetricalLogTransform
from numpy.typing import NDArray

from ebmguard.errors import ConfigError

from ..engine.run_folder import series
from ..engine.task import DIVERGED_GAP
from ..jem.paper import DIVERGED, METRICS, PROGRESS_FIGURES, TABLE_2
from ..jem.runs import JemRun, find_runs
from ..plots.canvas import CONTRASTS, DARK, unframed
from ..plots.page import grid
from .config import JemFigure
from .jem_tables import describe, scores, setups
from .study import Study, frame_of

VALUES, LEAST_POINTS = 200, 40
"""Values that become one point in the paper, of a run of 140,600; fewer of a short run, so that it
has about so many points."""
LINTHRESH = 0.1
"""The symmetric log axis is linear up to this size. Beyond it ten times as much is as far again as
from 0 to 0.9 of it: matplotlib's "symlog" of base 10."""
NARROWEST, HIGHEST = 0.02, 10_000
"""The least that an axis of an evaluation spans, as a share of its largest value; and above what it
is logarithmic: so is the FID of a lost run by its own classifier, beside which the others would be
one line."""
PANELS = {"test accuracy (%)": "accuracy", "IS": "inception", "FID": "fid"}
"""The panels beside the gap's."""


def bundle(steps: NDArray[np.int64], values: NDArray[np.float64], size: int) -> pd.DataFrame:
    """Every `size` consecutive values as one point; the last one may have fewer.

    Args:
        steps: (T,).
        values: (T,).
        size: at least 1.

    Returns:
        the mean of the "steps"; "low" and "high", the smallest and the largest finite value;
        "centre", the centre of gravity of the finite values on the symmetric log axis: the value at
        the mean of their places; all NaN where none is finite; and how many are "lost".
    """
    axis = SymmetricalLogTransform(base=10, linthresh=LINTHRESH, linscale=1)
    finite = pd.Series(values).where(np.isfinite(values))
    parts = pd.DataFrame({"steps": steps, "low": finite, "high": finite, "lost": finite.isna()})
    parts["centre"] = axis.transform(finite.to_numpy())
    how = {"steps": "mean", "low": "min", "high": "max", "centre": "mean", "lost": "sum"}
    points = parts.groupby(np.arange(len(parts)) // size).agg(how)
    return points.assign(centre=axis.inverted().transform(points["centre"].to_numpy()))


def bundle_size(longest: int) -> int:
    """Values a point, for runs of which the longest has so many."""
    return max(1, min(VALUES, longest // LEAST_POINTS))


def opened(config: JemFigure) -> list[JemRun]:
    """The runs that the command names; ConfigError where a folder holds none."""
    return find_runs(config.runs)


def progress(runs: Sequence[JemRun], config: JemFigure) -> pd.DataFrame:
    """The runs of the figure's scenario, their gaps bundled alike."""
    scenario = PROGRESS_FIGURES.get(config.name, "1")
    own = [run for run in runs if run.scenario == scenario]
    _check_runs(own, len(runs), config.name, scenario)
    recorded = [series(run.path, ["energy_gap"]) for run in own]
    size = bundle_size(max(len(steps) for steps, _ in recorded))
    by_epoch = all(run.steps_per_epoch for run in own)
    rows = []
    for run, (steps, values) in zip(own, recorded, strict=True):
        gaps, lost = values["energy_gap"], run.diverged_at
        bundles, scale = bundle(steps, gaps, size), float(run.steps_per_epoch or 1)
        ends = bundles["centre"].dropna().tolist() or [None]
        row = {"run": run.path.name, "beta_star": run.beta_star, "seed": run.seed}
        row |= {"steps": run.steps, "iterations": run.iterations, "lost at": lost}
        row |= {"epoch": lost / scale if lost is not None and run.steps_per_epoch else None}
        row |= {"gap, first": ends[0], "gap, last": ends[-1]}
        row |= {"not finite": int((~np.isfinite(gaps)).sum())}
        found = scores(run).items()
        row |= {METRICS[name]: score if score.values else None for name, score in found}
        if by_epoch:
            bundles["steps"] /= scale
        evaluations = run.evaluations.assign(accuracy=100 * run.evaluations["accuracy"])
        evaluations["step"] /= scale if by_epoch else 1.0
        place = None if lost is None else lost / (scale if by_epoch else 1.0)
        drawn = {"gaps": bundles, "evaluations": evaluations, "lost": place, "over": run.complete}
        rows.append({**row, "of": drawn})
    frame = frame_of(rows)
    run = own[0]
    words = f"{run.network}, {run.config['data']}, {run.iterations:,} iterations"
    changed = "; ".join(run.deviations().values())
    words += f". NOT the published setup: {changed}" if changed else ""
    said = DIVERGED.get(scenario, "no word on when runs diverged")
    note = f"Paper, scenario {scenario} ({TABLE_2[scenario].setup}): {said}."
    frame.attrs |= {"words": words, "note": note, "size": size}
    frame.attrs |= {"panels": ["IS"] if config.name == "3" else list(PANELS)}
    frame.attrs |= {"axis": "epoch" if by_epoch else "iteration"}
    return frame


def _check_runs(own: Sequence[JemRun], given: int, name: str, scenario: str) -> None:
    if not own:
        raise ConfigError(
            f"Figure {name} shows scenario {scenario}, which none of the {given} given runs "
            "has. Make one by `ebmguard train jem --out DIR --data cifar10 --scenario "
            f"{scenario} --beta-star 0`."
        )
    groups = setups(own)
    if len(groups) > 1:
        lines = [f"{describe(g)}: {', '.join(r.path.name for r in g)}" for g in groups.values()]
        raise ConfigError(
            f"the runs of scenario {scenario} have {len(groups)} different setups, which one "
            "picture would mix; give those of one:\n  " + "\n  ".join(lines)
        )
    strengths = sorted({run.beta_star for run in own})
    if len(strengths) > len(CONTRASTS):
        raise ConfigError(
            f"a figure has room for {len(CONTRASTS)} β*; the runs have {len(strengths)}: "
            f"{', '.join(f'{value:g}' for value in strengths)}. Give fewer of them."
        )
    if not any(run.steps for run in own):
        raise ConfigError(
            "no energy gap is recorded in metrics.jsonl yet. Go on with a run by "
            f"`ebmguard train jem --out {own[0].path} --resume`."
        )


def draw_progress(frame: pd.DataFrame, title: str) -> Figure:
    """The gap, and panels of the evaluations; of Figure 3 the Inception score alone."""
    names, said = frame.attrs["panels"], textwrap.wrap(frame.attrs["words"], 130)
    colours = dict(zip(sorted(set(frame["beta_star"])), CONTRASTS, strict=False))
    curves = [(of, colours[beta_star]) for of, beta_star in frame[["of", "beta_star"]].to_numpy()]
    handles, columns = _legend(frame, colours), 4
    canvas, panels = grid(
        title,
        "",
        1 + len(names),
        2,
        (4.5, 2.6),
        sides=(0.95, 0.85, 0.25),
        top=1.1 + 0.17 * len(said),
        below=0.95,
        foot=0.24 * math.ceil(len(handles) / columns),
    )
    for i, line in enumerate(said):
        canvas.write(canvas.width / 2, 0.5 + 0.17 * i, line, fontsize=9, color=DARK)
    _draw_gap(panels[0], curves, frame.attrs["size"])
    for axes, name in zip(panels[1:], names, strict=True):
        _draw_panel(axes, name, curves)
    right = max(axes.get_xlim()[1] for axes in panels)
    for axes in panels:
        for of, colour in curves:
            if of["lost"] is not None:
                axes.axvline(of["lost"], color=colour, lw=0.9, ls="--", alpha=0.8)
        axes.set_xlim(0, right)
        axes.set_xlabel(frame.attrs["axis"])
        axes.tick_params(labelsize=9)
        unframed(axes)
    style: dict[str, Any] = {"ncols": columns, "frameon": False, "fontsize": 10}
    canvas.figure.legend(handles=handles, loc="lower center", **style)
    return canvas.figure


Curves = list[tuple[dict[str, Any], str]]


def _draw_gap(axes: Axes, curves: Curves, size: int) -> None:
    # On the upper edge: a gap that is not finite has no place on the axis.
    edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
    for of, colour in curves:
        gaps = of["gaps"]
        axes.fill_between(gaps["steps"], gaps["low"], gaps["high"], color=colour, alpha=0.2, lw=0)
        few = gaps["centre"].count() < 8
        axes.plot("steps", "centre", "o-" if few else "-", data=gaps, color=colour, lw=1.2, ms=3)
        x = gaps["steps"][gaps["lost"] > 0]
        axes.plot(x, np.ones(len(x)), "x", color=colour, ms=4, mew=0.9, **edge)
        if of["lost"] is not None:
            axes.plot(of["lost"], 1.0, "X", color=colour, mec="black", ms=9, zorder=5, **edge)
    axes.set_yscale("symlog", linthresh=LINTHRESH)
    bottom, top = axes.get_ylim()
    bottom = max(min(bottom, -LINTHRESH), -DIVERGED_GAP)
    top = min(max(top, LINTHRESH), DIVERGED_GAP)
    axes.set_ylim(bottom, top)
    axes.axhline(0, color="black", lw=0.6)
    axes.set_ylabel(f"mean f(x⁺) − mean f(x⁻)\nsymlog, linear up to ±{LINTHRESH:g}")
    words = f"each point {size} values: minimum, maximum, centre of gravity"
    words = words if size > 1 else "every value"
    if DIVERGED_GAP in (top, -bottom):
        words += f"\nthe axis ends at ±{DIVERGED_GAP:g}, where a run counts as lost"
    axes.set_title(words, fontsize=9, color=DARK, pad=10)


def _draw_panel(axes: Axes, name: str, curves: Curves) -> None:
    rows_of = [of["evaluations"].dropna(subset=PANELS[name]) for of, _ in curves]
    marker = "o" if max(map(len, rows_of)) < 60 else ""
    for (_, colour), rows in zip(curves, rows_of, strict=True):
        style: dict[str, Any] = {"color": colour, "lw": 1.2, "marker": marker, "ms": 2.5}
        axes.plot(rows["step"], rows[PANELS[name]], **style)
    bottom, top = axes.get_ylim()
    if top > HIGHEST:
        axes.set_yscale("log")
    else:
        # Values that are all but equal are drawn so: ticks a millionth apart show noise alone.
        short = max(0.0, NARROWEST * max(abs(bottom), abs(top)) - (top - bottom)) / 2
        axes.set_ylim(bottom - short, top + short)
    axes.set_ylabel(name)
    shown = pd.concat(rows_of)
    if shown.empty:
        axes.text(0.5, 0.5, f"no run has it: {name}", transform=axes.transAxes, ha="center")
    elif name in ("IS", "FID"):
        pairs = shown[["features", "samples"]].drop_duplicates().to_numpy()
        labels = sorted(f"{features}, {int(samples):,} samples" for features, samples in pairs)
        other = "" if shown["published"].all() else " (≠ the paper’s)"
        words = f"features{other}: {'; '.join(labels)}"
        lines = textwrap.wrap(words, 66, max_lines=3, placeholder=" …")
        axes.set_title("\n".join(lines), fontsize=9, color=DARK)


def _legend(frame: pd.DataFrame, colours: dict[float, str]) -> list[Any]:
    handles = []
    for beta_star, own in frame.groupby("beta_star"):
        words = [f"{len(own)} seeds"] if len(own) > 1 else []
        lost = int(own["lost at"].notna().sum())
        words += [f"{lost} lost" if len(own) > 1 else "lost"] if lost else []
        words += [] if all(of["over"] for of in own["of"]) else ["not over"]
        label = f"β* = {beta_star:g}" + (f" ({', '.join(words)})" if words else "")
        handles.append(Line2D([], [], color=colours[beta_star], lw=2, label=label))
    if frame["lost at"].notna().any():
        style: dict[str, Any] = {"color": "white", "mec": "black", "ls": ""}
        handles.append(Line2D([], [], marker="X", ms=8, label="lost", **style))
    if frame["not finite"].any():
        handles.append(Line2D([], [], marker="x", color=DARK, ls="", label="gap not finite"))
    return handles


_PROGRESS = (
    "gap: mean f(x⁺) − mean f(x⁻), of the first and the last point that is finite. ACC: test "
    "accuracy at the best validation accuracy; IS and FID, of the replay buffer, the best of the "
    "training. † diverged, … not over, ‡ not of the paper's features, § no validation images."
)
SOURCE = "robust objective, Section 4.3 and Appendix M"
STUDIES = {
    name: Study(
        f"Figure {name}: JEM, scenario {scenario} ({TABLE_2[scenario].setup})",
        SOURCE,
        opened,
        progress,
        draw_progress,
        _PROGRESS,
        "with β* > 0 no run is lost",
        lambda frame: bool(frame.loc[frame["beta_star"] > 0, "lost at"].isna().all()),
    )
    for name, scenario in ({"3": "1"} | PROGRESS_FIGURES).items()
}
