"""What the pictures show: densities, numbers, and panels that do not lie on each other."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from scipy.stats import gaussian_kde

from ebmguard.reference_training.toy.figures.config import FigureConfig
from ebmguard.reference_training.toy.figures.draw import PANEL, draw_images
from ebmguard.reference_training.toy.figures.lines import draw_lines
from ebmguard.reference_training.toy.figures.panels import (
    learned_density,
    pictures,
    sampled_density,
    true_density,
)
from ebmguard.reference_training.toy.figures.runs import load_run
from ebmguard.reference_training.toy.figures.tradeoff import draw_tradeoff
from ebmguard.reference_training.toy.figures.words import negatives
from tests.reference_training.toy.figures.fabricate import made_up, write_run


def fabricate(tmp_path, name, *, diverged=None, **options):
    """A figure's specification and its runs, made by hand."""
    config = FigureConfig(name=name, out=tmp_path)
    runs = {}
    for scenario in config.spec.scenarios:
        training = config.training(scenario)
        lost = diverged if scenario.startswith("circles") else None
        write_run(training, diverged=lost, **options)
        runs[scenario] = load_run(training.out)
    return config.spec, runs


def numbers(values):
    return np.asarray(values, dtype=float)


def texts(figure):
    return [text.get_text() for text in figure.texts]


def assert_no_text_on_text(figure):
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    written = [text for text in figure.texts if text.get_text()]
    boxes = [text.get_window_extent(renderer) for text in written]
    for text, box in zip(written, boxes, strict=True):
        outside = box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1
        assert not outside, f"{text.get_text()!r} leaves the picture"
    for (a, one), (b, two) in itertools.combinations(zip(written, boxes, strict=True), 2):
        assert not one.overlaps(two), f"{a.get_text()!r} lies on {b.get_text()!r}"


def test_densities_are_those_of_the_model_its_samples_and_the_truth(tmp_path):
    _, runs = fabricate(tmp_path, "2", resolution=200, samples=2000)
    run = runs["gmm-default"]
    cell = float(run.axis[1] - run.axis[0]) ** 2
    truth = true_density(run)
    assert truth.shape == (200, 200)
    assert truth.sum() * cell == pytest.approx(1, abs=1e-3)
    # The made-up energies are the true log density times a slope.
    member = run.of("0.5", "default")[0]
    power = truth ** member.metrics["energy_scale"]
    learned = learned_density(run, member)
    assert learned is not None
    bright = truth > 0.01
    np.testing.assert_allclose(learned[bright], (power / power.sum() / cell)[bright], rtol=1e-3)
    # Rows are y, columns are x: the kernel estimate of scipy at the points (x, y).
    sampled = sampled_density(run, member)
    assert sampled is not None
    x, y = np.meshgrid(run.axis[::20], run.axis[::20])
    samples = run.samples[member.index].astype(np.float64)
    published = gaussian_kde(samples.T, bw_method=run.distribution.kde_factor)
    expected = published(np.stack([x.ravel(), y.ravel()])).reshape(x.shape)
    assert np.abs(sampled[::20, ::20] - expected).max() < 0.1 * expected.max()


def test_the_layout_is_the_papers(tmp_path):
    spec, runs = fabricate(tmp_path, "2", resolution=16, samples=20)
    (picture,) = pictures(spec, runs)
    assert picture.name == "figure_2"
    assert [band.label for band in picture.bands] == ["GMM", "circles"]
    figure = draw_images(spec, picture)
    # Four rows of the truth and six pairs, all of one size.
    assert len(figure.axes) == 4 * 13
    width, height = figure.get_size_inches()
    for axes in figure.axes:
        box = axes.get_position()
        assert (box.width * width, box.height * height) == pytest.approx((PANEL, PANEL))
    # y grows downward, and the second row is the logarithm of the first.
    first, below = figure.axes[0].images[0], figure.axes[13].images[0]
    assert first.origin == "upper"
    density, log_density = (np.asarray(image.get_array()) for image in (first, below))
    np.testing.assert_allclose(density, picture.bands[0].truth.density)
    np.testing.assert_allclose(log_density, np.log(density + 1e-10))
    written = texts(figure)
    assert "KL 8\nmedian of 3: 8.8" in written
    assert "TV 0.05\nmedian of 3: 0.05" in written
    for title in ("truth", "β = 0", "β = 0.9", "GMM", "circles", "log density"):
        assert title in written
    assert_no_text_on_text(figure)


