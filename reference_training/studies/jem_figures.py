"""JEM figures: 3, 16 and 20 to 25 show a training's progress, 4 and 17 to 19 its negatives."""

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
from ..plots.canvas import CONTRASTS, DARK, constrained, legend_below, plain, show_on, tiling
from ..plots.images import load_samples
from .config import JemFigure
from .jem_tables import describe, number, scores, setups
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
EPOCH, APART, MOST = 107, 100, 6
"""The epoch of Figure 4, iterations between the grids of Figure 17, and grids of the others."""
NEGATIVES = {"4": 0.5, "17": 0.0, "18": 0.5, "19": 10.0}
"""β* of the figures of samples, all of scenario 1."""


def bundle(steps: NDArray[np.int64], values: NDArray[np.float64], size: int) -> pd.DataFrame:
    """Every `size` consecutive values as one point; the last one may have fewer.

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
    if not own:
        raise _lacking(config.name, "runs", scenario)
    _check_runs(own)
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
        unit = scale if by_epoch else 1.0
        bundles["steps"] /= unit
        seen = run.evaluations
        seen = seen.assign(accuracy=100 * seen["accuracy"], step=seen["step"] / unit)
        place = None if lost is None else lost / unit
        drawn = {"gaps": bundles, "evaluations": seen, "lost": place, "over": run.complete}
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


def _check_runs(own: Sequence[JemRun]) -> None:
    groups = setups(own)
    if len(groups) > 1:
        lines = [f"{describe(g)}: {', '.join(r.path.name for r in g)}" for g in groups.values()]
        raise ConfigError(
            f"the runs have {len(groups)} different setups, which one picture would mix; give "
            "those of one:\n  " + "\n  ".join(lines)
        )
    strengths = {run.beta_star for run in own}
    if len(strengths) > len(CONTRASTS):
        room = f"{len(strengths)} β*, and the figure has room for {len(CONTRASTS)}"
        raise ConfigError(f"the runs have {room}; give fewer of them")


def _lacking(name: str, what: str, scenario: str, beta_star: float = 0.0) -> ConfigError:
    return ConfigError(
        f"Figure {name} shows {what} of scenario {scenario}, which the given runs lack. A run "
        "that has them is made by `ebmguard train jem --out DIR --data cifar10 --scenario "
        f"{scenario} --beta-star {beta_star:g}`" + (", if it diverges" if name == "17" else "")
    )


def draw_progress(frame: pd.DataFrame, title: str) -> Figure:
    """The gap, and panels of the evaluations; of Figure 3 the Inception score alone."""
    names, said = frame.attrs["panels"], textwrap.fill(frame.attrs["words"], 130)
    colours = dict(zip(sorted(set(frame["beta_star"])), CONTRASTS, strict=False))
    curves = [(of, colours[beta_star]) for of, beta_star in frame[["of", "beta_star"]].to_numpy()]
    shape = tiling(1 + len(names), 2)
    figure, panels = constrained(f"{title}\n{said}", shape, (11, 3.7 * shape[0] + 1.2))
    _draw_gap(panels.flat[0], curves, frame.attrs["size"])
    for axes, name in zip(panels.flat[1:], names, strict=True):
        _draw_panel(axes, name, curves)
    right = max(axes.get_xlim()[1] for axes in panels.flat)
    for axes in panels.flat:
        for of, colour in curves:
            if of["lost"] is not None:
                axes.axvline(of["lost"], color=colour, lw=0.9, ls="--", alpha=0.8)
        axes.set_xlim(0, right)
        plain(axes, axes.get_title(), frame.attrs["axis"], axes.get_ylabel())
    legend_below(figure, _legend(frame, colours))
    return figure


Curves = list[tuple[dict[str, Any], str]]


def _draw_gap(axes: Axes, curves: Curves, size: int) -> None:
    # On the upper edge: a gap that is not finite has no place on the axis.
    edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
    edge["in_layout"] = False
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
    axes.set_title(f"{words}\n")  # the markers of what is lost lie above the panel


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
        axes.set_title("\n".join(textwrap.wrap(words, 60, max_lines=3, placeholder=" …")))


def _legend(frame: pd.DataFrame, colours: dict[float, str]) -> list[Line2D]:
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


def negatives(runs: Sequence[JemRun], config: JemFigure) -> pd.DataFrame:
    """Samples at some steps of a run of scenario 1: the first that has them, published first."""
    run, steps, note = _chosen(runs, config.name)
    known, values = series(run.path, ["energy_gap"])
    gaps = dict(zip(known.tolist(), values["energy_gap"].tolist(), strict=True))
    files, rows = run.grids(), []
    for step in steps:
        images = load_samples(files[step])
        pixels = images.double()
        row = {"samples": when(run, step), "step": step, "gap": gaps.get(step)}
        row |= {"pixel mean": pixels.mean().item(), "pixel std": pixels.std(correction=0).item()}
        seen = run.evaluations[run.evaluations["step"] <= step]
        tested, judged = seen["accuracy"].dropna(), seen[seen["features"].notna()]
        for metric, head in METRICS.items():
            found = tested if metric == "accuracy" else judged[metric]
            row[head] = number(metric, found.iloc[-1]) if found[-1:].notna().any() else None
        rows.append({**row, "shown": images})
    frame = frame_of(rows)
    words = [f"{run.network}, {run.config['data']}, seed {run.seed}"]
    words += ["NOT the published setup"] * bool(run.deviations()) + [note] * bool(note)
    told = f"{run.path}: {run.state()}" + (f"\n\n{note}" if note else "")
    frame.attrs |= {"words": "; ".join(words), "note": told}
    return frame


def _chosen(runs: Sequence[JemRun], name: str) -> tuple[JemRun, tuple[int, ...], str]:
    fitting = (run for run in runs if (run.scenario, run.beta_star) == ("1", NEGATIVES[name]))
    for run in sorted(fitting, key=lambda run: (bool(run.deviations()), run.seed)):
        if (found := chosen_steps(name, run)) is not None:
            return run, *found
    what = f"samples{' around a divergence' * (name == '17')} at β* = {NEGATIVES[name]:g}"
    raise _lacking(name, what, "1", NEGATIVES[name])


def chosen_steps(name: str, run: JemRun) -> tuple[tuple[int, ...], str] | None:
    """Whose negatives a figure shows, and what is not as in the paper; None where it has none."""
    stored = list(run.grids())
    # The chains start as noise, which shows nothing of the training.
    trained = [step for step in stored if step > 0]
    if name == "17":
        lost = -1 if run.diverged_at is None else run.diverged_at
        before = max((step for step in stored if step < lost), default=math.inf)
        later = [step for step in stored if step > before]
        if not later:
            return None
        after = min(later, key=lambda step: abs(step - before - APART))
        far = f"{after - before:,} iterations apart, not {APART}"
        return (int(before), after), "" if after - before == APART else far
    if not trained:
        return None
    if name == "4":
        wanted = EPOCH * (run.steps_per_epoch or math.inf)
        if wanted > trained[-1]:
            return (trained[-1],), f"the latest; epoch {EPOCH} is not reached"
        return (min(trained, key=lambda step: abs(step - wanted)),), ""
    places = np.linspace(0, len(trained) - 1, min(MOST, len(trained))).round().astype(int)
    return tuple(trained[i] for i in places), ""


def when(run: JemRun, step: int) -> str:
    """A step as the paper names it: epoch and iteration, each counted from 0."""
    if run.steps_per_epoch is None:
        return f"iteration {step:,}"
    return "epoch {}, iteration {}".format(*divmod(step, run.steps_per_epoch))


def draw_negatives(frame: pd.DataFrame, title: str) -> Figure:
    """The samples, one panel for each step."""
    rows, columns = tiling(len(frame), 3)
    size, words = (max(3.6 * columns, 6.5), 3.7 * rows + 0.6), frame.attrs["words"]
    heading = f"{title}\n{textwrap.fill(words, 75)}"
    figure, panels = constrained(heading, (rows, columns), size)
    for axes in panels.flat[len(frame) :]:
        axes.remove()
    for axes, name, images in zip(panels.flat, frame["samples"], frame["shown"], strict=False):
        axes.set_title(name, fontsize=10)
        axes.set_box_aspect(1)
        show_on(axes, images, 8)
    return figure


_PROGRESS = (
    "gap: mean f(x⁺) − mean f(x⁻), of the first and the last point that is finite. ACC: test "
    "accuracy at the best validation accuracy; IS and FID, of the replay buffer, the best of the "
    "training. † diverged, … not over, ‡ not of the paper's features, § no validation images."
)
_NEGATIVES = "The gap of that step, and the latest evaluation up to it."
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
for _name, _beta_star in NEGATIVES.items():
    _around = " around the divergence" if _name == "17" else ""
    _title = f"Figure {_name}: negatives of JEM{_around}, scenario 1, β* = {_beta_star:g}"
    STUDIES[_name] = Study(_title, SOURCE, opened, negatives, draw_negatives, _NEGATIVES)
