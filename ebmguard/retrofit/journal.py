"""One row for each step: measured, judged and written down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..energies import Groups, LogQ
from .alarm import Alarm
from .measure import Meter
from .rows import Finished, Monitor, Row
from .strength import StrengthAt

__all__ = ["Journal"]

_log = logging.getLogger("ebmguard")

# Steps between a row's measurement and its decision on a GPU (see Monitor).
_LAG = 2
# Histograms, the Pareto shape and what needs copies of samples or parameters come once in so many
# steps.
_SLOW_EVERY = 50
# Losses in one step, beyond any gradient accumulation.
_ENDLESS_STEP = 1000


class Journal:
    """Counts the steps, and takes the row of each from the meter by the alarm to the sinks.

    Args:
        meter: measures.
        monitor: brings rows to the host and to the sinks.
        alarm: judges.
        models: model dimensions of an ensemble.
        hold: whether a row is judged inside its loss; None: on a CPU.

    Attributes:
        step, last, members: as :class:`ebmguard.Guard` has them.
        losses: how many there were so far.
        losses_in_step: how many of them in the present step.
        listeners: called with every row that is judged.
    """

    def __init__(
        self, meter: Meter, monitor: Monitor, alarm: Alarm, models: torch.Size, hold: bool | None
    ) -> None:
        self.step = 0
        self.last: Row = {}
        self.members: list[Row] = []
        self.losses = 0
        self.losses_in_step = 0
        self._meter = meter
        self._monitor = monitor
        self._alarm = alarm
        self._models = models
        self._hold = hold
        self._is_endless = False
        self.listeners: list[Callable[[Row], None]] = []

    @property
    def lag(self) -> int:
        """Steps between a row's measurement and its decision."""
        return self._monitor.lag

    @property
    def is_slow(self) -> bool:
        """Whether the present step has the tier that is not taken at every step."""
        return self.step % _SLOW_EVERY == 0

    def observe(
        self,
        f_pos: Tensor,
        f_neg: Tensor,
        groups: Groups | None,
        log_q: LogQ | None,
        strength: StrengthAt,
        extra: Mapping[str, Tensor | None],
    ) -> None:
        """Measure a loss call, and judge it where the row is judged inside the loss.

        Args:
            f_pos: detached energies, high on data.
            f_neg: the same for negatives.
            groups: class labels, as for the loss.
            log_q: log-densities of the proposal, as for the loss.
            strength: the exponent in use.
            extra: further numbers by tag, those that are known.
        """
        if not self.losses:
            self._monitor.lag = self._lag(not f_pos.is_cuda if self._hold is None else self._hold)
        slow = self.is_slow and not self.losses_in_step
        self.losses += 1
        self.losses_in_step += 1
        if self.losses_in_step >= _ENDLESS_STEP and not self._is_endless:
            self._is_endless = True
            _log.warning(
                "%d losses without a step of the attached optimizer: rows wait for it. Attach the "
                "optimizer whose step() is called (of a wrapper such as SAM, the inner one).",
                self.losses_in_step,
            )
        known = {name: x.detach() for name, x in extra.items() if x is not None}
        numbers, samples = self._meter.measure(
            f_pos, f_neg, strength, groups, log_q, known, slow=slow
        )
        rows = self._monitor.add(numbers, samples, self._models)
        if rows is not None:
            self._monitor.note({"alert_level": self._judge(self.step, *rows)})

    def end_step(self) -> None:
        """The step is over: close its row, and judge and write those that have arrived."""
        self._finish(self._monitor.end_step(self.step))
        self.step += 1
        self.losses_in_step = 0

    def end_step_by_optimizer(self, skipped: float | Tensor, by_scaler: bool) -> None:
        """The optimizer has ended the step.

        Args, as of :class:`ebmguard.retrofit.optimizer.OptimizerHooks`:
            skipped: whether its gradients were not finite.
            by_scaler: whether a GradScaler said so.
        """
        tag = "scaler/skipped" if by_scaler else "nonfinite/gradients"
        row: Row | None = None
        if isinstance(skipped, Tensor):
            rows = self._monitor.add({tag: skipped}, {})
            row = None if rows is None else rows[0]
        else:
            self._monitor.note({tag: skipped})
            if not self._monitor.lag:
                row = {tag: skipped}
        # The rest of this step's row has been judged in the loss. No member's row tells that the
        # gradients of an ensemble are finite again, so that its detector is told here.
        if row is not None and (row[tag] or self._models):
            self.last = self.last | row
            known = {name: self.last[name] for name in (tag, "beta_star") if name in self.last}
            self._monitor.note({"alert_level": self._alarm.judge(self.step, known)})
        self.end_step()

    def note(self, numbers: Mapping[str, float]) -> None:
        """Numbers for the present step's row that the host knows already."""
        self._monitor.note(numbers)

    def write_unjudged(self) -> None:
        """Write the rows under way as they are: of steps that a rollback takes back."""
        for finished in self._monitor.drain():
            self._monitor.write(finished)

    def close(self) -> None:
        """Judge and write what is still under way, and flush."""
        self._finish(self._monitor.drain())
        self._monitor.flush()

    def flush(self) -> None:
        """Flush the sinks."""
        self._monitor.flush()

    def state_dict(self, *, is_over: bool) -> dict[str, Any]:
        """What a checkpoint needs.

        Args:
            is_over: whether the present step ends here.
        """
        return {
            "step": self.step + is_over,
            "losses": self.losses,
            "lag": self._monitor.lag,
            "rows": self._monitor.under_way(with_open=is_over),
            "meter": self._meter.state_dict(),
            **self._alarm.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: of other rules, or of another number of members. Nothing has changed then.
        """
        self._alarm.load_state_dict(state)
        self._meter.load_state_dict(state["meter"])
        self._monitor.put_back(state["rows"])
        self._monitor.lag = int(state["lag"]) if self._hold is None else self._lag(self._hold)
        self.step = self._monitor.step = int(state["step"])
        self.losses = int(state["losses"])
        self.losses_in_step = 0

    def _judge(self, step: int, row: Row, members: list[Row]) -> float:
        self.last, self.members = row, members
        for listener in self.listeners:
            listener(row)
        return self._alarm.judge(step, row, members)

    def _finish(self, rows: Sequence[Finished]) -> None:
        for finished in rows:
            if "alert_level" not in finished.row:  # with hold it was judged inside the loss
                level = self._judge(finished.step, finished.row, finished.members)
                finished.row["alert_level"] = level
            self._monitor.write(finished)

    @staticmethod
    def _lag(hold: bool) -> int:
        return 0 if hold else _LAG
