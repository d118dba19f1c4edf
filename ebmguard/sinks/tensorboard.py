"""The sinks for TensorBoard: an event file, or the ``add_scalar`` of a logger."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, folder_path, typed
from .protocol import LEVEL_NUMBERS, MARKER_PREFIX, Histograms, Record, Scalars, Sink, prefixed
from .safe_files import removed_on_failure

if TYPE_CHECKING:
    from .events import EventFile

__all__ = ["AddScalarSink", "TensorBoardSink", "alert_markdown", "event_file_type", "marker_tag"]

# Category -> chart -> tags of the Custom Scalars page: regular expressions, a line for every tag
# that matches; or "margin" and the tags of a line and its lower and upper edge.
LAYOUT = {
    "Alerts": {
        "alerts by rule: 1 WARN, 2 ERROR": "_alerts/(WARN|ERROR)_.*",
        "state of the run: 0 healthy, 1 look, 2 lost": "alert_level",
        "non-finite energies and samples": "nonfinite/energies nonfinite/samples",
    },
    "Energies": {
        "energy gap: mean f_pos - mean f_neg": "energy_gap",
        "medians of f_pos and f_neg": "f_pos/median f_neg/median",
        "f_pos: median, 5% to 95%": "margin f_pos/median f_pos/q05 f_pos/q95",
        "f_neg: median, 5% to 95%": "margin f_neg/median f_neg/q05 f_neg/q95",
        "energy overlap: P(f_neg > f_pos)": "energy_overlap",
    },
    "Weights of the negatives": {
        "GradScale": "grad_scale ref/grad_scale",
        "ESS and weight entropy": "ess weight_entropy ref/ess ref/weight_entropy",
        "Pareto k": "pareto_k ref/pareto_k",
    },
    "Sampler": {
        "sharpness of the steps: over 1 they are too long": "sampler/sharpness",
        "finer steps that each is taken as": "sampler/substeps",
        "gradient norm of the sampler, mean and max": "sampler/grad_norm sampler/grad_norm_max",
        "length of a step's drift over that of its noise": "sampler/drift_to_noise",
        "Metropolis acceptance of the last step": "sampler/acceptance",
        "share of the samples' entries at the clamp": "sampler/clamped",
        "age of the drawn chains": "buffer/age",
        "draws that repeat a chain, and that start afresh": "buffer/duplicates buffer/reinit",
    },
    "Optimizer": {
        "update over learning rate and GradScale": "optim/amplification",
        "norms of gradient and update": "optim/grad_norm optim/update_norm",
    },
}


class AddScalarSink(Sink):
    """Write to anything that has ``add_scalar(tag, value, step)``: a ``SummaryWriter``, or
    Lightning's ``logger.experiment``.

    Its ``add_text``, ``add_histogram`` and ``flush`` are used if it has them; the caller closes it.
    Tags and markers are those of :class:`TensorBoardSink`; rollbacks show only as the rows'
    ``recovery/attempt``. About 60 calls a step cost several times as much as ``log_dir=``, which
    writes a row at once.
    """

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def write_row(self, step: int, scalars: Scalars, histograms: Histograms) -> None:
        """Pass on every scalar, and the histograms if the logger has ``add_histogram``."""
        for tag, value in scalars.items():
            self.logger.add_scalar(prefixed(tag), value, step)
        for tag, values in histograms.items() if hasattr(self.logger, "add_histogram") else ():
            import torch  # only here: other sinks need none

            # Histograms of a SummaryWriter raise on NaN. The row's nonfinite/* tags count those.
            drawn = torch.tensor(
                [x for x in values if math.isfinite(x)], dtype=torch.float64, device="cpu"
            )
            if len(drawn):
                self.logger.add_histogram(prefixed(tag), drawn, step)

    def write_alert(self, record: Record) -> None:
        """Pass on the alert as a marker, and as text if the logger has ``add_text``."""
        step = record["step"]
        if level := LEVEL_NUMBERS[record["level"]]:
            self.logger.add_scalar(marker_tag(record), level, step)
        if add_text := getattr(self.logger, "add_text", None):
            add_text("guard/alerts", alert_markdown(record), step)

    def write_verdict(self, step: int, verdict: str) -> None:
        """Pass on the verdict as text if the logger has ``add_text``."""
        if add_text := getattr(self.logger, "add_text", None):
            add_text("guard/verdict", verdict, step)

    def flush(self) -> None:
        """Flush the logger if it has ``flush``."""
        getattr(self.logger, "flush", lambda: None)()


@typed
class TensorBoardSink(AddScalarSink):
    """Write one event file into a folder.

    - Scalars under ``guard/<tag>``, the trainer's under their names; non-finite ones are drawn as
      triangles. Histograms ``guard/f_pos`` and ``guard/f_neg``.
    - The run's verdict as text under ``guard/verdict``, at every step where it changes.
    - Alerts as text under ``guard/alerts``, and on TensorBoard's first page as the scalar
      ``_alerts/<LEVEL>_<rule>`` (1 WARN, 2 ERROR), beside the gap and GradScale once more.
    - Rollbacks as text under ``guard/recovery``: all so far, with the alerts of abandoned steps.
    - A layout for the Custom Scalars page that puts related scalars on one chart.

    TensorBoard shows a random 1,000 steps of a scalar and 10 texts of a tag. Start it with
    ``--samples_per_plugin=scalars=100000,text=1000`` to see all: a blow-up may take five steps.
    If a resumed or rewound run writes steps again, TensorBoard shows only the later pass; it needs
    ``--load_fast=false``, or no package tensorboard-data-server, and no event files of other
    writers in the folder.

    The folder is made if missing; other event files in it are left alone. Raises a ``ConfigError``
    if it cannot be written, or the package tensorboard is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path, event_file = folder_path("folder", folder), event_file_type()
        self.made: list[Path] = []
        with removed_on_failure(self.made, path):
            super().__init__(file := event_file(path, self.made))
            file.add_layout(LAYOUT)
            file.flush()
        # A resumed run repeats steps that an earlier process has written.
        self._last_step = math.inf if file.is_continued else -math.inf
        self._alerts: list[Record] = []
        self._story, self._story_step, self._verdict_step = "", -1, -1

    def write_row(self, step: int, scalars: Scalars, histograms: Histograms) -> None:
        """Keep one event with all the row's scalars and histograms."""
        self._move_to(step)
        first = "energy_gap", "ref/grad_scale" if scalars.get("beta_star") == 0 else "grad_scale"
        beside = {MARKER_PREFIX + name: scalars[name] for name in first if name in scalars}
        self.logger.add_row(step, {**scalars, **beside}, histograms)

    def write_alert(self, record: Record) -> None:
        """Keep the alert's text and its marker."""
        self._move_to(record["step"])
        self._alerts.append(record)
        super().write_alert(record)

    def write_recovery(self, record: Record) -> None:
        """Keep the text of all rollbacks, and void the steps that come again."""
        abandoned = self._move_to(record["restored_step"])
        self._story += f"**Rollback {record['attempt']}**\n\n{record['message']}\n\n"
        if abandoned:
            lines = "\n".join(f"- {alert['message']}" for alert in abandoned)
            self._story += f"Alerts of the abandoned steps:\n\n{lines}\n\n"
        self._story_step = record["step"]
        self.logger.add_text("guard/recovery", self._story, self._story_step)

    def write_verdict(self, step: int, verdict: str) -> None:
        """Keep the verdict as a text; the latest has the highest step, also after a rollback."""
        self._verdict_step = max(step, self._verdict_step + 1)
        super().write_verdict(self._verdict_step, verdict)

    def _move_to(self, step: int) -> list[Record]:
        """Void what was written of this step and later ones; return its alerts."""
        abandoned = []
        if step < self._last_step:
            self.logger.add_restart(step)
            abandoned = [alert for alert in self._alerts if alert["step"] >= step]
            self._alerts = [alert for alert in self._alerts if alert["step"] < step]
            if self._story_step >= step:
                self.logger.add_text("guard/recovery", self._story, self._story_step)
        self._last_step = step
        return abandoned


