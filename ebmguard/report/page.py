"""`ebmguard report`: runs as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import tyro

from ..errors import ConfigError, printable
from ..tags import BETA_STAR, REFERENCE, Tag, weight_tag
from . import plots
from .advice import advice, to_do
from .files import ALERT, batches, flat, opened
from .folder import ACCURACY, RecordedRun, outcome, value_of
from .plots import CHARTS, MORE_CHARTS, note, short_number, unnamed

__all__ = ["ReportConfig", "page", "report"]

_MOST_RUNS = 6
_PNG = b"\x89PNG\r\n\x1a\n"
_LARGEST = 4 << 20  # bytes; a larger picture would make the page slow to open


@dataclass(frozen=True)
class ReportConfig:
    """Write a page about runs, finished or not: charts, alerts, rollbacks, what to do next."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, up to six: the trainer's, or the guard's log_dir."""
    out: Path = Path("report.html")
    """The page, one file that needs no network."""


def report(config: ReportConfig) -> int:
    """`ebmguard report`; the exit status is 0."""
    if not 1 <= len(config.runs) <= _MOST_RUNS:
        raise ConfigError(f"A report takes 1 to {_MOST_RUNS} run folders; got {len(config.runs)}.")
    text = page(config.runs)
    try:
        config.out.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{config.out} cannot be written: {error}. Name another --out."
        ) from error
    print(f"report: {printable(config.out)}")
    return 0


def page(folders: Sequence[Path]) -> str:
    """The page about run folders as HTML; a ``ConfigError`` where one has no rows or is damaged."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError('reports need jinja2: pip install "ebmguard[cli]"') from error
    main, more = _charts(folders)
    runs = [RecordedRun.read(folder, [chart.name for chart in main + more]) for folder in folders]
    environment = Environment(
        loader=PackageLoader("ebmguard.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _cell, "note": note}
    names = [printable(folder.resolve().name) for folder in folders]
    if len(set(names)) < len(names):
        names = [run.name for run in runs]
    own = sorted({name for run in runs for name in run.own})
    configs, results = [_flat(run.config) for run in runs], [_flat(run.results) for run in runs]
    return environment.get_template("report.html").render(
        runs=[_facts(run, name) for run, name in zip(runs, names, strict=True)],
        main=[plot for chart in (*main, ACCURACY) if (plot := plots.draw(chart, runs))],
        # What stayed 0 from beginning to end is healthy, and no news.
        more=[plot for chart in more if (plot := plots.draw(chart, runs)) and not plot.is_zero],
        own=[plot for name in own if (plot := plots.draw(unnamed(name), runs))],
        differing={"settings": _differing(configs), "outcome": _differing(results)},
        configs=configs,
        results=results,
        plots=plots,
    )


def _charts(folders: Sequence[Path]) -> tuple[list[Tag], list[Tag]]:
    """The main ones, with the samplers that the first row names; the others, with alerts' tags."""
    main, more = ({chart.name: chart for chart in charts} for charts in (CHARTS, MORE_CHARTS))
    for folder in folders:
        first = next((rows[0] for rows in batches(folder / "metrics.jsonl")), {})
        for match in filter(None, (re.fullmatch("mixture/(.*)/weight", tag) for tag in first)):
            title = f"weight on {match[1]}"
            main[match[0]] = Tag(match[0], title, "share", "beside its share of samples")
        for alert in chain.from_iterable(batches(folder / "alerts.jsonl", ALERT)):
            tag = alert["tag"].removeprefix(REFERENCE)
            if tag not in main:
                more.setdefault(tag, unnamed(tag))
    return [*main.values()], [*more.values()]


def _facts(run: RecordedRun, name: str) -> dict[str, Any]:
    counts, results, row = Counter(alert["level"] for alert in run.alerts), run.results, run.latest
    tiles = [
        (ACCURACY.title, results.get("accuracy", run.accuracy[-1][1] if run.accuracy else None)),
        ("best test accuracy", results.get("best_accuracy")),
    ]
    for chart in CHARTS:
        # Not the name that the results have for another number: theirs is at β*, 0 or not.
        own = weight_tag(chart.name, row.get(BETA_STAR, math.nan))
        title = f"reference {chart.title}" if own != chart.name and own in row else chart.title
        tiles.append((title, value_of(row, chart.name)))
    tiles.append(("seconds", results.get("wall_seconds")))
    return {
        "name": name,
        "recorded": run,
        "verdict": run.verdict,
        "diverged": results.get("diverged_at") is not None,
        "outcome": outcome(run),
        "to_do": to_do(run),
        "counts": {kind: counts[kind] for kind in ("ERROR", "WARN", "INFO") if counts[kind]},
        "tiles": [(title, value) for title, value in tiles if value is not None],
        "advice": advice(run),
        "samples": _samples(run.path),
    }


def _samples(folder: Path) -> list[tuple[str, str]]:
    """Names and base64 text of the pictures of samples that a run kept, figures/samples_*.png."""
    found = []
    for path in sorted((folder / "figures").glob("samples_*.png")):
        if file := opened(path):
            with file:
                picture = file.read(_LARGEST + 1)
            if picture.startswith(_PNG) and len(picture) <= _LARGEST:
                name = path.stem.removeprefix("samples_").replace("_", " ")
                found.append((printable(name), base64.b64encode(picture).decode()))
    return found


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings by dotted names; long lists by their length."""
    return {
        name: f"{len(own)} entries" if isinstance(own, list) and len(str(own)) > 60 else own
        for name, own in flat(values, ".").items()
    }


def _differing(columns: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, [column.get(key, "—") for column in columns]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _cell(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return short_number(value)
    return f"{value:,}" if type(value) is int else str(value)
