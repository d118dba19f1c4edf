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


def table_rows(page: str, *starts: str) -> list[list[str]]:
    """The cells of the lines of a page's tables that begin so."""
    lines = re.findall(r"^\|.*", (ROOT / page).read_text(), re.MULTILINE)
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells for cells in found if cells[0].startswith(starts)]


def test_the_readme_quotes_results_as_they_are():
    readme = " ".join((ROOT / "README.md").read_text().split())
    beta = {
        cells[0]: cells[1] for cells in reversed(table_rows("docs/results/digits.md", "0", "2"))
    }
    assert f"{beta['0']} seeds at β\\* = 0, and on {beta['2']} at" in readme

    page = "docs/results/population.md"
    blow_up, any_error, false_error = (
        table_rows(page, start)[0]
        for start in ("dying: ERROR in the last 50 steps", "healthy: an", "healthy: a false ERROR")
    )

    def shipped(cells: list[str]) -> tuple[int, int]:
        counts = [re.findall(r"\d+", cells[column]) for column in (2, 5)]
        found, total = (sum(map(int, column)) for column in zip(*counts, strict=True))
        return found, total

    found, died = shipped(blow_up)
    assert f"Of {died} runs that died, {found} raised an ERROR in their last 50 steps" in readme
    ahead = table_rows(page, "median steps")[0][2]
    assert f"a median of {ahead} steps ahead" in readme
    found, healthy = shipped(any_error)
    assert f"Of {healthy} healthy runs {found} raised one" in readme
    left_out = f"on other families it is {blow_up[3]}, and a false ERROR in {false_error[3]}"
    assert left_out in readme

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


def test_files_that_contributors_are_sent_to_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = {name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name or ".py" in name}
    # Files of a folder that was named before are named without it.
    folders = ("", "ebmguard/", "ebmguard/alerts/", "benchmarks/", "reference_training/")
    missing = {name for name in named if not any((ROOT / at / name).exists() for at in folders)}
    assert len(named) > 30
    assert not missing


def test_beta_star_for_jem_is_the_same_everywhere() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "ebmguard").rglob("*.py")]
    said = {}
    for file in files:
        if file.parent.name != "results":
            # A line of a table is a setting of the paper's.
            lines = [line for line in file.read_text().splitlines() if not line.startswith("| ")]
            text = " ".join(" ".join(lines).split())
            said[file.name] = re.findall(
                r"JEM\W[^.]{0,40}\b0\.5 to (\d+)|0\.5 to (\d+) \w* ?\w* ?for JEM", text
            )
    ends = {end for pairs in said.values() for pair in pairs for end in pair if end}
    assert ends == {"4"}
    assert {name for name, pairs in said.items() if pairs} >= {"beta.md", "strength.py"}
