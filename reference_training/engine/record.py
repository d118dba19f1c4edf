"""The course of a run: what is written of it beside the guard's own rows and alerts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ebmguard.alerts import Alert, Level

from ..device import describe
from .lagged import LaggedNumbers
from .progress import Reporter
from .ranks import ONE_RANK, Ranks
from .rows import last_course
from .run_config import RunConfig
from .run_folder import RunFolder, read_rows

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from .task import Step, Task

ROWS = "training.jsonl"
ROWS_EVERY = 50
"""Rows are written every so many steps."""
STOPPED = "stopped"
"""Name under which ranks tell each other that one of them was interrupted."""


class Record:
    """Steps, alerts, divergence, rollbacks and rows of a run, and what a person sees of them.

    training.jsonl has a line for each step; numbers and samples go to TensorBoard too, as the run
    "trainer". After a rollback steps come again: their rows have an entry "attempt", the number of
    rollbacks before them. Nothing waits for the device: numbers are read two steps late on a GPU.

    Args:
        config: the settings.
        folder: where it is written.
        device: of the training.
        ranks: the processes that train together.

    Attributes:
        next_step: steps finished so far.
        diverged_at: first diverged step, or None.
        ended: why the guard ended the run, or None.
        interrupted: some rank of several was asked to stop.
        rollbacks: records of the guard's rollbacks, oldest first.
        first_alerts: records of the first alert that reached WARN and ERROR, by level.
        counts: alerts by level.
        last_alert: the latest in a few words.
        numbers: of the latest step that has reached the host.
    """

    task: Task
    reporter: Reporter

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        device: torch.device,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.config = config
        self.folder = folder
        self.device = device
        self.ranks = ranks
        self.next_step = 0
        self.diverged_at: int | None = None
        self.ended: str | None = None
        self.interrupted = False
        self.rollbacks: list[dict[str, Any]] = []
        self.first_alerts: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.last_alert = "none"
        self.numbers: dict[str, float] = {}
        self._new_alerts: list[Alert] = []
        self._lagged = LaggedNumbers()
        self._under_way: dict[int, tuple[list[str], Mapping[str, Any]]] = {}
        self._rows: list[dict[str, Any]] = []
        self._earlier = 0.0
        self._started = time.monotonic()
        self._writer: SummaryWriter | None = None
        self._events_from = 0

    @property
    def for_guard(self) -> dict[str, Any]:
        """Keywords that every guard of the run needs."""
        log_dir = self.folder.path if self.ranks.is_first else None
        return {
            "log_dir": log_dir,
            "on_alert": self.on_alert,
            "process_group": self.ranks.group,
        }

    @property
    def attempt(self) -> dict[str, int]:
        """What a row says about rollbacks: how many there were before it; nothing without any."""
        return {"attempt": len(self.rollbacks)} if self.rollbacks else {}

    @property
    def finished(self) -> bool:
        """All steps are done, the guard ended the run, or it diverged long enough ago."""
        lost, more = self.diverged_at, self.task.stop_after
        stopped = lost is not None and more is not None and self.next_step > lost + more
        return stopped or self.ended is not None or self.next_step >= self.config.total_steps

    def on_alert(self, alert: Alert) -> None:
        """Keep an alert of a guard until the step is over."""
        self._new_alerts.append(alert)

    def after_step(
        self, step: int, done: Step, row: Mapping[str, float], requested: bool = False
    ) -> None:
        """Take in a finished step.

        Args:
            step: its number.
            done: what it told.
            row: the guard's latest.
            requested: this rank was asked to stop.
        """
        self.next_step = step + 1
        self.task.keep(step, done.samples)
        numbers = dict(done.numbers)
        if self.ranks.world > 1:
            numbers[STOPPED] = torch.full((), float(requested), device=self.device)
        if numbers:
            self._under_way[step] = list(numbers), done.known
            sent = self.ranks.average(torch.stack([x.detach() for x in numbers.values()]))
            self._take(self._lagged.put(step, sent))
        self._take_alerts()
        if step % ROWS_EVERY == 0:
            self._write_rows()
        self.reporter.step(self.next_step, self.task.shown(row))

    def end(self, steps: int, why: str) -> None:
        """The guard has ended the run, after so many steps."""
        self.next_step = steps
        self.ended = why
        self.reporter.note(f"ended after {steps} {self.task.unit}s: {why}")

    def roll_back(self, rollback: Mapping[str, Any]) -> None:
        """The guard has gone back to an earlier step: what came after it is of a course given up.

        Args:
            rollback: its record.
        """
        self.flush()
        self._take_alerts()
        step = int(rollback["restored_step"])
        self.task.roll_back(step)
        if self.diverged_at is not None and self.diverged_at >= step:
            self.diverged_at = None
        self.next_step = self._events_from = step
        self.rollbacks.append(dict(rollback))
        self._close_writer()

    def finish(self) -> dict[str, Any]:
        """Write results.json, when the guards have judged all their rows.

        Returns:
            What it holds.
        """
        self._take_alerts()  # of the rows that were still under way on a GPU
        self.flush()
        own = self.task.results()
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
        return last_course(read_rows(folder.path, "metrics.jsonl")) if folder.writes else []

    def scalar(self, tag: str, value: float, step: int) -> None:
        """A number for TensorBoard."""
        if self.folder.writes:
            self._events().add_scalar(tag, value, step)

    def images(self, tag: str, pixels: Tensor, step: int) -> None:
        """Bytes (n, C, H, W) for TensorBoard, which lays them out as a grid."""
        if self.folder.writes:
            self._events().add_images(tag, pixels, step)

    def elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._earlier + time.monotonic() - self._started

    def flush(self) -> None:
        """Write what is kept in memory; waits for the device."""
        self._take(self._lagged.drain())
        self._write_rows()

    def close(self) -> None:
        """Write what is pending and let go of the files."""
        self.flush()
        self._close_writer()

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint. Call :meth:`flush` first."""
        return {
            "next_step": self.next_step,
            "diverged_at": self.diverged_at,
            "rollbacks": list(self.rollbacks),
            "first_alerts": dict(self.first_alerts),
            "counts": dict(self.counts),
            "last_alert": self.last_alert,
            "elapsed": self.elapsed(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved record."""
        self.next_step = self._events_from = state["next_step"]
        self.diverged_at = state["diverged_at"]
        self.rollbacks = list(state["rollbacks"])
        self.first_alerts = dict(state["first_alerts"])
        self.counts = Counter(state["counts"])
        self.last_alert = state["last_alert"]
        self._earlier = state["elapsed"]

    def _take(self, found: list[tuple[int, list[float]]]) -> None:
        """Numbers that have reached the host."""
        for step, values in found:
            names, known = self._under_way.pop(step)
            numbers = dict(zip(names, values, strict=True))
            self.interrupted |= numbers.pop(STOPPED, 0.0) > 0
            self.numbers = numbers
            written = {k: v for k, v in numbers.items() if k not in self.task.hidden}
            if written or known:
                self._rows.append({"step": step, **self.attempt, **known, **written})
            why = self.task.see(step, numbers)
            if why is not None and self.diverged_at is None:
                self.diverged_at = step
                self.reporter.note(f"diverged at {self.task.unit} {step}: {why}")

    def _take_alerts(self) -> None:
        """What the guards have said since the last call."""
        for alert in self._new_alerts:
            self.last_alert = f"{alert.level.name} {alert.rule} @{alert.step}"
            self.counts[alert.level.name] += 1
            reached = [level.name for level in (Level.WARN, Level.ERROR) if alert.level >= level]
            new = [name for name in reached if name not in self.first_alerts]
            self.first_alerts |= {name: {**alert.record(), **self.attempt} for name in new}
            if new:
                self.task.first_alert(alert)
        self._new_alerts.clear()

    def _write_rows(self) -> None:
        if self._rows:
            self.folder.append_rows(ROWS, self._rows)
        for row in self._rows:
            for name, tag in self.task.curves.items():
                self.scalar(tag, row[name], row["step"])
        self._rows = []
        if self._writer is not None:
            self._writer.flush()

    def _events(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A folder of its own: TensorBoard reads one growing event file for each folder.
            # purge_step hides the steps that a run goes through again, resumed or rolled back.
            self._writer = SummaryWriter(
                str(self.folder.path / "trainer"), purge_step=self._events_from
            )
        return self._writer

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
