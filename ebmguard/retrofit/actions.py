"""The consequences of a judged row: log lines, callback, an ERROR's action, rollbacks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from ..alerts import Alert, Level, Situation
from ..alerts.remedies import MOVES, Remedy, WordedRemedy
from ..errors import MISFITS, ConfigError, EbmguardError
from ..trainer import Trainer
from .rows import StepRow

if TYPE_CHECKING:
    from ..recovery import Recoverer

__all__ = ["Actions"]

_log = logging.getLogger("ebmguard")
_FIRST_CHECKPOINT = 50  # step before which no trainer keeps one


@dataclass(eq=False)
class Actions:
    """Keep an ERROR for a safe point, report alerts, and know what rollbacks have changed."""

    on_alert: Callable[[Alert], object] | None
    _: KW_ONLY
    acts: bool  # whether an ERROR has an action, which waits for a safe point
    is_logging: bool = True  # whether alerts are logged; of several ranks one does
    could_roll_back: bool = True  # whether another run of the kind could
    recoverer: Recoverer | None = None
    # Makes one where nobody has asked for rollbacks, once they are possible; what they cannot do
    # ends them then, and not the run.
    offer: Callable[[], Recoverer] | None = None

    def __post_init__(self) -> None:
        self.alerts: list[Alert] = []
        self.asks_steps = False  # whether the sampler does
        self.sets_steps = False  # whether the latest call's caller does, to another number
        self.pending: Alert | None = None  # an ERROR whose action waits for a safe point
        self._usual_steps: int | None = None
        self._is_over = False  # whether rollbacks are
        self._skipped: Alert | None = None  # an ERROR of a step that may have been left out
        self._advised: dict[str, tuple[int, tuple[float, ...]]] = {}  # direction, and the run then

    @property
    def answers(self) -> bool:
        """Tell whether an ERROR would now cause its action."""
        return self.acts and not (self.recoverer and self.recoverer.is_spent)

    @property
    def takes_back(self) -> bool:
        """Tell whether rollbacks are on."""
        return self.acts and self.recoverer is not None

    def attempt(self, call: Callable[..., object], *args: object) -> None:
        """Do what a rollback needs: where nobody asked for them, its errors end them alone."""
        try:
            call(*args)
        except (EbmguardError, *MISFITS) as error:
            if self.offer is None:
                raise
            self.end_rollbacks(str(error))

    def end_rollbacks(self, why: str = "") -> None:
        """Take nothing back any more: from here on the run goes on as it would alone."""
        assert self.recoverer is not None
        self.acts, self.pending, self._is_over = False, None, True
        self.recoverer.forget()
        if why and self.is_logging:
            _log.warning("From here on no ERROR takes the run back: %s", why)

    def attach(self, trainer: Trainer) -> None:
        """Take the parts that are attached."""
        self._usual_steps = trainer.sgld_steps
        is_possible = None not in (trainer.model, trainer.optimizer) and not self._is_over
        if self.offer is not None and self.recoverer is None and is_possible:
            self.recoverer, self.acts = self.offer(), True
        if self.recoverer is not None:
            self.recoverer.start(trainer)

    def begin(self, step: int, trainer: Trainer, own_state: Callable[[], Any]) -> None:
        """See :meth:`ebmguard.recovery.Recoverer.begin`."""
        if self.acts and self.recoverer is not None:
            self.attempt(self.recoverer.begin, step, trainer, own_state)

    def check_ready(self, trainer: Trainer, *, is_shared: bool) -> None:
        """Refuse a run that cannot be rolled back, or end rollbacks that nobody asked for."""
        if not self.acts or self.recoverer is None:
            return
        if is_shared and self.offer is not None:
            self.end_rollbacks("another guard has the optimizer, too.")
        else:
            self.attempt(self.recoverer.check_ready, trainer)

    def situation(
        self, trainer: Trainer, beta_star: float | None, most: float, row: Mapping[str, float] = {}
    ) -> Situation:
        """The state of the run: β* (None: several), the highest allowed β*, a row's numbers."""
        groups = [] if trainer.optimizer is None else trainer.optimizer.param_groups
        rates = [
            group["lr"] for group in groups if isinstance(group.get("lr"), float)
        ]  # on the host
        factor = 1.0 if self.recoverer is None else self.recoverer.effect.lr
        return Situation(
            beta_star=math.nan if beta_star is None else beta_star,
            most=most,
            samples_above=row.get("energy_gap", 0.0) < -row.get("f_pos/std", math.inf),
            sgld_steps=None if self._usual_steps is None else self.steps,
            noise_std=trainer.noise_std,
            learning_rate=factor * max(rates, default=math.nan),
            rolls_back=self.takes_back,
        )

    def advised(self, alert: Alert, now: Situation, lost_since: int | None = None) -> Alert:
        """An alert with the first two of its remedies that make sense in this run.

        A remedy that contradicts earlier advice is left out until the run has changed. A run that
        is lost since an earlier step goes back to before that one.
        """
        chosen: list[str] = []
        for remedy in alert.remedies:
            move = MOVES.get(remedy)
            if len(chosen) < 2 and now.allows(remedy):
                if move is not None:
                    what = move[0] if alert.member is None else f"{move[0]} of {alert.member}"
                    direction, then = self._advised.get(what, (0, ()))
                    if direction == -move[1] and now.is_like(then):
                        continue
                    if direction != move[1] or not now.is_like(then):
                        self._advised[what] = move[1], now.moved
                if remedy == Remedy.ROLL_BACK:
                    since = alert.step if lost_since is None else lost_since
                    back = (
                        remedy if since >= _FIRST_CHECKPOINT else "begin again, as no checkpoint is"
                    )
                    next_time = '; action="rollback" next time' if self.could_roll_back else ""
                    words = f"{back} of before step {since:,}{next_time}"
                    remedy = WordedRemedy.of(Remedy.ROLL_BACK, words)
                chosen.append(remedy)
        return replace(alert, remedies=tuple(chosen))

    def observe(self, row: StepRow, alerts: Sequence[Alert]) -> None:
        """Keep the alerts of a row. Once its step is over, the recoverer reads the row."""
        if row.is_over and self.recoverer is not None:
            self.recoverer.read(row.numbers)
        self.alerts += alerts
        if not (alerts or self._skipped):
            return
        errors = [alert for alert in alerts if alert.level is Level.ERROR]
        if self.offer is not None:
            errors = self._lasting(row, errors)
        if self.pending is None and self.answers:
            self.pending = next(iter(errors), None)

    def _lasting(self, row: StepRow, errors: Sequence[Alert]) -> list[Alert]:
        """Drop an ERROR of a batch that is no number, whose step is left out, if it stays alone."""
        last, lasting = self._skipped, [alert for alert in errors if alert.rule != "nonfinite"]
        if last is None:
            self._skipped = next((alert for alert in errors if alert.rule == "nonfinite"), None)
        elif row.is_over and row.step > last.step:
            lasting += [last] if row.numbers.get(last.tag) else []
            self._skipped = None
        return lasting

    def report(self, alerts: Sequence[Alert]) -> None:
        """Log alerts and call ``on_alert``. It comes last because it is the caller's code."""
        for alert in alerts:
            if self.is_logging and alert.level > Level.INFO:
                say = _log.error if alert.level is Level.ERROR else _log.warning
                say(alert.message)
            if self.on_alert is not None:
                self.on_alert(alert)

    def take_pending(self) -> Alert | None:
        """Take the ERROR that waits for its action, if any."""
        alert, self.pending = self.pending, None
        return alert

    @property
    def beta_star(self) -> tuple[float | None, float]:
        """The least β* and the factor set by rollbacks."""
        if self.recoverer is None:
            return None, 1.0
        # A schedule that has come further than a rollback has put β* goes on.
        return self.recoverer.effect.beta_star, self.recoverer.effect.beta_factor

    @property
    def steps(self) -> int:
        """The steps a sampler call should run now; a ConfigError if ``sgld_steps`` is unknown."""
        if self._usual_steps is None:
            raise ConfigError(
                "The guard does not know the usual number of SGLD steps: g.attach(sgld_steps=20)."
            )
        effect = 1.0 if self.recoverer is None else self.recoverer.effect.sgld_steps
        return max(1, round(self._usual_steps * effect))

    def ask_steps(self) -> int:
        """Return :attr:`steps` to a sampler that follows them."""
        steps, self.asks_steps = self.steps, True
        return steps

    def with_steps(
        self, name: str, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """A sampler call's arguments with the number of steps to run as the argument ``name``.

        A number that the caller gives is taken as it is, unless it is the usual one.
        """
        bound = signature(call).bind_partial(*args)
        steps = kwargs.get(name, bound.arguments.get(name, self._usual_steps))
        self.sets_steps = steps != self._usual_steps
        if self.sets_steps:
            return args, kwargs
        if name not in bound.arguments:
            return args, {**kwargs, name: self.ask_steps()}
        bound.arguments[name] = self.ask_steps()
        return bound.args, kwargs

    def advice(self) -> dict[str, Any]:
        """The advice given so far, which a rollback restores."""
        return {what: [way, *then] for what, (way, then) in self._advised.items()}

    def load_advice(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`advice`; drop an ERROR that was still pending."""
        self.pending = None
        self._advised = {what: (int(way), tuple(then)) for what, (way, *then) in state.items()}
