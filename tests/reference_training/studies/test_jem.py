"""Figures and tables of JEM runs: what they take, what they show, and their scores."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.scale import SymmetricalLogTransform

from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.runs import JemRun, evaluated, find_runs
from ebmguard.reference_training.studies import jem_tables
from ebmguard.reference_training.studies.command import find, told
from ebmguard.reference_training.studies.config import JemFigure
from ebmguard.reference_training.studies.jem_figures import (
    LINTHRESH,
    bundle,
)
from ebmguard.reference_training.studies.jem_tables import (
    best_beta_star,
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
