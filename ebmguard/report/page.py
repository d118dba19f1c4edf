"""`ebmguard report`: runs as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import tyro

from ..errors import ConfigError, printable
from ..tags import BETA_STAR, REFERENCE, Tag, weight_tag
from . import plots
from .advice import advice, outcome
from .charts import ACCURACY, CHARTS, MORE_CHARTS, note, unnamed, value_of
from .files import batches, opened
from .folder import RecordedRun
from .plots import short_number
from .records import flat

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
        why = f"{config.out} cannot be written: {error}. Name another --out."
        raise ConfigError(why) from error
    print(f"report: {printable(config.out)}")
    return 0


def page(folders: Sequence[Path]) -> str:
    """The page about run folders as HTML; a ``ConfigError`` where one has no rows or is damaged."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError('reports need jinja2: pip install "ebmguard[cli]"') from error
    mixtures, others = _more_charts(folders)
    main, more = (*CHARTS, *mixtures), (*MORE_CHARTS, *others)
    tags = [chart.name for chart in (*main, *more)]
    runs = [RecordedRun.read(folder, tags) for folder in folders]
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
    configs = [_flat(run.config) for run in runs]
    results = [_flat(run.results) for run in runs]
    return environment.get_template("report.html").render(
        names=names,
        runs=[_facts(run, name) for run, name in zip(runs, names, strict=True)],
        main=[plot for chart in (*main, ACCURACY) if (plot := plots.draw(chart, runs))],
        # What stayed 0 from beginning to end is healthy, and no news.
        more=[plot for chart in more if (plot := plots.draw(chart, runs)) and not plot.is_zero],
        own=_own_charts(runs),
        differing_config=_differing(configs),
        differing_results=_differing(results),
        configs=configs,
        results=results,
        plots=plots,
    )


def _more_charts(folders: Sequence[Path]) -> tuple[list[Tag], list[Tag]]:
    """The samplers of mixtures, which the first row names, and what only alerts name."""
    first: dict[str, Any] = {}
    tags = [chart.name for chart in (*CHARTS, *MORE_CHARTS)]
    others: dict[str, None] = {}
    for folder in folders:
        first |= next((rows[0] for rows in batches(folder / "metrics.jsonl")), {})
        for alert in chain.from_iterable(batches(folder / "alerts.jsonl")):
            others |= {str(alert.get("tag", tags[0])).removeprefix(REFERENCE): None}
    weights = [match for tag in first if (match := re.fullmatch("mixture/(.*)/weight", tag))]
    return (
        [Tag(m[0], f"weight on {m[1]}", "share", "beside its share of samples") for m in weights],
        [unnamed(tag) for tag in others if tag not in tags],
    )


def _own_charts(runs: Sequence[RecordedRun]) -> dict[str, list[plots.Plot]]:
    """What the trainers logged themselves, by what stands before the slash of the name."""
    found: dict[str, list[plots.Plot]] = defaultdict(list)
    for name in sorted({name for run in runs for name in run.own}):
        if plot := plots.draw(unnamed(name), runs):
            found[printable(name.partition("/")[0]) if "/" in name else ""].append(plot)
    return dict(sorted(found.items()))


def _facts(run: RecordedRun, name: str) -> dict[str, Any]:
    counts, results = Counter(alert["level"] for alert in run.alerts), run.results
    evaluated = run.surviving(ACCURACY.name)
    accuracy = evaluated[-1].low if evaluated else None
    tiles = [
        (ACCURACY.title, results.get("accuracy", accuracy)),
        ("best test accuracy", results.get("best_accuracy")),
        *((_title(chart, run.latest), value_of(run.latest, chart.name)) for chart in CHARTS),
        ("seconds", results.get("wall_seconds")),
    ]
    return {
        "name": name,
        "recorded": run,
        "outcome": outcome(run),
        "is_lost": results.get("diverged_at") is not None,
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


def _title(chart: Tag, row: Mapping[str, float]) -> str:
    """Not the name that the results have for another number: theirs is at β*, 0 or not."""
    own = weight_tag(chart.name, row.get(BETA_STAR, math.nan))
    return f"reference {chart.title}" if own != chart.name and own in row else chart.title


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
        return short_number(value) if math.isfinite(value) else str(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
