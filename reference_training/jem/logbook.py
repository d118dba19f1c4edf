"""Everything a JEM run writes down beside the guard's own rows and alerts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ebmguard.alerts import Alert

from ..data import ImageData
from ..figures import save_sample_figures
from ..networks import WideResNet
from ..progress import Reporter
from ..run_folder import RunFolder
from .accuracy import AccuracyWatch
from .config import JemConfig
from .record import RunRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SHOWN_SAMPLES = 64
HEALTHY_SHARE = 0.9
"""Samples count as healthy while the accuracy is at least this share of the best so far."""


class Logbook:
    """Test accuracy, divergence, samples and what a person sees of the run.

    training.jsonl has a line for each step (`cross_entropy`, `energy_gap`), accuracy.jsonl one for
    each evaluation (`test_accuracy`); both also go to TensorBoard, as the run "trainer".

    Args:
        config: the settings.
        folder: where it is written.
        network: the network in training.
        data: the data set, on the network's device.
        reporter: what a person sees.
    """

    def __init__(
        self,
        config: JemConfig,
        folder: RunFolder,
        network: WideResNet,
        data: ImageData,
        reporter: Reporter,
    ) -> None:
        self.config = config
        self.folder = folder
        self.reporter = reporter
        self.record = RunRecord()
        self.watch = AccuracyWatch(
            network,
            data.test_x,
            data.test_y,
            every=config.eval_every,
            context=config.alert_context,
            window=config.alert_window,
            results=self.record.accuracy,
        )
        self.samples: dict[str, Tensor] = {"data": data.train_x[:SHOWN_SAMPLES].clone()}
        self._new_alerts: list[Alert] = []
        self._last_alert = "none"
        self._rows: list[dict[str, Any]] = []
        self._started = time.monotonic()
        self._writer: SummaryWriter | None = None

    @property
    def finished(self) -> bool:
        """All steps are done, or the run diverged long enough ago."""
        record = self.record
        lost = record.diverged_at
        stopped = lost is not None and record.next_step > lost + self.config.stop_after
        return stopped or record.next_step >= self.config.iterations

    def on_alert(self, alert: Alert) -> None:
        """Keep an alert of the guard until the step is over."""
        self._new_alerts.append(alert)

    def before_step(self, step: int) -> None:
        """Evaluate the parameters that `step` starts with, if they are due."""
        self._write_accuracy(self.watch.before_step(step))

    def after_step(
        self,
        step: int,
        *,
        cross_entropy: float,
        gap: float,
        x_neg: Tensor,
        guard: Mapping[str, float],
    ) -> None:
        """Take in a finished step.

        Args:
            step: its number.
            cross_entropy: loss of the classifier.
            gap: mean f+ - mean f-.
            x_neg: the step's samples.
            guard: the guard's latest row.
        """
        record = self.record
        record.next_step = step + 1
        self._rows.append({"step": step, "cross_entropy": cross_entropy, "energy_gap": gap})
        if record.see_gap(step, gap):
            self.reporter.note(f"diverged at step {step}: energy gap {gap:.3g}")
            self._write_accuracy(self.watch.look_at(step))
        for alert in self._new_alerts:
            self._last_alert = f"{alert.level.name} {alert.rule} @{alert.step}"
            if record.see_alert(alert):
                self._write_accuracy(self.watch.look_at(alert.step))
        self._new_alerts.clear()
        self._keep_samples(step, x_neg)
        if step % self.config.eval_every == 0:
            self.flush()
        shown = {"acc": record.last_accuracy(), "gap": gap}
        for name, tag in (("GradScale", "grad_scale"), ("ESS", "ess")):
            # At beta* = 0 the weights are uniform and say nothing: show the reference exponent's.
            shown[name] = guard.get(tag if self.config.beta_star else f"ref/{tag}")
        state: dict[str, float | str] = {k: v for k, v in shown.items() if v is not None}
        self.reporter.step(step + 1, {**state, "alert": self._last_alert})

    def finish(self, rows: list[dict[str, Any]], device: str) -> dict[str, Any]:
        """Evaluate the final parameters, draw the figures and write results.json.

        Args:
            rows: the guard's rows, oldest first.
            device: the device in words.

        Returns:
            What results.json holds.
        """
        config, record = self.config, self.record
        self._write_accuracy(self.watch.evaluate(record.next_step))
        self.flush()
        save_sample_figures(self.folder.figures, self.samples)
        results = {
            "command": config.command(),
            "seed": config.seed,
            "beta_star": config.beta_star,
            "iterations": config.iterations,
            "device": device,
            "torch": torch.__version__,
            "wall_seconds": round(self.elapsed(), 3),
            **record.results(rows, before=config.alert_context, after=config.alert_window),
        }
        self.folder.write_results(results)
        return results

    def elapsed(self) -> float:
        """Seconds spent on the run, sessions before a resume included."""
        return self.record.elapsed + time.monotonic() - self._started

    def close(self) -> None:
        """Write what is pending and let go of the files."""
        self.flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors for a checkpoint. Call :meth:`flush` first."""
        return {
            "record": {**self.record.state_dict(), "elapsed": self.elapsed()},
            "watch": self.watch.state_dict(),
            "samples": dict(self.samples),
            "last_alert": self._last_alert,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        self.record.load_state_dict(state["record"])
        self.watch.results = self.record.accuracy
        self.watch.load_state_dict(state["watch"])
        self.samples = dict(state["samples"])
        self._last_alert = state["last_alert"]

    def _keep_samples(self, step: int, x_neg: Tensor) -> None:
        shown = x_neg[:SHOWN_SAMPLES]
        if step == 0:
            self.samples["start"] = shown.clone()
        self.samples["end"] = shown
        if self.record.diverged_at is None and step % self.config.eval_every == 0:
            best = max(self.record.accuracy.values())
            if self.record.accuracy[step] >= HEALTHY_SHARE * best:
                self.samples["healthy"] = shown.clone()

    def _write_accuracy(self, steps: list[int]) -> None:
        if not steps:
            return
        rows = [{"step": step, "test_accuracy": self.record.accuracy[step]} for step in steps]
        self.folder.append_rows("accuracy.jsonl", rows)
        for row in rows:
            self._tensorboard().add_scalar("test/accuracy", row["test_accuracy"], row["step"])

    def flush(self) -> None:
        """Write the rows that are kept in memory."""
        if self._rows:
            self.folder.append_rows("training.jsonl", self._rows)
            for row in self._rows:
                self._tensorboard().add_scalar(
                    "train/cross_entropy", row["cross_entropy"], row["step"]
                )
            self._rows = []
        if self._writer is not None:
            self._writer.flush()

    def _tensorboard(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A folder of its own: TensorBoard reads one growing event file for each folder.
            # purge_step hides the steps that a resumed run goes through again.
            self._writer = SummaryWriter(
                str(self.folder.path / "trainer"), purge_step=self.record.next_step
            )
        return self._writer
