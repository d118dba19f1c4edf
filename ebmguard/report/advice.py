"""The one adviser: what a recorded run can do, of which nothing contradicts the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..alerts import Level, Remedy
from ..alerts.remedies import agreeing
from .folder import RecordedRun

__all__ = ["Advice", "advice", "moved_by_rollbacks", "next_settings", "to_do"]


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


def moved_by_rollbacks(run: RecordedRun) -> dict[str, int]:
    """What rollbacks have moved, and which way: no advice goes against them.

    Nor does a run go back that is not lost, or that was rolled back.
    """
    pairs = [pair for rollback in run.rollbacks for pair in rollback["changes"].items()]
    names = {"sgld_steps": "steps"}
    moved = {names.get(what, what): 1 if new > old else -1 for what, (old, new) in pairs}
    return moved if run.verdict.is_lost and not run.rollbacks else {**moved, Remedy.ROLL_BACK: 1}


def next_settings(run: RecordedRun) -> str:
    """What a run that was rolled back is to begin with the next time."""
    changes = {name: pair[1] for own in run.rollbacks for name, pair in own["changes"].items()}
    said = ", ".join(f"{name} {after:g}" for name, after in changes.items())
    return f"begin the next run with {said or 'new random numbers, which were enough'}"


def to_do(run: RecordedRun, advised: Iterable[Advice]) -> tuple[str, ...]:
    """What to do about the verdict, likeliest first; empty where nothing is to be done."""
    said = [next_settings(run)] if run.rollbacks else []
    said += [remedy for own in advised if own.level != "INFO" for remedy in own.remedies]
    if run.verdict.is_lost and not said:
        said = ['action="rollback" next time, which takes it back and goes on']
    return tuple(said)


def advice(run: RecordedRun, moved: dict[str, int] | None = None) -> list[Advice]:
    """One entry for each rule that fired unanswered, the most severe first, then the earliest."""
    by_rule: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for alert in sorted(run.alerts[run.answered :], key=lambda alert: -Level[alert["level"]]):
        by_rule[alert["rule"]].append(alert)
    found = []
    for rule, alerts in by_rule.items():
        worst, at = alerts[0], [alert["step"] for alert in alerts]
        said = tuple(remedy for alert in alerts for remedy in alert["remedies"])
        found.append(Advice(rule, worst["level"], len(at), min(at), max(at), worst, said))
    found.sort(key=lambda entry: (-Level[entry.level], entry.first))
    moved = moved_by_rollbacks(run) if moved is None else moved
    return [replace(entry, remedies=agreeing(entry.remedies, moved)) for entry in found]
