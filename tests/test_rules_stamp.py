"""Pages of results that quote alerts say under which version of the rules they were made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import rules
from ebmguard.alerts import DEFAULT_RULES, Level

RESULTS = Path(__file__).parents[1] / "docs" / "results"
NAMES = [rule.name for rule in DEFAULT_RULES]
QUOTES = re.compile(rf"`?\b({'|'.join(NAMES)})\b|\b({'|'.join(level.name for level in Level)})\b")
STAMP = re.compile(r"^Rules of the alerts: (`[0-9a-f]{8}`|older\b.+)", re.MULTILINE)

# It names a level and no rule's verdict: how long a run with an alert now and then takes.
NO_VERDICT = {"overhead.md"}


def problem(name: str, text: str, version: str) -> str:
    """What is wrong with a page's stamp; empty where nothing is."""
    if name in NO_VERDICT or not QUOTES.search(text):
        return ""
    stamps = STAMP.findall(text)
    if len(stamps) != 1:
        return f"expected one line 'Rules of the alerts: `{version}`.', found {len(stamps)}"
    if not stamps[0].startswith("older") and stamps[0] != f"`{version}`":
        return f"is of rules {stamps[0]}, and those shipped are `{version}`: call it older"
    return ""


@pytest.fixture(scope="module")
def version():
    return rules.rules_version()


def test_pages_are_of_the_rules_that_they_name(version):
    pages = {page.name: page.read_text(encoding="utf-8") for page in RESULTS.glob("*.md")}
    assert {x: said for x, text in pages.items() if (said := problem(x, text, version))} == {}


def test_cells_of_the_shipped_rules_have_its_line_and_others_are_older(monkeypatch):
    monkeypatch.setattr(rules, "rules_version", lambda: "00000000")
    assert rules.stamp(["00000000", "00000000"]) == "Rules of the alerts: `00000000`."
    for versions in (["00000000", "11111111"], ["11111111"], [None], ["00000000", None], []):
        assert ": older (" in rules.stamp(versions)
