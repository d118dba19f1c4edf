"""Memory, seconds, file sizes and what else could leak in 200,000 guarded steps.

    python -m benchmarks.long_run
    python -m benchmarks.long_run --remake 1000 --blow-up 700    # as in a notebook, and rollbacks

A small network on points of the plane, 2 SGLD steps a step: nearly all of the time is the guard's.
Everything is attached, snapshots go to a folder, rows, alerts and rollbacks to JSON lines and event
files. With ``--remake`` the guard is closed every so many steps, and another goes on in the same
folder, on the same model and optimizer; with ``--blow-up`` the weights grow by a factor every so
many steps, which a rollback takes back.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ebmguard import Recovery, guard
from ebmguard.samplers import ReplayBuffer, sgld

from .grid import table_of

BATCH = 16
STEPS: dict[str, Any] = {"step_size": 0.1, "noise_std": 0.1}
TIMED = 1000
"""Steps over which seconds are averaged."""


class Training:
    """A guarded loop with everything attached, in a folder."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1), nn.Flatten(0))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, weight_decay=1e-4)
        self.rng = torch.Generator().manual_seed(0)
        self.buffer = ReplayBuffer(1000, (2,), reinit_rate=0.05, generator=self.rng)
        self.folder, self.ended = folder, Counter[str]()
        self.begin()

    def begin(self) -> None:
        """Guard it, and go on from the snapshots that there are."""
        told: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, **STEPS}
        told |= {"buffer": self.buffer, "generators": [self.rng], "sgld_steps": 2}
        told["recovery"] = Recovery(folder=self.folder / "snapshots", every=100, budget=10_000)
        told |= {"beta_star": 0.5, "log_dir": self.folder / "run", "action": "rollback"}
        self.guard = guard(None, self._sample, **told)
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
        x = sgld(f, start, steps=2, generator=self.rng, **STEPS)
        self.buffer.write(rows, x)
        return x

    def step(self) -> None:
        x_neg = self.guard.sampler(self.model)
        x_pos = 0.5 * torch.randn(BATCH, 2, generator=self.rng)
        self.optimizer.zero_grad()
        self.guard.loss(self.model(x_pos), self.model(x_neg)).backward()
        self.optimizer.step()


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


def main() -> None:
    """Train, and print a line now and then."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--remake", type=int, default=0, help="steps of a guard; 0: one guard")
    parser.add_argument("--blow-up", type=int, default=0, help="steps between two; 0: none")
    given = parser.parse_args()
    torch.set_num_threads(1)
    marks, lines = [given.steps // part for part in (20, 4, 2, 1)], []
    with tempfile.TemporaryDirectory() as temporary:
        training = Training(Path(temporary))
        for step in range(1, given.steps + 1):
            if step + TIMED in marks:
                cpu = time.process_time()
            if given.remake and step % given.remake == 0:
                training.end()
                training.begin()
            if given.blow_up and step % given.blow_up == 0:
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
    print(f"\n{table_of(lines)}\n\nalerts and rollbacks: {dict(training.ended)}")


if __name__ == "__main__":
    main()
