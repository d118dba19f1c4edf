"""Charts of runs as coordinates: axes and lines. The page adds the markup."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import printable
from ..tags import REFERENCE, SHARPNESS, TAGS, Scale, Tag
from .bins import Bin
from .folder import RecordedRun, first_and_last, value_of

__all__ = ["CHARTS", "MORE_CHARTS", "Axis", "Plot", "draw", "note", "short_number", "unnamed"]

_FIRST = "energy_gap", SHARPNESS, "grad_scale", "ess", "energy_overlap", "sampler/grad_norm"
CHARTS = tuple(TAGS[name] for name in _FIRST)
MORE_CHARTS = tuple(tag for tag in TAGS.values() if tag.scale is not None and tag not in CHARTS)
WIDTH, HEIGHT = 560, 210
LEFT, RIGHT, TOP, BOTTOM = 54, 548, 16, 186
# Beyond these a lost run would flatten everything that came before.
_TALLEST, _DECADES = 1e6, 12
# The transform of a value to an even scale, and its inverse.
_TRANSFORMS: dict[str | None, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "log": (math.log10, lambda y: 10.0**y),
    "symlog": (
        lambda x: x if abs(x) <= 1 else math.copysign(1 + math.log10(abs(x)), x),
        lambda y: y if abs(y) <= 1 else math.copysign(10.0 ** (abs(y) - 1), y),
    ),
}


def unnamed(name: str) -> Tag:
    """Return the chart of a number that the tags do not describe, usually the trainer's."""
    return Tag(name, printable(name), "symlog", "")


def note(chart: Tag) -> str:
    """Return a short note: the healthy value, and what other values mean."""
    return "; ".join(filter(None, (chart.healthy, chart.tells))) or chart.definition


def short_number(value: float) -> str:
    """Return a value in few characters."""
    if not math.isfinite(value):
        return str(value)
    digits = 4 if 1e-3 <= abs(value) < 9999.5 else 3
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


@dataclass(frozen=True)
class Axis:
    """An axis from its lowest value to its highest."""

    scale: Scale | None  # None is linear
    low: float  # values outside are drawn at the end
    high: float

    @classmethod
    def around(cls, scale: Scale | None, values: Sequence[float]) -> Axis:
        """Return the axis that fits finite values, cut if a few would flatten the rest."""
        if scale == "share":
            return cls(scale, 0.0, 1.0)
        if scale == "log":
            values = [min(value, 1e300) for value in values if value > 1e-300] or [1.0]
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if scale == "symlog":
            low, high = (min(_TALLEST, max(-_TALLEST, end)) for end in (low, high))
        forward, back = _TRANSFORMS.get(scale, (float, float))
        down, up = forward(low), forward(high)
        if scale == "log":
            return cls(scale, back(max(down, up - _DECADES) - 0.1), back(up + 0.1))
        middle = max(abs(down), abs(up)) or 1.0
        # A constant is drawn in the middle.
        pad = 0.05 * (up - down) if up - down > 1e-9 * middle else 0.5 * middle
        return cls(scale, back(down - pad), back(up + pad))

    def at(self, value: float) -> float:
        """Return the position of a finite value: 0 at the lower end, 1 at the upper."""
        if self.scale == "log" and value <= 0:
            return 0.0
        low, x, high = map(_TRANSFORMS.get(self.scale, (float,))[0], (self.low, value, self.high))
        return min(1.0, max(0.0, (x - low) / (high - low)))

    def ticks(self) -> list[float]:
        """Return about five round values on the axis."""
        ticks = _powers(self.low, self.high) if self.scale == "log" else []
        if self.scale == "symlog" and max(-self.low, self.high) > 4:
            inside = [0.0, *_powers(1.0, self.high), *(-x for x in _powers(1.0, -self.low))]
            inside += [5 * x for x in inside if x] if len(inside) < 5 else []
            ticks = sorted(tick for tick in inside if self.low <= tick <= self.high)
        return ticks if len(ticks) > 1 else _round_values(self.low, self.high)


