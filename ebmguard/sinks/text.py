"""Alerts and rollbacks as markdown, for sinks that can show text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .protocol import MARKER_PREFIX

__all__ = ["LEVEL_NUMBERS", "alert_markdown", "marker_tag", "recovery_markdown"]

# Levels as numbers, as in the scalar guard/alert_level.
LEVEL_NUMBERS = {"INFO": 0, "WARN": 1, "ERROR": 2}


def marker_tag(record: Mapping[str, Any]) -> str:
    """The tag of the scalar that marks an alert's step; its value is the level's number.

    It names level and rule, because a page of scalars shows no other words, and because a line
    joins the points of one tag. Both follow the last slash: TensorBoard cuts what stands before it
    where there is little room.

    Args:
        record: what ``Alert.record()`` returns.
    """
    return f"{MARKER_PREFIX}{record['level']}_{record['rule']}"


def alert_markdown(record: Mapping[str, Any]) -> str:
    """A heading, a table of the numbers and the list of remedies.

    Args:
        record: what ``Alert.record()`` returns.
    """
    remedies = "\n".join(f"{i}. {text}" for i, text in enumerate(record["remedies"], start=1))
    member = f", member {record['member']}" if "member" in record else ""
    return (
        f"**{record['level']} {record['rule']}** at step {record['step']}{member}\n\n"
        "| diagnostic | value | limit | window |\n"
        "|---|---|---|---|\n"
        f"| `{record['tag']}` | {record['value']:.6g} | {record['limit']:.6g} "
        f"| {record['window']} |\n\n"
        f"Likeliest remedies:\n\n{remedies}\n"
    )


def recovery_markdown(record: Mapping[str, Any], abandoned: Sequence[Mapping[str, Any]]) -> str:
    """A heading, what was done, and the alerts of the steps that were abandoned.

    Args:
        record: one of the audit log's.
        abandoned: records of alerts.
    """
    parts = [f"**Rollback {record['attempt']}**", record["message"]]
    if abandoned:
        parts.append("Alerts of the abandoned steps:")
        parts.append("\n".join(f"- {alert['message']}" for alert in abandoned))
    return "\n\n".join(parts) + "\n\n"
