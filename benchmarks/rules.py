"""The version of the rules that are shipped, as a page of results quotes it.

python -m benchmarks.rules
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache

from ebmguard.alerts import DEFAULT_RULES, Judge

from .population.judged import load

REWORDED = {"go back to your own checkpoint": "roll back to the last good snapshot"}
"""Phrases of remedies that are told in other words now, and do the same."""


@cache
def rules_version() -> str:
    """Eight hex digits of the thresholds, and of all alerts on one recorded run of each family.

    Words of the code may change and leave it; a threshold, or an alert that comes at another step,
    changes it.
    """
    words = repr(DEFAULT_RULES)
    for new, old in REWORDED.items():
        words = words.replace(new, old)
    digest = hashlib.sha256(words.encode())
    for recorded in [each for each in load("first") if each.run.number == 0]:
        judge = Judge(DEFAULT_RULES)
        for step, row in enumerate(recorded.rows):
            for alert in judge.observe(step, row):
                digest.update(f"{recorded.run.name} {step} {alert.rule} {alert.level}\n".encode())
    return digest.hexdigest()[:8]


def stamp(versions: Iterable[str | None]) -> str:
    """The line of a page about the rules that its runs had; None is of a run that kept none."""
    found = set(versions)
    if found == {rules_version()}:
        return f"Rules of the alerts: `{rules_version()}`."
    named = ", ".join(f"`{version}`" for version in sorted(filter(None, found)))
    return f"Rules of the alerts: older ({named or 'no version was kept'})."


if __name__ == "__main__":
    print(rules_version())
