"""The population of runs: recorded, judged, taken back.

    python -m benchmarks.population record       # trains all runs that are not there
    python -m benchmarks.population judge        # replays their rows through the rules
    python -m benchmarks.population take-back    # trains dying runs with rollbacks
    python -m benchmarks.population page         # docs/results/population.md

What has been recorded lies in benchmarks/population/rows, so that rules are judged in a minute;
what was taken back lies beside the page.
`judge --name NAME` keeps the steps of the ERRORs; errors-release.json are those of release 0.1's.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.grid import RESULTS, filled, read_json, read_rows, write_rows, write_text
from benchmarks.rules import rules_version, stamp

from .families import FAMILIES, LAST_FAMILIES, Run, population
from .judged import Recorded, ends_lost, errors_of, load, verdict
from .leave_out import leave_one_out
from .record import record
from .tables import by_family, cause_of, detection, families_table, lost_table, taken_back_table
from .taken_back import REMEDIES, chosen_runs, file_name, take_back

HERE = Path(__file__).parent
ROWS = HERE / "rows"
RUNS = Path("runs/population")
PAGE = RESULTS / "population.md"
TAKEN_BACK = PAGE.with_suffix(".csv.gz")


def in_parallel(
    work: Callable[..., dict[str, Any]], tasks: Sequence[tuple[Any, ...]], workers: int
) -> None:
    """Do the tasks, some at a time, and print what each returns."""
    with ProcessPoolExecutor(workers, initializer=logging.disable) as pool:
        for done in as_completed([pool.submit(work, *task) for task in tasks]):
            print(json.dumps(done.result()), flush=True)


def every_run() -> list[Run]:
    """Of all families, first those of each that come first."""
    runs = [*population(FAMILIES), *population(LAST_FAMILIES)]
    return sorted(runs, key=lambda run: run.number)


def record_missing(arguments: argparse.Namespace) -> None:
    missing = [run for run in every_run() if not (ROWS / f"{run.name}.npz").is_file()]
    in_parallel(record, [(run, ROWS) for run in missing], arguments.workers)


def judge(arguments: argparse.Namespace) -> None:
    """Judge the rows by the shipped rules; keep the steps of the ERRORs under a name."""
    runs = load(every_run(), arguments.rows)
    steps = {each.run.name: [alert.step for alert in errors_of(each)] for each in runs}
    print(detection({arguments.name: verdicts_of(runs, steps)}))
    print(lost_table({arguments.name: [(each, ends_lost(each)) for each in runs]}))
    file = arguments.out / f"errors-{arguments.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(steps) + "\n")


def verdicts_of(runs: Sequence[Recorded], steps: dict[str, list[int]]) -> list[Any]:
    return [verdict(each, sorted(set(steps[each.run.name]))) for each in runs]


def take_runs_back(arguments: argparse.Namespace) -> None:
    runs = chosen_runs(load(every_run(), ROWS), arguments.most)
    folder = RUNS / "taken_back"
    tasks = [
        (each, remedy, folder)
        for remedy in arguments.remedies or REMEDIES
        for each in runs
        if not (folder / file_name(each.run, remedy)).is_file()
    ]
    in_parallel(take_back, tasks, arguments.workers)


def taken_back() -> list[dict[str, Any]]:
    """What has become of the runs, remedy by remedy; what is new is kept with the code."""
    kept = {(each["remedy"], each["run"]): each for each in read_rows(TAKEN_BACK)}
    for new in map(read_json, (RUNS / "taken_back").glob("*.json")):
        short = {name: new[name] for name in ("remedy", "run", "fate", "best", "last")}
        kept[new["remedy"], new["run"]] = short | {"rollbacks": len(new["rollbacks"])}
    found = sorted(kept.values(), key=lambda x: (list(REMEDIES).index(x["remedy"]), x["run"]))
    write_rows(TAKEN_BACK, found)
    return found


def page(_: argparse.Namespace) -> None:
    recorded = load(every_run(), ROWS)
    first = [each for each in recorded if each.run.family in FAMILIES]
    last = [each for each in recorded if each.run.family in LAST_FAMILIES]
    errors = {each.run.name: errors_of(each) for each in recorded}
    shipped = {name: [alert.step for alert in alerts] for name, alerts in errors.items()}
    release = json.loads((HERE / "errors-release.json").read_text())
    without = leave_one_out(first)
    columns = {
        "last release": verdicts_of(first, release),
        "shipped rules": verdicts_of(first, shipped),
        "thresholds chosen without the family": [v for _, vs in without.values() for v in vs],
        "last release, last families": verdicts_of(last, release),
        "shipped rules, last families": verdicts_of(last, shipped),
    }
    ends = {
        name: [(each, ends_lost(each)) for each in runs]
        for name, runs in {"shipped rules": first, "shipped rules, last families": last}.items()
    }
    causes = {each.run.name: cause_of(each, errors[each.run.name]) for each in recorded}
    found = [{**each, "cause": causes[each["run"]]} for each in taken_back()]
    slots = {
        "rules": stamp([rules_version()]),
        "families": families_table(recorded),
        "found": detection(columns),
        "verdicts": lost_table(ends),
        "left-out": by_family(without),
        "taken-back": taken_back_table(found),
    }
    write_text(PAGE, filled(PAGE.read_text(encoding="utf-8"), slots))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("record").set_defaults(do=record_missing)
    judging = commands.add_parser("judge")
    judging.add_argument("--name", default="shipped", help="of these rules")
    judging.add_argument("--rows", type=Path, default=ROWS)
    judging.add_argument("--out", type=Path, default=RUNS)
    judging.set_defaults(do=judge)
    taking = commands.add_parser("take-back")
    taking.add_argument("--most", type=int, default=8, help="runs of a family")
    taking.add_argument("--remedies", nargs="*", choices=list(REMEDIES))
    taking.set_defaults(do=take_runs_back)
    commands.add_parser("page").set_defaults(do=page)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
