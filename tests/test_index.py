"""The index of claims: rows are whole, verdicts no bolder than their numbers; pages are short."""

from __future__ import annotations

import ast
import csv
import importlib
import importlib.util
import inspect
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
import tyro
from scipy.stats import binomtest

from ebmguard import cli
from tests.test_docs import anchors

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "index.md"
CLAIMS = PAGE.with_name("claims.csv")
HEAD = ["claim", "verdict", "ours", "theirs", "seeds", "command"]
VERDICT = re.compile(r"\*\*(holds|holds in part|not seen|not run)\*\*")
COMMAND = re.compile(r"`([^`]+)`")
GONE = re.compile(r"`python -m ([\w.]+)` of commit ([0-9a-f]{7,})")
"""A study that is no longer here, and the commit that still has it."""
RATE = re.compile(r"(?<![\d.,])(\d+) of (\d+)\b(?:\]\([^)]*\))?(?: \((\d\.\d\d) to (\d\.\d\d)\))?")
NUMBER = "none|one|two|three|four|five|six|seven|eight|nine|ten"
IN_WORDS = re.compile(rf"\b({NUMBER}|all)( \w+)? of (\d+|{NUMBER})\b")


with CLAIMS.open(encoding="utf-8", newline="") as opened:
    ROWS = list(csv.DictReader(opened))
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = sorted(
    {x.strip("`") for x in (row["command"] for row in ROWS) if "`" in x and not GONE.match(x)}
)


def problem(row: dict[str, str]) -> str:
    """What is wrong with a row; empty where nothing is."""
    if list(row) != HEAD and list(row) != ["section", *HEAD]:
        return "other columns"
    verdict = VERDICT.match(row["verdict"])
    has_command = COMMAND.fullmatch(row["command"]) or GONE.fullmatch(row["command"])
    is_open = row["command"] == "none" and row["verdict"].startswith("**not run**")
    if not row["claim"] or not row["theirs"] or not (has_command or is_open):
        return "a claim, a command or the paper's side is missing"
    if not verdict:
        return "no verdict"
    if verdict[1] == "not run":
        after = row["verdict"][verdict.end() :]
        return "" if re.match(r"(:| with) \w", after) else "does not say why it was not run"
    return "" if row["ours"] and row["seeds"] else "a verdict without a number or its seeds"


def too_bold(row: dict[str, str]) -> str:
    """Why a verdict says more than its numbers; empty where it does not.

    "Holds" takes three seeds or an exact argument, and a rate its 95% interval (Clopper-Pearson).
    """
    verdict = VERDICT.match(row["verdict"])
    if verdict and verdict[1] == "not run":
        return ""
    seeds = [int(count) for count in re.findall(r"\d+", row["seeds"])]
    if verdict and verdict[1] == "holds" and "exact" not in row["seeds"] and min(seeds) < 3:
        return "holds on fewer than three seeds"
    if in_words := IN_WORDS.search(row["ours"]):
        return f"a rate in words has no interval: {in_words[0]}"
    for k, n, *said in RATE.findall(row["ours"]):
        interval = binomtest(int(k), int(n)).proportion_ci()
        if said != (exact := [f"{interval.low:.2f}", f"{interval.high:.2f}"]):
            return f"{k} of {n} without ({exact[0]} to {exact[1]})"
    return ""


@pytest.mark.parametrize("check", [problem, too_bold])
def test_rows_are_whole_and_no_bolder_than_their_numbers(check):
    assert {row["claim"]: said for row in ROWS if (said := check(row))} == {}


def test_the_page_counts_the_rows():
    found = Counter((row["section"], *VERDICT.findall(row["verdict"])[:1]) for row in ROWS)
    verdicts = ("holds", "holds in part", "not seen", "not run")
    for section in {row["section"] for row in ROWS}:
        counts = " | ".join(str(found[section, verdict]) for verdict in verdicts)
        assert f"| {section} | {counts} |" in TEXT
    sums = [sum(n for (_, own), n in found.items() if own == verdict) for verdict in verdicts]
    assert [int(n) for n in re.findall(r"\b\d+\b", TEXT.split("\n\n")[1])][:5] == [len(ROWS), *sums]


