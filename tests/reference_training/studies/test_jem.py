"""Figures and tables of JEM runs: what they take, what they show, and their scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.scale import SymmetricalLogTransform

from ebmguard import cli
from ebmguard.errors import ConfigError, DiskError
from ebmguard.reference_training.jem.runs import JemRun, evaluated, find_runs, load_run
from ebmguard.reference_training.studies import jem_tables
from ebmguard.reference_training.studies.command import find, told
from ebmguard.reference_training.studies.config import JemFigure, TableConfig
from ebmguard.reference_training.studies.jem_figures import (
    LINTHRESH,
    bundle,
    chosen_steps,
)
from ebmguard.reference_training.studies.jem_tables import (
    FINAL,
    describe,
    run,
    setups,
)
from tests.reference_training.jem.fabricate import write_run
from tests.reference_training.studies.small import assert_no_text_on_text

AXIS = SymmetricalLogTransform(base=10, linthresh=LINTHRESH, linscale=1)
anything = st.one_of(st.floats(-1e12, 1e12), st.sampled_from([math.nan, math.inf, -math.inf]))
TINY: dict[str, Any] = {"steps_per_epoch": 10, "depth": 10, "width": 1}
SHORT, LONG = TINY | {"iterations": 120, "train_images": 640}, TINY | {"iterations": 2000}


def made(name: Any, *folders: Any) -> tuple[Any, list[dict[str, str]], str]:
    """The picture of a figure of the runs in some folders; its table by row and head; its words."""
    study = find(name)
    frame = study.numbers(find_runs(folders), JemFigure(name=name, runs=()))
    (figure,) = study.drawn(frame).values()
    assert_no_text_on_text(figure)
    words = told(study, frame)
    lines = [line.split("|")[1:-1] for line in words.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line] for line in lines)
    return figure, [dict(zip(head, row, strict=True)) for row in rows], words


@given(st.lists(anything, max_size=40), st.integers(1, 12), st.integers(1, 3))
def test_bundles_are_those_of_a_loop(values, size, stride):
    steps = np.arange(len(values)) * stride
    found = bundle(steps, np.array(values, dtype=float), size)
    starts = range(0, len(values), size)
    assert len(found) == len(starts)
    for k, start in enumerate(starts):
        part = values[start : start + size]
        known = [value for value in part if math.isfinite(value)]
        row = found.loc[k]
        assert row["lost"] == len(part) - len(known)
        assert row["steps"] == pytest.approx(np.mean(steps[start : start + size]))
        if not known:
            assert row[["low", "high", "centre"]].isna().all()
            continue
        assert (row["low"], row["high"]) == (min(known), max(known))
        places = [float(AXIS.transform(np.array([value]))[0]) for value in known]
        expected = AXIS.inverted().transform(np.array([math.fsum(places) / len(places)]))
        assert row["centre"] == pytest.approx(float(expected[0]), rel=1e-6, abs=1e-6)


def test_which_runs_a_picture_of_progress_refuses(tmp_path):
    path = write_run(tmp_path / "one", **SHORT)
    with pytest.raises(ConfigError, match="--scenario 3 --beta-star 0"):
        made("21", path)
    write_run(tmp_path / "two", **{**SHORT, "width": 2})
    with pytest.raises(ConfigError, match="2 different setups"):
        made("16", tmp_path)
    many = [write_run(tmp_path / "many" / str(b), beta_star=b, **SHORT) for b in range(9)]
    with pytest.raises(ConfigError, match="9 β\\*, and the figure has room for 8"):
        made("16", *many)
    empty = write_run(tmp_path / "empty" / "x", finished=False, steps=0, **SHORT)
    assert made("16", empty)[1][0]["gap, first"] == "–"


@pytest.mark.parametrize(
    ("stored", "steps", "note"),
    [
        ((300, 400, 450, 500, 600), (450, 500), "50 iterations apart, not 100"),
        ((100, 500), (100, 500), "400 iterations apart, not 100"),
    ],
)
def test_figure_17_is_around_the_divergence(tmp_path, stored, steps, note):
    path = write_run(tmp_path / "x", diverged_at=460, samples=stored, **LONG)
    assert chosen_steps("17", load_run(path)) == (steps, note)


def test_figure_17_needs_a_run_that_was_lost_and_18_one_with_samples(tmp_path):
    write_run(tmp_path / "healthy", samples=(0, 100), **LONG)
    write_run(tmp_path / "other", beta_star=2, diverged_at=50, samples=(0, 100), **LONG)
    write_run(tmp_path / "late", diverged_at=460, samples=(500,), seed=1, **LONG)
    write_run(tmp_path / "early", diverged_at=460, samples=(400,), seed=2, **LONG)
    write_run(tmp_path / "half", beta_star=0.5, samples=(0,), **LONG)
    with pytest.raises(ConfigError, match=r"--scenario 1 --beta-star 0`, if it diverges"):
        made("17", tmp_path)
    for name, beta_star in (("18", "0.5"), ("19", "10")):
        with pytest.raises(
            ConfigError, match=f"samples at β\\* = {beta_star} of scenario 1, which"
        ):
            made(name, tmp_path)
    write_run(tmp_path / "good", diverged_at=460, samples=(400, 500), seed=3, **LONG)
    assert [row["step"] for row in made("17", tmp_path)[1]] == ["400", "500"]


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
    assert describe(groups["B"]) == "size and settings as published; in bfloat16"
    # The published learning rate of scenario 6 is another one.
    assert describe(groups["C ≠"]) == (
        "depth 10, not 28; width 1, not 10; lr 0.001, not 0.0001; lr 0.001, not 2.5e-05"
    )


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
