"""Charts of runs as coordinates: everything about a drawing but its markup, which is the page's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .charts import Chart
from .follow import Followed
from .scales import Axis, number
from .thin import Bin

__all__ = ["BOTTOM", "HEIGHT", "LEFT", "RIGHT", "TOP", "WIDTH", "Plot", "draw"]

WIDTH, HEIGHT = 560, 210
LEFT, RIGHT, TOP, BOTTOM = 54, 548, 16, 186


@dataclass
class Plot:
    """One chart; coordinates are those of a viewBox of ``WIDTH`` by ``HEIGHT``.

    Attributes:
        chart: what is drawn.
        x_ticks, y_ticks: position and label.
        bands: outlines of the range in which no rule says WARN.
        limits: heights of the rules' fixed limits, with their label.
        lines: of each run its number, whether a rollback has undone these steps, and the path.
        owed: a value that is not finite is an alarm, and not just unknown.
        gaps: of each value that is not finite the position and the step.
        markers: alerts of this diagnostic: ``x``, ``y``, ``level``, ``message``, and ``run`` and
            ``index``, which name its line in the table of alerts.
        moments: position and kind of what happened elsewhere: alerts' levels, "diverged".
        rollbacks: ``x`` and ``back`` (of the step and the restored one), ``message``, ``run`` and
            ``index`` likewise.
        data: what a reader of the page can ask for; see :func:`_readout`.
    """

    chart: Chart
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    bands: list[str] = field(default_factory=list)
    limits: list[tuple[float, str]] = field(default_factory=list)
    lines: list[tuple[int, bool, str]] = field(default_factory=list)
    owed: bool = False
    gaps: list[tuple[float, int]] = field(default_factory=list)
    markers: list[dict[str, Any]] = field(default_factory=list)
    moments: list[tuple[float, str]] = field(default_factory=list)
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


def draw(chart: Chart, runs: Sequence[Followed]) -> Plot | None:
    """The chart of a diagnostic, the runs over each other; None where no run has a finite value."""
    pieces = [run.pieces(chart.tag) for run in runs]
    values = [
        value
        for of_run in pieces
        for kept, undone in of_run
        for own in (*kept, *undone)
        for _, value in own.points()
    ]
    if not values:
        return None
    y = Axis.around(chart.scale, values)
    end = max(1, *(attempt.last for run in runs for attempt in run.attempts))
    x = Axis("linear", 0, end)
    plot = Plot(
        chart,
        [(_x(x, tick), f"{tick:,.0f}") for tick in x.ticks() if tick == int(tick)],
        [(_y(y, tick), number(tick)) for tick in y.ticks()],
        owed=any(run.owes(chart.tag) for run in runs),
        data={"last": end, "runs": [_readout(of_run) for of_run in pieces]},
    )
    if len(runs) == 1:
        plot.bands = _bands(runs[0], chart.tag, x, y)
    limits = runs[0].limits.get(chart.tag)
    moves = any(chart.tag in attempt.bands for attempt in runs[0].attempts)
    if limits is not None and not moves:
        plot.limits = [
            (_y(y, at), f"WARN {sign} {number(at)}")
            for sign, at in (("<", limits.low), (">", limits.high))
            if y.low < at < y.high
        ]
    for index, (run, of_run) in enumerate(zip(runs, pieces, strict=True)):
        # What rollbacks undid lies below the one line of what led to the present state.
        kept = [own for piece, _ in of_run for own in piece]
        for undone, bins in (*((True, piece) for _, piece in of_run), (False, kept)):
            path = _path(bins, x, y)
            plot.lines += [(index, undone, path)] if path else []
            plot.gaps += [(_x(x, own.bad_at), own.bad_at) for own in bins if own.bad_at is not None]
        _mark(plot, index, run, x, y)
    return plot


def _mark(plot: Plot, of: int, run: Followed, x: Axis, y: Axis) -> None:
    for entry, alert in enumerate(run.alerts):
        at = _x(x, alert["step"])
        if alert["tag"].removeprefix("ref/") == plot.chart.tag:
            value = float(alert["value"])
            plot.markers.append(
                {
                    "x": at,
                    # What has no place on the axis is marked at its foot, like a gap.
                    "y": _y(y, value) if not math.isnan(value) else BOTTOM,
                    "level": alert["level"],
                    "run": of,
                    "index": entry,
                    "message": alert["message"],
                }
            )
        elif alert["level"] != "INFO":
            plot.moments.append((at, alert["level"]))
    lost = (run.results or {}).get("diverged_at")
    plot.moments += [(_x(x, lost), "diverged")] if lost is not None else []
    plot.rollbacks += [
        {
            "x": _x(x, record["step"]),
            "back": _x(x, record["restored_step"]),
            "run": of,
            "index": entry,
            "message": record["message"],
        }
        for entry, record in enumerate(run.recoveries)
    ]


def _path(bins: Sequence[Bin], x: Axis, y: Axis) -> str:
    """The data of an SVG path through the extremes; a new stretch begins after a gap."""
    words = []
    pen = "M"
    for own in bins:
        for step, value in own.points():
            words.append(f"{pen}{_x(x, step):g} {_y(y, value):g}")
            pen = "L"
        if own.is_gap:
            pen = "M"
    # A stretch of a single value is a point, which a line with round ends shows.
    return " ".join(words) + ("h0" if len(words) == 1 else "")


def _bands(run: Followed, tag: str, x: Axis, y: Axis) -> list[str]:
    """Outlines of the band of every attempt, as wide as it was at its widest within a bin."""
    outlines = []
    for attempt in run.attempts:
        low, high = attempt.bands.get(tag, (None, None))
        if low is None or high is None:
            continue
        corners = [(own.step, -math.inf if own.is_gap else own.low) for own in low.bins]
        corners += [(own.step, math.inf if own.is_gap else own.high) for own in reversed(high.bins)]
        outlines.append(" ".join(f"{_x(x, step):g},{_y(y, value):g}" for step, value in corners))
    return outlines


def _readout(pieces: Sequence[tuple[list[Bin], list[Bin]]]) -> dict[str, list[Any]]:
    """Steps, and the lowest and highest value of each bin; None where it has no finite value."""
    bins = [own for kept, _ in pieces for own in kept]
    return {
        "step": [own.step for own in bins],
        "low": [None if own.is_gap else _short(own.low) for own in bins],
        "high": [None if own.is_gap else _short(own.high) for own in bins],
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _x(axis: Axis, step: float) -> float:
    return round(LEFT + axis.at(step) * (RIGHT - LEFT), 1)


def _y(axis: Axis, value: float) -> float:
    """Infinities lie at the ends."""
    at = axis.at(value) if math.isfinite(value) else float(value > 0)
    return round(BOTTOM - at * (BOTTOM - TOP), 1)
