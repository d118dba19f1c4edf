"""The population of runs: recorded, and judged.

    python -m benchmarks.population              # judges the shipped rules and baselines
    python -m benchmarks.population --detector mymodule:detect    # and yours
    python -m benchmarks.population record       # trains all runs that are not there
    python -m benchmarks.population page         # docs/results/population.md and .csv
    python -m benchmarks.population take-back    # deaths under action="rollback": taken_back.csv

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

import pandas as pd

from benchmarks.grid import RESULTS, filled, table_of
from benchmarks.rules import rules_version, stamp
from ebmguard.reference_training.engine.run_folder import read_json, write_text

from .detectors import BASELINES, Detect, named, shipped
from .families import GROUPS, group_of
from .judged import ROWS, Recorded, Verdict, file_of, load, scores, verdict
from .leave_out import GRID, NUMBERS, leave_one_out, sweep
from .record import pack, record
from .take_back import take_back

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


def groups_table(groups: Mapping[str, Sequence[Recorded]]) -> str:
    """What the population is, and what became of it: a line for each group."""
    lines = []
    for group, runs in groups.items():
        fates = Counter(each.fate.name for each in runs)
        counts = {
            "families": len({each.run.family for each in runs}),
            "runs": len(runs),
            "steps": sum(each.fate.steps for each in runs),
            **{name: fates[name] for name in ("dead", "collapsed", "limping", "healthy")},
        }
        lines.append({"group": group} | {name: f"{count:,}" for name, count in counts.items()})
    return table_of(lines)


def detection(detectors: Mapping[str, Sequence[Verdict]]) -> list[dict[str, str]]:
    """What each detector found, a line each."""
    return [
        {"detector": title} | {name: _number(name, x) for name, x in scores(verdicts).items()}
        for title, verdicts in detectors.items()
    ]


def of_blowups(runs: Sequence[Recorded]) -> list[dict[str, str]]:
    """The rule of blow-ups alone: other numbers, and those chosen without a family, in it."""
    lines = [{"runs": "first and new"} | line for line in detection(sweep(runs, NUMBERS))]
    every = []
    for family, (point, verdicts) in leave_one_out(runs).items():
        named = ", ".join(f"{x} {value:g}" for x, value in zip(GRID, point, strict=True))
        lines += [{"runs": family} | line for line in detection({named: verdicts})]
        every += verdicts
    return [*lines, {"runs": "first and new", **detection({"chosen without each": every})[0]}]


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
        found = detection(all_verdicts(load(group), own))
        print(f"\n{group}\n\n{table_of(found)}", flush=True)


def page(_: argparse.Namespace) -> None:
    """The page, and beside it a table of all that it quotes from."""
    groups = {group: load(group) for group in GROUPS}
    pools = groups | {"unseen": [*groups["new"], *groups["last look"]]}
    found = {group: detection(all_verdicts(runs, {})) for group, runs in pools.items()}
    lines = [{"runs": group} | line for group, own in found.items() for line in own]
    lines += of_blowups([*groups["first"], *groups["new"]])
    pd.DataFrame(lines).to_csv(PAGE.with_suffix(".csv"), index=False)
    every = [each for runs in groups.values() for each in runs]
    slots = {
        "rules": stamp([rules_version()]),
        "groups": groups_table(groups | {"all": every}),
        "unseen": table_of(found["unseen"][-1 - len(BASELINES) :]),
    }
    write_text(PAGE, filled(PAGE.read_text(encoding="utf-8"), slots))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = {"judge": judge, "record": record_missing, "page": page}
    commands["take-back"] = lambda own: take_back(own.workers)
    parser.add_argument("command", nargs="?", choices=list(commands), default="judge")
    parser.add_argument("--detector", action="append", default=[], help="module:function")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()
