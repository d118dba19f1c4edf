"""The shipped rules, measured in ``docs/alerts.md``; the judge, which turns rows into alerts."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, DivergenceError, Stateful, WeightsDegenerateError, undamaged
from ..tags import SCALER_SKIPPED
from . import remedies as cures
from .growth import GrowthRule
from .rule import Alert, Level, Limits, Memory, Reading, Rule, Watcher, check_rule, read_by
from .thresholds import Bound, CollapsedRule, FloorRule, MedianRule, NonFiniteRule
from .verdict import LostState

__all__ = ["DEFAULT_RULES", "Bands", "Judge", "error_for"]

_SKIP = "amp_skip"
# So many calm rows in a row end an episode; for so many rows after a report no WARN begins another;
# an ERROR so many times as large is reported again in its episode.
_CALM, _REST, _WORSE = 10, 500, 3.0
# After so many rows the judge keeps its state; where a row comes again, those since are read anew.
_REPLAYED = 32

# The arguments of a bound: tag, side, limit, values in the median, what helps, level.
DEFAULT_RULES: tuple[NonFiniteRule | GrowthRule | CollapsedRule | FloorRule | MedianRule, ...] = (
    NonFiniteRule(),
    GrowthRule(),
    CollapsedRule(),
    FloorRule(),
    MedianRule(
        "weights_degenerate",
        (
            Bound("ess", "below", 0.1, 50, cures.WEIGHTS),
            # The Pareto shape comes rarely, and each value pools the weights of several steps.
            Bound("pareto_k", "above", 0.7, 5, cures.WEIGHTS),
        ),
        reference_prefix="ref/",
        error=WeightsDegenerateError,
    ),
    MedianRule("overshoot", (Bound("energy_overlap", "above", 0.95, 50, cures.OVERSHOOT),)),
    MedianRule(
        "stale_chains",
        (
            # A chain that moves never repeats itself to the last bit.
            Bound("sampler/repeated", "above", 0.5, 5, cures.HUNG),
            Bound("buffer/duplicates", "above", 0.5, 50, cures.CROWDED),
            # Persistent chains that never start afresh are a method too: reported, but no WARN.
            Bound("buffer/age", "above", 200.0, 50, cures.OLD, Level.INFO),
        ),
    ),
    # In real images up to 0.82 of the entries lie at an end (MNIST).
    MedianRule("saturated", (Bound("sampler/clamped", "above", 0.95, 50, cures.SATURATED),)),
    # Trainers choose step and noise apart, and live with what is no exact sampler: INFO only.
    MedianRule(
        "step_size",
        (
            Bound("sampler/acceptance", "below", 0.01, 5, cures.TOO_LONG, Level.INFO),
            Bound("sampler/drift_to_noise", "above", 100.0, 50, cures.TOO_LONG, Level.INFO),
            Bound("sampler/drift_to_noise", "below", 0.001, 50, cures.TOO_SHORT, Level.INFO),
        ),
    ),
)


def error_for(alert: Alert, rules: Sequence[Rule] = DEFAULT_RULES) -> type[DivergenceError]:
    """The error class of the alert's rule; :class:`DivergenceError` where it names none."""
    errors = {rule.name: getattr(rule, "error", DivergenceError) for rule in rules}
    return errors.get(alert.rule, DivergenceError)


