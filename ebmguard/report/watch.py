"""`ebmguard watch`: a run on the terminal, while it goes on."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ..tags import Scale
from .bins import Bin
from .files import ROWS, listed, similar_runs
from .folder import ACCURACY, RecordedRun, value_of
from .plots import CHARTS, Axis, short_number, unnamed
from .problems import advice, next_steps

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError('watching needs rich: pip install ".[cli]" in a clone') from error

__all__ = ["WatchConfig", "sparkline", "watch"]

_EVERY, _RATE_OVER = 1.0, 60.0  # seconds
_EVERY_AS_TEXT = 30.0  # without a terminal, where frames are appended
_TEXT_HEIGHT = 50  # of a frame that is not for a screen

_STYLES = {"": "green", "INFO": "cyan", "WARN": "yellow", "ERROR": "bold red"}
_BAR, _LEVELS, _VALUES = 24, 6, 12  # characters, with the space around them
_NARROWEST_SPARK, _WIDEST_SPARK = 12, 100
_MOST_TRAINER_TAGS = 4
_TALL = 34  # lines, from which on sparklines are two lines tall
_BLOCKS, _NOT_A_NUMBER = " ▁▂▃▄▅▆▇█", "×"


@dataclass(frozen=True)
class WatchConfig:
    """Watch a run until it is over: diagnostics with their healthy bands, alerts and rollbacks.

    The folder need not exist yet. If the trainer writes no results.json, the run is watched until
    Ctrl-C.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder: the trainer's, or the guard's log_dir."""
    once: bool = False
    """Print the present state and exit."""


def watch(config: WatchConfig) -> int:
    """Run `ebmguard watch`; Ctrl-C ends it. The exit status is 0."""
    console = Console(highlight=False)
    tags = [chart.name for chart in CHARTS]
    run = RecordedRun(config.run, tags)
    with suppress(KeyboardInterrupt):
        if config.once:
            console.print(_frame(RecordedRun.read(config.run, tags), None, console))
            return 0
        if not os.path.lexists(config.run / ROWS) and (runs := similar_runs(config.run)):
            # The folder may be there soon, or be misspelt.
            console.print(f"no run in {run.name} yet; runs that are there: {listed(runs)}")
        if console.is_terminal:
            with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
                live.update(f"reading {run.name}", refresh=True)  # some seconds where it is long
                for frame in _frames(run, console, 0.0):
                    live.update(frame, refresh=True)
        else:
            for frame in _frames(run, console, _EVERY_AS_TEXT):
                console.print(frame, "\n", end="")
    return 0


def _frames(run: RecordedRun, console: Console, every: float) -> Iterator[RenderableType]:
    """Yield frames until the run is over: with ``every``, only new ones and not too often."""
    progress: list[tuple[float, int]] = []  # times and steps of the last minute
    shown, is_new = -math.inf, True
    while True:
        is_new |= run.update()
        now, step = time.monotonic(), run.step if run.attempts else 0
        # Later steps are of before a rollback.
        progress = [x for x in progress if now - x[0] <= _RATE_OVER and x[1] <= step]
        progress.append((now, step))
        start, first = progress[0]
        rate = (step - first) / (now - start) if step > first else None
        if run.is_over or not every or (is_new and now - shown >= every):
            yield _frame(run, rate, console)
            shown, is_new = now, False
        if run.is_over:
            return
        time.sleep(_EVERY)


def _frame(run: RecordedRun, rate: float | None, console: Console) -> RenderableType:
    """Return the state of a run; the rate is in steps per second, None if it is not known yet."""
    if not run.attempts:
        state = "waiting for the first row" if run.path.is_dir() else "waiting: no such folder yet"
        return Group(Text(run.name, style="bold"), Text(state, style="dim"))
    height = console.height if console.is_terminal else _TEXT_HEIGHT
    table = _diagnostics(run, console.width, 2 if height >= _TALL else 1)
    advised = next_steps(run, advice(run))
    next_ = [Text(f"next: {'; '.join(advised)}")] if advised else []
    head = Group(_headline(run, rate), _state(run), *next_, Text(), table)
    left = height - len(console.render_lines(head))
    rollbacks = _records("rollbacks", run.rollbacks, left // 3, console)
    left -= len(console.render_lines(rollbacks))
    return Group(head, rollbacks, _records("alerts", run.alerts, left, console))


def _headline(run: RecordedRun, rate: float | None) -> Text:
    step, total = run.step + 1, run.setting("iterations")
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
    facts += [run.thinning] if run.thinning else []
    return line.append("  " + ", ".join(facts), "dim")


def _state(run: RecordedRun) -> Text:
    worst = max((level for chart in CHARTS if (level := run.level(chart.name))), default=None)
    verdict, name = run.verdict, worst.name if worst else ""
    kind = "ERROR" if verdict.is_lost else "WARN" if verdict.name == "look" else ""
    line = Text.assemble((f"● {verdict}", _STYLES[kind]))
    if name or not verdict.is_lost:
        line.append(f", {name or 'in bounds'} now", _STYLES[name])
    counts = [f"{count} {level}" for level, count in run.counts.items()]
    line.append(f"   so far {', '.join(counts) or 'no alerts'}")
    if back := len(run.rollbacks):
        line.append(f", {back} rollback{'s' if back > 1 else ''}", "magenta")
    beta_star = run.latest.get("beta_star")
    if beta_star is not None:
        line.append(f"   β* = {short_number(beta_star)}")
    if beta_star == 0:
        line.append(" (GradScale, ESS: at the reference exponent)", "dim")
    return line


def _diagnostics(run: RecordedRun, width: int, tall: int) -> RenderableType:
    rows = [
        (chart, value_of(run.latest, chart.name), run.surviving(chart.name)) for chart in CHARTS
    ]
    # Numbers that are not measured in every step are shown as they were last.
    others = (ACCURACY, *map(unnamed, run.trainer_tags[:_MOST_TRAINER_TAGS]))
    known = [(chart, bins) for chart in others if (bins := run.surviving(chart.name))]
    rows += [(chart, run.latest.get(chart.name, bins[-1].last), bins) for chart, bins in known]
    bands = [_band(*run.limits(chart.name)[:2]) for chart, *_ in rows]
    free = width - _LEVELS - max(len(chart.title) for chart, *_ in rows) - _VALUES
    # In a narrow terminal the bands make room for the lines.
    with_band = free >= max(map(len, bands)) + _NARROWEST_SPARK
    spark = free - (max(map(len, bands)) + 1 if with_band else 0)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, min_width=_LEVELS - 1)
    table.add_column(no_wrap=True, max_width=max(4, width - _LEVELS - _VALUES))
    table.add_column(no_wrap=True, min_width=_VALUES - 2, justify="right")
    columns = 3 + (spark >= _NARROWEST_SPARK // 2) + with_band
    lift = "\n" * (tall - 1)  # words stand at the foot of a tall line
    for (chart, value, bins), band in zip(rows, bands, strict=True):
        level = run.level(chart.name)
        name = level.name if level else ""
        lines = sparkline(bins, chart.scale, max(1, min(_WIDEST_SPARK, spark)), tall)
        drawn = Text("\n".join(lines), _STYLES[name])
        bad = _STYLES["ERROR"] if run.bands.owes(chart.name) else "dim"
        drawn.highlight_words([_NOT_A_NUMBER], bad)
        shown = "unknown" if value is None else short_number(value)
        words = Text(lift + name, _STYLES[name]), Text(lift + chart.title)
        number = Text(lift + shown, _STYLES[name] if name else "bold")
        table.add_row(*(*words, number, drawn, Text(lift + band, "dim"))[:columns])
    return table


def _band(low: float, high: float) -> str:
    if math.isinf(low):
        return "" if math.isinf(high) else f"≤ {short_number(high)}"
    above = f"≥ {short_number(low)}"
    return above if math.isinf(high) else f"{short_number(low)} … {short_number(high)}"


def _records(title: str, records: list[dict[str, Any]], room: int, console: Console) -> Group:
    """Return the latest records, newest first, as many as there is room for, and at least one."""
    shown: list[Text] = []
    room -= 3  # title, an empty line and the count of the rest
    for record in reversed(records):
        line = Text(record["message"], _STYLES.get(record.get("level", ""), ""))
        room -= len(console.render_lines(line))
        if shown and room < 0:
            break
        shown.append(line)
    head = [Text(f"\nlatest {title}", "bold")] if records else []
    rest = len(records) - len(shown)
    return Group(*head, *shown, *([Text(f"and {rest} before", "dim")] if rest else []))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def sparkline(bins: Sequence[Bin], scale: Scale | None, width: int, height: int = 1) -> list[str]:
    """Return a series as lines of blocks, from top to bottom, that show its largest excursions.

    A column shows the value farthest from the median of the series, so that a spike of a single
    step is visible in a run of any length. × marks a column with a value that is not finite.
    """
    values = [value for span in bins for _, value in span.points()]
    if not bins:
        return [" " * width] * height
    axis = Axis.around(scale, values)
    middle = axis.at(statistics.median(values)) if values else 0.0
    first, last = bins[0].step, bins[-1].step
    columns: list[list[float]] = [[] for _ in range(width)]
    bad = set()
    for span in bins:
        # Fewer bins than columns are spread, so that time runs evenly from left to right.
        column = (span.step - first) * (width - 1) // max(1, last - first)
        columns[column] += [axis.at(value) for _, value in span.points()]
        if span.bad_at is not None:
            bad.add(column)
    drawn, level = [], math.nan
    for i, heights in enumerate(columns):
        # A number that is measured every so many steps holds until it is measured again.
        level = max(heights, key=lambda x: abs(x - middle), default=level)
        if i in bad or math.isnan(level):
            drawn.append((_NOT_A_NUMBER if i in bad else " ") * height)
        else:
            # The lowest value still shows, as the lowest block of the lowest line.
            filled = max(1, round(level * 8 * height))
            below = range(8 * (height - 1), -1, -8)
            drawn.append("".join(_BLOCKS[min(8, max(0, filled - blocks))] for blocks in below))
    return ["".join(line) for line in zip(*drawn, strict=True)]
