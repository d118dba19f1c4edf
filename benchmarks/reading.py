"""Seconds and memory that the readers of run folders take, at 50,000 and at a million rows.

    python -m benchmarks.reading

The folder holds rows of a guarded run, written again and again with steps that go on, and one
rollback. Each command runs in a process of its own: seconds of CPU, seconds on the clock, and the
most memory that it held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = {
    "report": ["report", "{run}", "--out", "{out}/report.html"],
    "watch": ["watch", "{run}", "--once"],
    "compare": ["compare", "{run}", "{run}", "--out", "{out}/compare.html"],
}


def seed_rows(folder: Path) -> list[str]:
    """The rows of a short guarded run, each without its step."""
    from .long_run import Training

    training = Training(folder)
    for _ in range(300):
        training.step()
    training.end()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line.partition(", ")[2] for line in lines]


def write_run(path: Path, rows: int, lines: list[str]) -> Path:
    """A folder with that many rows; the last twentieth but one of its steps comes twice."""
    back = rows // 20
    again = [line.replace('"recovery/attempt": 0.0', '"recovery/attempt": 1.0') for line in lines]
    path.mkdir()
    with (path / "metrics.jsonl").open("w") as file:
        for begin, own in ((0, lines), (rows - 2 * back, again)):
            steps = range(begin, rows - back)
            file.writelines(f'{{"step": {s}, {own[s % len(own)]}\n' for s in steps)
    return path


def peak_resident_kib() -> int:
    """The most memory that this process has held."""
    # ru_maxrss of a child process starts at its parent's value on Linux, /proc does not.
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = (line.split() for line in status.read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == "VmHWM:")


def measure(words: list[str]) -> None:
    """Run one command here, and print what it took as JSON."""
    from ebmguard.cli import main

    start = time.perf_counter()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = main(words)
    taken = {"status": status, "wall": time.perf_counter() - start, "cpu": time.process_time()}
    print(json.dumps(taken | {"mib": peak_resident_kib() / 2**10}))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[50_000, 1_000_000])
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure)
        return
    print("| command | rows | MB | s of CPU | s on the clock | peak, MiB |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lines = seed_rows(folder / "seed")
        for rows in given.rows:
            run = write_run(folder / f"rows-{rows}", rows, lines)
            size = (run / "metrics.jsonl").stat().st_size / 1e6
            for name, words in COMMANDS.items():
                own = [word.format(run=run, out=folder) for word in words]
                command = [sys.executable, "-m", "benchmarks.reading", "--measure", *own]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                taken = json.loads(done.stdout)
                cells = (f"{taken[x]:.1f}" for x in ("cpu", "wall", "mib"))
                print(f"| {name} | {rows:,} | {size:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
