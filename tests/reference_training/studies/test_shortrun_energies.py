"""Figures 12 to 14 against rows written by hand, plain Python, and chains in closed form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebmguard.errors import ConfigError
from ebmguard.reference_training.studies import shortrun_energies as module
from ebmguard.reference_training.studies.command import find
from tests.reference_training.parts import Function, Quadratic, tiny_run
from tests.reference_training.studies.small import assert_no_text_on_text, study_of, write_rows

# -- Figure 12 --------------------------------------------------------------------------------


def rows(gaps: Any) -> dict[str, list[float]]:
    """Rows whose gaps are these; every number is another one."""
    found = {"f_pos/mean": [1 + float(gap) for gap in gaps], "f_neg/mean": [1.0 for _ in gaps]}
    starts = {"grad_scale": 0.5, "ess": 0.7, "ref/grad_scale": 0.1, "ref/ess": 0.2}
    return found | {name: [x + i / 1000 for i in range(len(gaps))] for name, x in starts.items()}


def run_of(path: Path, beta_star: float, gaps: Any, **settings: Any) -> Any:
    write_rows(path, rows(gaps))
    return tiny_run(path, beta_star=beta_star, **settings)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    write_rows(tmp_path / "empty", {"f_pos/mean": []})
    for name in ("none", "empty"):
        with pytest.raises(ConfigError, match=rf"{name}/metrics\.jsonl has no rows"):
            study_of("12", tiny_run(tmp_path / name))
    run = run_of(tmp_path / "x", 1.0, [1.0])
    with pytest.raises(ConfigError, match="leave --count out"):
        study_of("12", run, count=3)
    other = run_of(tmp_path / "y", 1.0, [1.0], image_size=4)
    with pytest.raises(ConfigError, match="digits, 1x4x4"):
        study_of("12", run, other)


# -- Figures 13 and 14 ------------------------------------------------------------------------


def test_what_is_not_finite_is_counted_left_out_and_has_no_histogram():
    data = np.array([0.0, 1.0, 2.0])
    found = module.separation(data, np.array([1.0, math.nan, 3.0, -math.inf]))
    assert (found["mean"], found["std"], found["gap"], found["not_finite"]) == (2, 1, -1, 2)
    assert found["above"] == pytest.approx((1.5 + 3) / 6)
    lost = module.separation(data, np.array([math.nan, math.inf]))
    assert all(math.isnan(lost[name]) for name in ("mean", "std", "above", "gap"))
    assert lost["not_finite"] == 2
    frame = study_of("13", tiny_run(network=Quadratic(math.nan)), count=50)
    (figure,) = find("13").drawn(frame).values()
    assert figure.axes[0].texts[0].get_text() == "f is finite nowhere on data"


def test_negatives_are_the_chain_in_closed_form():
    """Of f = -a/2 |x - m|² every pixel is an AR(1) process, and f is a sum of 64 squares."""
    a, m, steps, beta_star = 0.3, 0.2, 4, 4000.0
    given: dict[str, Any] = {"beta_star": beta_star, "sgld_steps": steps, "train_images": 1400}
    run = tiny_run(network=Quadratic(a, m), data_noise=0.5, **given)
    found = study_of("14", run, count=1400)
    assert found["step_size"].tolist() == [1, 4]
    for factor, mean in found[["step_size", "mean"]].to_numpy():
        shrink = (1 - factor * (1 - beta_star / 20_000) * a) ** 2
        square = 1 / 3 + m**2  # of a pixel of U(-1, 1), from m
        for _ in range(steps):
            square = shrink * square + factor * 0.01**2
        assert mean == pytest.approx(-a / 2 * 64 * square, rel=0.01)
    expected = (found["mean"][1] - found["mean"][0]) / found["data_std"][0]
    assert found["rise"].tolist() == [None, pytest.approx(expected)]
    # Data have the noise of the training, which takes 64 times its variance on average.
    squares = (run.data.scale(run.data.train_x).double() - m).square().flatten(1).sum(1)
    data_mean = -a / 2 * (squares.mean().item() + 64 * 0.25)
    assert found["data_mean"][0] == pytest.approx(data_mean, rel=0.01)


def test_chains_that_are_lost_are_counted_and_the_rest_is_drawn():
    # Up |x|⁴ chains leave for infinity, some sooner than others.
    exploding = Function(lambda x: x.square().sum(1).square() * 0.003)
    run = tiny_run(network=exploding, sgld_steps=6, train_images=1000)
    found = study_of("14", run, count=200)
    lost, all_lost = found["not_finite"]
    assert 0 < lost < all_lost == 200
    assert math.isnan(found["mean"][1])
    assert math.isnan(found["rise"][1])
    (figure,) = find("14").drawn(found).values()
    (axes,) = figure.axes
    assert "P(f⁻ > f⁺) = undefined" in axes.get_xlabel()
    assert "200 of 200 not finite" in axes.get_xlabel()
    # The others are on their way, at up to 1e38.
    assert axes.get_xscale() == "asinh"
    assert len(axes.get_xticks()) <= 8
    sums = [patch.get_data().values.sum() for patch in axes.patches]
    assert sums == pytest.approx([100, 100, 0])
    assert_no_text_on_text(figure)