def _powers(low: float, high: float) -> list[float]:
    if high < low:
        return []
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**e for e in range(first, last + 1, max(1, 1 + (last - first) // 4))]


def _round_values(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(s for s in (1.0, 2.0, 2.5, 5.0, 10.0) if s * unit >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


@dataclass
class Plot:
    """One chart; coordinates are those of a viewBox of ``WIDTH`` by ``HEIGHT``."""

    chart: Tag
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    bands: list[str]  # outlines of the range in which no rule says WARN
    limits: list[tuple[float, str]]  # heights of the rules' fixed limits
    owed: bool  # a value that is not finite is an alarm, and not just unknown
    # The last step, and for every run the steps, lowest and highest values of its bins.
    data: dict[str, Any]
    # The number of the run, whether a rollback has undone these steps, and the path.
    lines: list[tuple[int, bool, str]] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)  # not finite: position and step
    # The alerts of this diagnostic: x, y, the numbers of run and alert, and the alert.
    markers: list[tuple[float, float, int, int, dict[str, Any]]] = field(default_factory=list)
    # Alerts of other diagnostics by their level, and "diverged".
    moments: list[tuple[float, str]] = field(default_factory=list)
    # x of the step and of the restored step, and then as in markers.
    rollbacks: list[tuple[float, float, int, int, dict[str, Any]]] = field(default_factory=list)

    @property
    def group(self) -> str:
        """The part before the slash of its name, by which charts of trainers are grouped."""
        return printable(self.chart.name.rpartition("/")[0].partition("/")[0])

    @property
    def is_zero(self) -> bool:
        """True if every value is 0, without an alert."""
        ends = (end for run in self.data["runs"] for end in (*run["low"], *run["high"]))
        return not (self.markers or self.gaps or any(ends))


def draw(chart: Tag, runs: Sequence[RecordedRun]) -> Plot | None:
    """Return the chart of a diagnostic for all runs; None if no run has a finite value."""
    pieces = [run.pieces(chart.name) for run in runs]
    bins = [span for attempts in pieces for parts in attempts for part in parts for span in part]
    values = [value for span in bins for _, value in span.points()]
    if not values:
        return None
    y = Axis.around(chart.scale, values)
    end = max(1, *(attempt.last for run in runs for attempt in run.attempts))
    x = Axis("linear", 0, end)
    bounds = runs[0].limits(chart.name)
    moves = [a.bands[chart.name] for a in runs[0].attempts if chart.name in a.bands]
    plot = Plot(
        chart,
        [(_x(x, tick), f"{tick:,.0f}") for tick in x.ticks() if tick == int(tick)],
        [(_y(y, tick), short_number(tick)) for tick in y.ticks()],
        bands=[_band(edges.bins, x, y) for edges in moves if len(runs) == 1],
        limits=[
            (_y(y, limit), f"WARN {sign} {short_number(limit)}")
            for sign, limit in (("<", bounds.low), (">", bounds.high))
            if y.low < limit < y.high and not moves
        ],
        owed=any(run.bands.owes(chart.name) for run in runs),
        data={"last": end, "runs": []},
    )
    for index, (run, attempts) in enumerate(zip(runs, pieces, strict=True)):
        kept = [span for piece, _ in attempts for span in piece]
        last = value_of(run.latest, chart.name)
        if kept and last is not None and (run.step, last) not in kept[-1].points():
            kept += [Bin.over([run.step], [last])] if math.isfinite(last) else []
        low = [None if span.is_gap else float(f"{span.low:.4g}") for span in kept]
        high = [None if span.is_gap else float(f"{span.high:.4g}") for span in kept]
        plot.data["runs"].append({"step": [span.step for span in kept], "low": low, "high": high})
        # The steps that rollbacks undid are drawn below the line that led to the present state.
        for undone, part in (*((True, piece) for _, piece in attempts), (False, kept)):
            path = _path(part, x, y)
            plot.lines += [(index, undone, path)] if path else []
            plot.gaps += [
                (_x(x, span.bad_at), span.bad_at) for span in part if span.bad_at is not None
            ]
        _mark(plot, index, run, x, y)
    return plot


def _mark(plot: Plot, number: int, run: RecordedRun, x: Axis, y: Axis) -> None:
    for index, alert in first_and_last(run.alerts):
        moment = _x(x, alert["step"]), alert["level"]
        if alert["tag"].removeprefix(REFERENCE) == plot.chart.name:
            plot.markers.append((moment[0], _y(y, float(alert["value"])), number, index, alert))
        elif alert["level"] != "INFO":
            plot.moments.append(moment)
    plot.moments = list(dict.fromkeys(plot.moments))  # one of many at one place
    lost = run.results.get("diverged_at")
    plot.moments += [(_x(x, lost), "diverged")] if lost is not None else []
    for index, record in first_and_last(run.rollbacks):
        places = _x(x, record["step"]), _x(x, record["restored_step"])
        plot.rollbacks.append((*places, number, index, record))


def _path(bins: Sequence[Bin], x: Axis, y: Axis) -> str:
    """Return the data of an SVG path through the extremes; a gap begins a new stretch."""
    words, pen = [], "M"
    for span in bins:
        for step, value in span.points():
            words.append(f"{pen}{_x(x, step):g} {_y(y, value):g}")
            pen = "L"
        pen = "M" if span.is_gap else pen
    # A stretch of a single value is a point, which a line with round ends shows.
    return " ".join(words) + ("h0" if len(words) == 1 else "")


def _band(edges: Sequence[Bin], x: Axis, y: Axis) -> str:
    """Return the outline of an attempt's band, as wide as it was at its widest within a bin."""
    corners = [(span.step, span.low) for span in edges]
    corners += [(span.step, span.high) for span in reversed(edges)]
    return " ".join(f"{_x(x, step):g},{_y(y, value):g}" for step, value in corners)


def _x(axis: Axis, step: float) -> float:
    return round(LEFT + axis.at(step) * (RIGHT - LEFT), 1)


def _y(axis: Axis, value: float) -> float:
    height = axis.at(value) if math.isfinite(value) else float(value > 0)
    return round(BOTTOM - height * (BOTTOM - TOP), 1)
