"""Rows, alerts and rollbacks for TensorBoard: as an event file, or by a logger's ``add_scalar``."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, typed
from .protocol import (
    LEVEL_NUMBERS,
    MARKER_PREFIX,
    TAG_PREFIX,
    Histograms,
    Record,
    Scalars,
    alert_markdown,
    marker_tag,
    prefixed,
    recovery_markdown,
)

if TYPE_CHECKING:
    from .events import EventFile

__all__ = ["AddScalarSink", "TensorBoardSink", "event_file_type"]


def _lines(*tags: str) -> tuple[str, ...]:
    # The page reads them as regular expressions that need to match only the start of a tag.
    return tuple(f"{TAG_PREFIX}{tag}$" for tag in tags)


def _band(tag: str) -> tuple[str, ...]:
    return ("margin", *(f"{TAG_PREFIX}{tag}/{q}" for q in ("median", "q05", "q95")))


# Category -> chart -> tags of the Custom Scalars page.
LAYOUT: dict[str, dict[str, tuple[str, ...]]] = {
    "Alerts": {
        "alerts by rule: 1 WARN, 2 ERROR": (f"{MARKER_PREFIX}(WARN|ERROR)_.*",),
        "alert level of every step: 0 none, 1 WARN, 2 ERROR": _lines("alert_level"),
        "non-finite energies and samples": _lines("nonfinite/energies", "nonfinite/samples"),
    },
    "Energies": {
        "energy gap: mean f_pos - mean f_neg": _lines("energy_gap"),
        "medians of f_pos and f_neg": _lines("f_pos/median", "f_neg/median"),
        "f_pos: median, 5% to 95%": _band("f_pos"),
        "f_neg: median, 5% to 95%": _band("f_neg"),
        "energy overlap: P(f_neg > f_pos)": _lines("energy_overlap"),
    },
    "Weights of the negatives": {
        "GradScale": _lines("grad_scale", "ref/grad_scale"),
        "ESS and weight entropy": _lines("ess", "weight_entropy", "ref/ess", "ref/weight_entropy"),
        "Pareto k": _lines("pareto_k", "ref/pareto_k"),
    },
    "Mixture of samplers": {
        "share of the weight": _lines("mixture/.*/weight"),
        "energy gap": _lines("mixture/.*/energy_gap"),
    },
    "Sampler": {
        "gradient norm of the sampler, mean and max": _lines(
            "sampler/grad_norm", "sampler/grad_norm_max"
        ),
        "length of a step's drift over that of its noise": _lines("sampler/drift_to_noise"),
        "Metropolis acceptance of the last step": _lines("sampler/acceptance"),
        "share of the samples' entries at the clamp": _lines("sampler/clamped"),
        "age of the drawn chains": _lines("buffer/age"),
        "draws that repeat a chain, and that start afresh": _lines(
            "buffer/duplicates", "buffer/reinit"
        ),
    },
    "Optimizer": {
        "update over learning rate and GradScale": _lines("optim/amplification"),
        "norms of gradient and update": _lines("optim/grad_norm", "optim/update_norm"),
    },
}


def _beside(scalars: Scalars) -> Scalars:
    names = "energy_gap", "ref/grad_scale" if scalars.get("beta_star") == 0 else "grad_scale"
    return {MARKER_PREFIX + name: scalars[name] for name in names if name in scalars}


@typed
class TensorBoardSink:
    """Writes one event file into a folder.

    - Scalars under ``guard/<tag>``, a trainer's own under their names, non-finite ones included
      (drawn as triangles).
    - Histograms ``guard/f_pos`` and ``guard/f_neg`` on the rows that carry them.
    - Alerts as text under ``guard/alerts``, and as markers on TensorBoard's first page: the scalar
      ``_alerts/<LEVEL>_<rule>``, whose value is the level (1 WARN, 2 ERROR), beside the gap and
      GradScale once more. An INFO has none.
    - Rollbacks as text under ``guard/recovery``: all so far, with the alerts of abandoned steps.
    - A layout for the Custom Scalars page with the pairs that belong together on one chart.

    The step axis is the guard's step. Events are kept in memory until :meth:`flush`.

    TensorBoard shows a random 1,000 steps of a scalar and 10 texts of a tag. Start it with
    ``--samples_per_plugin=scalars=100000,text=1000`` to see all: a blow-up may take five steps.
    Of steps that a resumed or rewound run writes again it shows only the later pass. With
    ``--load_fast=false``, or without the package tensorboard-data-server, this needs a folder with
    no other writer's event files: voiding steps there would void them for all tags.

    Args:
        folder: created if missing. Other event files in it are left alone.

    Raises:
        ConfigError: if the folder cannot be written, or the package tensorboard is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        event_file = event_file_type()
        self.folder = Path(folder)
        self._file = event_file(self.folder)
        # A resumed run repeats steps that an earlier process has written.
        self._last_step = math.inf if self._file.is_continued else -math.inf
        self._alerts: list[Record] = []
        self._story = ""
        self._story_step = -1
        self._file.add_layout(LAYOUT)
        self._file.flush()

    def write_row(self, step: int, scalars: Scalars, histograms: Histograms) -> None:
        """Keep one event with all the row's scalars and histograms."""
        self._move_to(step)
        self._file.add_row(step, {**scalars, **_beside(scalars)}, histograms)

    def write_alert(self, record: Record) -> None:
        """Keep the alert's text and its marker."""
        step = record["step"]
        self._move_to(step)
        self._alerts.append(record)
        if level := LEVEL_NUMBERS[record["level"]]:
            self._file.add_row(step, {marker_tag(record): level}, {})
        self._file.add_text(step, TAG_PREFIX + "alerts", alert_markdown(record))

    def write_recovery(self, record: Record) -> None:
        """Keep the story of all rollbacks; the steps that come again are void."""
        abandoned = self._move_to(record["restored_step"])
        self._story += recovery_markdown(record, abandoned)
        self._story_step = record["step"]
        self._tell_story()

    def flush(self) -> None:
        """Append the kept events to the file; after an ``OSError`` the next flush goes on."""
        self._file.flush()

    def _move_to(self, step: int) -> list[Record]:
        """Void what was written of this step and later ones; return its alerts."""
        abandoned = []
        if step < self._last_step:
            self._file.add_restart(step)
            abandoned = [alert for alert in self._alerts if alert["step"] >= step]
            self._alerts = [alert for alert in self._alerts if alert["step"] < step]
            if self._story_step >= step:
                self._tell_story()
        self._last_step = step
        return abandoned

    def _tell_story(self) -> None:
        self._file.add_text(self._story_step, TAG_PREFIX + "recovery", self._story)


