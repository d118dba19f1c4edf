"""The population of runs: recorded, and judged.

    python -m benchmarks.population              # judges the shipped rules and baselines
    python -m benchmarks.population --detector mymodule:detect    # and yours
    python -m benchmarks.population record       # trains all runs that are not there
    python -m benchmarks.population page         # docs/results/population.md

A detector takes the rows of a run, a pandas frame, and returns the steps of its ERRORs. What has
been recorded lies in benchmarks/population/rows, ERRORs of rules of another day in errors.json.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.grid import RESULTS, filled, table_of
from benchmarks.rules import rules_version, stamp
from ebmguard.reference_training.engine.run_folder import read_json, write_text

from .detectors import BASELINES, Detect, named, shipped
from .families import GROUPS, KINDS, group_of
from .judged import ROWS, Recorded, Verdict, file_of, load, scores, verdict
from .leave_out import GRID, NUMBERS, Point, leave_one_out, sweep
from .record import pack, record

RUNS = Path("runs/population")
PAGE = RESULTS / "population.md"
KEPT = ROWS.with_name("errors.json")
SHIPPED = "shipped rules"


def _number(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name == "steps ahead":
        return f"{value:g}"
    count, of = value
    if name == "per 1,000 steps":
        return f"{count / of:.2f}" if of else "–"
    if name == "limping":
        return f"{count} in {of}"
    return f"{count} of {of}" if of else "–"


def families_table(runs: Sequence[Recorded]) -> str:
    """What the population is, and what became of it."""
    lines = []
    families = {each.run.family: KINDS[each.run.family] for each in runs}
    for family, axes in (families | {"all": dict.fromkeys(_USUAL, "")}).items():
        own = [each for each in runs if family in (each.run.family, "all")]
        fates: Counter[str] = Counter(each.fate.name for each in own)
        kind = {x: axes.get(x, usual) for x, usual in _USUAL.items()}
        words = {x: of if isinstance(of, str) else ", ".join(of) for x, of in kind.items()}
        line = {"family": family, **words}
        line |= {"runs": str(len(own)), "steps": f"{sum(each.fate.steps for each in own):,}"}
        lines.append(line | {name: str(fates[name]) for name in _FATES})
    return table_of(lines, 5)


_USUAL = {"data": "", "task": "jem", "network": "mlp", "sampler": "persistent"}
FEW = ("in time", "under 5 points", "steps ahead", "healthy, false")
_FATES = ("dead", "collapsed", "limping", "healthy")


def detection(detectors: Mapping[str, Sequence[Verdict]], *names: str) -> str:
    """What each detector found, a line each; all scores if none is named."""
    lines = []
    for title, verdicts in detectors.items():
        found = scores(verdicts)
        line = {name: _number(name, found[name]) for name in names or found}
        lines.append({"detector": title} | line)
    return table_of(lines)


def by_family(chosen: Mapping[str, tuple[Point, Sequence[Verdict]]]) -> str:
    """What thresholds that were chosen without a family find in it."""
    lines = []
    every = {"all": ((), [v for _, verdicts in chosen.values() for v in verdicts])}
    for family, (point, verdicts) in (dict(chosen) | every).items():
        found = scores(verdicts)
        line = {"left out": family, ", ".join(GRID): ", ".join(f"{value:g}" for value in point)}
        lines.append(line | {name: _number(name, found[name]) for name in FEW})
    return table_of(lines, 2)


def record_missing(arguments: argparse.Namespace) -> None:
    """The runs of groups that have no rows yet."""
    for group in GROUPS:
        file, folder = ROWS / file_of(group), RUNS / group
        if file.is_file():
            continue
        runs = sorted(group_of(group), key=lambda run: run.number)
        missing = [run for run in runs if not (folder / f"{run.name}.npz").is_file()]
        with ProcessPoolExecutor(arguments.workers, initializer=logging.disable) as pool:
            for done in as_completed([pool.submit(record, run, folder) for run in missing]):
                print(json.dumps(done.result()), flush=True)
        pack(folder, file)


def verdicts_of(runs: Sequence[Recorded], detect: Detect) -> list[Verdict]:
    """What a detector is worth on each run."""
    return [verdict(each, detect(each.frame)) for each in runs]


def all_verdicts(runs: Sequence[Recorded], own: Mapping[str, Detect]) -> dict[str, list[Verdict]]:
    """By detector: rules of another day, the rules that are shipped, baselines and one's own."""
    kept = {
        title: [verdict(each, steps[each.run.name]) for each in runs]
        for title, steps in read_json(KEPT).items()
        if all(each.run.name in steps for each in runs)
    }
    return kept | {
        title: verdicts_of(runs, detect)
        for title, detect in ({SHIPPED: shipped} | BASELINES | dict(own)).items()
    }


def judge(arguments: argparse.Namespace) -> None:
    """Print what detectors find, group by group."""
    own = {path: named(path) for path in arguments.detector}
    for group in GROUPS:
        print(f"\n{group}\n\n{detection(all_verdicts(load(group), own))}", flush=True)


def page(_: argparse.Namespace) -> None:
    groups = {group: load(group) for group in GROUPS}
    families = families_table([each for runs in groups.values() for each in runs])
    groups["unseen"] = [*groups["new"], *groups["last look"]]
    found = {group: detection(all_verdicts(runs, {})) for group, runs in groups.items()}
    slots = {
        "rules": stamp([rules_version()]),
        "families": families,
        "left-out": by_family(leave_one_out([*groups["first"], *groups["new"]])),
        "sweep": detection(sweep([*groups["first"], *groups["new"]], NUMBERS), *FEW),
    }
    slots |= {group.replace(" ", "-"): table for group, table in found.items()}
    write_text(PAGE, filled(PAGE.read_text(encoding="utf-8"), slots))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = {"judge": judge, "record": record_missing, "page": page}
    parser.add_argument("command", nargs="?", choices=list(commands), default="judge")
    parser.add_argument("--detector", action="append", default=[], help="module:function")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()