@dataclass
class Latch(Memory):
    """The reports of a rule so far, by the rules under "Episodes" in ``docs/alerts.md``."""

    active: Level | None = None  # the highest of the current episode, None outside episodes
    reported: Level | None = None  # the highest reported in it
    calm: int = 0  # observations inside the calm band so far
    since_report: int | None = None  # observations since the last report of WARN or more
    informed: bool = False  # whether an INFO has been reported
    worst: float = 0.0  # the size of the ERROR reported last

    def update(self, reading: Reading) -> bool:
        """Take one reading; return whether its level is to be reported now."""
        level = reading.level
        if self.since_report is not None:
            self.since_report += 1
        if level is None and reading.calm is None:
            return False
        self.calm = self.calm + 1 if level is None and reading.calm else 0
        if level is None:
            if self.calm >= _CALM:
                self.active = self.reported = None
            return False
        if level is Level.INFO:
            self.informed, news = True, not self.informed
            return news
        self.active = max(level, self.active or level)
        if level is Level.ERROR:
            size = abs(reading.value) if math.isfinite(reading.value) else sys.float_info.max
            # A value that is bad because it is small, like GradScale, has no size that is worse.
            is_worse = size / _WORSE > self.worst and not size < abs(reading.limit)
            has_rested = self.since_report is None or self.since_report >= _CALM
            if self.reported is Level.ERROR and not (is_worse and has_rested):
                return False
            self.worst = size
        else:
            rested = self.since_report is None or self.since_report >= _REST
            if self.reported is not None or not rested:
                return False
        self.reported, self.since_report = level, 0
        return True


@dataclass
class _Watch(Stateful):
    rule: Rule
    watcher: Watcher
    latch: Latch
    follows: str | None = None  # the rule in ERROR when the trouble of this one began

    def _saved(self) -> dict[str, Any]:
        return {"watcher": self._restored, "latch": Stateful, "follows": str | None}

    def _restored(self, saved: Mapping[str, Any]) -> Watcher:
        watcher = self.rule.watcher()
        watcher.load_state_dict(saved)
        return watcher

    def copy(self) -> _Watch:
        source = self.watcher
        watcher = (
            source.copy() if isinstance(source, Memory) else self._restored(source.state_dict())
        )
        return _Watch(self.rule, watcher, self.latch.copy(), self.follows)


