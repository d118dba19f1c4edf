"""Pages of results that quote alerts say under which version of the rules they were made."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rules
from benchmarks.population.judged import load
from ebmguard.alerts import DEFAULT_RULES, CollapsedRule, Level, NonFiniteRule

RESULTS = Path(__file__).parents[1] / "docs" / "results"
NAMES = [rule.name for rule in DEFAULT_RULES]
QUOTES = re.compile(rf"`?\b({'|'.join(NAMES)})\b|\b({'|'.join(level.name for level in Level)})\b")
STAMP = re.compile(r"^Rules of the alerts: (`[0-9a-f]{8}`|older, .+)", re.MULTILINE)

# Made with rules that are no longer shipped; each says so, and why, in its own words.
OLDER = {
    "adapters.md",
    "index.md",
    "jem_cifar10.md",
    "mixture.md",
    "retrofit-jem.md",
    "shortrun-beta.md",
    "shortrun.md",
    "toys.md",
}
# It names a level and no rule's verdict: how long a run with an alert now and then takes.
NO_VERDICT = {"overhead.md"}


def problem(name: str, text: str, version: str) -> str:
    """What is wrong with a page's stamp; empty where nothing is."""
    if name in NO_VERDICT or not QUOTES.search(text):
        return ""
    stamps = STAMP.findall(text)
    if len(stamps) != 1:
        return f"expected one line 'Rules of the alerts: `{version}`.', found {len(stamps)}"
    if name in OLDER:
        return "" if stamps[0].startswith("older") else "is listed as older, and is stamped"
    if stamps[0] != f"`{version}`":
        return f"is of rules {stamps[0]}, and those shipped are `{version}`: make it again"
    return ""


@pytest.fixture(scope="module")
def version():
    return rules.rules_version()


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.name)
def test_a_page_is_of_the_rules_that_it_names(page, version):
    assert not problem(page.name, page.read_text(encoding="utf-8"), version)


@pytest.mark.parametrize("name", sorted(OLDER | NO_VERDICT))
def test_what_is_excused_is_there(name):
    assert (RESULTS / name).is_file()


@pytest.mark.parametrize(
    ("name", "stamps", "is_right"),
    [
        ("new.md", ["`00000000`"], True),
        ("new.md", ["`11111111`"], False),
        ("new.md", ["older, not repeated"], False),
        ("new.md", [], False),
        ("new.md", ["`00000000`", "`00000000`"], False),
        ("mixture.md", ["older, not repeated"], True),
        ("mixture.md", ["`00000000`"], False),
        ("mixture.md", ["older, "], False),
    ],
)
def test_a_page_of_other_rules_is_seen(name, stamps, is_right):
    text = "\n".join(["`energy_blowup` at step 3", *(f"Rules of the alerts: {s}" for s in stamps)])
    assert (not problem(name, text, "00000000")) == is_right


@pytest.fixture
def one_family(monkeypatch):
    """The version as a function, of a single family's run."""
    one = load("first")[:1]
    monkeypatch.setattr(rules, "load", lambda _: one)
    return rules.rules_version.__wrapped__


def test_another_threshold_is_another_version(one_family, monkeypatch):
    before = one_family()
    assert one_family() == before
    changed = [
        replace(r, share=0.001) if isinstance(r, CollapsedRule) else r for r in DEFAULT_RULES
    ]
    monkeypatch.setattr(rules, "DEFAULT_RULES", tuple(changed))
    assert one_family() != before


def test_other_code_with_the_same_thresholds_is_another_version(one_family, monkeypatch):
    before, watcher = one_family(), NonFiniteRule.watcher

    def loud(rule: NonFiniteRule) -> Any:
        inner: Any = watcher(rule)
        read = inner.read
        inner.read = lambda row: read({**row, "energy_gap": math.nan})
        return inner

    monkeypatch.setattr(NonFiniteRule, "watcher", loud)
    assert one_family() != before


def test_cells_of_one_version_have_its_line_and_others_are_older():
    assert rules.stamp(["00000000", "00000000"]) == "Rules of the alerts: `00000000`."
    for versions in (["00000000", "11111111"], [None], ["00000000", None], []):
        assert "older, " in rules.stamp(versions)
