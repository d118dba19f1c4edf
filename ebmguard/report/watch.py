"""`ebmguard watch`: a run on the terminal, while it goes on."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ..tags import Scale
from .bins import Bin
from .charts import ACCURACY, CHARTS, unnamed, value_of
from .folder import RecordedRun
from .plots import Axis, short_number

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError('watching needs rich: pip install "ebmguard[cli]"') from error

__all__ = ["WatchConfig", "sparkline", "watch"]

_EVERY = 1.0
_EVERY_AS_TEXT = 30.0  # without a terminal, where frames are appended
_RATE_OVER = 60.0
_TEXT_HEIGHT = 50  # of a frame that is not for a screen

_STYLES = {"": "green", "INFO": "cyan", "WARN": "yellow", "ERROR": "bold red"}
_BAR = 24
_LEVELS, _VALUES = 6, 12  # characters, with the space around them
_NARROWEST_SPARK, _WIDEST_SPARK = 12, 100
_MOST_OWN = 4  # of the trainer's own numbers
_TALL = 34  # lines, from which on sparklines are two lines tall
_BLOCKS = " ▁▂▃▄▅▆▇█"
_NOT_A_NUMBER = "×"


@dataclass(frozen=True)
class WatchConfig:
    """Watch a run until it is over: diagnostics with their healthy bands, alerts and rollbacks.

    The folder may be one that does not exist yet. A run whose trainer writes no results.json is
    watched until Ctrl-C.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder: the trainer's, or the guard's log_dir."""
    once: bool = False
    """Print the present state and exit."""


def watch(config: WatchConfig) -> int:
    """`ebmguard watch`; the exit status is 0, also after Ctrl-C, which is the way out."""
    console = Console(highlight=False)
    tags = [chart.name for chart in CHARTS]
    run = RecordedRun(config.run, tags)
    try:
        if config.once:
            console.print(_frame(RecordedRun.read(config.run, tags), None, console))
        elif console.is_terminal:
            with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
                live.update(f"reading {run.name}", refresh=True)  # some seconds where it is long
                _follow(run, console, lambda frame: live.update(frame, refresh=True), 0.0)
        else:
            _follow(run, console, lambda frame: console.print(frame, "\n", end=""), _EVERY_AS_TEXT)
    except KeyboardInterrupt:
        pass
    return 0


def _follow(
    run: RecordedRun, console: Console, show: Callable[[RenderableType], None], every: float
) -> None:
    """Show frames until the run is over: with ``every``, only new ones and not too often."""
    # Moments of the last minute, and how many rows there were.
    seen: deque[tuple[float, int]] = deque()
    shown, is_new = -math.inf, True
    while True:
        is_new |= run.update()
        now, rows = time.monotonic(), run.row_count
        if seen and rows < seen[-1][1]:
            seen.clear()  # the file began anew
        seen.append((now, rows))
        while now - seen[0][0] > _RATE_OVER:
            seen.popleft()
        start, before = seen[0]
        rate = (rows - before) / (now - start) if rows > before else None
        if run.is_over or not every or (is_new and now - shown >= every):
            show(_frame(run, rate, console))
            shown, is_new = now, False
        if run.is_over:
            return
        time.sleep(_EVERY)


def _frame(run: RecordedRun, rate: float | None, console: Console) -> RenderableType:
    """The state of a run; the rate is in rows per second, None where it is not known yet."""
    if not run.attempts:
        there = "waiting for the first row" if run.path.is_dir() else "waiting: no such folder yet"
        return Group(Text(run.name, style="bold"), Text(there, style="dim"))
    width, height = console.width, console.height if console.is_terminal else _TEXT_HEIGHT
    charts = len(CHARTS) + len(run.own[:_MOST_OWN]) + bool(run.surviving(ACCURACY.name))
    tall = 2 if height >= _TALL else 1
    head = [_headline(run, rate), _state(run), Text()]
    left = height - sum(_lines(part, width) for part in head) - charts * tall
    rollbacks = _records("rollbacks", run.rollbacks, left // 3, width)
    left -= sum(_lines(part, width) for part in rollbacks)
    alerts = _records("alerts", run.alerts, left, width)
    return Group(*head, _diagnostics(run, width, tall), *rollbacks, *alerts)


def _headline(run: RecordedRun, rate: float | None) -> Text:
    step, total = (run.step or 0) + 1, run.setting("iterations")
    line = Text.assemble((run.name, "bold"), f"  step {step:,}")
    if total:
        share = max(0.0, min(1.0, step / total))
        done = round(_BAR * share)
        line.append(f" of {total:,} ")
        line.append("━" * done, "green").append("─" * (_BAR - done), "dim").append(f" {share:.0%}")
    if run.is_over:
        seconds = run.results.get("wall_seconds")
        facts = ["over"] + ([f"took {_duration(seconds)}"] if seconds else [])
    else:
        facts = [f"{short_number(rate)} steps/s"] if rate else []
        facts += [f"{_duration((total - step) / rate)} left"] if rate and total else []
        age = time.time() - (run.path / "metrics.jsonl").stat().st_mtime
        facts.append(f"last row {_duration(max(0.0, age))} ago")
    return line.append("  " + ", ".join(facts), "dim")


def _state(run: RecordedRun) -> Text:
    worst = max((level for chart in CHARTS if (level := run.level(chart.name))), default=None)
    name = worst.name if worst else ""
    line = Text.assemble((f"● {name or 'in bounds'} now", _STYLES[name]))
    lost = run.results.get("diverged_at")
    if lost is not None:
        line.append(f", DIVERGED at step {lost:,}", _STYLES["ERROR"])
    counts = Counter(alert["level"] for alert in run.alerts)
    said = [f"{counts[kind]} {kind}" for kind in ("ERROR", "WARN", "INFO") if counts[kind]]
    line.append(f"   so far {', '.join(said) or 'no alerts'}")
    if back := len(run.rollbacks):
        line.append(f", {back} rollback{'s' if back > 1 else ''}", "magenta")
    beta_star = run.latest.get("beta_star")
    if beta_star is not None:
        line.append(f"   β* = {short_number(beta_star)}")
    if beta_star == 0:
        line.append(" (GradScale, ESS: at the reference exponent)", "dim")
    return line


def _diagnostics(run: RecordedRun, width: int, tall: int) -> RenderableType:
    rows = [(own, value_of(run.latest, own.name), run.surviving(own.name)) for own in CHARTS]
    # What is not measured in every step: as it was at last.
    others = (ACCURACY, *map(unnamed, run.own[:_MOST_OWN]))
    seen = [(own, bins) for own in others if (bins := run.surviving(own.name))]
    rows += [(own, run.latest.get(own.name, bins[-1].mean), bins) for own, bins in seen]
    bands = [_band(*run.limits(chart.name)[:2]) for chart, *_ in rows]
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
        level = run.level(chart.name)
        name = level.name if level else ""
        lines = sparkline(bins, chart.scale, max(1, min(_WIDEST_SPARK, spark)), tall)
        drawn = Text("\n".join(lines), style=_STYLES[name])
        bad = _STYLES["ERROR"] if run.bands.owes(chart.name) else "dim"
        drawn.highlight_words([_NOT_A_NUMBER], bad)
        shown = "unknown" if value is None else short_number(value)
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


def _band(low: float, high: float) -> str:
    if math.isinf(low):
        return "" if math.isinf(high) else f"≤ {short_number(high)}"
    above = f"≥ {short_number(low)}"
    return above if math.isinf(high) else f"{short_number(low)} … {short_number(high)}"


def _records(
    title: str, records: Sequence[Mapping[str, Any]], room: int, width: int
) -> list[RenderableType]:
    """The latest, newest first, as many as there is room for, and one in any case."""
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
    return sum(1 + len(line) // width for line in str(part).split("\n"))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def sparkline(bins: Sequence[Bin], scale: Scale | None, width: int, height: int = 1) -> list[str]:
    """Lines of blocks, from top to bottom, that show where a series went farthest.

    A column's value is the one farthest from the median of the series, so that a spike of a single
    step is seen however long the run. A column with a value that is not finite is marked by ×.
    """
    values = [value for own in bins for _, value in own.points()]
    if not bins:
        return [" " * width] * height
    axis = Axis.around(scale, values)
    middle = axis.at(statistics.median(values)) if values else 0.0
    first, last = bins[0].step, bins[-1].step
    columns: list[list[float]] = [[] for _ in range(width)]
    bad = set()
    for own in bins:
        # Fewer bins than columns are spread, so that time runs evenly from left to right.
        column = (own.step - first) * (width - 1) // max(1, last - first)
        columns[column] += [axis.at(value) for _, value in own.points()]
        if own.bad_at is not None:
            bad.add(column)
    drawn, at = [], math.nan
    for i, heights in enumerate(columns):
        # What is measured every so many steps holds until it is measured again.
        at = max(heights, key=lambda x: abs(x - middle), default=at)
        if i in bad or math.isnan(at):
            drawn.append((_NOT_A_NUMBER if i in bad else " ") * height)
        else:
            # The lowest value is still seen: as the lowest block of the lowest line.
            filled = max(1, round(at * 8 * height))
            below = range(8 * (height - 1), -1, -8)
            drawn.append("".join(_BLOCKS[min(8, max(0, filled - of))] for of in below))
    return ["".join(line) for line in zip(*drawn, strict=True)]