def test_a_diverged_member_says_so_and_what_the_guard_said(tmp_path):
    spec, runs = fabricate(tmp_path, "6", diverged={"0": 1200}, resolution=16, samples=20)
    (picture,) = pictures(spec, runs)
    assert picture.bands[1].pairs[0][0].density is None
    figure = draw_images(spec, picture)
    written = texts(figure)
    assert written.count("diverged at\nupdate 1,200") == 4
    assert "diverged at 1,200\nmedian undefined" in written
    assert "ERROR at 1,197:\nenergy_blowup" in written
    assert sum(not axes.images for axes in figure.axes) == 4
    assert_no_text_on_text(figure)
    tradeoff = draw_tradeoff(spec, runs)
    gmm, circles = tradeoff.axes
    assert not gmm.texts
    assert [text.get_text() for text in circles.texts] == ["5 of 5 diverged"]


def test_a_diverged_member_whose_density_is_finite_is_drawn(tmp_path):
    spec, runs = fabricate(tmp_path, "6", diverged={"0": 1200}, resolution=16, samples=20)
    run = runs["circles-shifted"]
    run.negative_energy[:] = 0.0
    (picture,) = pictures(spec, runs)
    learned, sampled = picture.bands[1].pairs[0]
    assert learned.density is not None
    assert learned.captions[0][0] == "diverged at 1,200"
    assert sampled.density is None
    run.alerts.clear()
    (picture,) = pictures(spec, runs)
    assert picture.bands[1].pairs[0][0].captions[1] == ("no alert",)


@pytest.mark.parametrize(
    ("name", "names", "bands", "columns"),
    [
        ("5", ["figure_5"], ["circles, 10,000 updates", "circles, 20,000 updates"], 4),
        (
            "7",
            ["figure_7_gmm", "figure_7_circles"],
            ["default", "no pos", "batch corr", "true obj"],
            3,
        ),
        ("8", ["figure_8"], ["GMM", "circles"], 4),
        (
            "9",
            ["figure_9"],
            ["GMM\n1", "circles\n1", "GMM\n100", "circles\n100"],
            6,
        ),
        ("10", ["figure_10"], ["default", "no pos", "batch corr", "true obj"], 6),
    ],
)
def test_bands_and_columns_of_the_other_figures(tmp_path, name, names, bands, columns):
    spec, runs = fabricate(tmp_path, name, resolution=8, samples=5)
    drawn = pictures(spec, runs)
    assert [picture.name for picture in drawn] == names
    if name == "5":
        updates = [f"{run.settings['iterations']:,}" for run in runs.values()]
        bands = [f"circles, {number} updates" for number in updates]
    if name == "9":
        own = (negatives(run).removeprefix(f"{run.settings['n_neg']}") for run in runs.values())
        bands = [band + rest for band, rest in zip(bands, own, strict=True)]
    assert [band.label for band in drawn[-1].bands] == bands
    assert all(len(band.pairs) == columns for band in drawn[-1].bands)
    if name in ("7", "9"):
        assert_no_text_on_text(draw_images(spec, drawn[-1]))


def test_a_band_says_whether_the_learning_rate_decays(tmp_path):
    _, runs = fabricate(tmp_path, "8", resolution=8, samples=5)
    run = runs["circles-degenerate"]
    for settings, words in (
        ({"n_neg": 1, "lr": 1e-3, "lr_end": 1e-3}, "1 negative"),
        ({"n_neg": 100, "lr": 1e-3, "lr_end": 1e-5}, "100 negatives, decaying rate"),
    ):
        run.config["settings"] |= settings
        assert negatives(run) == words


