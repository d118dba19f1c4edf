"""How a run went, in words, and what its alerts say should be tried next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..alerts import Level
from .folder import RecordedRun

__all__ = ["Advice", "advice", "outcome"]


@dataclass(frozen=True)
class Advice:
    """What one rule has to say about a run."""

    rule: str  # its name, which is that of its section in docs/alerts.md
    level: str  # the worst that it reported
    count: int
    first: int  # steps of its first and its last report
    last: int
    alert: Mapping[str, Any]  # the first of the worst level
    remedies: tuple[str, ...]  # those of the worst level first, likeliest first


def advice(run: RecordedRun) -> list[Advice]:
    """One entry for each rule that fired unanswered, the most severe first, then the earliest."""
    by_rule: dict[str, list[dict[str, Any]]] = {}
    for alert in run.alerts[run.answered :]:
        by_rule.setdefault(alert["rule"], []).append(alert)
    found = []
    for rule, alerts in by_rule.items():
        alerts.sort(key=lambda alert: -Level[alert["level"]])
        worst, steps = alerts[0], [alert["step"] for alert in alerts]
        remedies = tuple(dict.fromkeys(r for alert in alerts for r in alert["remedies"]))
        own = Advice(rule, worst["level"], len(steps), min(steps), max(steps), worst, remedies)
        found.append(own)
    return sorted(found, key=lambda entry: (-Level[entry.level], entry.first))


def outcome(run: RecordedRun) -> str:
    """In a few words: finished, diverged, ended, or not over."""
    steps = 0 if run.step is None else run.step + 1
    back = len(run.rollbacks)
    after = f" after {back} rollback{'s' if back > 1 else ''}" if back else ""
    lost = run.results.get("diverged_at")
    if lost is not None:
        return f"DIVERGED at step {lost:,}{after}"
    if not run.results:
        total = run.setting("iterations")
        of = f"{steps:,}{f' of {total:,}' if total else ''} steps"
        return f"ended after {of}{after}" if run.is_over else f"{of} so far{after}"
    return f"finished {steps:,} steps{after}"
