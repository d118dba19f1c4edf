"""JEM figures: which runs and samples they take, what they show, and text that lies on no text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.scale import SymmetricalLogTransform

from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.runs import find_runs, load_run
from ebmguard.reference_training.plots.canvas import CONTRASTS
from ebmguard.reference_training.studies.command import find, told
from ebmguard.reference_training.studies.config import JemFigure
from ebmguard.reference_training.studies.jem_figures import (
    LINTHRESH,
    bundle,
    bundle_size,
    chosen_steps,
)
from tests.reference_training.jem.fabricate import write_run
from tests.reference_training.pictures import assert_no_text_on_text

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


@pytest.mark.parametrize(
    ("longest", "size"), [(140_600, 200), (8_000, 200), (7_999, 199), (600, 15), (30, 1), (0, 1)]
)
def test_short_runs_have_fewer_values_a_point(longest, size):
    assert bundle_size(longest) == size


def test_the_gap_is_bundled_on_the_axis(tmp_path):
    gaps = np.random.default_rng(0).standard_normal(120) * 10.0 ** np.arange(-3, 3).repeat(20)
    figure, (row,), _ = made("16", write_run(tmp_path / "x", beta_star=1, gaps=gaps, **SHORT))
    expected = bundle(np.arange(120), gaps, 3)
    axes = figure.axes[0]
    lines = [line for line in axes.lines if to_hex(line.get_color()) == CONTRASTS[0].lower()]
    (line,) = [line for line in lines if line.get_linestyle() == "-"]
    np.testing.assert_allclose(line.get_ydata(), expected["centre"])
    np.testing.assert_allclose(line.get_xdata(), expected["steps"] / 10)
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    assert corners[:, 1].min() == expected["low"].min()
    assert corners[:, 1].max() == expected["high"].max()
    ends = expected["centre"].iloc[[0, -1]]
    assert [row["gap, first"], row["gap, last"]] == [f"{end:.3g}" for end in ends]


def test_a_lost_run_is_marked_and_its_gaps_are_counted(tmp_path):
    gaps = np.zeros(120)
    gaps[90:] = math.nan
    gaps[80] = math.inf
    path = write_run(tmp_path / "stopped", gaps=gaps, finished=False, **SHORT)
    figure, (row,), _ = made("16", path)
    for axes in figure.axes:
        (vertical,) = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert list(vertical.get_xdata()) == [8.0, 8.0]
    (cross,) = [line for line in figure.axes[0].lines if line.get_marker() == "X"]
    assert list(cross.get_xdata()) == [8.0]
    (small,) = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    # Bundle 26 holds step 80; from bundle 30 on nothing is finite.
    assert len(small.get_xdata()) == 11
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["β* = 0 (lost, not over)", "lost", "gap not finite"]
    assert (row["lost at"], row["epoch"], row["not finite"]) == ("80", "8", "31")


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


def test_figure_4_is_of_epoch_107_or_the_latest(tmp_path):
    path = write_run(tmp_path / "x", beta_star=0.5, samples=(0, 900, 1060, 1090), **LONG)
    assert chosen_steps("4", load_run(path)) == ((1060,), "")
    early = write_run(tmp_path / "y", beta_star=0.5, samples=(0, 100, 300), **LONG)
    figure, (row,), words = made("4", early)
    assert row["step"] == "300"
    assert "the latest; epoch 107" in figure.get_suptitle()
    assert "\n\nthe latest; epoch 107 is not reached" in words


@pytest.mark.parametrize(
    ("stored", "steps", "note"),
    [
        ((300, 400, 500, 600), (400, 500), ""),
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


def test_the_table_has_the_gap_and_the_last_evaluation_and_the_published_size_comes_first(tmp_path):
    gaps = np.arange(2000.0)
    path = write_run(tmp_path / "x", beta_star=10, samples=(57,), gaps=gaps, **LONG)
    _, (row,), _ = made("19", path)
    assert (row["samples"], row["step"], row["gap"]) == ("epoch 5, iteration 7", "57", "57")
    stored = np.load(path / "samples" / "00000057.npy") / 127.5 - 1
    assert row["pixel mean"] == f"{stored.mean():.3g}"
    assert row["pixel std"] == f"{stored.std():.3g}"
    before = load_run(path).evaluations.iloc[5]
    assert before.step == 50
    assert (row["ACC (%)"], row["FID"]) == (f"{100 * before.accuracy:.1f}", f"{before.fid:.1f}")
    published = write_run(tmp_path / "y", beta_star=10, samples=(703,), seed=1, every=10_000)
    assert f"{published}: finished" in made("19", tmp_path)[2]
