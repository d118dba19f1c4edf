"""What the pictures show: densities, numbers, and panels that do not lie on each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import gaussian_kde

from ebmguard.reference_training.studies.command import find
from ebmguard.reference_training.studies.config import ToyFigure
from ebmguard.reference_training.studies.toy import FIGURES, load_run, members, training
from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from tests.reference_training.toy.fabricate import KL_AT_ZERO, made_up, write_run


def fabricate(tmp_path, name: Any, *, diverged=None, seeds=None, **options):
    """The runs of a figure, made by hand."""
    config = ToyFigure(name=name, out=tmp_path, seeds=seeds)
    runs = []
    for scenario in FIGURES[name].scenarios:
        own = training(config, scenario)
        lost = diverged if scenario.startswith("circles") else None
        write_run(own, diverged=lost, **{"resolution": 8, "samples": 5, **options})
        runs.append(load_run(own.out))
    return runs


def frame_of(tmp_path, name: Any, **options):
    return members(fabricate(tmp_path, name, **options), ToyFigure(name=name))


def drawn(frame):
    """The pictures of a frame."""
    return find(frame.attrs["spec"]).drawn(frame)


def numbers(values):
    return np.asarray(values, dtype=float)


def test_densities_are_those_of_the_model_its_samples_and_the_truth(tmp_path):
    runs = fabricate(tmp_path, "2", resolution=80, samples=500)
    frame = members(runs, ToyFigure(name="2"))
    (row,) = frame[(frame["scenario"] == "gmm-default") & (frame["beta"] == "0.5")].to_dict(
        "records"
    )
    run = runs[0]
    cell = float(run.axis[1] - run.axis[0]) ** 2
    (truth, log_truth), (learned, _), (sampled, _) = (
        [shown for shown, _ in row["picture"][name]] for name in ("truth", "learned", "sampled")
    )
    np.testing.assert_allclose(log_truth, np.log(truth + 1e-10))
    assert truth.shape == (80, 80)
    assert truth.sum() * cell == pytest.approx(1, abs=1e-3)
    # The made-up energies are the true log density times a slope.
    power = truth ** made_up("0.5", "default", 0)["energy_scale"]
    bright = truth > 0.01
    np.testing.assert_allclose(learned[bright], (power / power.sum() / cell)[bright], rtol=1e-3)
    # Rows are y, columns are x: the kernel estimate of scipy at the points (x, y).
    x, y = np.meshgrid(run.axis[::8], run.axis[::8])
    index = run.members.index[run.members["beta"] == "0.5"][0]
    samples = run.samples[index].astype(np.float64)
    published = gaussian_kde(samples.T, bw_method=DISTRIBUTIONS["gmm"].kde_factor)
    expected = published(np.stack([x.ravel(), y.ravel()])).reshape(x.shape)
    assert np.abs(sampled[::8, ::8] - expected).max() < 0.1 * expected.max()


def test_the_trade_off_shows_medians_and_ranges(tmp_path):
    gmm, circles = drawn(frame_of(tmp_path, "2"))["tradeoff"].axes
    assert gmm.get_yscale() == "log"
    kl, kl_sgld = gmm.containers
    np.testing.assert_allclose(numbers(kl[0].get_xdata()), [0, 0.1, 0.3, 0.5, 0.7, 0.9])
    expected = [8.8 * math.exp(-6 * beta) for beta in (0, 0.1, 0.3, 0.5, 0.7, 0.9)]
    np.testing.assert_allclose(numbers(kl[0].get_ydata()), expected)
    np.testing.assert_allclose(kl[2][0].get_segments()[0][:, 1], [8.0, 9.6])
    np.testing.assert_allclose(numbers(kl_sgld[0].get_ydata())[0], 0.022)
    assert "circles-default" in circles.get_title()


def test_curves_are_medians_over_seeds_with_their_range(tmp_path):
    figure = drawn(frame_of(tmp_path, "mixture", seeds=3))["curves"]
    kl_at_zero, _, kl, _, weight_at_zero, _, weight, _ = figure.axes
    assert [axes.get_title() for axes in (kl_at_zero, kl)] == ["β = 0", "β = 0.5"]
    assert kl.get_yscale() == "log"
    for axes, beta in ((kl_at_zero, 0.0), (kl, 0.5)):
        assert len(axes.lines) == 3
        expected = KL_AT_ZERO * math.exp(-6 * beta) * 1.1
        for line in axes.lines:
            assert numbers(line.get_xdata()).tolist() == [100, 200]
            np.testing.assert_allclose(numbers(line.get_ydata()), expected)
        ends = axes.collections[0].get_paths()[0].vertices[:, 1]
        assert (ends.min(), ends.max()) == pytest.approx((expected / 1.1, expected / 1.1 * 1.2))
    # Only the mixture has a weight; the other line is its share of the negatives.
    for axes, share in ((weight_at_zero, 0.5), (weight, 0.75)):
        mixture, expected_share = axes.lines
        assert numbers(mixture.get_ydata()).tolist() == [share, share]
        assert set(expected_share.get_ydata()) == {0.5}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "good: 20",
        "good + exploding: 20 each",
        "exploding: 20",
    ]
