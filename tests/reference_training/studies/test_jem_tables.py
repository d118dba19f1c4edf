"""Scores of runs against the same said in other words, and the page as a reader sees it."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebmguard import cli
from ebmguard.errors import ConfigError, DiskError
from ebmguard.reference_training.jem.paper import TABLE_1
from ebmguard.reference_training.jem.runs import JemRun, evaluated, find_runs, load_run
from ebmguard.reference_training.studies import jem_tables
from ebmguard.reference_training.studies.config import TableConfig
from ebmguard.reference_training.studies.jem_tables import (
    FINAL,
    LOST,
    MEASURE,
    UNFINISHED,
    best_beta_star,
    describe,
    over_seeds,
    page,
    run,
    setups,
)
from tests.reference_training.jem.fabricate import OWN, made_up_evaluation, write_run

SMALL: dict[str, Any] = {"iterations": 30, "steps_per_epoch": 10, "depth": 10, "width": 1}

number = st.one_of(st.floats(0, 1), st.just(math.nan))
maybe = st.one_of(st.none(), number)
NAMES = ("valid_accuracy", "test_accuracy", "buffer_is", "buffer_fid")


def run_with(rows, *, fixed=True):
    """A finished run with evaluations of these four numbers."""
    looks = {"buffer_samples": 10_000, "features_comparable": True, "features_fixed": fixed}
    evaluations = [
        {"step": step, "epoch": step, **dict(zip(NAMES, row, strict=True)), **looks}
        | {"features": None if row[2] is None and row[3] is None else "one"}
        for step, row in enumerate(rows)
    ]
    config = {"beta_star": 0.0, "settings": {"iterations": 10}}
    own: tuple[Any, ...] = ("1", 0.0, 0, "float32", config["settings"], {}, evaluated(evaluations))
    return JemRun(None, config, *own, None, 10, None)


def scores(run):
    """The three values, None where there is none."""
    return [score.values[0] if score.values else None for score in jem_tables.scores(run).values()]


def marks(run):
    return [score.marks for score in jem_tables.scores(run).values()]


@settings(max_examples=30)
@given(st.lists(st.tuples(maybe, st.floats(0, 1), maybe, maybe), max_size=8))
def test_the_best_of_a_run(rows):
    run = run_with(rows)
    accuracy, *found = scores(run)
    known = [row for row in rows if row[0] is not None and not math.isnan(row[0])]
    if known:
        assert accuracy == max(known, key=lambda row: row[0])[1]  # the first of equals
    else:
        assert accuracy == (rows[-1][1] if rows else None)
    assert (FINAL in marks(run)[0]) == bool(rows and not known)
    for value, place, pick in zip(found, (2, 3), (max, min), strict=True):
        defined = [
            row[place] for row in rows if row[place] is not None and row[place] == row[place]
        ]
        assert value == (pick(defined) if defined else None)


def test_scores_by_features_that_change_are_the_last():
    rows = [
        (0.1, 0.1, 1.0, 0.2),
        (0.5, 0.5, 3.0, 40.0),
        (0.6, 0.6, 2.0, 30.0),
        (0.7, 0.7, None, None),
    ]
    assert scores(run_with(rows, fixed=False)) == [0.7, 2.0, 30.0]
    assert scores(run_with(rows)) == [0.7, 3.0, 0.2]


@settings(max_examples=30)
@given(
    st.dictionaries(
        st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]),
        st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=3),
    )
)
def test_the_best_beta_star_is_not_zero_and_has_the_best_median(table):
    runs = {
        beta_star: [run_with([(0.5, v and v / 10, v and float(v), v and float(v))]) for v in values]
        for beta_star, values in sorted(table.items())
    }
    known = {
        beta_star: statistics.median([v for v in values if v is not None])
        for beta_star, values in table.items()
        if beta_star and any(v is not None for v in values)
    }
    for metric, pick in (("inception", max), ("fid", min)):
        best = best_beta_star(metric, runs)
        if known:
            assert known[best] == pick(known.values())
        else:
            assert best is None


def test_marks_say_what_a_number_is_not(tmp_path):
    def evaluate(step, epoch, beta_star, lost):
        return {"step": step, "epoch": epoch, "test_accuracy": 0.5, "buffer_is": 2.0, **OWN}

    def load(name, **settings):
        return load_run(write_run(tmp_path / name, **SMALL, **settings))

    good, lost = load("good"), load("lost", seed=1, diverged_at=12)
    part, bare = load("part", finished=False, steps=12), load("bare", evaluate=evaluate)
    assert marks(good) == [""] * 3
    assert marks(lost) == [LOST] * 3
    assert marks(part) == [UNFINISHED] * 3
    assert marks(bare) == [FINAL, MEASURE, MEASURE]
    # One seed suffices; marks come once, in the legend's order.
    together = over_seeds("accuracy", [good, lost, part, bare, lost])
    assert together.marks == UNFINISHED + LOST + FINAL
    assert str(over_seeds("fid", [bare])) == "no value" + MEASURE


def test_setups_part_runs_by_their_own_values_and_arithmetic(tmp_path):
    def load(name, **settings):
        return load_run(write_run(tmp_path / name, finished=False, steps=0, **settings))

    tiny = {"depth": 10, "width": 1}
    groups = setups(
        [
            load("a", **tiny, lr=0.001),
            load("b", scenario="6", **tiny, lr=0.001),
            load("c", **tiny),
            load("d", beta_star=2.0, seed=1),
            load("e", scenario="3"),
            load("f", precision="bfloat16"),
        ]
    )
    names = {name: [run.path.name for run in group] for name, group in groups.items()}
    assert names == {"A": ["d", "e"], "B": ["f"], "C ≠": ["a", "b"], "D ≠": ["c"]}
    assert describe(groups["A"]) == "size and settings as published"
    assert describe(groups["B"]) == "size and settings as published; in bfloat16"
    # The published learning rate of scenario 6 is another one.
    assert describe(groups["C ≠"]) == (
        "depth 10, not 28; width 1, not 10; lr 0.001, not 0.0001; lr 0.001, not 2.5e-05"
    )


def tables(folder):
    """Title of each section of the page -> its table's rows, by a parser that knows Markdown."""
    found = {}
    for section in page(find_runs([folder])).split("## ")[1:]:
        title, *lines = section.splitlines()
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
        if rows:
            assert all(set(cell) <= {"-", ":"} for cell in rows.pop(1))
            found[title] = rows
    return found


