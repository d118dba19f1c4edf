"""`ebmguard report` and `compare`: runs as one HTML file, and side by side as a table."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import tyro

from ..errors import ConfigError, printable
from ..sinks.safe_files import open_without_links, safe_open
from ..tags import BETA_STAR, REFERENCE, Tag, weight_tag
from . import plots
from .files import batches, flattened, listed, run_folders
from .folder import ACCURACY, RecordedRun, first_and_last, outcome, value_of
from .plots import CHARTS, MORE_CHARTS, note, short_number, unnamed
from .problems import advice, next_steps

__all__ = ["CompareConfig", "ReportConfig", "compare", "page", "report"]

_MOST_RUNS, _MOST_CHARTS, _MOST_SETTINGS = 6, 200, 1000
_PNG = b"\x89PNG\r\n\x1a\n"
_LARGEST = 4 << 20  # bytes; a larger picture would make the page slow to open


@dataclass(frozen=True)
class ReportConfig:
    """Write a page about runs, finished or not: charts, alerts, rollbacks, what to do next."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, the trainer's or the guard's log_dir, up to six, or a folder that holds some."""
    out: Path | None = None
    """The page, one file that needs no network; else it goes into the run's folder, or, of several
    runs, into the one folder that is named, or into the present one."""


@dataclass(frozen=True)
class CompareConfig(ReportConfig):
    """Compare two to six runs, finished or not: a table of how they went, and a page."""


def report(config: ReportConfig) -> int:
    """Run `ebmguard report`; the exit status is 0."""
    out, _ = _write(config, "report", 1)
    print(f"report: {printable(out)}")
    return 0


def compare(config: CompareConfig) -> int:
    """Run `ebmguard compare`; the exit status is 0."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError('comparing needs rich: pip install ".[cli]" in a clone') from error
    table = Table.grid(padding=(0, 2))
    out, facts = _write(config, "compare", 2)
    for title, cells in _comparison(facts).items():
        shown = ("—" if value is None else _cell(value) for value in cells)
        table.add_row(title, *(Text(cell, overflow="fold") for cell in shown))
    Console(highlight=False).print(table)
    print(f"\npage: {printable(out)}")
    return 0


def _write(config: ReportConfig, command: str, fewest: int) -> tuple[Path, list[dict[str, Any]]]:
    """Write the page; return its path and the facts of the runs."""
    folders = run_folders(config.runs)
    paths = folders if len(folders) == 1 else config.runs
    parent = paths[0] if len(paths) == 1 else Path()
    out = config.out or parent / f"{command}.html"
    if not fewest <= len(folders) <= _MOST_RUNS:
        got = f"{len(folders)}" + (f": {listed(folders)}" if folders else "")
        raise ConfigError(f"{command} takes {fewest} to {_MOST_RUNS} run folders; got {got}.")
    if out.suffix in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--out {out}: expected a page, such as {command}.html.")
    text, facts = _page(folders)
    try:
        with open(out, "w", encoding="utf-8", opener=open_without_links) as file:
            file.write(text)
    except (OSError, ValueError) as error:
        why = "it is a link, and pages are not written through links" if out.is_symlink() else error
        raise ConfigError(f"{out} cannot be written: {why}. Name another --out.") from error
    return out, facts


def page(folders: Sequence[Path]) -> str:
    """Return the HTML page about runs; raise a ``ConfigError`` if one has no rows or is damaged."""
    return _page(folders)[0]


def _page(folders: Sequence[Path]) -> tuple[str, list[dict[str, Any]]]:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError('reports need jinja2: pip install ".[cli]" in a clone') from error
    main, more = _charts(folders)
    runs = [RecordedRun.read(folder, [chart.name for chart in main + more]) for folder in folders]
    environment = Environment(
        loader=PackageLoader("ebmguard.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _cell, "note": note, "first_and_last": first_and_last}
    names = [printable(folder.resolve().name) for folder in folders]
    if len(set(names)) < len(names):
        names = [run.name for run in runs]
    facts = [_facts(run, name) for run, name in zip(runs, names, strict=True)]
    trainer_tags = sorted({name for run in runs for name in run.trainer_tags})
    configs, results = [_flat(run.config) for run in runs], [_flat(run.results) for run in runs]
    text = environment.get_template("report.html").render(
        runs=facts,
        main=[plot for chart in (*main, ACCURACY) if (plot := plots.draw(chart, runs))],
        # A number that stayed 0 from beginning to end is healthy, and no news.
        more=[plot for chart in more if (plot := plots.draw(chart, runs)) and not plot.is_zero],
        trainer_plots=[plot for name in trainer_tags if (plot := plots.draw(unnamed(name), runs))],
        differing={"settings": _differing(configs), "outcome": _differing(results)},
        configs=configs,
        results=results,
        plots=plots,
    )
    return text, facts


def _comparison(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the lines of the table by title, one column a run; None if a value is unknown."""
    runs: list[RecordedRun] = [fact["recorded"] for fact in facts]
    tiles = [dict(fact["tiles"]) for fact in facts]
    return {
        "": [fact["name"] for fact in facts],
        **{name: [fact[name] for fact in facts] for name in ("verdict", "outcome")},
        **{f"first {level}": [_first(run, level) for run in runs] for level in ("WARN", "ERROR")},
        "rollbacks": [len(run.rollbacks) for run in runs],
        "β*": [run.latest.get(BETA_STAR) for run in runs],
    } | {title: [tile.get(title) for tile in tiles] for title in dict.fromkeys(chain(*tiles))}


