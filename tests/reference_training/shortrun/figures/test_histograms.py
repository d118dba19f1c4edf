"""Figures 13 and 14 against scipy, loops in plain Python, and a chain in closed form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu
from torch import nn

from ebmguard.reference_training.shortrun.figures import separation as sep
from ebmguard.reference_training.shortrun.figures.chain_energies import Energies, measure
from ebmguard.reference_training.shortrun.figures.config import FigureConfig
from ebmguard.reference_training.shortrun.figures.grids import make as make_15
from ebmguard.reference_training.shortrun.figures.histograms import make, symlog_ticks
from tests.reference_training.pictures import assert_no_text_on_text
from tests.reference_training.shortrun.parts import Quadratic, tiny_run

makers = {"13": make, "14": make, "15": make_15}
values = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=30)


def figure(name: str, **settings: Any) -> FigureConfig:
    return FigureConfig(name=name, runs=(), **settings)  # type: ignore[arg-type,unused-ignore]


def cells(text: str, line: int) -> list[str]:
    return [cell.strip() for cell in text.splitlines()[line].strip("|").split("|")]


@settings(max_examples=40)
@given(values, values)
def test_above_is_the_mann_whitney_statistic(data, negatives):
    x, y = np.array(data), np.array(negatives)
    expected = mannwhitneyu(y, x, method="asymptotic").statistic / (len(x) * len(y))
    assert sep.separation(x, y).above == pytest.approx(float(expected))


def test_overlap_of_what_is_known():
    x = np.random.default_rng(0).normal(size=2000)
    assert sep.overlap(x, x) == pytest.approx(1)
    assert sep.overlap(x, x + 20) == 0
    # Two uniform densities of which one half lies on the other.
    u = (np.arange(10_000) + 0.5) / 10_000
    assert sep.overlap(u, u + 0.5) == pytest.approx(0.5, abs=0.03)
    # Far away or not, and however wide: the same half.
    assert sep.overlap(u, np.where(u < 0.5, u * 2, 1000 * u)) == pytest.approx(0.5, abs=0.03)


def test_what_is_not_finite_is_counted_and_left_out():
    data = np.array([0.0, 1.0, 2.0])
    found = sep.separation(data, np.array([1.0, math.nan, 3.0, -math.inf]))
    assert (found.mean, found.std, found.not_finite) == (2, 1, 2)
    assert found.gap == -1
    assert found.above == pytest.approx((1.5 + 3) / 6)
    lost = sep.separation(data, np.array([math.nan, math.inf]))
    assert all(map(math.isnan, (lost.mean, lost.std, lost.above, lost.overlap, lost.gap)))
    assert lost.not_finite == 2


@settings(max_examples=40)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.lists(st.floats(-1e6, 1e6)))
def test_bins_hold_every_value(data, negatives):
    x, y = np.array(data), np.array(negatives)
    bins = sep.edges(x, y)
    assert (np.diff(bins) > 0).all()
    assert sep.shares(x, bins).sum() == pytest.approx(1)
    assert sep.shares(y, bins).sum() == pytest.approx(1 if negatives else 0)


def test_bins_are_of_one_width_unless_values_lie_far_from_the_data():
    x = np.random.default_rng(0).normal(size=500) * 0.3 + 7
    near, far = sep.edges(x, x + 2), sep.edges(x, x + 1e5)
    assert np.ptp(np.diff(near)) < 1e-12
    assert sep.linear_range(x, x + 2) is None
    # A power of ten, of one to ten standard deviations.
    assert sep.linear_range(x, x + 1e5) == 1
    # The data keep more than one bin: with bins of one width it would have been one of 50.
    assert (sep.shares(x, far) > 0).sum() >= 5
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
    assert symlog_ticks(low, high, 1.0) == pytest.approx(ticks)
    assert symlog_ticks(low / 100, high / 100, 0.01) == pytest.approx([t / 100 for t in ticks])


def test_negatives_are_the_chain_in_closed_form():
    """Of f = -a/2 |x - m|² every pixel is an AR(1) process, and f is a sum of 64 squares."""
    a, m, steps, beta_star = 0.3, 0.2, 4, 4000.0
    run = tiny_run(
        network=Quadratic(a, m), beta_star=beta_star, sgld_steps=steps, train_images=1400
    )
    found = measure(run, "x", 1400, 0, (1.0, 4.0))
    for factor in (1.0, 4.0):
        shrink = (1 - factor * (1 - beta_star / 20_000) * a) ** 2
        square = 1 / 3 + m**2  # of a pixel of U(-1, 1), from m
        for _ in range(steps):
            square = shrink * square + factor * 0.01**2
        expected = -a / 2 * 64 * square
        assert len(found.negatives[factor]) == 1400
        assert found.negatives[factor].mean() == pytest.approx(expected, rel=0.01)
    assert found.rise == pytest.approx(
        (found.negatives[4.0].mean() - found.negatives[1.0].mean()) / found.data.std()
    )


@pytest.mark.parametrize(
    ("larger", "rise"),
    [(3.0, math.inf), (1.0, -math.inf), (2.0, math.nan), (math.nan, math.nan)],
)
def test_a_rise_over_data_that_do_not_vary(larger, rise):
    flat = np.zeros(2)
    found = Energies("x", 0.0, flat, flat, {1.0: flat + 2, 4.0: flat + larger})
    assert found.rise == pytest.approx(rise, nan_ok=True)


def test_data_have_the_noise_of_the_training():
    run = tiny_run(network=Quadratic(2.0), data_noise=0.5, train_images=1400)
    found = measure(run, "x", 1400, 0, (1.0,))
    # f = -|x|², of which noise takes 64 times its variance on average.
    assert (found.clean - found.data).mean() == pytest.approx(64 * 0.25, rel=0.02)
    pixels = run.data.scale(run.data.train_x).double()
    squares = pixels.square().flatten(1).sum(1)
    np.testing.assert_allclose(np.sort(found.clean), np.sort(-squares.numpy()), rtol=1e-5)


def test_fewer_images_than_asked_for_and_the_same_from_the_same_seed():
    run = tiny_run(train_images=40)
    found = measure(run, "x", 1000, 3, (1.0, 4.0))
    again, other = measure(run, "x", 1000, 3, (1.0,)), measure(run, "x", 1000, 4, (1.0,))
    assert len(found.data) == len(found.negatives[1.0]) == 40
    np.testing.assert_array_equal(found.negatives[1.0], again.negatives[1.0])
    np.testing.assert_array_equal(found.data, again.data)
    assert not np.array_equal(found.negatives[1.0], other.negatives[1.0])
    # A step size that changes nothing gives the same chains: starts and noise are shared.
    same = measure(run, "x", 1000, 3, (1.0, 1.0))
    np.testing.assert_array_equal(same.negatives[1.0], found.negatives[1.0])


def two_runs(**settings: Any) -> list[Any]:
    return [
        tiny_run(f"b{beta_star:g}", network=Quadratic(strength), beta_star=beta_star, **settings)
        for strength, beta_star in ((0.02, 20.0), (0.1, 0.0))
    ]


def test_figure_13():
    made = make(two_runs(), figure("13", count=50))
    assert [axes.get_title() for axes in made.figure.axes] == ["β* = 0", "β* = 20"]
    assert [own["beta_star"] for own in made.numbers["runs"]] == [0, 20]
    (numbers,) = made.numbers["runs"][0]["step_size"].values()
    found = measure(two_runs()[1], "x", 50, 0, (1.0,))
    # Of 25 values each of one distribution, in 50 bins.
    chance = sep.overlap(found.data[::2], found.data[1::2])
    assert chance < 0.7
    assert f"two halves of the first run's f(x⁺) by {chance:.3g}." in made.text
    assert numbers["data_mean"] == pytest.approx(found.data.mean())
    assert numbers["gap"] == pytest.approx(found.data.mean() - found.negatives[1.0].mean())
    assert numbers["std"] == pytest.approx(found.negatives[1.0].std())
    assert "rise" not in made.numbers["runs"][0]
    assert len(made.text.splitlines()[0:4]) == 4
    assert cells(made.text, 2)[:2] == ["β* = 0", "× 1"]
    # Two histograms a panel, and all images are in them.
    for axes in made.figure.axes:
        heights = [patch.get_data().values.sum() for patch in axes.patches]
        assert heights == pytest.approx([100, 100])
        assert axes.get_xlabel().startswith("f − mean f(x⁺)\nP(f⁻ > f⁺) = ")
    legend = [text.get_text() for text in made.figure.legends[0].get_texts()]
    assert legend == ["data", "negatives"]
    assert_no_text_on_text(made.figure)


def test_figure_14_has_both_step_sizes():
    made = make(two_runs(), figure("14", count=50))
    plain, larger = made.numbers["runs"][0]["step_size"].values()
    # Of f = -0.05 |x|² larger steps come nearer to its top.
    assert larger["mean"] > plain["mean"]
    rise = (larger["mean"] - plain["mean"]) / plain["data_std"]
    assert made.numbers["runs"][0]["rise"] == pytest.approx(rise)
    table = [cells(made.text, line) for line in range(2, 6)]
    assert [row[1] for row in table] == ["× 1", "× 4"] * 2
    assert table[0][-1] == "–"
    assert float(table[1][-1]) == pytest.approx(rise, rel=0.01)
    assert f"by (per β*): {table[1][-1]} at 0, {table[3][-1]} at 20" in made.text
    for axes in made.figure.axes:
        assert len(axes.patches) == 3
    legend = [text.get_text() for text in made.figure.legends[0].get_texts()]
    assert legend == ["data", "negatives, step size × 1", "negatives, step size × 4"]
    assert_no_text_on_text(made.figure)


class Exploding(nn.Module):
    """f = |x|⁴ / 333, up which chains leave for infinity, some sooner than others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) -> (B,)."""
        f: torch.Tensor = x.square().flatten(1).sum(1).square() * 0.003
        return f


def test_chains_that_are_lost_are_counted_and_the_rest_is_drawn():
    run = tiny_run(network=Exploding(), sgld_steps=6, train_images=1000)
    made = make([run], figure("13", count=200))
    (plain,) = made.numbers["runs"][0]["step_size"].values()
    assert 0 < plain["not_finite"] < 200
    assert "counted, and left out" in made.text
    assert cells(made.text, 2)[-1] == f"{plain['not_finite']:,}"
    (axes,) = made.figure.axes
    assert f"{plain['not_finite']} of 200 not finite" in axes.get_xlabel()
    # The others are on their way, at up to 1e38.
    assert axes.get_xscale() == "symlog"
    assert [patch.get_data().values.sum() for patch in axes.patches] == pytest.approx([100, 100])
    assert_no_text_on_text(made.figure)


def test_where_all_chains_are_lost_the_data_are_drawn():
    run = tiny_run(network=Exploding(), sgld_steps=6, train_images=1000)
    made = make([run], figure("14", count=50))
    _, larger = made.numbers["runs"][0]["step_size"].values()
    assert larger["not_finite"] == 50
    assert math.isnan(larger["mean"])
    assert math.isnan(made.numbers["runs"][0]["rise"])
    assert cells(made.text, 3)[5:10] == ["undefined"] * 5
    assert "P(f⁻ > f⁺) = undefined" in made.figure.axes[0].get_xlabel()
    assert_no_text_on_text(made.figure)


def test_a_network_that_is_not_finite_has_no_histogram():
    run = tiny_run(network=Quadratic(math.nan))
    made = make([run], figure("13", count=50))
    assert made.figure.axes[0].texts[0].get_text() == "f is finite nowhere on data"
    assert cells(made.text, 2)[2:10] == ["undefined"] * 8


@pytest.mark.parametrize("name", ["13", "14", "15"])
def test_steps_that_were_finer_in_training_are_told(name):
    runs = two_runs(most_steps=4)
    told = makers[name](runs, figure(name, count=4)).text.splitlines()[-1]
    assert told.endswith("each as much finer, up to so many times: b0 4, b20 4.")
    assert "finer" not in makers[name](two_runs(), figure(name, count=4)).text
