"""The lines of `ebmguard/tags.py` against the rows, rules, charts and pages that name tags."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard import Recovery, guard
from ebmguard.alerts import DEFAULT_RULES
from ebmguard.report.plots import CHARTS, MORE_CHARTS, note
from ebmguard.samplers import ReplayBuffer, sgld
from ebmguard.tags import REFERENCE, SECTIONS, TAGS, Tag, is_guard_tag
from tests.parts import Energy, Memory, take

ROOT = Path(__file__).parents[1]
PAGE, START = ROOT / "docs" / "diagnostics.md", ROOT / "docs" / "index.md"


def find(name: str) -> Tag | None:
    """The line of a number of a row, named without ``guard/``; None where there is none."""
    bare = name.removeprefix(REFERENCE)
    patterns = {re.escape(tag).replace("<name>", ".+"): tag for tag in TAGS}
    named = (tag for pattern, tag in patterns.items() if re.fullmatch(pattern, bare))
    found = TAGS.get(bare) or next((TAGS[tag] for tag in named), None)
    at_reference = {tag.name for tag in SECTIONS["Weights of the negatives"]}
    if found and bare != name and found.name not in at_reference:
        return None
    return found


class TellingBuffer(ReplayBuffer):
    def diagnostics(self) -> dict[str, Tensor]:
        return super().diagnostics() | {"own": torch.ones(())}


@cache
def written() -> frozenset[str]:
    """The tags of all rows of two runs with everything on, under a GradScaler and without."""
    return frozenset(tag for amp in (True, False) for tag in run(amp))


def run(amp: bool) -> set[str]:
    torch.manual_seed(0)
    f, memory, buffer = (
        Energy(),
        Memory(),
        TellingBuffer(64, (2,), reinit_rate=0.1, generator=torch.Generator()),
    )
    optimizer = torch.optim.Adam(f.parameters())
    scaler = torch.amp.GradScaler("cpu") if amp else None

    def stored(f: Energy) -> Tensor:
        x, rows = buffer.sample(32)
        x = sgld(f, x, steps=g.next_steps(), step_size=0.1, noise_std=0.1, clamp=(-1.0, 1.0))
        buffer.write(rows, x)
        return x

    g = guard(
        lambda pos, neg: neg.mean() - pos.mean(),
        stored,
        beta_star=0.5,
        output_scale=20.0,
        substeps=4,
        sinks=[memory],
        action="rollback",
        recovery=Recovery(),
    )
    g.attach(model=f, optimizer=optimizer, scaler=scaler, buffer=buffer, sgld_steps=2)
    g.attach(step_size=0.1, noise_std=0.1, clamp=(-1.0, 1.0))
    for _ in range(2):
        optimizer.zero_grad()
        labels = torch.arange(6) % 3, torch.arange(32) % 2
        loss = g.loss(f(torch.randn(6, 2)), f(g.sampler(f)), groups=labels)
        take(loss, optimizer, scaler)
    g.close()
    return {tag for _, row in memory.rows for tag in row} | {
        tag for _, samples in memory.histograms for tag in samples
    }


HISTOGRAMS = {"f_pos", "f_neg"}


def unknown(tags: Iterable[str]) -> set[str]:
    """Those without a line; that of any buffer's own numbers would pass a slip of the pen."""
    return {tag for tag in tags if find(tag) in (None, TAGS["buffer/<name>"])}


def test_every_number_of_a_row_has_its_line() -> None:
    assert written() >= HISTOGRAMS
    assert unknown(written() - HISTOGRAMS) == {"buffer/own"}


def test_every_number_of_a_row_is_the_guards_own() -> None:
    assert {name for name in written() if not is_guard_tag(name)} == set()
    histograms = {f"{name}/{part}" for name in HISTOGRAMS for part in ("", "q99")}
    later = {"buffer/mine", "ref/new", "optim"}
    elsewhere = {"guard/x", "_alerts/ERROR_x", "step", "run", "attempt", "abandoned"}
    assert all(map(is_guard_tag, histograms | later | elsewhere))


@pytest.mark.parametrize(
    "name", ["accuracy", "loss/classification", "Loss", "guarded", "ess2", "f_positive", "lr", "β"]
)
def test_other_names_are_a_trainers(name: str) -> None:
    assert not is_guard_tag(name)


def test_every_line_is_of_a_number_that_is_written() -> None:
    found = {tag.name for name in written() - HISTOGRAMS if (tag := find(name))}
    assert set(TAGS) - found == set()
    # Also each of those that have it at the reference exponent.
    at_reference = {tag for name, tag in TAGS.items() if find("ref/" + name)}
    assert {find(name) for name in written() if name.startswith("ref/")} == at_reference


def named(value: Any, field: str = "") -> Iterator[str]:
    """The tags in the fields of a rule."""
    if is_dataclass(value):
        for part in fields(value):
            yield from named(getattr(value, part.name), part.name)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from named(part, field)
    elif isinstance(value, str) and (field.endswith("tag") or field in ("counts", "numbers")):
        yield value


def test_the_rules_name_tags_that_exist() -> None:
    tags = {tag for rule in DEFAULT_RULES for tag in named(rule)}
    assert len(tags) > 15
    assert unknown(tags - {""}) == set()


def test_every_scale_is_a_chart() -> None:
    charts = {chart.name: chart for chart in (*CHARTS, *MORE_CHARTS)}
    assert {name for name, tag in TAGS.items() if tag.scale} == set(charts)
    assert all(chart.title and note(chart) for chart in charts.values())


def rows(section: tuple[Tag, ...]) -> list[str]:
    """The rows of a table of `docs/diagnostics.md`; lines that say the same share one."""
    texts = itertools.groupby(section, lambda tag: (tag.definition, tag.healthy, tag.tells))
    return [
        f"| {', '.join(f'`{tag.name}`' for tag in tags)} | {' | '.join(cells)} |"
        for cells, tags in texts
    ]


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_has_the_lines(title: str) -> None:
    _, found, rest = PAGE.read_text().partition(f"\n## {title}\n")
    assert found
    table = [line for line in rest.split("\n## ")[0].splitlines() if line.startswith("|")]
    head = ["| tag | definition | healthy | what it tells |", "|---|---|---|---|"]
    assert table == head + rows(SECTIONS[title])
