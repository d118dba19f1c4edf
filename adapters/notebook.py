"""Notebooks: a sink that keeps one live picture of energy gap and GradScale, with the alerts.

g = guard(None, sample_q, sinks=[NotebookSink()])
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ebmguard.adapters._requires import requires
from ebmguard.report.bins import BinnedSeries
from ebmguard.report.folder import value_of
from ebmguard.report.plots import Axis, short_number
from ebmguard.tags import ENERGY_GAP, GRAD_SCALE, TAGS

with requires("ipython", extra="notebook"):
    from IPython.display import display

__all__ = ["NotebookSink"]

_EVERY = 1.0  # seconds between two pictures
_LEFT, _WIDTH, _HEIGHT, _FOOT = 50, 420, 130, 20
_COLOURS = {"ERROR": "#d1284f", "WARN": "#b25e00", "INFO": "#2a6db0"}


class NotebookSink:
    """Draws below the cell in which the first row comes, and draws anew once a second.

    It keeps some hundred numbers of a run of any length. Steps that a rollback undid are dropped.
    """

    def __init__(self) -> None:
        self._series = {tag: BinnedSeries(300) for tag in (ENERGY_GAP, GRAD_SCALE)}
        self._lines: list[str] = []
        self._handle: Any = None
        self._step, self._drawn = 0, -math.inf

    def write_row(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None:
        """Take gap and GradScale; at β* = 0 GradScale is that of the reference exponent."""
        self._step = step
        for tag, series in self._series.items():
            value = value_of(scalars, tag)
            if value is not None:
                series.extend([step], [value])
        if time.monotonic() - self._drawn >= _EVERY:
            self.flush()

    def write_alert(self, record: Mapping[str, Any]) -> None:
        """List the alert."""
        level, text = record["level"], escape(record["message"].removeprefix(record["level"]))
        self._lines.append(f'<b style="color:{_COLOURS[level]}">{level}</b> {text}')

    def write_recovery(self, record: Mapping[str, Any]) -> None:
        """List the rollback, and drop its steps, which come again."""
        self._lines.append(escape(record["message"]))
        for series in self._series.values():
            series.bins = [one for one in series.bins if one.step < record["restored_step"]]

    def flush(self) -> None:
        """Draw the present state."""
        self._drawn = time.monotonic()
        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def _repr_html_(self) -> str:
        charts = "".join(self._chart(tag) for tag in self._series)
        lines = "".join(f"<li>{line}</li>" for line in self._lines)
        alerts = f"<ul>{lines}</ul>" if lines else "<p>no alerts</p>"
        return f"<div><b>step {self._step:,}</b><br>{charts}{alerts}</div>"

    def _chart(self, tag: str) -> str:
        title, points = TAGS[tag].title, [p for b in self._series[tag].bins for p in b.points()]
        y = Axis.around(TAGS[tag].scale, [value for _, value in points])
        last = max(1, self._step)

        def height(value: float) -> float:
            return round(_FOOT + (1 - y.at(value)) * (_HEIGHT - 2 * _FOOT), 1)

        ticks = y.ticks()
        ticks = [0.0, ticks[0], ticks[-1]] if len(ticks) > 6 else ticks  # there is room for six
        grid = "".join(
            f'<path d="M{_LEFT} {height(tick)}H{_WIDTH}" stroke="currentColor" opacity=".15"/>'
            f'<text x="{_LEFT - 6}" y="{height(tick) + 4}" text-anchor="end">'
            f"{short_number(tick)}</text>"
            for tick in ticks
        )
        line = "L".join(
            f"{round(_LEFT + step / last * (_WIDTH - _LEFT), 1)} {height(value)}"
            for step, value in points
        )
        return (
            f'<svg width="{_WIDTH}" height="{_HEIGHT}" font-size="11" fill="currentColor">'
            f'<text x="{_LEFT}" y="11" font-weight="bold">{title}</text>{grid}'
            + (f'<path d="M{line}" fill="none" stroke="#0072B2" stroke-width="1.4"/>' * bool(line))
            + "</svg>"
        )
