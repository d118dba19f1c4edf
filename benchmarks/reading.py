"""Seconds and memory that the readers of run folders take, at 50,000 and at a million rows.

    python -m benchmarks.reading

The folder holds rows of a guarded run, written again and again with steps that go on, an alert
every 1,000 rows, one rollback, evaluations, settings and results. Each command runs in a process of
its own: seconds of CPU, seconds on the clock, and the most memory that it held.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ebmguard.alerts import Alert, Level
from ebmguard.sinks import JsonlSink

STEPS = 300
ALERT_EVERY = 1000
COMMANDS = {
    "report": ["report", "{run}", "--out", "{out}/report.html"],
    "watch": ["watch", "{run}", "--once"],
    "compare": ["compare", "{run}", "{run}", "--out", "{out}/compare.html"],
}


def seed_rows(folder: Path) -> list[str]:
    """The rows of a short guarded run, each without its step."""
    from .long_run import Training

    folder.mkdir()
    training = Training(folder)
    for _ in range(STEPS):
        training.step()
    training.guard.close()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line.partition(", ")[2] for line in lines]


def write_run(path: Path, rows: int, lines: list[str]) -> Path:
    """A folder with that many rows; the last twentieth but one of its steps comes twice."""
    import numpy as np

    from ebmguard.recovery.policy import Rollback

    back = rows // 20
    again = [line.replace('"recovery/attempt": 0.0', '"recovery/attempt": 1.0') for line in lines]
    parts = ((range(rows - back), lines), (range(rows - 2 * back, rows - back), again))
    (path / "figures").mkdir(parents=True)
    with (path / "metrics.jsonl").open("w") as file:
        for steps, own in parts:
            file.writelines(f'{{"step": {s}, {own[s % len(own)]}\n' for s in steps)
    sink = JsonlSink(path)
    alert = Alert("energy_blowup", Level.WARN, 0, "energy_gap", 1.0, 0.5, 64, ("a lower lr",))
    for step in range(0, rows - back, ALERT_EVERY):
        sink.write_alert(alert.record() | {"step": step})
    changes = {"lr": (1e-3, 5e-4)}
    ends = rows - back, rows - 2 * back
    sink.write_recovery(Rollback(alert, *ends, 1, True, False, (), 4, changes).record())
    sink.flush()
    accuracy = [{"step": s, "test_accuracy": 0.9} for s in range(0, rows - back, ALERT_EVERY)]
    (path / "accuracy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in accuracy))
    (path / "config.json").write_text(json.dumps({"beta_star": 0.5, "iterations": rows}))
    results = {"steps": rows - back, "diverged_at": None, "accuracy": 0.9, "wall_seconds": 1.0}
    (path / "results.json").write_text(json.dumps(results))
    samples = np.zeros((16, 1, 8, 8), dtype=np.float32)
    np.savez(path / "figures" / "samples.npz", start=samples, healthy=samples, end=samples)
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
    with open(os.devnull, "w") as nowhere:
        shown, sys.stdout = sys.stdout, nowhere
        status = main(words)
        sys.stdout = shown
    taken = {
        "status": status,
        "wall": time.perf_counter() - start,
        "cpu": time.process_time(),
        "mib": peak_resident_kib() / 2**10,
    }
    print(json.dumps(taken))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[50_000, 1_000_000])
    parser.add_argument("--only", choices=list(COMMANDS), nargs="+", default=list(COMMANDS))
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
            for name in given.only:
                words = [word.format(run=run, out=folder) for word in COMMANDS[name]]
                command = [sys.executable, "-m", "benchmarks.reading", "--measure", *words]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                taken = json.loads(done.stdout)
                print(
                    f"| {name} | {rows:,} | {size:.0f} | {taken['cpu']:.1f} | {taken['wall']:.1f} "
                    f"| {taken['mib']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
