"""Links between the pages lead somewhere, and a page quotes another as it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ebmguard.alerts.remedies import ABOVE_DATA_ERROR, BLOWUP_ERROR

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them; a repeated one gets a number."""
    found: dict[str, int] = {}
    names = set()
    for title in re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_what_pages_show_of_the_examples_is_whole_statements() -> None:
    # A formatter that takes the quotation for code would spoil it.
    quoted = re.compile(r'^``` \{\.python.*\}\n--8<-- "([^":]+)(?::(\d+):(\d+))?"\n```$', re.M)
    count = 0
    for page in PAGES:
        text = page.read_text()
        found = quoted.findall(text)
        assert len(found) == len(re.findall(r"^--8", text, re.M)), page
        for path, first, last in found:
            lines = (ROOT / path).read_text().splitlines()
            part = lines[int(first) - 1 : int(last)] if first else lines
            ast.parse("\n".join(part))
            assert part[0].strip()
            count += 1
    assert count >= 6


def test_quoted_blow_ups_advise_what_their_rule_does():
    # A guard that takes the run back by itself does not advise it.
    advice = {
        "; ".join(words.zero[start : start + 2])
        for words in (BLOWUP_ERROR, ABOVE_DATA_ERROR)
        for start in (0, 1)
    }
    message = re.compile(
        r"ERROR energy_blowup at [^(]*\(limit [^)]*\)\. Likeliest remedies: ([^.]*)\."
    )
    quoted = [
        words for page in PAGES for words in message.findall(" ".join(page.read_text().split()))
    ]
    # The rule's own words; an alert adds the step, and what to do the next time.
    quoted = [re.sub(r" of before step \d+; action=\S+ next time", "", words) for words in quoted]
    assert len(quoted) >= 3
    assert {*quoted} <= advice


def test_the_alerts_page_quotes_the_population_as_it_is():
    def rows(page: str) -> dict[str, list[str]]:
        lines = re.findall(r"^\|.*", (ROOT / page).read_text(), re.MULTILINE)
        found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        starts = ("dying", "healthy", "median steps")
        return {cells[0]: cells[1:4] for cells in found if cells[0].startswith(starts)}

    measured, quoted = rows("docs/results/population.md"), rows("docs/alerts.md")
    assert len(quoted) == 6
    for name, cells in quoted.items():
        assert cells == [cell.split(" (")[0] for cell in measured[name]]
