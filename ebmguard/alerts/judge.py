"""The judge: rows in, alerts out; one blow-up gives one WARN and one ERROR, not a hundred."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, DivergenceError, Stateful, undamaged
from ..tags import SCALER_SKIPPED
from .defaults import DEFAULT_RULES
from .rule import Alert, Level, Memory, Reading, Rule, Watcher, check_rule

__all__ = ["Judge", "error_for"]

_AMP_SKIP = "amp_skip"
# Rows after which the judge keeps its state, and which are read anew where a row comes again.
_REPLAYED = 32


def error_for(alert: Alert, rules: Sequence[Rule] = DEFAULT_RULES) -> type[DivergenceError]:
    """The error class of the alert's rule; :class:`DivergenceError` where it names none."""
    errors = {rule.name: getattr(rule, "error", DivergenceError) for rule in rules}
    return errors.get(alert.rule, DivergenceError)


@dataclass
class Latch(Memory):
    """What a rule has reported, by the rules under "Episodes" in ``docs/alerts.md``."""

    calm_steps: int
    cooldown: int
    active: Level | None = None  # the highest of the current episode, None outside episodes
    reported: Level | None = None  # the highest reported in it
    calm: int = 0  # observations inside the calm band so far
    since_report: int | None = None  # observations since the last report of WARN or more
    informed: bool = False  # whether an INFO has been reported
    worst: float = 0.0  # the size of the ERROR reported last
    passed: bool = False  # whether it was over in an observation since

    def update(self, found: Reading) -> bool:
        """Take one reading; say whether its level is to be reported now."""
        level = found.level
        if self.since_report is not None:
            self.since_report += 1
        if level is None and found.calm is None:
            return False
        self.passed = self.passed or level is not Level.ERROR
        self.calm = self.calm + 1 if level is None and found.calm else 0
        if level is None:
            if self.calm >= self.calm_steps:
                self.active = self.reported = None
            return False
        if level is Level.INFO:
            self.informed, news = True, not self.informed
            return news
        self.active = max(level, self.active or level)
        if level is Level.ERROR:
            size = abs(found.value) if math.isfinite(found.value) else sys.float_info.max
            # Of what is bad because it is small, like GradScale, no size is worse.
            is_worse = self.passed and size / 2 > self.worst and not size < abs(found.limit)
            if self.reported is Level.ERROR and not is_worse:
                return False
            self.worst, self.passed = size, False
        else:
            rested = self.since_report is None or self.since_report >= self.cooldown
            if self.reported is not None or not rested:
                return False
        self.reported, self.since_report = level, 0
        return True


@dataclass
class _Watch(Stateful):
    """A rule's memory, what it has reported, and the rule in ERROR when its trouble began."""

    rule: Rule
    watcher: Watcher
    latch: Latch
    follows: str | None = None

    def _saved(self) -> dict[str, Any]:
        own = Stateful if isinstance(self.watcher, Stateful) else self._restored
        return {"watcher": own, "latch": Stateful, "follows": str | None}

    def _restored(self, saved: Mapping[str, Any]) -> Watcher:
        watcher = self.rule.watcher()
        watcher.load_state_dict(saved)
        return watcher

    def copy(self) -> _Watch:
        own = self.watcher
        watcher = own.copy() if isinstance(own, Memory) else self._restored(own.state_dict())
        return _Watch(self.rule, watcher, self.latch.copy(), self.follows)


