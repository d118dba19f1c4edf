"""The judge: rows in, alerts out; one blow-up gives one WARN and one ERROR, not a hundred."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, DivergenceError, Stateful, undamaged
from ..tags import SCALER_SKIPPED
from .alert import Alert, Level
from .defaults import DEFAULT_RULES
from .rule import Memory, Reading, Rule, Watcher, check_rule

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
        level, calm = found.level, found.calm
        if self.since_report is not None:
            self.since_report += 1
        if level is not Level.ERROR and (level is not None or calm is not None):
            self.passed = True
        if level is None:
            if calm is not None:
                self.calm = self.calm + 1 if calm else 0
                if self.calm >= self.calm_steps:
                    self.active = self.reported = None
            return False
        self.calm = 0
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

    def _saved(self) -> dict[str, Any]:
        levels = dict.fromkeys(("active", "reported"), Level | None)
        counts = {"calm": int, "since_report": int | None}
        return levels | counts | {"informed": bool, "worst": float, "passed": bool}


class _Watch(Stateful):
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.watcher, self.latch = rule.watcher(), Latch(rule.calm_steps, rule.cooldown)
        self.follows: str | None = None  # the rule in ERROR when the trouble of this one began

    def _saved(self) -> dict[str, Any]:
        own = Stateful if isinstance(self.watcher, Stateful) else self._restored
        return {"watcher": own, "latch": Stateful, "follows": str | None}

    def kept(self) -> tuple[Any, ...]:
        own = self.watcher
        memory = _copied(vars(own)) if isinstance(own, Memory) else own.state_dict()
        return memory, _copied(vars(self.latch)), self.follows

    def put_back(self, kept: tuple[Any, ...]) -> None:
        memory, latch, self.follows = kept
        if isinstance(self.watcher, Memory):
            vars(self.watcher).update(_copied(memory))
        else:
            self.watcher.load_state_dict(memory)
        vars(self.latch).update(latch)

    def _restored(self, saved: Mapping[str, Any]) -> Watcher:
        watcher = self.rule.watcher()
        watcher.load_state_dict(saved)
        return watcher


def _copied(memory: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [x[:] if type(x) is list else x for x in value] if type(value) is list else value
        for name, value in memory.items()
    }


class _Memory:
    """What all rules remember of one kind of row: the run's own, or that of a member."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.watches = {rule.name: _Watch(rule) for rule in rules}
        # The step observed last, its row, what was returned of it, and whether its row came again.
        self.step: int | None = None
        self.row: Mapping[str, float] = {}
        self.said: dict[str, Level] = {}
        self.is_again = False
        # What they remembered, and copies of the rows read since.
        self.before: list[tuple[Any, ...]] = []
        self.since: list[Mapping[str, float]] = []

    def observe(self, step: int, row: Mapping[str, float], member: int | None) -> list[Alert]:
        if step != self.step:
            # The state of every step costs more than the rules, and few need it.
            if self.is_again or len(self.since) % _REPLAYED == 0:
                self.before, self.since = self._kept(), []
            self.step, self.said, self.is_again = step, {}, False
        elif row is self.row:
            return []
        else:
            self.is_again = True
            for watch, kept in zip(self.watches.values(), self.before, strict=True):
                watch.put_back(kept)
            for each in self.since[:-1]:
                self._read(step, each, member, {})
            if self.since[1:]:
                self.before = self._kept()
            self.since = []
        self.row = row
        self.since.append(dict(row))
        return self._read(step, row, member, self.said)

    def _kept(self) -> list[tuple[Any, ...]]:
        return [watch.kept() for watch in self.watches.values()]

    def _read(
        self, step: int, row: Mapping[str, float], member: int | None, said: dict[str, Level]
    ) -> list[Alert]:
        alerts = []
        skipped = row.get(SCALER_SKIPPED, 0.0)
        if skipped and _AMP_SKIP not in said:
            said[_AMP_SKIP] = Level.INFO
            remedies = ("none: the GradScaler lowers its scale by itself", "train in bfloat16")
            what = SCALER_SKIPPED, skipped, 0.0, 0, remedies
            alerts.append(Alert(_AMP_SKIP, Level.INFO, step, *what))
        watches = self.watches.items()
        lost = [name for name, watch in watches if watch.latch.active is Level.ERROR]
        lost.sort(key=lambda name: self.watches[name].follows is not None)  # consequences last
        for name, watch in watches:
            latch = watch.latch
            found, is_new = watch.watcher.read(row), latch.active is None
            level, is_told = found.level, latch.update(found)
            if is_new:
                watch.follows = lost[0] if lost and level is not None else None
            if is_told and level is not None and level > said.get(name, -1):
                said[name] = level
                alert = Alert(name, level, step, *found[2:], member)
                if watch.follows in lost:
                    alert = replace(alert, remedies=(), follows=watch.follows)
                alerts.append(alert)
        return alerts

    def after_rollback(self) -> None:
        self.step, self.since = None, []
        for watch in self.watches.values():
            if hasattr(watch.watcher, "after_rollback"):
                watch.watcher.after_rollback()

    def state_dict(self) -> dict[str, Any]:
        return {name: watch.state_dict() for name, watch in self.watches.items()}

    def load_state_dict(self, state: Any) -> None:
        names = sorted(state) if isinstance(state, Mapping) else state
        if names != (own := sorted(self.watches)):
            said = f"This state is of a judge with the rules {names}, but this one has {own}."
            raise ConfigError(f"{said} Build it with the same rules.")
        for name, watch in self.watches.items():
            try:
                watch._take(watch._read(state[name]))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"The judge's state of rule {name!r} is damaged: {type(error).__name__}: "
                    f"{error}. Pass what Judge.state_dict() returned."
                ) from error


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
        self._shared = _Memory(self.rules)
        self._members = [_Memory(self.rules) for _ in range(members)]

    @property
    def active(self) -> dict[str, Level]:
        """The rules whose episode (WARN or more) is not over, but an ensemble's members', each with
        the highest level reached."""
        levels = {name: watch.latch.active for name, watch in self._shared.watches.items()}
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
        if not members:
            return self._shared.observe(step, row, None)
        if len(members) != len(self._members):
            raise ConfigError(
                f"Expected rows of {len(self._members)} members, but got {len(members)}: see "
                "Judge(rules, members=...)."
            )
        own = members[0].keys() - {"beta_star"}  # which words the remedies
        shared = {tag: value for tag, value in row.items() if tag not in own}
        alerts = self._shared.observe(step, shared, None)
        for i, (memory, each) in enumerate(zip(self._members, members, strict=True)):
            alerts += memory.observe(step, each, i)
        return alerts

    def after_rollback(self) -> None:
        """Count anew what counts steps out of range: after the state of a snapshot was loaded."""
        for memory in (self._shared, *self._members):
            memory.after_rollback()

    def state_dict(self) -> dict[str, Any]:
        """The whole memory as JSON-able data: restored, it gives the alerts it would have given."""
        return {
            "shared": self._shared.state_dict(),
            "members": [memory.state_dict() for memory in self._members],
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
        memories = [_Memory(self.rules) for _ in parts]
        for memory, part in zip(memories, parts, strict=True):
            memory.load_state_dict(part)
        self._shared, *self._members = memories