def test_links_of_the_rows_lead_somewhere():
    for link in re.findall(r"\]\(([^)\s]+)\)", CLAIMS.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        assert (PAGE.parent / path).is_file(), link
        assert not anchor or anchor in anchors(PAGE.parent / path), link


PAGES = sorted(PAGE.parents[1].rglob("*.md"))
MOST_PROSE = {
    **dict.fromkeys(PAGE.parent.glob("*.md"), 800),
    **{PAGE.parents[1] / f"{page}.md": 1200 for page in ("bism", "shortrun", "toys", "training")},
}


def words(text: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in text.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_short_and_results_come_first_in_two_sentences(page):
    text = page.read_text(encoding="utf-8")
    assert words(text) <= 1500  # tables and code with the rest
    prose = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    assert words(prose) <= MOST_PROSE.get(page, 1500)
    if page.parent == PAGE.parent:
        opening = " ".join(text.split("\n\n")[1].split())
        sentences = len(re.findall(r"(?<!Eq)[.?!](?= |$)", opening))
        told = re.fullmatch(r"[^|#`<\[].*\.", opening)
        assert told, opening
        assert sentences <= 2, opening
        assert "TODO" not in opening


def is_a_command(words: list[str]) -> bool:
    """Whether `ebmguard` takes them: parsed in full, and nothing run."""
    found, taken = cli.find(words)
    if len(found) != 1 or taken < len(found[0]):
        return False
    taken -= cli.ALTERNATIVES in found[0][-1]
    try:
        tyro.cli(cli.load(cli.COMMANDS[found[0]].config), args=words[taken:])
    except SystemExit:
        return False
    return True


def is_a_module(words: list[str]) -> bool:
    """Whether `python -m` finds it, it can be imported, and it or what it uses has the options."""
    spec = importlib.util.find_spec(words[0])
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{words[0]}.__main__")
    if spec is None or spec.origin is None:
        return False
    module = importlib.import_module(spec.name)
    used = {getattr(each, "__module__", "") for each in vars(module).values()}
    own = [sys.modules[name] for name in used if name.startswith("benchmarks.")]
    source = "".join(map(inspect.getsource, [module, *own]))
    return all(f'"{word}"' in source for word in words[1:] if word.startswith("-"))


def is_a_target(words: list[str]) -> bool:
    """Whether the Makefile has it, and uses the variables that are set."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    used = all(f"$({word.partition('=')[0]})" in text for word in words[1:])
    return used and re.search(rf"^{words[0]}:", text, re.MULTILINE) is not None


def is_a_test(words: list[str]) -> bool:
    path, _, name = words[0].partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return not name or name in functions


def parses(command: str) -> bool:
    """Whether the words name something that is there, with options that it takes."""
    for start, check in (
        ("ebmguard ", is_a_command),
        ("python -m ", is_a_module),
        ("pytest ", is_a_test),
        ("make ", is_a_target),
    ):
        if command.startswith(start):
            return check(shlex.split(command.removeprefix(start)))
    return False


def test_commands_are_there():
    assert [command for command in COMMANDS if not parses(command)] == []


def test_the_manual_stays_short_and_each_page_says_for_whom_it_is():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = config[config.index("\nnav:") : config.index("  - Reference trainers:")]
    manual = [PAGE.parents[1] / name for name in re.findall(r"[\w/-]+\.md", nav)]
    assert len(manual) > 20
    assert sum(words(page.read_text(encoding="utf-8")) for page in manual) <= 20_000
    for page in manual[1:]:  # each begins by saying whom it is for
        assert re.match(r"(---\n.*?---\n)?# [^\n]+\n\nFor ", page.read_text("utf-8"), re.DOTALL), (
            page
        )
