"""Memory, seconds, file sizes and what else could leak in 200,000 guarded steps.

    python -m benchmarks.long_run
    python -m benchmarks.long_run --remake 1000 --blow-up 700    # as in a notebook, and rollbacks

A small network on points of the plane, 2 SGLD steps a step: nearly all of the time is the guard's.
Everything is attached, snapshots go to a folder, and rows, alerts and rollbacks go to JSON lines,
event files, an `add_scalar` logger (lines of CSV) and a webhook on this machine. Besides the rules
that are shipped, one reports a WARN every so many steps, so that what an alert leaves behind would
be seen. With ``--remake`` the guard is closed every so many steps, and another goes on in the same
folder, on the same model and optimizer; with ``--blow-up`` the weights grow by a factor every so
many steps, which a rollback takes back.
"""

from __future__ import annotations

import argparse
import csv
import http.server
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ebmguard import Guard, Recovery, guard
from ebmguard.alerts import DEFAULT_RULES, Level, Reading
from ebmguard.samplers import ReplayBuffer, sgld
from ebmguard.sinks import AddScalarSink, Sink, WebhookSink

STEP_SIZE, NOISE_STD = 0.1, 0.1
BATCH, CHAINS, SGLD_STEPS = 16, 1000, 2
ALERT_EVERY = 1000
# Steps over which seconds are averaged.
TIMED = 1000


@dataclass(frozen=True)
class EveryNow:
    """A rule that reports a WARN of no consequence every ``every`` rows."""

    every: int = ALERT_EVERY
    name: str = "every_now"

    def watcher(self) -> _Counter:
        return _Counter(self.every)


class _Counter:
    def __init__(self, every: int) -> None:
        self.every = every
        self.count = 0

    def read(self, row: Mapping[str, float]) -> Reading:
        self.count += 1
        if self.count % self.every:
            return Reading(None, True)
        return Reading(Level.WARN, False, "energy_gap", row.get("energy_gap", 0.0), 0.0, 1)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.count = state["count"]


