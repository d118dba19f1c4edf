"""How a run went, in words, and what its alerts say should be tried next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..alerts import Level
from .follow import Followed

__all__ = ["Advice", "advice", "before_last_rollback", "outcome"]


@dataclass(frozen=True)
class Advice:
    """What one rule has to say about a run.

    Attributes:
        rule: its name, which is that of its section in docs/alerts.md.
        level: the worst level that it reported.
        count: how often it reported.
        first, last: steps of its first and its last report.
        remedies: what it names, those of the worst level first, likeliest first.
    """

    rule: str
    level: str
    count: int
    first: int
    last: int
    remedies: tuple[str, ...]


def before_last_rollback(run: Followed) -> int:
    """How many of the alerts, oldest first, a rollback has answered already.

    They are those up to the one that the last record of the audit log names: steps alone would not
    tell, since a rollback makes them come again.
    """
    if not run.recoveries:
        return 0
    last = run.recoveries[-1]
    named = [
        i
        for i, alert in enumerate(run.alerts)
        if alert["step"] <= last["step"]
        and all(
            str(alert[k]) == str(last[k])
            for k in ("rule", "tag", "value")  # NaN is itself here
        )
    ]
    return named[-1] + 1 if named else 0


def advice(run: Followed) -> list[Advice]:
    """One entry for each rule that fired, the most severe first, then the earliest.

    Alerts that a rollback has answered are left out.
    """
    by_rule: dict[str, list[dict[str, Any]]] = {}
    for alert in run.alerts[before_last_rollback(run) :]:
        by_rule.setdefault(alert["rule"], []).append(alert)
    found = []
    for rule, alerts in by_rule.items():
        worst_first = sorted(alerts, key=lambda alert: -Level[alert["level"]])
        steps = [alert["step"] for alert in alerts]
        found.append(
            Advice(
                rule=rule,
                level=worst_first[0]["level"],
                count=len(alerts),
                first=min(steps),
                last=max(steps),
                # Each once, in the order in which they come.
                remedies=tuple(dict.fromkeys(r for a in worst_first for r in a["remedies"])),
            )
        )
    return sorted(found, key=lambda entry: (-Level[entry.level], entry.first))


def outcome(run: Followed) -> str:
    """In a few words: finished, diverged, or not over."""
    steps = 0 if run.step is None else run.step + 1
    back = len(run.recoveries)
    after = f" after {back} rollback{'s' if back > 1 else ''}" if back else ""
    lost = (run.results or {}).get("diverged_at")
    if lost is not None:
        return f"DIVERGED at step {lost:,}{after}"
    if run.results is None:
        total = run.iterations
        of = f" of {total:,}" if total else ""
        return f"{steps:,}{of} steps so far{after}"
    return f"finished {steps:,} steps{after}"