def event_file_type() -> type[EventFile]:
    """What writes an event file.

    Raises:
        ConfigError: the package tensorboard is missing.
    """
    try:
        from .events import EventFile
    except ImportError as error:
        raise ConfigError(
            f"Event files need the package tensorboard, which cannot be imported: {error}. "
            'Run `pip install "ebmguard[tensorboard]"`, or pass '
            "sinks=[ebmguard.sinks.JsonlSink(dir)] instead of log_dir."
        ) from error
    return EventFile


class AddScalarSink:
    """Writes to anything that has ``add_scalar(tag, value, step)``.

    For example ``torch.utils.tensorboard.SummaryWriter``, tensorboardX's, or Lightning's
    ``logger.experiment``. Its ``add_text``, ``add_histogram`` and ``flush`` are used if it has
    them. Tags and markers are those of :class:`TensorBoardSink`. Some 60 calls a step cost several
    times as much as ``log_dir=``, which writes the row at once.

    Args:
        logger: the object. It stays the caller's to close.
    """

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self._add_text = getattr(logger, "add_text", None)
        self._add_histogram = getattr(logger, "add_histogram", None)
        self._flush = getattr(logger, "flush", None)

    def write_row(self, step: int, scalars: Scalars, histograms: Histograms) -> None:
        """Pass every scalar on, and the histograms where the logger has ``add_histogram``."""
        for tag, value in scalars.items():
            self.logger.add_scalar(prefixed(tag), value, step)
        if self._add_histogram is None or not histograms:
            return
        import torch  # only here: other sinks need none

        for tag, values in histograms.items():
            # Histograms of a SummaryWriter raise on NaN. The row's nonfinite/* tags count those.
            drawn = torch.tensor(values, dtype=torch.float64)
            drawn = drawn[drawn.isfinite()]
            if drawn.numel():
                self._add_histogram(TAG_PREFIX + tag, drawn, step)

    def write_alert(self, record: Record) -> None:
        """Pass the alert on as a marker, and as text where the logger has ``add_text``."""
        step = record["step"]
        if level := LEVEL_NUMBERS[record["level"]]:
            self.logger.add_scalar(marker_tag(record), level, step)
        if self._add_text is not None:
            self._add_text(TAG_PREFIX + "alerts", alert_markdown(record), step)

    def write_recovery(self, record: Record) -> None:
        """Nothing: a logger shows a rollback by the rows' ``recovery/attempt``."""

    def flush(self) -> None:
        """Flush the logger where it can be flushed."""
        if self._flush is not None:
            self._flush()