class Judge:
    """A judge reads one row per step and reports which rules fire.

    It goes by the rows alone: equal on equal ranks. What a GradScaler skips is an ``amp_skip``.

    Args:
        rules: what to watch for; their names must differ.
        members: number of models of an ensemble; 0 for a single model.

    Raises:
        ConfigError: one is no :class:`~ebmguard.alerts.Rule`, or two have one name.
    """

    def __init__(self, rules: Sequence[Rule] = DEFAULT_RULES, members: int = 0) -> None:
        if not isinstance(rules, Iterable):
            raise ConfigError(f"Expected a sequence of rules, no single rule, but got {rules!r}.")
        self.rules = tuple(rules)
        for rule in self.rules:
            check_rule(rule)
        names = [rule.name for rule in self.rules]
        if len({_SKIP, *names}) <= len(names):
            raise ConfigError(
                f"Rules need different names, none of them {_SKIP!r}, but got {names}. Rename "
                'one: dataclasses.replace(rule, name="...").'
            )
        self._watches = {rule.name: _Watch(rule, rule.watcher(), Latch()) for rule in self.rules}
        self._members = [Judge(self.rules) for _ in range(members)]
        self._lost_state = LostState()
        # The step observed last, its row, and the levels that were reported for it.
        self._step: int | None = None
        self._row: Mapping[str, float] = {}
        self._reported: dict[str, Level] = {}
        # The earlier memory of the rules, and copies of the rows read since.
        self._before = self._watches, self._lost_state
        self._calm: tuple[tuple[float, float] | None] | None = None  # once it was asked for
        self._since: list[Mapping[str, float]] = []

    @property
    def active(self) -> dict[str, Level]:
        """The rules whose episode is not over, with the highest level reached; no member's."""
        levels: dict[str, Level] = {}
        for name, watch in self._watches.items():
            if (level := watch.latch.active) is not None:
                levels[name] = level
        return levels

    @property
    def level(self) -> Level:
        """The level: ERROR until its state was left, see :mod:`.verdict`; else WARN in an episode.

        The level of an ensemble is that of its worst member.
        """
        level = Level.ERROR if self._lost_state.is_lost else Level.INFO
        for watch in self._watches.values():
            if watch.latch.active is not None:
                level = max(level, Level.WARN)
        return max([level, *(judge.level for judge in self._members)]) if self._members else level

    @property
    def calm(self) -> tuple[float, float] | None:
        """Sizes |gap| + ``f_pos/std`` that are no ERROR in the next rows; None if nobody knows."""
        self._calm = self._calm or (self._next_calm(),)
        return self._calm[0]

    def _next_calm(self) -> tuple[float, float] | None:
        if self._members or self._lost_state.is_lost or Level.ERROR in self.active.values():
            return None
        watches = self._watches.values()
        ranges: list[Any] = [getattr(x.watcher, "calm", lambda: None)() for x in watches]
        if None in ranges:
            return None
        lows, highs = zip(*ranges, (-math.inf, math.inf), strict=True)
        return max(lows), min(highs)

    def observe(
        self, step: int, row: Mapping[str, float], members: Sequence[Mapping[str, float]] = ()
    ) -> list[Alert]:
        """Take the row of one step; return the alerts to report now, in the order of the rules.

        A row of the same step as before, as where losses are accumulated, replaces the earlier one
        in the memory of the rules, and an alert of this step comes again only at a higher level;
        the same object is unchanged. A trouble that begins in another rule's ERROR follows it.

        Args:
            step: the step the row belongs to.
            row: diagnostics by tag, without the ``guard/`` prefix; for an ensemble the mean row, of
                which only what no member has is judged.
            members: the rows of all members, else a ConfigError; or none: then all of the row is
                judged, and the memory of the members stays as it is.
        """
        if members:
            if len(members) != (n := len(self._members)):
                raise ConfigError(f"Judge(members={n}) needs {n} members, but got {len(members)}.")
            member_tags = members[0].keys() - {"beta_star"}  # which words the remedies
            row = {tag: value for tag, value in row.items() if tag not in member_tags}
        alerts = self._observe(step, row)
        for i, (judge, member_row) in enumerate(zip(self._members, members, strict=False)):
            alerts += [replace(alert, member=i) for alert in judge._observe(step, member_row)]
        return alerts

    def _observe(self, step: int, row: Mapping[str, float]) -> list[Alert]:
        self._calm = None
        if step != self._step:
            # A copy at every step costs more than the rules, and few need it.
            if len(self._since) % _REPLAYED == 0:
                self._keep()
            self._step, self._reported = step, {}
        elif row is self._row:
            return []
        else:
            self._watches, self._lost_state = self._before
            for earlier_row in self._since[:-1]:
                self._read(step, earlier_row, {})
            self._keep()
        self._row = row
        self._since.append(dict(row))
        return self._read(step, row, self._reported)

    def _keep(self) -> None:
        watches = {name: watch.copy() for name, watch in self._watches.items()}
        self._before = watches, self._lost_state.copy()
        self._since = []

    def _read(self, step: int, row: Mapping[str, float], reported: dict[str, Level]) -> list[Alert]:
        alerts, errors = [], []
        skipped = row.get(SCALER_SKIPPED, 0.0)
        if skipped and _SKIP not in reported:
            reported[_SKIP] = Level.INFO
            remedies = ("none: the GradScaler lowers its scale by itself", "train in bfloat16")
            alerts.append(Alert(_SKIP, Level.INFO, step, SCALER_SKIPPED, skipped, 0.0, 0, remedies))
        watches, active = self._watches.items(), self.active
        lost = [name for name in active if active[name] is Level.ERROR] if active else []
        lost.sort(key=lambda name: self._watches[name].follows is not None)  # consequences last
        readings = read_by([(name, watch.watcher) for name, watch in watches], row)
        for (name, watch), reading in zip(watches, readings, strict=True):
            latch, level = watch.latch, reading.level
            if latch.active is None:
                watch.follows = lost[0] if lost and level is not None else None
                if level is None and latch.since_report is None:
                    continue  # nothing has begun, nor has anything to be counted
            if not latch.update(reading) or level is None:
                continue
            alert = Alert(name, level, step, *reading[2:])
            errors += [alert] if level is Level.ERROR else []
            if level > reported.get(name, -1):
                reported[name] = level
                if watch.follows in lost:
                    alert = replace(alert, remedies=(), follows=watch.follows)
                alerts.append(alert)
        self._lost_state.update(row, errors)
        return alerts

    def after_rollback(self) -> None:
        """Restart the counts of steps out of range, after the state of a snapshot was loaded."""
        self._step, self._since, self._calm = None, [], None
        self._lost_state.leave()
        for watch in self._watches.values():
            if hasattr(watch.watcher, "after_rollback"):
                watch.watcher.after_rollback()
        for member in self._members:
            member.after_rollback()

    def state_dict(self) -> dict[str, Any]:
        """The whole memory as JSON-able data: restored, it gives the alerts it would have given."""
        return {
            "rules": {name: watch.state_dict() for name, watch in self._watches.items()},
            "trouble": self._lost_state.state_dict(),
            "members": [member.state_dict() for member in self._members],
        }

    @undamaged("a judge")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. The step observed last is then over.

        Raises:
            ConfigError: it is damaged, of other rules or members; the judge is then as it was.
        """
        if (m := len(state["members"])) != (n := len(self._members)):
            problem = f"This is the state of a judge of {m} ensemble members, but this one has {n}"
            raise ConfigError(f"{problem} (0 for a single model). Build it with as many.")
        loaded = Judge(self.rules, n)
        for judge, part in zip((loaded, *loaded._members), (state, *state["members"]), strict=True):
            judge._load(part["rules"])
            judge._lost_state.load_state_dict(part["trouble"])
        vars(self).update(vars(loaded))

    def _load(self, state: Any) -> None:
        names = sorted(state) if isinstance(state, Mapping) else state
        if names != (expected := sorted(self._watches)):
            problem = (
                f"This state is of a judge with the rules {names}, but this one has {expected}."
            )
            raise ConfigError(f"{problem} Build it with the same rules.")
        for name, watch in self._watches.items():
            try:
                watch._take(watch._read(state[name]))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                problem = f"The judge's state of rule {name!r} is damaged: {error!r}"
                raise ConfigError(f"{problem}. Pass what Judge.state_dict() returned.") from error


class Bands:
    """The narrowest limits of every diagnostic, of all rules; ``limits`` are of the last row."""

    def __init__(self, rules: Sequence[Rule] = DEFAULT_RULES) -> None:
        watchers: list[Any] = [rule.watcher() for rule in rules]
        self._moving = [watcher for watcher in watchers if hasattr(watcher, "limits")]
        self._owed = {tag for rule in rules for tag in getattr(rule, "owed", ())}
        self._fixed: dict[str, Limits] = {}
        for rule in rules:
            self._fixed |= _narrowed(getattr(rule, "limits", dict)(), self._fixed)
        self.limits = dict(self._fixed)

    def owes(self, tag: str) -> bool:
        """Return whether NaN is an alarm."""
        return tag in self._owed

    def level(self, tag: str, value: float) -> Level | None:
        """The level of the present value by itself, without the patience of the rules."""
        limits = self.limits.get(tag, Limits())
        if math.isnan(value):
            return Level.ERROR if self.owes(tag) else None
        if limits.low <= value <= limits.high:
            return None
        inside = limits.error_low <= value <= limits.error_high
        return Level.WARN if inside and math.isfinite(value) else Level.ERROR

    def read(self, row: Mapping[str, float]) -> dict[str, Limits]:
        """Take the row of one step; return the limits that move, as they were for this row."""
        moving: dict[str, Limits] = {}
        for watcher in self._moving:
            watcher.read(row)
            moving |= _narrowed(watcher.limits(), self._fixed | moving)
        self.limits |= moving
        return moving


def _narrowed(limits: Mapping[str, Limits], others: Mapping[str, Limits]) -> dict[str, Limits]:
    return {tag: bounds.within(others.get(tag, bounds)) for tag, bounds in limits.items()}
