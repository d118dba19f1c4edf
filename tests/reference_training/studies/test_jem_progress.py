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
from tests.reference_training.jem.fabricate import write_run
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
