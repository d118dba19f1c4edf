"""What the pictures of a training show: curves, losses, and text that does not lie on text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from ebmguard.errors import ConfigError
from ebmguard.reference_training.jem.runs import find_runs
from ebmguard.reference_training.plots.canvas import CONTRASTS
from ebmguard.reference_training.studies.command import find, told
from ebmguard.reference_training.studies.config import JemFigure
from ebmguard.reference_training.studies.jem_progress import bundle
from tests.reference_training.jem.fabricate import OWN, made_up_evaluation, write_run
from tests.reference_training.pictures import assert_no_text_on_text

SMALL: dict[str, Any] = {
    "iterations": 120,
    "steps_per_epoch": 10,
    "depth": 10,
    "width": 1,
    "train_images": 640,
}


def made(name: Any, runs: Any) -> tuple[Any, str]:
    """The picture of a figure, and its numbers as text."""
    study = find(name)
    frame = study.numbers(runs, JemFigure(name=name, runs=()))
    (figure,) = study.drawn(frame).values()
    return figure, told(study, frame)


def lines_of(axes, colour):
    """The curves of a colour: the lines whose data are not a vertical or a marker."""
    lines = [line for line in axes.lines if to_hex(line.get_color()) == colour.lower()]
    return [line for line in lines if line.get_linestyle() == "-"]


def test_the_four_panels(tmp_path):
    for beta_star in (0.0, 2.0):
        lost = 70 if beta_star == 0 else None
        write_run(tmp_path / f"{beta_star:g}", beta_star=beta_star, diverged_at=lost, **SMALL)
    runs = find_runs([tmp_path])
    figure, _ = made("16", runs)
    gap, accuracy, inception, fid = figure.axes
    assert gap.get_yscale() == "symlog"
    assert [axes.get_ylabel() for axes in figure.axes[1:]] == ["test accuracy (%)", "IS", "FID"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"epoch"}
    for run, colour in zip(runs, CONTRASTS, strict=False):
        for axes, value in (
            (accuracy, lambda row: 100 * row.test_accuracy),
            (inception, lambda row: row.inception),
            (fid, lambda row: row.fid),
        ):
            (line,) = lines_of(axes, colour)
            np.testing.assert_allclose(line.get_xdata(), [r.step / 10 for r in run.evaluations])
            np.testing.assert_allclose(line.get_ydata(), [value(r) for r in run.evaluations])
    # 120 steps: three values a point.
    (line,) = lines_of(gap, CONTRASTS[1])
    assert len(line.get_xdata()) == 40
    assert "each point 3 values" in gap.get_title()
    assert "NOT the published setup: depth 10" in " ".join(t.get_text() for t in figure.texts)
    assert_no_text_on_text(figure)


def test_the_gap_is_bundled_on_the_axis(tmp_path):
    gaps = np.random.default_rng(0).standard_normal(120) * 10.0 ** np.arange(-3, 3).repeat(20)
    write_run(tmp_path / "x", beta_star=1, gaps=gaps, **SMALL)
    figure, _ = made("16", find_runs([tmp_path]))
    expected = bundle(np.arange(120), gaps, 3)
    (line,) = lines_of(figure.axes[0], CONTRASTS[0])
    np.testing.assert_allclose(line.get_ydata(), expected["centre"])
    np.testing.assert_allclose(line.get_xdata(), expected["steps"] / 10)
    (band,) = figure.axes[0].collections
    corners = band.get_paths()[0].vertices
    assert corners[:, 1].min() == expected["low"].min()
    assert corners[:, 1].max() == expected["high"].max()


def test_a_lost_run_is_marked_and_its_gaps_are_counted(tmp_path):
    gaps = np.zeros(120)
    gaps[90:] = math.nan
    gaps[80] = math.inf
    write_run(tmp_path / "stopped", gaps=gaps, finished=False, **SMALL)
    runs = find_runs([tmp_path])
    figure, text = made("16", runs)
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
    cells = [cell.strip() for cell in text.splitlines()[2].split("|")]
    assert (cells[6], cells[10]) == ("80", "31")
    assert_no_text_on_text(figure)


def test_a_finite_blow_up_ends_the_axis(tmp_path):
    gaps = np.full(120, 0.01)
    gaps[60:] = 1e19
    write_run(tmp_path / "x", gaps=gaps, diverged_at=60, steps=120, **SMALL)
    figure, _ = made("16", find_runs([tmp_path]))
    bottom, top = figure.axes[0].get_ylim()
    assert top == 1e4
    assert bottom <= -0.1
    assert "the axis ends at ±10000" in figure.axes[0].get_title()


def test_seeds_share_a_colour_and_are_counted(tmp_path):
    for seed in range(3):
        lost = 60 if seed == 1 else None
        write_run(tmp_path / f"{seed}", seed=seed, diverged_at=lost, scenario="6", **SMALL)
    figure, text = made("24", find_runs([tmp_path]))
    assert len(lines_of(figure.axes[1], CONTRASTS[0])) == 3
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[0] == "β* = 0 (3 seeds, 1 lost)"
    assert "SGLD step size × 4" in figure.texts[0].get_text()
    assert "Paper, scenario 6 (SGLD step size × 4): β* = 0 diverged by the third epoch." in text


def test_figure_3_is_the_gap_and_the_inception_score(tmp_path):
    write_run(tmp_path / "x", **SMALL)
    figure, _ = made("3", find_runs([tmp_path]))
    assert [axes.get_ylabel() for axes in figure.axes][1:] == ["IS"]
    assert_no_text_on_text(figure)


def test_features_other_than_inceptions_are_named(tmp_path):
    def evaluate(*words):
        return made_up_evaluation(*words) | OWN | {"buffer_samples": 500}

    write_run(tmp_path / "x", evaluate=evaluate, **SMALL)
    figure, _ = made("16", find_runs([tmp_path]))
    for axes in figure.axes[2:]:
        words = axes.get_title().replace("\n", " ")
        assert words == f"features (≠ the paper’s): {OWN['features']}, 500 samples"

    # However many and however long they are, they leave room for the panels above.
    def other(*words):
        return evaluate(*words) | {"features": "the classifier of the run " + "long/" * 20}

    write_run(tmp_path / "y", seed=1, evaluate=other, **SMALL)
    write_run(tmp_path / "z", seed=2, **SMALL)
    figure, _ = made("16", find_runs([tmp_path]))
    assert figure.axes[2].get_title().endswith("…")
    assert_no_text_on_text(figure)


def test_values_that_are_all_but_equal_are_drawn_so(tmp_path):
    def evaluate(step, *others):
        return made_up_evaluation(step, *others) | {"buffer_is": 1.000014 + 1e-9 * step}

    write_run(tmp_path / "x", evaluate=evaluate, **{**SMALL, "iterations": 30})
    figure, _ = made("16", find_runs([tmp_path]))
    bottom, top = figure.axes[2].get_ylim()
    assert bottom < 1 < top
    assert top - bottom == pytest.approx(0.02, rel=0.01)
    assert figure.axes[0].get_title() == "every value"
    assert_no_text_on_text(figure)


def test_a_lost_runs_fid_leaves_room_for_the_others(tmp_path):
    def evaluate(*words):
        row = made_up_evaluation(*words)
        return row | {"buffer_fid": 1e14} if words[-1] else row

    write_run(tmp_path / "x", evaluate=evaluate, diverged_at=60, **SMALL)
    write_run(tmp_path / "y", beta_star=2, **SMALL)
    figure, _ = made("16", find_runs([tmp_path]))
    assert [axes.get_yscale() for axes in figure.axes[1:]] == ["linear", "linear", "log"]
    bottom, top = figure.axes[3].get_ylim()
    assert 0 < bottom < 400
    assert top > 1e14
    assert_no_text_on_text(figure)


def test_a_panel_without_numbers_says_so(tmp_path):
    def evaluate(step, epoch, beta_star, lost):
        return {"step": step, "epoch": epoch, "test_accuracy": 0.5, "valid_accuracy": None}

    write_run(tmp_path / "x", evaluate=evaluate, **SMALL)
    figure, text = made("16", find_runs([tmp_path]))
    assert [t.get_text() for t in figure.axes[3].texts] == ["no run has it: FID"]
    assert "50.0§" in text


def test_figure_3_and_table_of_a_run_without_evaluations(tmp_path):
    path = write_run(tmp_path / "x", finished=False, steps=50, evaluations=[], **SMALL)
    figure, text = made("16", find_runs([path]))
    assert {axes.get_xlabel() for axes in figure.axes} == {"epoch"}
    assert "| x " in text


def test_all_published_strengths_fit(tmp_path):
    for beta_star in (0.0, 0.5, 1.0, 2.0, 4.0, 10.0):
        write_run(tmp_path / f"{beta_star:g}", beta_star=beta_star, **SMALL)
    figure, text = made("16", find_runs([tmp_path]))
    assert_no_text_on_text(figure)
    assert text.split("\n\n")[0].count("\n") == 1 + 6
    for extra in (20.0, 30.0, 40.0):
        write_run(tmp_path / f"{extra:g}", beta_star=extra, **SMALL)
    with pytest.raises(ConfigError, match="room for 8 β"):
        made("16", find_runs([tmp_path]))


def test_what_is_missing_names_the_command_that_makes_it(tmp_path):
    path = write_run(tmp_path / "one", **SMALL)
    with pytest.raises(ConfigError, match="--scenario 3 --beta-star 0"):
        made("21", find_runs([path]))
    write_run(tmp_path / "two", **{**SMALL, "width": 2})
    with pytest.raises(ConfigError, match="2 different setups"):
        made("16", find_runs([tmp_path]))
    empty = write_run(tmp_path / "empty" / "x", finished=False, steps=0, **SMALL)
    with pytest.raises(ConfigError, match="--resume"):
        made("16", find_runs([empty]))


def test_the_table_has_the_ends_of_the_gap(tmp_path):
    gaps = np.full(120, 0.25)
    gaps[:3] = 0.5
    gaps[-3:] = math.nan
    write_run(tmp_path / "x", gaps=gaps, diverged_at=117, steps=120, scenario="2", **SMALL)
    head, _, row, *_ = made("20", find_runs([tmp_path]))[1].splitlines()
    cells = dict(zip(*([c.strip() for c in line.split("|")] for line in (head, row)), strict=True))
    assert (cells["gap, first"], cells["gap, last"]) == ("0.5", "0.25")
    assert (cells["lost at"], cells["epoch"], cells["not finite"]) == ("117", "11.7", "3")