class _Taken(http.server.BaseHTTPRequestHandler):
    """Takes what is posted and counts it."""

    count = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).count += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class CsvLogger:
    """The least that an `add_scalar` logger can be: a line of step, tag and value a scalar."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", newline="")
        self.writer = csv.writer(self.file)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.writer.writerow((step, tag, value))

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class Training:
    """A guarded loop with everything attached, whose guard writes to ``run`` and to the sinks."""

    def __init__(self, folder: Path, *sinks: Sink) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1), nn.Flatten(0))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, weight_decay=1e-4)
        self.rng = torch.Generator().manual_seed(0)
        self.buffer = ReplayBuffer(CHAINS, (2,), reinit_rate=0.05, generator=self.rng)
        self.folder, self.sinks, self.ended = folder, sinks, Counter[str]()
        self.guard = self._guarded()

    def _guarded(self) -> Guard:
        return guard(
            None,
            self._sample,
            beta_star=0.5,
            rules=[*DEFAULT_RULES, EveryNow()],
            log_dir=self.folder / "run",
            sinks=self.sinks,
            action="rollback",
            recovery=Recovery(folder=self.folder / "snapshots", every=100, budget=10_000),
            model=self.model,
            optimizer=self.optimizer,
            buffer=self.buffer,
            generators=[self.rng],
            step_size=STEP_SIZE,
            noise_std=NOISE_STD,
            sgld_steps=SGLD_STEPS,
        )

    def renew(self) -> None:
        """Close the guard, and go on with another from its snapshots, as a cell that runs again."""
        self.end()
        self.guard = self._guarded()
        self.guard.resume()

    def end(self) -> None:
        """Close the guard, and count what it has seen."""
        self.guard.close()
        self.ended.update(alert.rule for alert in self.guard.alerts)
        self.ended["rollbacks"] = self.guard.attempt  # which goes on from the snapshots

    def blow_up(self) -> None:
        """What a step of a huge learning rate leaves."""
        with torch.no_grad():
            for own in self.model.parameters():
                own.mul_(30.0)

    def held(self) -> tuple[int, int, int]:
        """Descriptors and threads of the process, hooks on the optimizer."""
        hooks = [value for name, value in vars(self.optimizer).items() if name.endswith("_hooks")]
        open_ = len(list(Path("/proc/self/fd").iterdir()))
        return open_, threading.active_count(), sum(map(len, hooks))

    def _sample(self, f: nn.Module) -> Tensor:
        start, rows = self.buffer.sample(BATCH)
        x = sgld(
            f,
            start,
            steps=SGLD_STEPS,
            step_size=STEP_SIZE,
            noise_std=NOISE_STD,
            generator=self.rng,
        )
        self.buffer.write(rows, x)
        return x

    def step(self) -> None:
        loss, sample = self.guard
        x_neg = sample(self.model)
        x_pos = 0.5 * torch.randn(BATCH, 2, generator=self.rng)
        self.optimizer.zero_grad()
        loss(self.model(x_pos), self.model(x_neg)).backward()
        self.optimizer.step()


def resident_mib() -> float:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def sizes(folder: Path) -> dict[str, int]:
    """Bytes by what wrote them."""
    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            part = path.relative_to(folder).parts[0]
            name = path.name if path.suffix == ".jsonl" else "event files"
            name = name if part == "run" else part
            found[name] = found.get(name, 0) + path.stat().st_size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--remake", type=int, default=0, help="steps of a guard; 0: one guard")
    parser.add_argument("--blow-up", type=int, default=0, help="steps between two; 0: none")
    parser.add_argument("--keep", type=Path, help="leave the folder here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    marks = [given.steps // 20, given.steps // 4, given.steps // 2, given.steps]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Taken)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        webhook = WebhookSink(f"http://127.0.0.1:{server.server_address[1]}/")
        logger = CsvLogger(folder / "scalars.csv")
        training = Training(folder, AddScalarSink(logger), webhook)
        print(f"torch {torch.__version__}, {given.steps:,} steps, one thread\n")
        names: list[str] = []
        start, cpu, done = time.perf_counter(), time.process_time(), 0
        timed = min(TIMED, marks[0])
        for mark in marks:
            while done < mark:
                if done == mark - timed:
                    begin, begin_cpu = time.perf_counter(), time.process_time()
                if given.remake and done and done % given.remake == 0:
                    training.renew()
                if given.blow_up and done and done % given.blow_up == 0:
                    training.blow_up()
                training.step()
                done += 1
            training.guard.flush()
            seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
            written = sizes(folder)
            if not names:
                names = list(written)
                heads = [f"{name}, bytes/step" for name in names]
                held = "descriptors, threads, hooks"
                print(f"| steps | resident, MiB | {held} | s per 1,000 steps (CPU) |", end=" ")
                print(" | ".join(heads), "|")
                print("|---:" * (4 + len(names)) + "|")
            per_1000 = [1000 * each / timed for each in seconds]
            cells = [f"{written.get(name, 0) / done:,.1f}" for name in names]
            print(
                f"| {done:,} | {resident_mib():.1f} | {', '.join(map(str, training.held()))} |",
                f"{per_1000[0]:.2f} ({per_1000[1]:.2f}) |",
                " | ".join(cells),
                "|",
                flush=True,
            )
        training.end()
        webhook.wait(10.0)
        logger.close()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        alerts = training.ended
        rollbacks = alerts.pop("rollbacks")
        print(f"\n{wall:.0f} s, {cpu:.0f} s of CPU; {alerts.total()} alerts, of them ", end="")
        print(f"{alerts['every_now']} on purpose; {_Taken.count} posted; ", end="")
        print(f"{rollbacks} rollbacks. Files, MB:")
        for name, size in sizes(folder).items():
            print(f"- {name}: {size / 1e6:.1f}")
    server.shutdown()


if __name__ == "__main__":
    main()
