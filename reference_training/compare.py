"""`ebmguard compare`: runs side by side, as one picture and one printed table."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from ebmguard.errors import ConfigError, printable
from ebmguard.report import RecordedRun
from ebmguard.report.files import opened
from ebmguard.report.folder import outcome

from .plots.canvas import CONTRASTS, new_figure, unframed
from .plots.images import sample_grid
from .plots.numbers import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CompareConfig", "compare", "draw", "table"]

_MARKERS = {"WARN": "v", "ERROR": "X"}
# Steps that become one point with their minimum and maximum, as in Figure 16 of the paper, which
# takes 200 of a run a hundred times as long; as many as a bin has where that is more.
_BUNDLE = 10
_SHOWN = 16
# Bytes of a file of samples, and pixels that are drawn of one.
_LARGEST = 256 << 20
_WIDEST = 256
# What a file of arrays that is damaged may raise.
_DAMAGE = (
    BadZipFile,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    zlib.error,
)
_TALLEST = 1e6
_NARROWEST = 12  # characters of a column of the table
_MOST = 6  # runs in one picture
_CHARTS = ("energy_gap", "grad_scale")
_STAGES = {"start": "first step", "healthy": "last healthy", "end": "end"}


@dataclass(frozen=True)
class CompareConfig:
    """Draw finished runs side by side and print how each went."""

    runs: tuple[Path, ...]
    """Run folders, two or more."""
    out: Path = Path("compare.png")
    """The picture."""


def compare(config: CompareConfig) -> int:
    """`ebmguard compare`.

    Returns:
        exit status 0.

    Raises:
        ConfigError: fewer than two runs, or a folder without a finished run.
        ImportError: matplotlib is not installed.
    """
    if not 2 <= len(config.runs) <= _MOST:
        raise ConfigError(f"--runs takes 2 to {_MOST} folders; got {len(config.runs)}.")
    runs = [load(path) for path in config.runs]
    draw(runs).savefig(config.out, dpi=130)
    print(table(runs, shutil.get_terminal_size().columns))
    print(f"\npicture: {printable(config.out)}")
    return 0


def load(path: Path) -> RecordedRun:
    """The finished run that a folder holds.

    Raises:
        ConfigError: a file is missing, so that this is no run or one that has not ended; or the
            run is of another kind.
    """
    needed = ("config.json", "results.json", "metrics.jsonl")
    missing = [name for name in needed if not os.path.isfile(path / name)]
    if missing:
        raise ConfigError(
            f"{path} is not the folder of a finished run: {', '.join(missing)} missing. Finish "
            "it with `ebmguard train ... --resume`, or name another folder."
        )
    run = RecordedRun.read(path, _CHARTS)
    if run.setting("beta_star") is None:
        raise ConfigError(
            f"{path} holds a run without one beta_star, such as a toy ensemble, whose members "
            "`ebmguard figure` compares. Expected runs of `ebmguard train jem`."
        )
    return run


def table(runs: Sequence[RecordedRun], width: int | None = None) -> str:
    """How each run went, one column a run; cells are folded where it is wider than ``width``."""
    rows: list[tuple[str, list[str]]] = []

    def row(name: str, cells: list[str]) -> None:
        rows.append((name, cells))

    row("", [_name(run) for run in runs])
    row("outcome", [outcome(run) for run in runs])
    for level in ("WARN", "ERROR"):
        row(f"first {level}", [_alert_cell(run, level) for run in runs])
    row(
        "|energy gap|, median of last 100",
        [_number(run, "median_abs_gap_last_100") for run in runs],
    )
    row("test accuracy, best", [_percent(run.results.get("best_accuracy")) for run in runs])
    row("test accuracy, final", [_percent(run.results.get("accuracy")) for run in runs])
    row(
        "GradScale, final (at β*; at β* = 0: at reference)",
        [_weight(run, "grad_scale") for run in runs],
    )
    row("ESS / M, final (likewise)", [_weight(run, "ess") for run in runs])
    row("wall time", [_seconds(run) for run in runs])
    return "\n".join(_folded([[name, *cells] for name, cells in rows], width))


def _folded(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Lines of a table; columns that are wider than the others give way until it fits."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = math.inf if width is None else width - 2 * (len(widths) - 1)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in rows:
        cells = [textwrap.wrap(cell, each) for cell, each in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            line = "  ".join(f"{part:<{each}}" for part, each in zip(parts, widths, strict=True))
            lines.append(line.rstrip())
    lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return lines


def _name(run: RecordedRun) -> str:
    """The run by the setting that matters."""
    return f"β* = {run.setting('beta_star'):g}"


def draw(runs: Sequence[RecordedRun]) -> Figure:
    """The picture: energy gap, test accuracy and GradScale over the steps, and samples.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(15, 1.4 + 2.8 * max(2, len(runs)))
    figure.set_layout_engine("constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.1, 1), squeeze=False)[0]
    gap, accuracy, scale = left.subplots(3, 1, sharex=True, height_ratios=(1.7, 1, 1))
    for run, colour in zip(runs, CONTRASTS, strict=False):
        _draw_gap(gap, run, colour)
        accuracy.plot(*zip(*run.accuracy, strict=True), color=colour)
        # Each stretch from its lowest to its highest value, so that none is lost.
        points = [point for own in run.surviving("grad_scale") for point in own.points()]
        off = run.setting("beta_star") == 0
        scale.plot(*zip(*points, strict=True), color=colour, lw=0.9, ls=":" if off else "-")
        for level, marker in _MARKERS.items():
            alert = _first_alert(run, level)
            if alert is not None:
                step = alert["step"]
                for axes, height in (
                    (gap, _gap_at(run, alert)),
                    (accuracy, _accuracy_at(run, step)),
                ):
                    if height is not None:
                        axes.plot(
                            step,
                            height,
                            marker,
                            ms=10,
                            color=colour,
                            mec="black",
                            zorder=5,
                        )
        if run.results.get("diverged_at") is not None:
            for axes in (gap, accuracy, scale):
                axes.axvline(run.results["diverged_at"], color=colour, lw=1, ls="--", alpha=0.7)
    _dress(gap, accuracy, scale)
    _draw_samples(right, runs)
    return figure


def _draw_gap(axes: Axes, run: RecordedRun, colour: str) -> None:
    bins = [own for own in run.surviving("energy_gap") if not own.is_gap]
    bundles = [list(group) for _, group in groupby(bins, lambda own: own.step // _BUNDLE)]
    x = [bundle[0].step for bundle in bundles]
    low = [min(own.low for own in bundle) for bundle in bundles]
    high = [max(own.high for own in bundle) for bundle in bundles]
    axes.fill_between(x, low, high, color=colour, alpha=0.3, lw=0)
    middle = [statistics.median(own.mean for own in bundle) for bundle in bundles]
    axes.plot(x, middle, color=colour, label=f"{_name(run)}: {outcome(run)}")


def _dress(gap: Axes, accuracy: Axes, scale: Axes) -> None:
    gap.set_yscale("symlog", linthresh=1.0)
    bottom, top = gap.get_ylim()
    # A lost run ends at 1e20 and would flatten everything before.
    gap.set_ylim(max(bottom, -_TALLEST), min(top, _TALLEST))
    gap.axhline(0, color="black", lw=0.6)
    gap.set_ylabel("energy gap  f(x⁺) − f(x⁻)")
    for level, marker in _MARKERS.items():
        gap.plot(
            [], [], marker, color="white", mec="black", ms=9, ls="", label=f"first {level} alert"
        )
    gap.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    accuracy.set_ylim(0, 1.05)
    accuracy.set_ylabel("test accuracy")
    scale.set_ylim(-0.03, 1.05)
    scale.set_ylabel("GradScale")
    scale.set_xlabel(
        "training step   (GradScale dotted: at the reference exponent, β* = 0 has none)"
    )
    for axes in (gap, accuracy, scale):
        unframed(axes)


def _draw_samples(figure: Any, runs: Sequence[RecordedRun]) -> None:
    panels = figure.subplots(len(runs), len(_STAGES), squeeze=False)
    for axes, run, colour in zip(panels, runs, CONTRASTS, strict=False):
        stored = _samples(run.path / "figures" / "samples.npz")
        lost = run.results.get("diverged_at") is not None
        for panel, (stage, title) in zip(axes, _STAGES.items(), strict=True):
            panel.set_axis_off()
            # A run that ended well has no last healthy moment before its end.
            if stage in stored and (lost or stage != "healthy"):
                grid = sample_grid(stored[stage], columns=4)
                panel.imshow(grid, interpolation="nearest")
                panel.set_title(f"{_name(run)}\nsamples, {title}", color=colour, fontsize=11)


def _samples(file: Path) -> dict[str, Tensor]:
    """The first samples of each stage that a run has stored.

    Raises:
        ConfigError: the file is missing, damaged or too large.
    """
    import numpy as np

    stream = opened(file)
    if stream is None:
        raise ConfigError(f"{file} is missing. Restore it, or name another run.")
    try:
        with stream, ZipFile(stream) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _LARGEST:
                raise ValueError(f"more than {_LARGEST:,} bytes")
        with np.load(file) as stored:
            # Of images: what is none is refused before anything is drawn.
            found = {
                stage: torch.from_numpy(stored[stage][:_SHOWN])
                for stage in _STAGES
                if stage in stored
            }
        for images in found.values():
            sample_grid(images[:, :, :_WIDEST, :_WIDEST])
        return {stage: images[:, :, :_WIDEST, :_WIDEST] for stage, images in found.items()}
    except _DAMAGE as error:
        raise ConfigError(
            f"{file} does not hold samples: {type(error).__name__}: {error}. Restore it, or name "
            "another run."
        ) from error


def _first_alert(run: RecordedRun, level: str) -> dict[str, Any] | None:
    return next((alert for alert in run.alerts if alert["level"] == level), None)


def _gap_at(run: RecordedRun, alert: Mapping[str, Any]) -> float | None:
    """The gap that an alert is about, else the mean of the stretch that it lies in."""
    if alert["tag"] == "energy_gap":
        return float(alert["value"])
    before = [own for own in run.surviving("energy_gap") if own.step <= alert["step"]]
    return before[-1].mean if before else None


def _accuracy_at(run: RecordedRun, step: int) -> float | None:
    """Test accuracy of the latest evaluation up to a step."""
    return max(((at, value) for at, value in run.accuracy if at <= step), default=(0, None))[1]


def _alert_cell(run: RecordedRun, level: str) -> str:
    alert = _first_alert(run, level)
    if alert is None:
        return "none"
    kept = _accuracy_at(run, alert["step"])
    then = "" if kept is None else f", accuracy then {kept:.1%}"
    return f"step {alert['step']:,}: {alert['rule']}{then}"


def _weight(run: RecordedRun, tag: str) -> str:
    return _number(run, f"reference_{tag}" if run.setting("beta_star") == 0 else tag)


def _number(run: RecordedRun, key: str) -> str:
    value = run.results.get(key)
    # Numbers that are not finite are stored as strings.
    return "unknown" if value is None else number(float(value))


def _seconds(run: RecordedRun) -> str:
    value = run.results.get("wall_seconds")
    return "unknown" if value is None else f"{value:.0f} s"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
