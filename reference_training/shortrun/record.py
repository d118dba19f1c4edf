"""What a short-run training writes down beside the guard's own rows and alerts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ebmguard import tags
from ebmguard.alerts import Alert, Level

from ..engine.lagged import LaggedNumbers
from ..engine.progress import Reporter
from ..engine.run_folder import RunFolder
from ..figures import as_bytes, save_sample_figures
from ..numbers import median
from .config import ShortRunConfig

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

DIVERGED_GAP = 1e4
"""A run has diverged at the first update whose |energy gap| exceeds this, or is not finite."""
SHOWN = 64
"""Samples of an update that are kept."""
ROWS_EVERY = 50
"""Rows are written every so many updates."""
LAST = 100
"""Updates whose medians are results."""
WEIGHTS = (tags.GRAD_SCALE, tags.ESS)
WATCHED = (tags.ENERGY_GAP, "f_pos/mean", "f_neg/mean", *WEIGHTS, tags.SAMPLER_GRAD_NORM)
"""Of the guard's row; weights also at the reference exponent."""


class Record:
    """The course of a run: divergence, samples, training.jsonl, results.json.

    training.jsonl has a line for each update: `sgld_steps`, how many were run; `outside`, the share
    of the negatives' entries that lie outside of [-1, 1]; `contrast`, their standard deviation (of
    several ranks, the mean of theirs).

    Args:
        config: the settings.
        folder: where it is written.
        data: images (n, C, H, W) in [-1, 1], to be shown beside the samples.
        reporter: what a person sees.

    Attributes:
        next_step: updates finished so far.
        diverged_at: first diverged update, or None.
        ended: why the guard ended the run, or None.
        interrupted: some rank was asked to stop.
    """

    def __init__(
        self, config: ShortRunConfig, folder: RunFolder, data: Tensor, reporter: Reporter
    ) -> None:
        self.config = config
        self.folder = folder
        self.reporter = reporter
        self.next_step = 0
        self.diverged_at: int | None = None
        self.ended: str | None = None
        self.interrupted = False
        self._shown = {"data": data[:SHOWN]}
        self._alerts: dict[str, dict[str, Any]] = {}
        self._last_alert = "none"
        self._rows: list[dict[str, Any]] = []
        self._steps_of: dict[int, int] = {}
        self._lagged = LaggedNumbers()
        self._gap: float | None = None
        self._earlier = 0.0
        self._started = time.monotonic()
        self._writer: SummaryWriter | None = None
        self._events_from = 0

    @property
    def finished(self) -> bool:
        """All updates are done, the run has diverged, or the guard has ended it."""
        over = self.diverged_at is not None or self.ended is not None
        return over or self.next_step >= self.config.total_steps

    def on_alert(self, alert: Alert) -> None:
        """Keep the first alert of each level."""
        self._last_alert = f"{alert.level.name} {alert.rule} @{alert.step}"
        for level in (Level.WARN, Level.ERROR):
            if alert.level >= level:
                self._alerts.setdefault(level.name, alert.record())

    def after_update(
        self, numbers: Tensor, x_neg: Tensor, sgld_steps: int, guard: Mapping[str, float]
    ) -> None:
        """Take in a finished update.

        Args:
            numbers: (4,) mean f+ - mean f-, the share of the negatives' entries outside of the
                cube, their standard deviation, and whether a rank was interrupted; of all ranks.
            x_neg: this rank's negatives, (n, C, H, W).
            sgld_steps: how many steps led to them.
            guard: the guard's latest row.
        """
        step = self.next_step
        self.next_step += 1
        self._shown["end"] = x_neg[:SHOWN]
        self._steps_of[step] = sgld_steps
        self._take(self._lagged.put(step, numbers))
        if self.next_step % self.config.settings.sample_every == 0 or step == 0:
            self._keep_samples(x_neg[:SHOWN])
        if step % ROWS_EVERY == 0:
            self._write_rows()
        shown = {"gap": self._gap}
        for name, tag in zip(("GradScale", "ESS"), WEIGHTS, strict=True):
            shown[name] = guard.get(tags.weight_tag(tag, self.config.beta_star))
        state: dict[str, float | str] = {k: v for k, v in shown.items() if v is not None}
        self.reporter.step(self.next_step, {**state, "alert": self._last_alert})

    def end(self, steps: int, why: str) -> None:
        """The guard has ended the run, after so many updates."""
        self.next_step = steps
        self.ended = why
        self.reporter.note(f"ended after {steps} updates: {why}")

    def finish(self, rows: Sequence[Mapping[str, Any]], device: str) -> dict[str, Any]:
        """Draw the last samples and write results.json, when the guard has judged all its rows.

        Args:
            rows: the guard's rows, oldest first.
            device: in words.

        Returns:
            What results.json holds.
        """
        self.flush()
        if self.folder.writes:
            save_sample_figures(self.folder.figures, self._shown)
        config, last = self.config, rows[-LAST:]
        medians = {
            tag: median([row[tag] for row in last if row.get(tag) is not None])
            for name in WATCHED
            for tag in ((name, tags.REFERENCE + name) if name in WEIGHTS else (name,))
        }
        results = {
            "command": config.command(),
            "seed": config.seed,
            "data": config.data,
            "beta_star": config.beta_star,
            "beta": config.beta_star / config.settings.output_scale,
            "iterations": config.total_steps,
            "steps": self.next_step,
            "device": device,
            "torch": torch.__version__,
            "wall_seconds": round(self.elapsed(), 3),
            "diverged_at": self.diverged_at,
            "ended": self.ended,
            "first_warn": self._alerts.get("WARN"),
            "first_error": self._alerts.get("ERROR"),
            "median_last_100": medians,
        }
        self.folder.write_results(results)
        return results

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
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors for a checkpoint. Call :meth:`flush` first."""
        return {
            "next_step": self.next_step,
            "diverged_at": self.diverged_at,
            "shown": dict(self._shown),
            "alerts": dict(self._alerts),
            "last_alert": self._last_alert,
            "elapsed": self.elapsed(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved record."""
        self.next_step = self._events_from = state["next_step"]
        self.diverged_at = state["diverged_at"]
        self._shown = dict(state["shown"])
        self._alerts = dict(state["alerts"])
        self._last_alert = state["last_alert"]
        self._earlier = state["elapsed"]

    def _take(self, found: list[tuple[int, list[float]]]) -> None:
        """Numbers that have reached the host."""
        for step, (gap, outside, contrast, interrupted) in found:
            self._gap = gap
            self.interrupted |= interrupted > 0
            row = {"step": step, "sgld_steps": self._steps_of.pop(step)}
            self._rows.append({**row, "outside": outside, "contrast": contrast})
            lost = not (math.isfinite(gap) and abs(gap) <= DIVERGED_GAP)
            if lost and self.diverged_at is None:
                self.diverged_at = step
                self.reporter.note(f"diverged at update {step}: energy gap {gap:.3g}")

    def _keep_samples(self, x: Tensor) -> None:
        if not self.folder.writes:
            return
        pixels = as_bytes(x).cpu()
        np.save(self.folder.samples / f"{self.next_step:08d}.npy", pixels.numpy())
        # (n, C, H, W) bytes, which TensorBoard lays out as a grid.
        self._events().add_images("samples", pixels, self.next_step)

    def _write_rows(self) -> None:
        if self._rows and self.folder.writes:
            self.folder.append_rows("training.jsonl", self._rows)
            for row in self._rows:
                for name in ("outside", "contrast"):
                    self._events().add_scalar(f"negatives/{name}", row[name], row["step"])
            self._events().flush()
        self._rows = []

    def _events(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A folder of its own: TensorBoard reads one growing event file for each folder.
            # purge_step hides the steps that a resumed run goes through again.
            self._writer = SummaryWriter(
                str(self.folder.path / "trainer"), purge_step=self._events_from
            )
        return self._writer
