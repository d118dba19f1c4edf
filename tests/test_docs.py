"""Links between the pages lead somewhere, and a page quotes another as it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ebmguard.retrofit.strength import Strength

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


def test_links_lead_somewhere() -> None:
    links = [(page, x) for page in PAGES for x in LINK.findall(CODE.sub("", page.read_text()))]
    for page, link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), (page, link)
        if anchor:
            assert anchor in anchors(target), (page, link)


def test_no_line_begins_with_a_greater_sign() -> None:
    # Markdown would make a quotation of the end of "β > 0".
    for page in PAGES:
        assert not re.search(r"^\s*> ", CODE.sub("", page.read_text()), re.MULTILINE), page


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


def table_rows(page: str, *starts: str) -> list[list[str]]:
    """The cells of the lines of a page's tables that begin so."""
    lines = re.findall(r"^\|.*", (ROOT / page).read_text(), re.MULTILINE)
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells for cells in found if cells[0].startswith(starts)]


def test_the_readme_quotes_results_as_they_are():
    readme = " ".join((ROOT / "README.md").read_text().split())
    arms = {cells[0][0]: cells[1:] for cells in table_rows("docs/results/defaults.md", "a:", "f:")}
    (lost, of, runs), limping = arms["a"][0].split()[:3], arms["a"][1]
    assert f"Of {runs} runs, {lost} were lost unguarded and {limping} [limped]" in readme
    assert arms["f"][0].startswith(f"0 {of} {runs}")
    assert f"guarded, none was lost and {arms['f'][1]} limped" in readme

    page = "docs/results/rollback.md"
    short, long = (
        cells[1].split(" of ")[0] for cells in table_rows(page, "the default, by cause")[:2]
    )
    none = table_rows(page, "no guard's action")[0][1]
    runs = none.split(" of ")[1]
    saved = f"Of {runs} runs that diverge, {short} were saved until step 2,000, and {long} until"
    assert saved in readme
    assert f"until step 6,000; without it, {none}" in readme


@pytest.mark.parametrize(
    ("page", "most"), [("README.md", 700), ("CHANGELOG.md", 400), ("CONTRIBUTING.md", 1200)]
)
def test_what_people_read_first_is_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().split()) <= most


def test_what_is_said_of_the_default_beta_star_is_the_default() -> None:
    page = "docs/beta-star.md"
    said = re.findall(r"Without it β\\\* is (\S+):", (ROOT / page).read_text())
    for scale in (None, 1.0, 20_000.0):
        star = Strength.of(output_scale=scale).at(0).beta_star
        assert said == [f"{star:g}"]
