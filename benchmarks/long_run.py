"""Memory, seconds, file sizes and what else could leak in 200,000 guarded steps; reading them.

    python -m benchmarks.long_run
    python -m benchmarks.long_run --remake 1000 --blow-up 700    # as in a notebook, and rollbacks
    python -m benchmarks.long_run --read 50000 1000000           # what the readers take, by rows

A small network on points of the plane: nearly all of the time is the guard's. Everything is
attached, snapshots go to a folder, rows, alerts and rollbacks to JSON lines and event files, alerts
and rollbacks to a web server of this process, too. With ``--remake`` the guard is closed every so
many steps, and another goes on in the same folder, on the same model and optimizer; with
``--blow-up`` the weights grow by a factor every so many steps, which a rollback takes back. What is
read are rows of such a run, written again and again with steps that go on, and one rollback; each
command has a process of its own.
"""

from __future__ import annotations

import argparse
import http.server
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ebmguard import Recovery
from ebmguard.adapters.webhook import WebhookSink

from .grid import table_of
from .jem_step import CASES, Trainer

TIMED = 1000
"""Steps over which seconds are averaged."""
COMMANDS = {
    "report": ["report", "{run}", "--out", "{out}/report.html"],
    "watch": ["watch", "{run}", "--once"],
    "compare": ["compare", "{run}", "{run}", "--out", "{out}/compare.html"],
}

MEASURE = """
import json, sys, time
from ebmguard.cli import main
start = time.perf_counter()
status = main(sys.argv[1:])
took = {"s of CPU": time.process_time(), "s on the clock": time.perf_counter() - start}
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps(took | {"peak, MiB": int(peak) / 1024}), file=sys.stderr)
sys.exit(status)
"""


class Server(http.server.HTTPServer):
    """One that counts what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received, self.is_idle = 0, threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def service_actions(self) -> None:
        self.is_idle.set()

    def get_request(self) -> tuple[Any, Any]:
        self.is_idle.clear()
        return super().get_request()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers "no content"."""

    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received += 1
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """No line for each."""


class Training:
    """A guarded loop with everything attached, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.server = Server()
        self.trainer = Trainer(CASES["plane"], torch.device("cpu"))
        self.optimizer = self.trainer.adam(lr=1e-4)
        self.folder, self.ended = folder, Counter[str]()
        self.begin()

    def begin(self) -> None:
        """Guard it, and go on from the snapshots that there are."""
        recovery = Recovery(folder=self.folder / "snapshots", every=100, budget=10_000)
        self.webhook = WebhookSink(f"http://127.0.0.1:{self.server.server_port}/")
        own: dict[str, Any] = {"beta_star": 0.5, "action": "rollback", "recovery": recovery}
        own |= {"sinks": [self.webhook]}
        self.guard = self.trainer.guard(str(self.folder / "run"), self.optimizer, **own)
        self.guard.resume()

    def end(self) -> None:
        """Close the guard, and count what it has seen."""
        self.guard.close()
        self.webhook.wait(10.0)
        self.ended.update(alert.rule for alert in self.guard.alerts)
        self.ended["rollbacks"] = self.guard.attempt  # which goes on from the snapshots
        self.ended["messages"] = self.server.received

    def blow_up(self) -> None:
        """What a step of a huge learning rate leaves."""
        with torch.no_grad():
            for own in self.trainer.network.parameters():
                own.mul_(30.0)

    def held(self) -> tuple[int, int, int]:
        """Descriptors and threads of the process, hooks on the optimizer.

        Messages on their way hold a thread and two sockets, so they arrive first.
        """
        self.webhook.wait(10.0)
        for thread in threading.enumerate():
            if thread.name == "ebmguard":  # it ends right after its last message
                thread.join(10.0)
        self.server.is_idle.wait(10.0)
        hooks = [value for name, value in vars(self.optimizer).items() if name.endswith("_hooks")]
        open_ = len(list(Path("/proc/self/fd").iterdir()))
        return open_, threading.active_count(), sum(map(len, hooks))

    def step(self) -> None:
        loss, sample = self.guard
        self.trainer.step(loss, sample, self.optimizer)


def resident_mib() -> float:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def sizes(folder: Path) -> Counter[str]:
    """Bytes by what wrote them."""
    found = Counter[str]()
    for path in filter(Path.is_file, folder.rglob("*")):
        part = path.relative_to(folder).parts[0]
        rows = path.name if path.suffix == ".jsonl" else "event files"
        found[rows if part == "run" else part] += path.stat().st_size
    return found


def train(folder: Path, steps: int, remake: int, blow_up: int) -> str:
    """Train, and print a line now and then; all lines, and what was alerted."""
    marks, lines = [steps // part for part in (20, 4, 2, 1)], []
    training = Training(folder)
    for step in range(1, steps + 1):
        if step + TIMED in marks:
            cpu = time.process_time()
        if remake and step % remake == 0:
            training.end()
            training.begin()
        if blow_up and step % blow_up == 0:
            training.blow_up()
        training.step()
        if step in marks:
            training.guard.flush()
            line = {"steps": f"{step:,}", "resident, MiB": f"{resident_mib():.1f}"}
            held = ("descriptors", "threads", "hooks")
            line |= dict(zip(held, map(str, training.held()), strict=True))
            line["CPU s per 1,000 steps"] = f"{1000 * (time.process_time() - cpu) / TIMED:.2f}"
            written = sizes(training.folder).items()
            line |= {f"{name}, bytes/step": f"{n / step:,.1f}" for name, n in written}
            lines.append(line)
            print(line, flush=True)
    training.end()
    return f"{table_of(lines)}\n\nalerts and rollbacks: {dict(training.ended)}"


def seed_rows(folder: Path) -> list[str]:
    """The rows of a short guarded run, each without its step."""
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


def taken(words: Sequence[str]) -> dict[str, float]:
    """What one command takes in a process of its own, which imports no more than it needs."""
    command = [sys.executable, "-c", MEASURE, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return found


def read(folder: Path, counts: Sequence[int]) -> str:
    """What each command takes on folders of so many rows."""
    seeds, lines = seed_rows(folder / "seed"), []
    for rows in counts:
        run = write_run(folder / f"rows-{rows}", rows, seeds)
        size = (run / "metrics.jsonl").stat().st_size / 1e6
        for name, words in COMMANDS.items():
            own = [word.format(run=run, out=folder) for word in words]
            line = {"command": name, "rows": f"{rows:,}", "MB": f"{size:.0f}"}
            lines.append(line | {head: f"{x:.1f}" for head, x in taken(own).items()})
    return table_of(lines)


def main() -> None:
    """Train or read, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--remake", type=int, default=0, help="steps of a guard; 0: one guard")
    parser.add_argument("--blow-up", type=int, default=0, help="steps between two; 0: none")
    parser.add_argument("--read", type=int, nargs="+", help="rows of the folders to read")
    given = parser.parse_args()
    if given.steps < 21 * TIMED:
        parser.error(f"--steps is {given.steps}, expected {21 * TIMED} or more: {TIMED} are timed")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        own = (given.steps, given.remake, given.blow_up)
        print(read(place, given.read) if given.read else train(place, *own))


if __name__ == "__main__":
    main()