def test_tables_put_ours_beside_the_papers(tmp_path):
    def published(name, beta_star, **options):
        """At the published size, with few lines."""
        write_run(tmp_path / name, beta_star=beta_star, every=20_000, **options)

    for beta_star in (0.0, 0.5, 4.0):
        published(f"6-{beta_star:g}", beta_star, scenario="6")
    assert not any(name.startswith("Table 1") for name in tables(tmp_path))
    published("zero", 0.0, diverged_at=40_000)
    published("half", 0.5)
    published("part", 10.0, finished=False, steps=80_000)
    found = tables(tmp_path)
    head, *rows = found["Table 1, setup A: scenario 1 by β*"]
    assert head[3:] == ["ACC (%) ours", "paper", "IS ours", "paper", "FID ours", "paper"]
    by_strength = {row[0]: row for row in rows}
    assert list(by_strength) == [f"{beta_star:g}" for beta_star in TABLE_1]
    assert by_strength["0.5"][4::2] == ["91.2", "8.6", "38.9"]
    assert by_strength["0.5"][1] == "2.5e-05"
    assert by_strength["4"][3::2] == ["not run"] * 3
    # Of the epochs before the divergence, and of those so far.
    last = made_up_evaluation(0, 40_000 // 703, 0.0, lost=False)
    assert by_strength["0"][3] == f"{100 * last['test_accuracy']:.1f}†"
    assert by_strength["10"][3].endswith("…")
    (rows,) = [rows[1:] for name, rows in found.items() if name.startswith("Table 2")]
    assert len(rows) == 14
    paper, ours = rows[10:12]
    assert (paper[0], paper[2], ours[2]) == ("6", "paper", "ours")
    assert paper[4:] == ["36.2", "2.9", "154.1", "92.4 (4)", "8.0 (0.5)", "41.5 (0.5)"]
    # As made up: accuracy rises with β*, the other two get worse.
    assert [cell.split(" ")[1] for cell in ours[7:]] == ["(4)", "(0.5)", "(0.5)"]
    assert rows[3][4:] == ["not run"] * 6


def test_the_command_prints_and_writes_the_same_page(tmp_path, capsys):
    path = write_run(tmp_path / "x", **SMALL)
    out = tmp_path / "page.md"
    assert cli.main(["table", "jem", str(path), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert out.read_text() == printed
    assert "| `x`" in printed
    with pytest.raises(ConfigError, match="name run folders"):
        run(TableConfig(runs=()))
    with pytest.raises(DiskError, match=r"page\.md could not be written"):
        run(TableConfig(runs=(path,), out=tmp_path / "no" / "page.md"))