def event_file_type() -> type[EventFile]:
    """The class for event files; a ``ConfigError`` if the package tensorboard is missing."""
    try:
        from .events import EventFile
    except ImportError as error:
        raise ConfigError(
            f"Event files need the package tensorboard, which cannot be imported: {error}. "
            'Run `pip install ".[tensorboard]"` in a clone, or pass sinks=[JsonlSink(dir)].'
        ) from error
    return EventFile


def marker_tag(record: Record) -> str:
    """The tag of the scalar that marks the step of an ``Alert.record()``; its value is the level.

    Level and rule follow the last slash: if room is short, TensorBoard cuts the part before it.
    """
    return f"{MARKER_PREFIX}{record['level']}_{record['rule']}"


def alert_markdown(record: Record) -> str:
    """A heading, a table of the numbers and the remedies of an ``Alert.record()``."""
    remedies = "\n".join(f"{i}. {text}" for i, text in enumerate(record["remedies"], start=1))
    advice = f"Likeliest remedies:\n\n{remedies}\n" if remedies else ""
    if "follows" in record:
        advice = f"Follows {record['follows']}.\n"
    member = f", member {record['member']}" if "member" in record else ""
    return (
        f"**{record['level']} {record['rule']}** at step {record['step']}{member}\n\n"
        "| diagnostic | value | limit | window |\n"
        "|---|---|---|---|\n"
        f"| `{record['tag']}` | {record['value']:.6g} | {record['limit']:.6g} "
        f"| {record['window']} |\n\n{advice}"
    )
