"""JAX: the objective, its diagnostics and the alarm, for trainers written in JAX.

    (loss, row), grads = jax.value_and_grad(objective, has_aux=True)(params, x, samples)  # jitted
    recorder.record(step, row)                                                            # host

:func:`contrastive_loss`, :func:`temper` and :func:`diagnostics` are pure functions for jit, grad
and vmap, with the formulas, names and policies of :mod:`ebmguard.objective` and
:mod:`ebmguard.diagnostics`. β* may be traced, so that a schedule does not compile anew; an ensemble
is a vmap over β*. :class:`Recorder` hands rows to the rules and files of the guard, on the host.
The package torch must be installed, since ebmguard imports it, but computes nothing here.
``docs/frameworks.md`` has a whole trainer.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from ebmguard import Alert
from ebmguard.adapters._jax_diagnostics import diagnostics
from ebmguard.adapters._jax_objective import Array, contrastive_loss, temper
from ebmguard.adapters._requires import requires
from ebmguard.alerts import Judge, VerdictTracker, error_for
from ebmguard.errors import ConfigError, ShapeError
from ebmguard.retrofit.actions import Actions
from ebmguard.retrofit.rows import StepRow
from ebmguard.sinks import Writer, as_sink
from ebmguard.trainer import Trainer

with requires("jax", extra="jax"):
    import jax

__all__ = ["Recorder", "contrastive_loss", "diagnostics", "temper"]

# Steps between a row's measurement and its decision where the device is not the host's.
_LAG = 2


class Recorder:
    """Hands rows to the rules, and rows and alerts to files, as the guard of a torch trainer does.

    On a CPU a row is judged at once; elsewhere two steps later, so that the host waits for nothing
    that the device has not long done.

    Args:
        log_dir: folder for ``metrics.jsonl``, ``alerts.jsonl`` and TensorBoard's events, which
            `ebmguard watch` and `ebmguard report` read. Needs the extra ``tensorboard``.
        sinks: further sinks, as for :func:`ebmguard.guard`.
        action: "warn", or "raise" on an alert of level ERROR.
        on_alert: called with every alert.
        flush_every: rows between flushes of the sinks.

    Raises:
        ConfigError: another action, or sinks that cannot write.
    """

    def __init__(
        self,
        *,
        log_dir: str | PathLike[str] | None = None,
        sinks: Sequence[object] = (),
        action: Literal["warn", "raise"] = "warn",
        on_alert: Callable[[Alert], object] | None = None,
        flush_every: int = 50,
    ) -> None:
        if action not in ("warn", "raise"):
            raise ConfigError(
                f'action={action!r}; expected "warn" or "raise". The state of a JAX trainer is a '
                "value: keep the last good one, and go on from it where on_alert says so."
            )
        opened = [as_sink(sink) for sink in sinks]
        self._writer = Writer(opened, flush_every=flush_every, folder=log_dir)
        self._judge, self._course = Judge(), VerdictTracker()
        self._actions = Actions(on_alert, acts=action == "raise", could_roll_back=False)
        self._lag = 0 if jax.default_backend() == "cpu" else _LAG
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()
        # At exit too; the writer holds no reference to this.
        weakref.finalize(self, self._writer.close)

    @property
    def alerts(self) -> list[Alert]:
        """All alerts so far, oldest first."""
        return self._actions.alerts

    def record(self, step: int, row: Mapping[str, Array | float]) -> None:
        """Take the row of one step.

        Args:
            step: its number.
            row: what :func:`diagnostics` returned, and further numbers such as ``loss``.

        Raises:
            ShapeError: an entry that is not one number, as those of a vmapped row; it is not taken.
            DivergenceError: with ``action="raise"``, the typed error of an alert of level ERROR.
        """
        for name, value in row.items():
            shape = getattr(value, "shape", ())
            if shape != ():
                raise ShapeError(
                    f"row[{name!r}] has shape {shape}; expected one number. Make a Recorder "
                    "for every model, and record its row alone: "
                    "{name: x[i] for name, x in rows.items()}."
                )
        self._waiting.append((step, dict(row)))
        self._follow(keep=self._lag)

    def close(self) -> None:
        """Judge and write what is still waiting.

        Raises:
            DivergenceError: as :meth:`record`.
        """
        try:
            self._follow(keep=0)
        finally:
            self._writer.flush()
            self._writer.release()

    def _follow(self, keep: int) -> None:
        while len(self._waiting) > keep:
            step, row = self._waiting.popleft()
            values = {name: float(value) for name, value in jax.device_get(row).items()}
            fired = self._judge.observe(step, values)
            now = self._actions.situation(Trainer(), values.get("beta_star"), math.inf, values)
            lost_since = self._course.lost_since
            alerts = [self._actions.advised(alert, now, lost_since) for alert in fired]
            self._course.update(step, self._judge.level)
            values["alert_level"] = float(self._judge.level)
            self._actions.observe(StepRow(step, values), alerts)
            self._writer.write_alerts([alert.record() for alert in alerts])
            self._writer.write(step, values, {})
            self._actions.report(alerts)
            error = self._actions.take_pending()
            if error is not None:
                raise error_for(error)(error)