def _first(run: RecordedRun, level: str) -> str:
    """Describe the first alert of a level, and the last test accuracy before it, if any."""
    alert = next((alert for alert in run.alerts if alert["level"] == level), None)
    if alert is None:
        return "none"
    kept = [value for step, value in run.accuracy if step <= alert["step"]]
    then = f", accuracy then {kept[-1]:.1%}" if kept else ""
    return f"step {alert['step']:,}: {alert['rule']}{then}"


def _charts(folders: Sequence[Path]) -> tuple[list[Tag], list[Tag]]:
    """Return the main charts; the others, with those of the tags that alerts name."""
    main, more = ({chart.name: chart for chart in charts} for charts in (CHARTS, MORE_CHARTS))
    for folder in folders:
        # The records are not checked here: that is slow where there are many.
        tags = {alert.get("tag") for alert in chain.from_iterable(batches(folder / "alerts.jsonl"))}
        for tag in sorted(tag for tag in tags if isinstance(tag, str))[:_MOST_CHARTS]:
            tag = printable(tag.removeprefix(REFERENCE))
            if tag not in main:
                more.setdefault(tag, unnamed(tag))
    return [*main.values()], [*more.values()]


def _facts(run: RecordedRun, name: str) -> dict[str, Any]:
    results, row, advised = run.results, run.latest, advice(run)
    tiles = [
        (ACCURACY.title, results.get("accuracy", run.accuracy[-1][1] if run.accuracy else None)),
        ("best test accuracy", results.get("best_accuracy")),
    ]
    for chart in CHARTS:
        # Another title than that in the results, whose number is at β* even if β* is 0.
        tag = weight_tag(chart.name, row.get(BETA_STAR, math.nan))
        title = f"reference {chart.title}" if tag != chart.name and tag in row else chart.title
        tiles.append((title, value_of(row, chart.name)))
    tiles.append(("output scale", row.get("output_scale")))
    tiles.append(("seconds", results.get("wall_seconds")))
    return {
        "name": name,
        "recorded": run,
        "verdict": run.verdict,
        "diverged": results.get("diverged_at") is not None,
        "outcome": outcome(run),
        "next_steps": next_steps(run, advised),
        "tiles": [(title, value) for title, value in tiles if value is not None],
        "advice": advised,
        "samples": _samples(run.path),
    }


def _samples(folder: Path) -> list[tuple[str, str]]:
    """Return name and base64 text of the pictures that a run kept, figures/samples_*.png."""
    pictures = []
    for path in sorted((folder / "figures").glob("samples_*.png")):
        if file := safe_open(path, inside=folder):
            with file:
                picture = file.read(_LARGEST + 1)
            if picture.startswith(_PNG) and len(picture) <= _LARGEST:
                name = path.stem.removeprefix("samples_").replace("_", " ")
                pictures.append((printable(name), base64.b64encode(picture).decode()))
    return pictures


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten settings to dotted names, as many as fit a page; long lists become their length."""
    every = flattened(values, ".")
    shown = {
        name: f"{len(value)} entries" if isinstance(value, list) and len(str(value)) > 60 else value
        for name, value in islice(every.items(), _MOST_SETTINGS)
    }
    return shown | ({"…": "and more"} if len(every) > len(shown) else {})


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
