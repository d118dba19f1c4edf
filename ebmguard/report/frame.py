"""One frame of `ebmguard watch`, as something that rich can draw."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .charts import ACCURACY, CHARTS, Limits, value_of
from .follow import Followed
from .scales import number
from .spark import NOT_A_NUMBER, sparkline

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["frame"]

_STYLES = {"": "green", "INFO": "cyan", "WARN": "yellow", "ERROR": "bold red"}
_BAR = 24
# Characters for the level, and for the value, with the space around them.
_LEVELS, _VALUES = 6, 12
_NARROWEST_SPARK, _WIDEST_SPARK = 12, 100
# From this many lines on the sparklines are two lines tall.
_TALL = 34


def frame(run: Followed, rate: float | None, width: int, height: int) -> RenderableType:
    """The state of a run.

    Args:
        run: the run.
        rate: rows per second, None where it is not known yet.
        width, height: room for the frame, in characters.
    """
    from rich.console import Group
    from rich.text import Text

    if not run.rows:
        there = "waiting for the first row" if run.path.is_dir() else "waiting: no such folder yet"
        return Group(Text(str(run.path), style="bold"), Text(there, style="dim"))
    charts = len(CHARTS) + bool(run.surviving(ACCURACY.tag))
    tall = 2 if height >= _TALL else 1
    head = [_headline(run, rate), _state(run), Text()]
    left = height - sum(_lines(part, width) for part in head) - charts * tall
    rollbacks = _records("rollbacks", run.recoveries, left // 3, width)
    left -= sum(_lines(part, width) for part in rollbacks)
    alerts = _records("alerts", run.alerts, left, width)
    return Group(*head, _diagnostics(run, width, tall), *rollbacks, *alerts)


def _headline(run: Followed, rate: float | None) -> Text:
    from rich.text import Text

    step, total = run.step or 0, run.iterations
    line = Text(str(run.path), style="bold")
    line.append(f"  step {step + 1:,}", style="not bold")
    if total:
        share = min(1.0, (step + 1) / total)
        line.append(f" of {total:,} ", style="not bold")
        line.append("━" * round(_BAR * share), style="not bold green")
        line.append("─" * (_BAR - round(_BAR * share)), style="not bold dim")
        line.append(f" {share:.0%}", style="not bold")
    facts = []
    if run.is_over:
        seconds = (run.results or {}).get("wall_seconds")
        facts += ["over"] + ([f"took {_duration(seconds)}"] if seconds else [])
    else:
        facts += [f"{number(rate)} steps/s"] if rate else []
        facts += [f"{_duration((total - step - 1) / rate)} left"] if rate and total else []
        age = time.time() - (run.path / "metrics.jsonl").stat().st_mtime
        facts.append(f"last row {_duration(max(0.0, age))} ago")
    line.append("  " + ", ".join(facts), style="not bold dim")
    return line


def _state(run: Followed) -> Text:
    from rich.text import Text

    line = Text()
    worst = max((level for chart in CHARTS if (level := run.level(chart.tag))), default=None)
    name = worst.name if worst else ""
    line.append(f"● {name or 'in bounds'} now", style=_STYLES[name])
    lost = (run.results or {}).get("diverged_at")
    if lost is not None:
        line.append(f", DIVERGED at step {lost:,}", style=_STYLES["ERROR"])
    counts = Counter(alert["level"] for alert in run.alerts)
    said = [f"{counts[kind]} {kind}" for kind in ("ERROR", "WARN", "INFO") if counts[kind]]
    line.append(f"   so far {', '.join(said) or 'no alerts'}")
    if run.recoveries:
        back = len(run.recoveries)
        line.append(f", {back} rollback{'s' if back > 1 else ''}", style="magenta")
    beta_star = run.latest.get("beta_star")
    if beta_star is not None:
        line.append(f"   β* = {number(beta_star)}")
    if beta_star == 0:
        line.append(" (GradScale, ESS: at the reference exponent)", style="dim")
    return line


def _diagnostics(run: Followed, width: int, tall: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    rows = [(chart, value_of(run.latest, chart.tag), run.surviving(chart.tag)) for chart in CHARTS]
    evaluated = run.surviving(ACCURACY.tag)
    rows += [(ACCURACY, evaluated[-1].low, evaluated)] if evaluated else []
    bands = [_band(run.limits.get(chart.tag, Limits())) for chart, *_ in rows]
    words = _LEVELS + max(len(chart.title) for chart, *_ in rows) + _VALUES
    # In a narrow terminal the bands make room for the lines.
    with_band = width >= words + max(map(len, bands)) + _NARROWEST_SPARK
    spark = width - words - (max(map(len, bands)) + 1 if with_band else 0)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, min_width=_LEVELS - 1)
    table.add_column(no_wrap=True, max_width=max(4, width - _LEVELS - _VALUES))
    table.add_column(no_wrap=True, min_width=_VALUES - 2, justify="right")
    columns = 3 + (spark >= _NARROWEST_SPARK // 2) + with_band
    for _ in range(3, columns):
        table.add_column(no_wrap=True)
    for (chart, value, bins), band in zip(rows, bands, strict=True):
        level = run.level(chart.tag)
        name = level.name if level else ""
        lines = sparkline(bins, chart.scale, max(1, min(_WIDEST_SPARK, spark)), tall)
        drawn = Text("\n".join(lines), style=_STYLES[name])
        drawn.highlight_words([NOT_A_NUMBER], _STYLES["ERROR"] if run.owes(chart.tag) else "dim")
        shown = "unknown" if value is None else number(value)
        lift = "\n" * (tall - 1)  # words stand at the foot of a tall line
        cells = [
            Text(lift + name, style=_STYLES[name]),
            Text(lift + chart.title),
            Text(lift + shown, style=_STYLES[name] if name else "bold"),
            drawn,
            Text(lift + band, style="dim"),
        ]
        table.add_row(*cells[:columns])
    return table


def _band(limits: Limits) -> str:
    """The range in which no rule says WARN, in words."""
    low, high = number(limits.low), number(limits.high)
    if math.isinf(limits.low):
        return "" if math.isinf(limits.high) else f"≤ {high}"
    return f"≥ {low}" if math.isinf(limits.high) else f"{low} … {high}"


def _records(
    title: str, records: Sequence[Mapping[str, Any]], room: int, width: int
) -> list[RenderableType]:
    """The latest records, newest first, as many as there is room for, and one in any case."""
    from rich.text import Text

    if not records:
        return []
    shown: list[Text] = []
    room -= 3  # title, an empty line and the count of the rest
    for record in reversed(records):
        line = Text(str(record["message"]), style=_STYLES.get(record.get("level", ""), ""))
        room -= _lines(line, width)
        if shown and room < 0:
            break
        shown.append(line)
    rest = len(records) - len(shown)
    more = [Text(f"and {rest} before", style="dim")] if rest else []
    return [Text(f"\nlatest {title}", style="bold"), *shown, *more]


def _lines(part: RenderableType, width: int) -> int:
    """Lines that a text takes, or nearly: words are not broken."""
    text = str(part)
    return sum(1 + len(line) // width for line in text.split("\n"))


def _duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever says it in a short word."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