def test_figure_8_has_a_variant_in_every_column(tmp_path):
    spec, runs = fabricate(tmp_path, "8", resolution=8, samples=5)
    (picture,) = pictures(spec, runs)
    own = [pair[0].captions[0][0] for pair in picture.bands[0].pairs]
    # The made-up KL of no_pos is three times the default's.
    assert own == ["KL 0.4", "KL 1.2", "KL 0.44", "KL 0.48"]
    assert "batch corr" in texts(draw_images(spec, picture))
    ticks = [label.get_text() for label in draw_tradeoff(spec, runs).axes[0].get_xticklabels()]
    assert ticks == ["default", "no pos", "batch corr", "true obj"]


def test_one_dimension_is_drawn_as_lines(tmp_path):
    spec, runs = fabricate(tmp_path, "1d", resolution=200, samples=500)
    (picture,) = pictures(spec, runs)
    assert picture.bands[0].flat
    figure = draw_lines(spec, picture)
    assert len(figure.axes) == 2 * 4
    density, log_density = figure.axes[:2]
    assert [line.get_label() for line in density.lines] == [
        "truth",
        r"$p_\theta$",
        r"SGLD$(p_\theta)$",
    ]
    step = runs["mixture1d-default"].axis[1] - runs["mixture1d-default"].axis[0]
    for above, below in zip(density.lines, log_density.lines, strict=True):
        curve = np.asarray(above.get_ydata())
        assert curve.sum() * step == pytest.approx(1, abs=0.02)
        np.testing.assert_allclose(np.asarray(below.get_ydata()), np.log(curve + 1e-10))
    # At β = 0 the model is nine times too sharp: its peak is cut off, and says how high it is.
    peak = np.asarray(density.lines[1].get_ydata()).max()
    assert density.get_ylim()[1] < peak
    (note,) = density.texts
    assert f"reaches {peak:.2g}" in note.get_text()
    assert not figure.axes[-2].texts
    assert_no_text_on_text(figure)


def test_the_trade_off_shows_medians_and_ranges(tmp_path):
    spec, runs = fabricate(tmp_path, "2", resolution=8, samples=5)
    gmm, circles = draw_tradeoff(spec, runs).axes
    assert gmm.get_yscale() == "log"
    kl, kl_sgld = gmm.containers
    np.testing.assert_allclose(numbers(kl[0].get_xdata()), [0, 0.1, 0.3, 0.5, 0.7, 0.9])
    expected = [8.8 * math.exp(-6 * beta) for beta in (0, 0.1, 0.3, 0.5, 0.7, 0.9)]
    np.testing.assert_allclose(numbers(kl[0].get_ydata()), expected)
    ends = kl[2][0].get_segments()[0][:, 1]
    np.testing.assert_allclose(ends, [8.0, 9.6])
    np.testing.assert_allclose(numbers(kl_sgld[0].get_ydata())[0], 0.022)
    assert "circles-default" in circles.get_title()


def test_a_lost_member_does_not_flatten_the_trade_off(tmp_path):
    def metrics(beta, variant, seed):
        return made_up(beta, variant, seed) | ({"kl": 1e20} if beta == "0" else {})

    spec, runs = fabricate(tmp_path, "2", resolution=8, samples=5, metrics=metrics)
    assert draw_tradeoff(spec, runs).axes[0].get_ylim()[1] == 1e4


def test_one_seed_has_no_median(tmp_path):
    config = FigureConfig(name="1d", out=tmp_path, seeds=1)
    training = config.training("mixture1d-default")
    write_run(training, resolution=20, samples=10)
    (picture,) = pictures(config.spec, {"mixture1d-default": load_run(training.out)})
    assert picture.bands[0].pairs[0][0].captions == (("KL 8",), ("TV 0.99",))
