"""Stands in for `ebmguard train jem`: the same files and exit statuses, and no training.

plan.json beside the run folders says what a run does by the name of its folder; calls.jsonl there
gets a line for each process.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

INTERRUPTS: list[int] = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: INTERRUPTS.append(number))


def write(file, value):
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    os.replace(partial, file)


def note(grid, **what):
    with (grid / "calls.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    for name, kind in (("scenario", str), ("beta-star", float), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--resume", action="store_true")
    given, _ = parser.parse_known_args()
    out, grid = given.out, given.out.parent
    plan = json.loads((grid / "plan.json").read_text()) if (grid / "plan.json").is_file() else {}
    does = plan.get(out.name, plan.get("*", "finish"))
    if (out / "config.json").is_file() != given.resume:
        sys.exit("asked to resume where there is nothing, or the other way round")
    out.mkdir(exist_ok=True)
    config = {"scenario": given.scenario, "beta_star": given.beta_star, "seed": given.seed}
    write(out / "config.json", config | {"data": "digits", "iterations": given.iterations})
    own = {"name": out.name, "words": sys.argv[1:], "env": dict(os.environ)}
    note(grid, event="begin", leads=os.getpgid(0) == os.getpid(), **own)
    if does == "fail":
        print("\n".join(f"line {number}" for number in range(30)), flush=True)
        sys.exit(3)
    if does == "die" or (does == "die once" and not given.resume):
        os.kill(os.getpid(), signal.SIGKILL)
    ends = time.monotonic() + 3600  # in any case, should its test have failed
    while does in ("wait", "stubborn") and not (grid / "release").exists():
        if INTERRUPTS and does == "wait":
            time.sleep(0.5)  # a second signal would arrive while the checkpoint is written
            note(grid, event="stop", name=out.name, interrupts=len(INTERRUPTS))
            sys.exit(130)
        if time.monotonic() > ends:
            sys.exit("nobody wanted this run any more")
        time.sleep(0.01)
    results = {"iterations": given.iterations, "accuracy": 0.25, "diverged_at": None}
    write(out / "results.json", results | ({"diverged_at": 7} if does == "diverge" else {}))
    note(grid, event="end", name=out.name)


main()
