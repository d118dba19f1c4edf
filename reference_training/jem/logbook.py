"""Everything a JEM run writes down beside the guard's own rows and alerts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ebmguard.alerts import Alert

from ..data import ImageData
from ..engine.lagged import LaggedNumbers
from ..engine.progress import Reporter
from ..engine.run_folder import RunFolder
from ..networks import WideResNet
from .accuracy import AccuracyWatch
from .config import JemConfig
from .evaluation import Evaluator
from .record import RunRecord
from .samples import SHOWN, KeptSamples

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

HEALTHY_SHARE = 0.9
"""Samples count as healthy while the accuracy is at least this share of the best so far."""
ROWS_EVERY = 50
"""Rows are written every so many steps."""


class Logbook:
    """Evaluations, divergence and what a person sees of the run.

    training.jsonl has a line for each step (`cross_entropy`, `energy_gap`), evaluations.jsonl one
    for each evaluation, accuracy.jsonl one wherever the test accuracy is known. Numbers, and
    samples as pictures, also go to TensorBoard, as the run "trainer". After a rollback steps come
    again: their rows have an entry "attempt", the number of rollbacks before them.

    Args:
        config: the settings.
        folder: where it is written.
        network: the network in training.
        data: the data set, on the network's device.
        evaluator: what an evaluation is.
        reporter: what a person sees.
    """

    def __init__(
        self,
        config: JemConfig,
        folder: RunFolder,
        network: WideResNet,
        data: ImageData,
        evaluator: Evaluator,
        *,
        reporter: Reporter,
    ) -> None:
        self.config = config
        self.settings = config.settings
        self.folder = folder
        self.reporter = reporter
        self.network = network
        self.evaluator = evaluator
        self.epoch = max(1, len(data.train_x) // self.settings.n_pos)
        self.record = RunRecord()
        self.interrupted = False
        self.watch = AccuracyWatch(
            network,
            lambda: evaluator.test_accuracy(network),
            context=self.settings.alert_context,
            window=self.settings.alert_window,
            results=self.record.accuracy,
        )
        self.samples = KeptSamples(folder, data.scale(data.train_x[:SHOWN]))
        self._lagged = LaggedNumbers()
        self._new_alerts: list[Alert] = []
        self._last_alert = "none"
        self._gap: float | None = None
        self._rows: list[dict[str, Any]] = []
        self._started = time.monotonic()
        self._writer: SummaryWriter | None = None
        self._events_from = 0

    @property
    def finished(self) -> bool:
        """All steps are done, the guard ended the run, or it diverged long enough ago."""
        record = self.record
        if record.ended is not None:
            return True
        lost = record.diverged_at
        stopped = lost is not None and record.next_step > lost + self.settings.stop_after
        return stopped or record.next_step >= self.settings.iterations

    def on_alert(self, alert: Alert) -> None:
        """Keep an alert of the guard until the step is over."""
        self._new_alerts.append(alert)

    def is_due(self, step: int) -> bool:
        """Whether the parameters that `step` starts with are evaluated."""
        return step % self.settings.eval_every == 0

    def before_step(self, step: int) -> None:
        """Evaluate the parameters that `step` starts with, if alerts have drawn attention to it."""
        self._write_accuracy(self.watch.before_step(step))

    def evaluate(self, step: int, buffer: Tensor | None) -> None:
        """Evaluate the network as it is, as that of `step`; keep the best by validation accuracy.

        Args:
            step: steps finished so far.
            buffer: samples (n, C, H, W) of all ranks whose quality is measured, or None.
        """
        row = self.evaluator.evaluate(
            self.network, step=step, epoch=step / self.epoch, buffer=buffer
        )
        row |= self.record.attempt
        self.folder.append_rows("evaluations.jsonl", [row])
        if self.record.see_evaluation(row):
            self.folder.save(
                "checkpoints/best.pt",
                {
                    "step": step,
                    "valid_accuracy": row["valid_accuracy"],
                    "network": self.network.state_dict(),
                },
            )
        for name, value in row.items():
            if isinstance(value, float) and name != "epoch":
                self._scalar(f"evaluation/{name}", value, step)
        self._write_accuracy([step])

    def after_step(
        self,
        step: int,
        numbers: Tensor,
        *,
        x_neg: Tensor | None,
        guard: Mapping[str, float],
    ) -> None:
        """Take in a finished step.

        Args:
            step: its number.
            numbers: (3,) cross-entropy of the classifier, mean f+ - mean f-, and whether a rank was
                interrupted; of all ranks.
            x_neg: the step's samples, where it has some.
            guard: the guard's latest row.
        """
        self.record.next_step = step + 1
        if x_neg is not None:
            self._keep_samples(step, x_neg)
        self._take(self._lagged.put(step, numbers))
        self._take_alerts()
        if step % ROWS_EVERY == 0:
            self._write_rows()
        shown = {"acc": self.record.last_accuracy(), "gap": self._gap}
        for name, tag in (("GradScale", "grad_scale"), ("ESS", "ess")):
            # At beta* = 0 the weights are uniform and say nothing: show the reference exponent's.
            shown[name] = guard.get(tag if self.config.beta_star else f"ref/{tag}")
        state: dict[str, float | str] = {k: v for k, v in shown.items() if v is not None}
        self.reporter.step(step + 1, {**state, "alert": self._last_alert})

    def roll_back(self, rollback: Mapping[str, Any]) -> None:
        """The guard has gone back to an earlier step, after a finished one.

        Args:
            rollback: its record.
        """
        self.flush()
        self._take_alerts()
        settings, step = self.settings, rollback["restored_step"]
        self.record.see_rollback(
            rollback, before=settings.alert_context, after=settings.alert_window
        )
        self.watch.forget(step)
        self.samples.forget(step)
        self._close_writer()
        self._events_from = step

    def end(self, steps: int, why: str) -> None:
        """The guard has ended the run, after so many steps."""
        self.record.next_step = steps
        self.record.ended = why
        self.reporter.note(f"ended after {steps} steps: {why}")

    def _take(self, found: list[tuple[int, list[float]]]) -> None:
        """Numbers that have reached the host."""
        for step, (cross_entropy, gap, interrupted) in found:
            self._gap = gap if self.config.has_samples else None
            row = {"step": step, **self.record.attempt, "cross_entropy": cross_entropy}
            self._rows.append(row if self._gap is None else {**row, "energy_gap": gap})
            self.interrupted |= interrupted > 0
            if self.record.see_step(step, cross_entropy, self._gap):
                self.reporter.note(
                    f"diverged at step {step}: energy gap {gap:.3g}, "
                    f"cross-entropy {cross_entropy:.3g}"
                )
                self.samples.write_recent()
                self._write_accuracy(self.watch.look_at(step))

    def _take_alerts(self) -> None:
        """What the guard has said since the last call."""
        for alert in self._new_alerts:
            self._last_alert = f"{alert.level.name} {alert.rule} @{alert.step}"
            if self.record.see_alert(alert):
                self._write_accuracy(self.watch.look_at(alert.step))
        self._new_alerts.clear()

    def finish(
        self, rows: Sequence[Mapping[str, Any]], device: str, buffer: Tensor | None
    ) -> dict[str, Any]:
        """Evaluate the final parameters, draw the figures and write results.json.

        Call it when the guard has judged all of its rows.

        Args:
            rows: the guard's rows, oldest first, of the last course.
            device: the device in words.
            buffer: as for :meth:`evaluate`.

        Returns:
            What results.json holds.
        """
        config, record, settings = self.config, self.record, self.settings
        self._take_alerts()  # of the rows that were still under way on a GPU
        self.evaluate(record.next_step, buffer)
        self.flush()
        self.samples.draw()
        results = {
            "command": config.command(),
            "seed": config.seed,
            "data": config.data_name,
            "scenario": config.scenario_name,
            "beta_star": config.beta_star,
            "iterations": settings.iterations,
            "iterations_per_epoch": self.epoch,
            "device": device,
            "torch": torch.__version__,
            "wall_seconds": round(self.elapsed(), 3),
            **record.results(rows, before=settings.alert_context, after=settings.alert_window),
        }
        self.folder.write_results(results)
        return results

    def elapsed(self) -> float:
        """Seconds spent on the run, sessions before a resume included."""
        return self.record.elapsed + time.monotonic() - self._started

    def flush(self) -> None:
        """Write what is kept in memory; waits for the device."""
        self._take(self._lagged.drain())
        self._write_rows()

    def close(self) -> None:
        """Write what is pending and let go of the files."""
        self.flush()
        self._close_writer()

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors for a checkpoint. Call :meth:`flush` first."""
        return {
            "record": {**self.record.state_dict(), "elapsed": self.elapsed()},
            "watch": self.watch.state_dict(),
            "samples": self.samples.state_dict(),
            "last_alert": self._last_alert,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        self.record.load_state_dict(state["record"])
        self._events_from = self.record.next_step
        self.watch.results = self.record.accuracy
        self.watch.load_state_dict(state["watch"])
        self.samples.load_state_dict(state["samples"])
        self._last_alert = state["last_alert"]

    def _keep_samples(self, step: int, x: Tensor) -> None:
        record, is_due = self.record, self.is_due(step)
        lost = record.diverged_at is not None
        healthy = False
        if is_due and not lost:
            healthy = record.accuracy[step] >= HEALTHY_SHARE * max(record.accuracy.values())
        pixels = self.samples.see(step, x, evaluated=is_due, healthy=healthy, lost=lost)
        if pixels is not None and self._writer is not None:
            # (n, C, H, W) bytes, which TensorBoard lays out as a grid.
            self._writer.add_images("samples", pixels, step)

    def _write_accuracy(self, steps: list[int]) -> None:
        known, attempt = self.record.accuracy, self.record.attempt
        rows = [{"step": step, **attempt, "test_accuracy": known[step]} for step in steps]
        if rows:
            self.folder.append_rows("accuracy.jsonl", rows)
        for row in rows:
            self._scalar("test/accuracy", row["test_accuracy"], int(row["step"]))

    def _write_rows(self) -> None:
        if self._rows:
            self.folder.append_rows("training.jsonl", self._rows)
        for row in self._rows:
            self._scalar("train/cross_entropy", row["cross_entropy"], row["step"])
        self._rows = []
        if self._writer is not None:
            self._writer.flush()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalar(self, tag: str, value: float, step: int) -> None:
        if not self.folder.writes:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A folder of its own: TensorBoard reads one growing event file for each folder.
            # purge_step hides the steps that a run goes through again, resumed or rolled back.
            self._writer = SummaryWriter(
                str(self.folder.path / "trainer"), purge_step=self._events_from
            )
        self._writer.add_scalar(tag, value, step)
