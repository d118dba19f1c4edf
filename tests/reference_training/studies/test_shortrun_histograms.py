"""Figures 13 and 14 against scipy, loops in plain Python, and a chain in closed form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu
from torch import nn

from ebmguard.reference_training.studies import shortrun_histograms as module
from ebmguard.reference_training.studies.command import find
from ebmguard.reference_training.studies.config import ShortRunFigure
from tests.reference_training.pictures import assert_no_text_on_text
from tests.reference_training.shortrun.parts import Quadratic, tiny_run

values = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=30)


def numbers(run: Any, name: Any = "14", count: int = 1400, seed: int = 0) -> pd.DataFrame:
    config = ShortRunFigure(name=name, runs=(), count=count, seed=seed)
    return module.energies([run], config)


@settings(max_examples=40)
@given(values, values)
def test_above_is_the_mann_whitney_statistic(data, negatives):
    x, y = np.array(data), np.array(negatives)
    expected = mannwhitneyu(y, x, method="asymptotic").statistic / (len(x) * len(y))
    assert module.separation(x, y)["above"] == pytest.approx(float(expected))


def test_overlap_of_what_is_known():
    x = np.random.default_rng(0).normal(size=2000)
    assert module.overlap(x, x) == pytest.approx(1)
    assert module.overlap(x, x + 20) == 0
    # Two uniform densities of which one half lies on the other.
    u = (np.arange(10_000) + 0.5) / 10_000
    assert module.overlap(u, u + 0.5) == pytest.approx(0.5, abs=0.03)
    # Far away or not, and however wide: the same half.
    assert module.overlap(u, np.where(u < 0.5, u * 2, 1000 * u)) == pytest.approx(0.5, abs=0.03)


def test_what_is_not_finite_is_counted_and_left_out():
    data = np.array([0.0, 1.0, 2.0])
    found = module.separation(data, np.array([1.0, math.nan, 3.0, -math.inf]))
    assert (found["mean"], found["std"], found["gap"], found["not_finite"]) == (2, 1, -1, 2)
    assert found["above"] == pytest.approx((1.5 + 3) / 6)
    lost = module.separation(data, np.array([math.nan, math.inf]))
    assert all(math.isnan(lost[name]) for name in ("mean", "std", "above", "overlap", "gap"))
    assert lost["not_finite"] == 2


@settings(max_examples=40)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.lists(st.floats(-1e6, 1e6)))
def test_bins_hold_every_value(data, negatives):
    x, y = np.array(data), np.array(negatives)
    bins = module.edges(x, y)
    assert (np.diff(bins) > 0).all()
    assert module.shares(x, bins).sum() == pytest.approx(1)
    assert module.shares(y, bins).sum() == pytest.approx(1 if negatives else 0)


def test_bins_are_of_one_width_unless_values_lie_far_from_the_data():
    x = np.random.default_rng(0).normal(size=500) * 0.3 + 7
    near, far = module.edges(x, x + 2), module.edges(x, x + 1e5)
    assert np.ptp(np.diff(near)) < 1e-12
    assert module.linear_range(x, x + 2) is None
    # A power of ten, of one to ten standard deviations.
    assert module.linear_range(x, x + 1e5) == 1
    # The data keep more than one bin: with bins of one width it would have been one of 50.
    assert (module.shares(x, far) > 0).sum() >= 5
    assert (near[0], near[-1]) == (x.min(), (x + 2).max())
    assert (far[0], far[-1]) == (x.min(), (x + 1e5).max())


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (-5, 200, [-1, 0, 1, 10, 100]),
        (-0.5, 3, [0, 1]),
        (-2e3, 9e9, [-1e2, 0, 1e2, 1e5, 1e8]),
        (-2, 1e38, [0, 1e6, 1e13, 1e20, 1e27, 1e34]),
    ],
)
def test_ticks_are_few_and_inside(low, high, ticks):
    assert module.symlog_ticks(low, high, 1.0) == pytest.approx(ticks)
    assert module.symlog_ticks(low / 100, high / 100, 0.01) == pytest.approx(
        [t / 100 for t in ticks]
    )


def test_negatives_are_the_chain_in_closed_form():
    """Of f = -a/2 |x - m|² every pixel is an AR(1) process, and f is a sum of 64 squares."""
    a, m, steps, beta_star = 0.3, 0.2, 4, 4000.0
    given: dict[str, Any] = {"beta_star": beta_star, "sgld_steps": steps, "train_images": 1400}
    found = numbers(tiny_run(network=Quadratic(a, m), **given))
    assert found["step_size"].tolist() == [1, 4]
    for factor, mean in found[["step_size", "mean"]].to_numpy():
        shrink = (1 - factor * (1 - beta_star / 20_000) * a) ** 2
        square = 1 / 3 + m**2  # of a pixel of U(-1, 1), from m
        for _ in range(steps):
            square = shrink * square + factor * 0.01**2
        assert mean == pytest.approx(-a / 2 * 64 * square, rel=0.01)
    expected = (found["mean"][1] - found["mean"][0]) / found["data_std"][0]
    assert found["rise"].tolist() == [None, pytest.approx(expected)]


@pytest.mark.parametrize(
    ("difference", "rise"), [(1.0, math.inf), (-1.0, -math.inf), (0, math.nan), (math.nan,) * 2]
)
def test_a_rise_over_data_that_do_not_vary(difference, rise):
    assert module.rise(difference, 0.0) == pytest.approx(rise, nan_ok=True)


def test_data_have_the_noise_of_the_training():
    run = tiny_run(network=Quadratic(2.0), data_noise=0.5, train_images=1400)
    found = numbers(run, "13").iloc[0]
    # f = -|x|², of which noise takes 64 times its variance on average.
    assert found["clean_mean"] - found["data_mean"] == pytest.approx(64 * 0.25, rel=0.02)
    squares = run.data.scale(run.data.train_x).double().square().flatten(1).sum(1)
    assert found["clean_mean"] == pytest.approx(-squares.mean().item(), rel=1e-5)


def test_fewer_images_than_asked_for_and_the_same_from_the_same_seed(monkeypatch):
    run = tiny_run(train_images=40)
    found, again = numbers(run, count=1000, seed=3), numbers(run, "13", count=1000, seed=3)
    assert len(found["f_pos"][0]) == len(found["f_neg"][0]) == found["images"][0] == 40
    np.testing.assert_array_equal(found["f_neg"][0], again["f_neg"][0])
    np.testing.assert_array_equal(found["f_pos"][0], again["f_pos"][0])
    other = numbers(run, "13", count=1000, seed=4)
    assert not np.array_equal(found["f_neg"][0], other["f_neg"][0])
    # A step size that changes nothing gives the same chains: starts and noise are shared.
    monkeypatch.setattr(module, "LARGER", 1.0)
    same = numbers(run, count=1000, seed=3)["f_neg"]
    np.testing.assert_array_equal(same[0], same[1])


class Exploding(nn.Module):
    """f = |x|⁴ / 333, up which chains leave for infinity, some sooner than others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) -> (B,)."""
        f: torch.Tensor = x.square().flatten(1).sum(1).square() * 0.003
        return f


def test_chains_that_are_lost_are_counted_and_the_rest_is_drawn():
    run = tiny_run(network=Exploding(), sgld_steps=6, train_images=1000)
    found = numbers(run, "13", count=200)
    lost = found["not_finite"][0]
    assert 0 < lost < 200
    (figure,) = find("13").drawn(found).values()
    (axes,) = figure.axes
    assert f"{lost} of 200 not finite" in axes.get_xlabel()
    # The others are on their way, at up to 1e38.
    assert axes.get_xscale() == "symlog"
    assert [patch.get_data().values.sum() for patch in axes.patches] == pytest.approx([100, 100])
    assert_no_text_on_text(figure)


def test_where_all_chains_are_lost_the_data_are_drawn():
    run = tiny_run(network=Exploding(), sgld_steps=6, train_images=1000)
    found = numbers(run, count=50)
    assert found["not_finite"][1] == 50
    assert math.isnan(found["mean"][1])
    assert math.isnan(found["rise"][1])
    (figure,) = find("14").drawn(found).values()
    assert "P(f⁻ > f⁺) = undefined" in figure.axes[0].get_xlabel()
    assert_no_text_on_text(figure)


def test_a_network_that_is_not_finite_has_no_histogram():
    (figure,) = (
        find("13").drawn(numbers(tiny_run(network=Quadratic(math.nan)), "13", count=50)).values()
    )
    assert figure.axes[0].texts[0].get_text() == "f is finite nowhere on data"
