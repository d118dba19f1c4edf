"""The detector: rows in, alerts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import (
    ConfigError,
    DivergenceError,
    EnergyBlowupError,
    NonFiniteError,
    SamplerFailingError,
    WeightsDegenerateError,
)
from .alert import Alert, Level
from .band import BandWatcher
from .defaults import DEFAULT_RULES
from .latch import Latch
from .rules import BandRule, FloorRule, MedianRule, NonFiniteRule, Rule
from .watch import FloorWatcher, MedianWatcher, NonFiniteWatcher, Watcher

__all__ = ["Detector", "error_for"]

_ERRORS: dict[str, type[DivergenceError]] = {
    "nonfinite": NonFiniteError,
    "energy_blowup": EnergyBlowupError,
    "sampler_failing": SamplerFailingError,
    "weights_degenerate": WeightsDegenerateError,
}


def error_for(alert: Alert) -> type[DivergenceError]:
    """The error class of the alert's rule; :class:`DivergenceError` for rules of one's own."""
    return _ERRORS.get(alert.rule, DivergenceError)


def _watcher(rule: Rule) -> Watcher:
    match rule:
        case NonFiniteRule():
            return NonFiniteWatcher(rule)
        case BandRule():
            return BandWatcher(rule)
        case FloorRule():
            return FloorWatcher(rule)
        case MedianRule():
            return MedianWatcher(rule)
    raise ConfigError(
        f"A detector takes NonFiniteRule, BandRule, FloorRule and MedianRule, "
        f"but got {type(rule).__name__}."
    )


class Detector:
    """Reads one row per step and says which rules fire.

    A rule reads only the tags it knows; it is silent about tags that a row lacks. Time is counted
    in observed rows, so a step that was rewound or skipped changes nothing. All decisions depend
    on the rows alone, so that ranks that see equal rows raise equal alerts.

    Args:
        rules: what to watch for; their names must differ.

    Raises:
        ConfigError: if two rules share a name, or a rule is of an unknown type.
    """

    def __init__(self, rules: Sequence[Rule] = DEFAULT_RULES) -> None:
        self.rules = tuple(rules)
        watchers = [_watcher(rule) for rule in self.rules]
        self._watchers = {r.name: w for r, w in zip(self.rules, watchers, strict=True)}
        if len(self._watchers) != len(self.rules):
            raise ConfigError(
                "Rules of one detector need different names, but got "
                f"{[rule.name for rule in self.rules]}. Rename one: "
                'dataclasses.replace(rule, name="...").'
            )
        self._latches = {rule.name: Latch(rule.calm_steps, rule.cooldown) for rule in self.rules}

    @property
    def active(self) -> dict[str, Level]:
        """The rules whose episode is not over, each with the highest level it reached.

        A rule that has only informed is not among them.
        """
        return {
            name: latch.active for name, latch in self._latches.items() if latch.active is not None
        }

    @property
    def level(self) -> Level | None:
        """The highest level of the active rules, None while all is well."""
        return max(self.active.values(), default=None)

    def observe(self, step: int, row: Mapping[str, float]) -> list[Alert]:
        """Take the row of one step; return the alerts to report now, in the order of the rules.

        Args:
            step: the step the row belongs to; only copied into the alerts.
            row: diagnostics by tag, without the ``guard/`` prefix.
        """
        alerts = []
        for name, watcher in self._watchers.items():
            reading = watcher.read(row)
            news = self._latches[name].update(reading.level, reading.calm)
            if news and reading.level is not None:
                alerts.append(
                    Alert(
                        rule=name,
                        level=reading.level,
                        step=step,
                        tag=reading.tag,
                        value=reading.value,
                        limit=reading.limit,
                        window=reading.window,
                        remedies=reading.remedies,
                    )
                )
        return alerts

    def state_dict(self) -> dict[str, Any]:
        """The whole memory as JSON-able data: restored, it gives the alerts it would have given."""
        return {
            name: {"watcher": watcher.state_dict(), "latch": self._latches[name].state_dict()}
            for name, watcher in self._watchers.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: if the state is of a detector with other rules, or is damaged. The
                detector is then as it was.
        """
        if set(state) != set(self._watchers):
            raise ConfigError(
                f"This state is of a detector with the rules {sorted(state)}, but this one has "
                f"{sorted(self._watchers)}. Build it with the same rules."
            )
        fresh = Detector(self.rules)
        try:
            for name, part in state.items():
                fresh._watchers[name].load_state_dict(part["watcher"])
                fresh._latches[name].load_state_dict(part["latch"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"The detector's state of rule {name!r} is damaged: {type(error).__name__}: "
                f"{error}. Pass what Detector.state_dict() returned."
            ) from error
        self._watchers, self._latches = fresh._watchers, fresh._latches
