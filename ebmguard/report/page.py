"""`ebmguard report`: runs as one HTML file that needs nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ..errors import ConfigError
from ..sinks import read_jsonl
from ..sinks.jsonl import parse_line
from . import plots
from .advice import advice, outcome
from .charts import ACCURACY, CHARTS, MORE_CHARTS, Chart, value_of
from .folder import RecordedRun
from .plots import short_number

__all__ = ["ReportConfig", "page", "report"]

_MOST_RUNS = 6
_NONE = "—"
# Of the trainer's results, what the cards show.
_RESULTS = (
    ("accuracy", "test accuracy"),
    ("best_accuracy", "best test accuracy"),
)


@dataclass(frozen=True)
class ReportConfig:
    """Write a page about runs, finished or not: charts, alerts, rollbacks, what to do next."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, up to six: the trainer's, or the guard's log_dir."""
    out: Path = Path("report.html")
    """The page, one file that needs no network."""


def report(config: ReportConfig) -> int:
    """`ebmguard report`.

    Returns:
        exit status 0.

    Raises:
        ConfigError: no folder or too many, one without rows, or the page cannot be written.
        ImportError: jinja2 is not installed.
    """
    if not 1 <= len(config.runs) <= _MOST_RUNS:
        raise ConfigError(f"A report takes 1 to {_MOST_RUNS} run folders; got {len(config.runs)}.")
    text = page(config.runs)
    try:
        config.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{config.out} cannot be written: {error.strerror}. Name another --out."
        ) from error
    print(f"report: {config.out}")
    return 0


def page(folders: Sequence[Path]) -> str:
    """The page as HTML.

    Args:
        folders: run folders.

    Raises:
        ConfigError: a folder has no rows, or a file in it is damaged.
        ImportError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError('reports need jinja2: pip install "ebmguard[train]"') from error
    charts = (*CHARTS, *_mixture_charts(folders))
    more_charts = (*MORE_CHARTS, *_other_charts(folders))
    tags = [chart.tag for chart in (*charts, *more_charts)]
    runs = [RecordedRun.read(folder, tags) for folder in folders]
    environment = Environment(
        loader=PackageLoader("ebmguard.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _cell
    names = _names(folders)
    main = [plots.draw(chart, runs) for chart in (*charts, ACCURACY)]
    more = [plots.draw(chart, runs) for chart in more_charts]
    configs = [_flat(run.config) for run in runs]
    results = [_flat(run.results) for run in runs]
    return environment.get_template("report.html").render(
        names=names,
        runs=[_facts(run, name) for run, name in zip(runs, names, strict=True)],
        main=[plot for plot in main if plot],
        # What stayed 0 from beginning to end is healthy, and no news.
        more=[plot for plot in more if plot and not _is_zero(plot)],
        differing_config=_differing(configs),
        differing_results=_differing(results),
        configs=configs,
        results=results,
        plots=plots,
    )


def _mixture_charts(folders: Sequence[Path]) -> list[Chart]:
    """Charts of who delivers the weight in mixtures, whose samplers the first row names."""
    tags: dict[str, None] = {}
    for folder in folders:
        if (folder / "metrics.jsonl").is_file():
            with (folder / "metrics.jsonl").open("rb") as lines:
                tags |= dict.fromkeys(parse_line(lines.readline().rstrip(b"\n")) or {})
    names = [
        tag.split("/", 1)[1].removesuffix("/weight")
        for tag in tags
        if tag.startswith("mixture/") and tag.endswith("/weight")
    ]
    return [
        Chart(f"mixture/{name}/weight", f"weight on {name}", "share", "beside its share of samples")
        for name in names
    ]


def _other_charts(folders: Sequence[Path]) -> list[Chart]:
    """Charts of what alerts name and no chart of ours shows: rules may be anybody's."""
    files = [folder / "alerts.jsonl" for folder in folders]
    alerts = [alert for file in files if file.is_file() for alert in read_jsonl(file)]
    tags = dict.fromkeys(alert["tag"].removeprefix("ref/") for alert in alerts)
    known = {chart.tag for chart in (*CHARTS, *MORE_CHARTS)}
    return [Chart(tag, tag, "symlog", "") for tag in tags if tag not in known]


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their paths where these do not tell them apart."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _facts(run: RecordedRun, name: str) -> dict[str, Any]:
    counts = Counter(alert["level"] for alert in run.alerts)
    results = run.results
    tiles = [(title, results[key]) for key, title in _RESULTS if results.get(key) is not None]
    evaluated = run.surviving(ACCURACY.tag)
    if "accuracy" not in results and evaluated:
        tiles.insert(0, (ACCURACY.title, evaluated[-1].low))
    tiles += [
        (chart.title, value)
        for chart in CHARTS
        if (value := value_of(run.latest, chart.tag)) is not None
    ]
    if results.get("wall_seconds") is not None:
        tiles.append(("seconds", results["wall_seconds"]))
    return {
        "name": name,
        "path": str(run.path),
        "outcome": outcome(run),
        "is_lost": results.get("diverged_at") is not None,
        "beta_star": run.latest.get("beta_star"),
        "counts": {kind: counts[kind] for kind in ("ERROR", "WARN", "INFO") if counts[kind]},
        "tiles": tiles,
        "advice": advice(run),
        "answered": run.answered,
        "alerts": run.alerts,
        "rollbacks": run.rollbacks,
    }


def _is_zero(plot: plots.Plot) -> bool:
    return all(
        value in (0, None) for run in plot.data["runs"] for value in (*run["low"], *run["high"])
    ) and not (plot.markers or plot.gaps)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names; long lists by their length."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and len(str(value)) > 60:
            flat[prefix + key] = f"{len(value)} entries"
        else:
            flat[prefix + key] = value
    return flat


def _differing(columns: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """The names whose values are not the same in all runs, with these."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, [column.get(key, _NONE) for column in columns]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return short_number(value) if math.isfinite(value) else str(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
