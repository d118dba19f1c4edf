"""Scores of runs and of their seeds, against the same said in other words."""

from __future__ import annotations

import math
import statistics
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ebmguard.reference_training.jem.runs import JemRun, evaluated, load_run
from ebmguard.reference_training.studies import jem_tables
from ebmguard.reference_training.studies.jem_tables import (
    FINAL,
    LOST,
    MEASURE,
    UNFINISHED,
    best_beta_star,
    describe,
    over_seeds,
    setups,
)
from tests.reference_training.jem.fabricate import OWN, write_run

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
    own = ("1", 0.0, 0, "float32", config["settings"], {}, evaluated(evaluations))
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
