"""What a run remembers of its course, and what its guards have told it."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ebmguard.alerts import Alert, Level
from ebmguard.sinks import Sink

from ..device import describe
from .ranks import ONE_RANK, Ranks
from .run_config import RunConfig
from .run_folder import METRICS, RunFolder, last_course, read_rows

_KEPT = ("next_step", "diverged_at", "rollbacks", "first_alerts", "last_alert")


@dataclass(eq=False, repr=False)
class Record(Sink):
    """Steps, alerts, divergence and rollbacks of a run.

    It is a sink of the run's first guard, so that it has every row that the guard writes: of a GPU
    they come two steps late, and nothing waits for them. Of several ranks the first one has them.

    Attributes:
        next_step: steps finished so far.
        diverged_at: first diverged step, or None.
        ended: why the guard ended the run, or None.
        rollbacks: records of the guard's rollbacks, oldest first.
        first_alerts: records of the first alert that reached WARN and ERROR, by level.
        counts: alerts by level.
        last_alert: the latest in a few words.
    """

    config: RunConfig
    folder: RunFolder
    device: torch.device
    ranks: Ranks = ONE_RANK
    next_step: int = 0
    diverged_at: int | None = None
    ended: str | None = None
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    first_alerts: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    last_alert: str = "none"
    _new_alerts: list[Alert] = field(default_factory=list)
    _new_rows: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    _earlier: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    @property
    def for_guard(self) -> dict[str, Any]:
        """Keywords of the run's guard."""
        return {
            "log_dir": self.folder.path if self.ranks.is_first else None,
            "sinks": (self,),
            "on_alert": self.on_alert,
            "process_group": self.ranks.group,
        }

    @property
    def attempt(self) -> dict[str, int]:
        """What a row says about rollbacks: how many there were before it; nothing without any."""
        return {"attempt": len(self.rollbacks)} if self.rollbacks else {}

    def on_alert(self, alert: Alert) -> None:
        """Keep an alert of a guard until the step is over."""
        self._new_alerts.append(alert)

    def write_row(self, step: int, scalars: Mapping[str, float], histograms: object) -> None:
        """Keep a row of the guard until it is asked for."""
        self._new_rows.append((step, scalars))

    def write_alert(self, record: object) -> None:
        """Nothing: :meth:`on_alert` has it, on every rank."""

    def take_rows(self) -> list[tuple[int, Mapping[str, float]]]:
        """The guard's rows since the last call, with their steps."""
        rows, self._new_rows = self._new_rows, []
        return rows

    def take_alerts(self) -> list[Alert]:
        """Count the alerts since the last call; those that are the first WARN, or ERROR."""
        alerts, self._new_alerts = self._new_alerts, []
        firsts = []
        for alert in alerts:
            self.last_alert = f"{alert.level.name} {alert.rule} @{alert.step}"
            self.counts[alert.level.name] += 1
            reached = [level.name for level in (Level.WARN, Level.ERROR) if alert.level >= level]
            new = [name for name in reached if name not in self.first_alerts]
            self.first_alerts |= {name: {**alert.record(), **self.attempt} for name in new}
            firsts += [alert] if new else []
        return firsts

    def end(self, step: int, steps: int, why: str) -> None:
        """The guard has ended the run in a step, after so many: that one's row does not count."""
        self.next_step, self.ended = steps, why
        self._new_rows = [row for row in self._new_rows if row[0] < step]

    def roll_back(self, rollback: Mapping[str, Any]) -> None:
        """The guard has gone back to a step: what came after it is of a course given up."""
        self.next_step = int(rollback["restored_step"])
        if self.diverged_at is not None and self.diverged_at >= self.next_step:
            self.diverged_at = None
        self.rollbacks.append(dict(rollback))

    def finish(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Write results.json, with what the task has to say; what it holds."""
        results = {
            "command": self.config.command(),
            "seed": self.config.seed,
            "iterations": self.config.total_steps,
            "steps": self.next_step,
            "device": describe(self.device),
            "torch": torch.__version__,
            "wall_seconds": round(self.elapsed(), 3),
            "diverged_at": self.diverged_at,
            "ended": self.ended,
            "rollbacks": self.rollbacks,
            "first_warn": self.first_alerts.get("WARN"),
            "first_error": self.first_alerts.get("ERROR"),
            **own,
        }
        self.folder.write_results(results)
        return results

    def guard_rows(self) -> list[Mapping[str, Any]]:
        """The guard's rows of the course that counts, oldest first; none where another writes."""
        folder = self.folder
        return last_course(read_rows(folder.path, METRICS)) if folder.writes else []

    def images(self, tag: str, pixels: Tensor, step: int) -> None:
        """Bytes (n, C, H, W) for TensorBoard, which lays them out as a grid."""
        if self.folder.writes:
            from torch.utils.tensorboard import SummaryWriter

            # In a folder of their own: of the guard's, TensorBoard reads the file that grows. What
            # a run that is resumed or rolled back has from this step on gives way.
            folder = str(self.folder.path / "trainer")
            with closing(SummaryWriter(folder, purge_step=step)) as writer:
                writer.add_images(tag, pixels, step)

    def elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._earlier + time.monotonic() - self._started

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        kept = {name: getattr(self, name) for name in _KEPT}
        return copy.deepcopy({**kept, "counts": dict(self.counts), "elapsed": self.elapsed()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved record."""
        own = copy.deepcopy({name: state[name] for name in _KEPT})
        self.counts, self._earlier = Counter(state["counts"]), state["elapsed"]
        vars(self).update(own)
