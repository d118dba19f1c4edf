"""The population of runs: recorded, judged, taken back.

    python -m benchmarks.population record --out benchmarks/results/population
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from .families import FAMILIES, LAST_FAMILIES, Run, population
from .record import record


def record_all(runs: Sequence[Run], folder: Path, workers: int) -> None:
    """Record the runs that are not there yet, `workers` at a time."""
    missing = [run for run in runs if not (folder / f"{run.name}.npz").is_file()]
    costs: dict[str, Any] = {}
    with ProcessPoolExecutor(workers) as pool:
        waiting = {pool.submit(record, run, folder): run for run in missing}
        for done in as_completed(waiting):
            run = waiting[done]
            costs[run.name] = done.result()
            print(run.name, json.dumps(costs[run.name]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["record"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/population"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--numbers", type=int, default=16)
    parser.add_argument("--last", action="store_true")
    arguments = parser.parse_args()
    runs = population(LAST_FAMILIES if arguments.last else FAMILIES)
    runs = sorted(runs, key=lambda run: run.number)
    runs = [run for run in runs if run.number < arguments.numbers]
    record_all(runs, arguments.out, arguments.workers)


if __name__ == "__main__":
    main()