class Judge:
    """Reads one row per step and says which rules fire, by the rows alone: equal on equal ranks.

    A step that a GradScaler skipped is an INFO ``amp_skip``.

    Args:
        rules: what to watch for; their names must differ.
        members: number of models of an ensemble; 0 for a single model.

    Raises:
        ConfigError: of what is no :class:`~ebmguard.alerts.Rule`, or of two with one name.
    """

    def __init__(self, rules: Sequence[Rule] = DEFAULT_RULES, members: int = 0) -> None:
        if not isinstance(rules, Iterable):
            raise ConfigError(
                f"Expected a sequence of rules, not a single rule, but got {rules!r}."
            )
        self.rules = tuple(rules)
        for rule in self.rules:
            check_rule(rule)
        names = [rule.name for rule in self.rules]
        if len({_AMP_SKIP, *names}) <= len(names):
            raise ConfigError(
                f"Rules need different names, none of them {_AMP_SKIP!r}, but got {names}. Rename "
                'one: dataclasses.replace(rule, name="...").'
            )
        latches = [Latch(rule.calm_steps, rule.cooldown) for rule in self.rules]
        pairs = zip(self.rules, latches, strict=True)
        self._watches = {rule.name: _Watch(rule, rule.watcher(), latch) for rule, latch in pairs}
        self._members = [Judge(self.rules) for _ in range(members)]
        # The step observed last, its row, and what was returned of it.
        self._step: int | None = None
        self._row: Mapping[str, float] = {}
        self._said: dict[str, Level] = {}
        # What the rules remembered, and copies of the rows read since.
        self._before = self._watches
        self._since: list[Mapping[str, float]] = []

    @property
    def active(self) -> dict[str, Level]:
        """The rules whose episode (WARN or more) is not over, but an ensemble's members', each with
        the highest level reached."""
        levels = {name: watch.latch.active for name, watch in self._watches.items()}
        return {name: level for name, level in levels.items() if level is not None}

    def observe(
        self, step: int, row: Mapping[str, float], members: Sequence[Mapping[str, float]] = ()
    ) -> list[Alert]:
        """Take the row of one step; return the alerts to report now, in the order of the rules.

        Called again with the step of the call before, as where losses are accumulated, the row is
        that of the step so far: it replaces the earlier one in the memory of the rules, and an
        alert of this step comes again only at a higher level. A row that is the same object as
        before is unchanged. What begins while another rule is in ERROR follows it.

        Args:
            step: the step the row belongs to.
            row: diagnostics by tag, without the ``guard/`` prefix; of an ensemble the mean row, of
                which only what no member has is judged.
            members: the rows of all members, else a ConfigError; without any all of the row is
                judged, and what the rules remember of the members stays.
        """
        if members:
            if len(members) != len(self._members):
                raise ConfigError(
                    f"Expected rows of {len(self._members)} members, but got {len(members)}: see "
                    "Judge(rules, members=...)."
                )
            own = members[0].keys() - {"beta_star"}  # which words the remedies
            row = {tag: value for tag, value in row.items() if tag not in own}
        alerts = self._observe(step, row)
        for i, (judge, each) in enumerate(zip(self._members, members, strict=False)):
            alerts += [replace(alert, member=i) for alert in judge._observe(step, each)]
        return alerts

    def _observe(self, step: int, row: Mapping[str, float]) -> list[Alert]:
        if step != self._step:
            # A copy at every step costs more than the rules, and few need it.
            if len(self._since) % _REPLAYED == 0:
                self._keep()
            self._step, self._said = step, {}
        elif row is self._row:
            return []
        else:
            self._watches = self._before
            for each in self._since[:-1]:
                self._read(step, each, {})
            self._keep()
        self._row = row
        self._since.append(dict(row))
        return self._read(step, row, self._said)

    def _keep(self) -> None:
        self._before = {name: watch.copy() for name, watch in self._watches.items()}
        self._since = []

    def _read(self, step: int, row: Mapping[str, float], said: dict[str, Level]) -> list[Alert]:
        alerts = []
        skipped = row.get(SCALER_SKIPPED, 0.0)
        if skipped and _AMP_SKIP not in said:
            said[_AMP_SKIP] = Level.INFO
            remedies = ("none: the GradScaler lowers its scale by itself", "train in bfloat16")
            what = SCALER_SKIPPED, skipped, 0.0, 0, remedies
            alerts.append(Alert(_AMP_SKIP, Level.INFO, step, *what))
        watches = self._watches.items()
        lost = [name for name, watch in watches if watch.latch.active is Level.ERROR]
        lost.sort(key=lambda name: self._watches[name].follows is not None)  # consequences last
        for name, watch in watches:
            latch = watch.latch
            found, is_new = watch.watcher.read(row), latch.active is None
            level, is_told = found.level, latch.update(found)
            if is_new:
                watch.follows = lost[0] if lost and level is not None else None
            if is_told and level is not None and level > said.get(name, -1):
                said[name] = level
                alert = Alert(name, level, step, *found[2:])
                if watch.follows in lost:
                    alert = replace(alert, remedies=(), follows=watch.follows)
                alerts.append(alert)
        return alerts

    def after_rollback(self) -> None:
        """Count anew what counts steps out of range: after the state of a snapshot was loaded."""
        self._step, self._since = None, []
        for watch in self._watches.values():
            if hasattr(watch.watcher, "after_rollback"):
                watch.watcher.after_rollback()
        for member in self._members:
            member.after_rollback()

    def state_dict(self) -> dict[str, Any]:
        """The whole memory as JSON-able data: restored, it gives the alerts it would have given."""
        return {
            "shared": {name: watch.state_dict() for name, watch in self._watches.items()},
            "members": [member.state_dict()["shared"] for member in self._members],
        }

    @undamaged("a judge")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. The step observed last is then over.

        Raises:
            ConfigError: it is damaged, of other rules or members; the judge is then as it was.
        """
        parts = [state["shared"], *state["members"]]
        if len(parts) != 1 + len(self._members):
            raise ConfigError(
                f"This is the state of a judge of {len(parts) - 1} ensemble members, but this one "
                f"has {len(self._members)} (0 for a single model). Build it with as many."
            )
        loaded = Judge(self.rules, members=len(self._members))
        for judge, part in zip((loaded, *loaded._members), parts, strict=True):
            judge._load(part)
        vars(self).update(vars(loaded))

    def _load(self, state: Any) -> None:
        names = sorted(state) if isinstance(state, Mapping) else state
        if names != (own := sorted(self._watches)):
            said = f"This state is of a judge with the rules {names}, but this one has {own}."
            raise ConfigError(f"{said} Build it with the same rules.")
        for name, watch in self._watches.items():
            try:
                watch._take(watch._read(state[name]))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"The judge's state of rule {name!r} is damaged: {type(error).__name__}: "
                    f"{error}. Pass what Judge.state_dict() returned."
                ) from error
