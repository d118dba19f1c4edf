"""What the pictures show: densities, numbers, and panels that do not lie on each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import gaussian_kde

from ebmguard.reference_training.studies.command import find
from ebmguard.reference_training.studies.config import ToyFigure
from ebmguard.reference_training.studies.toy import FIGURES, load_run, training
from ebmguard.reference_training.studies.toy_numbers import band, members
from ebmguard.reference_training.studies.toy_pictures import PANEL
from tests.reference_training.pictures import assert_no_text_on_text
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


def texts(figure):
    return [text.get_text() for text in figure.texts]


def test_densities_are_those_of_the_model_its_samples_and_the_truth(tmp_path):
    runs = fabricate(tmp_path, "2", resolution=200, samples=2000)
    frame = members(runs, ToyFigure(name="2"))
    (row,) = frame[(frame["scenario"] == "gmm-default") & (frame["beta"] == "0.5")].to_dict(
        "records"
    )
    run = runs[0]
    cell = float(run.axis[1] - run.axis[0]) ** 2
    truth, learned, sampled = (row[name].numpy() for name in ("truth", "learned", "sampled"))
    assert truth.shape == (200, 200)
    assert truth.sum() * cell == pytest.approx(1, abs=1e-3)
    # The made-up energies are the true log density times a slope.
    power = truth ** made_up("0.5", "default", 0)["energy_scale"]
    bright = truth > 0.01
    np.testing.assert_allclose(learned[bright], (power / power.sum() / cell)[bright], rtol=1e-3)
    # Rows are y, columns are x: the kernel estimate of scipy at the points (x, y).
    x, y = np.meshgrid(run.axis[::20], run.axis[::20])
    index = next(iter(run.of("0.5", "default")))
    samples = run.samples[index].astype(np.float64)
    published = gaussian_kde(samples.T, bw_method=run.distribution.kde_factor)
    expected = published(np.stack([x.ravel(), y.ravel()])).reshape(x.shape)
    assert np.abs(sampled[::20, ::20] - expected).max() < 0.1 * expected.max()


def test_the_layout_is_the_papers(tmp_path):
    frame = frame_of(tmp_path, "2", resolution=16, samples=20)
    figure = drawn(frame)["figure_2"]
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
    np.testing.assert_allclose(density, frame["truth"][0])
    np.testing.assert_allclose(log_density, np.log(density + 1e-10))
    written = texts(figure)
    assert "KL 8\nmedian of 3: 8.8" in written
    assert "TV 0.05\nmedian of 3: 0.05" in written
    for title in ("truth", "β = 0", "β = 0.9", "GMM", "circles", "log density"):
        assert title in written
    assert_no_text_on_text(figure)


def test_a_diverged_member_says_so_and_what_the_guard_said(tmp_path):
    frame = frame_of(tmp_path, "6", diverged={"0": 1200}, resolution=16, samples=20)
    pictures = drawn(frame)
    figure = pictures["figure_6"]
    written = texts(figure)
    assert written.count("diverged at\nupdate 1,200") == 4
    assert "diverged at 1,200\nmedian undefined" in written
    assert "ERROR at 1,197:\nenergy_blowup" in written
    assert sum(not axes.images for axes in figure.axes) == 4
    assert_no_text_on_text(figure)
    gmm, circles = pictures["tradeoff"].axes
    said = [[t.get_text() for t in axes.texts if t.get_text()] for axes in (gmm, circles)]
    assert said == [[], ["5 of 5 diverged"]]


def test_a_diverged_member_whose_density_is_finite_is_drawn(tmp_path):
    runs = fabricate(tmp_path, "6", diverged={"0": 1200})
    runs[1].negative_energy[:] = 0.0
    runs[1].alerts.clear()
    frame = members(runs, ToyFigure(name="6"))
    row = frame[frame["scenario"] == "circles-shifted"].iloc[0]
    assert row["learned"] is not None
    assert row["sampled"] is None
    assert row["captions"]["kl"][0] == "diverged at 1,200"
    assert row["captions"]["tv"] == ("no alert",)


@pytest.mark.parametrize(
    ("name", "files", "bands", "columns"),
    [
        ("5", ["figure_5"], ["circles, 10,000 updates", "circles, 20,000 updates"], 4),
        (
            "7",
            ["figure_7_gmm", "figure_7_circles"],
            ["default", "no pos", "batch corr", "true obj"],
            3,
        ),
        ("8", ["figure_8"], ["GMM", "circles"], 4),
        ("10", ["figure_10"], ["default", "no pos", "batch corr", "true obj"], 6),
        (
            "broken",
            ["figure_broken"],
            [
                "GMM\ngood: 20",
                "GMM\ngood + lost: 20 each",
                "GMM\nlost: 20",
                "GMM\ngood + stuck: 20 each",
                "GMM\nstuck: 20",
                "GMM\ngood + exploding: 10 each",
                "GMM\ngood: 10",
            ],
            4,
        ),
    ],
)
def test_bands_and_columns_of_the_other_figures(tmp_path, name, files, bands, columns):
    frame = frame_of(tmp_path, name, seeds=2)
    pictures = drawn(frame)
    rest = "curves" if name == "broken" else "tradeoff"
    assert [*pictures] == [*files, rest]
    if name == "5":
        updates = frame["about"].unique()
        bands = [f"circles, {words.split()[1]} updates" for words in updates]
    figure = pictures[files[-1]]
    told = [text.get_text() for text in figure.texts if text.get_fontweight() == "bold"]
    assert told == bands
    assert len(figure.axes) == len(bands) * 2 * (1 + 2 * columns)
    if name == "7":
        assert_no_text_on_text(figure)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_neg": 1, "lr": 1e-3, "lr_end": 1e-3}, "circles\n1 negative"),
        ({"n_neg": 100, "lr": 1e-3, "lr_end": 1e-5}, "circles\n100 negatives, decaying rate"),
    ],
)
def test_a_band_says_whether_the_learning_rate_decays(tmp_path, settings, words):
    run = fabricate(tmp_path, "8")[1]
    run.config["settings"] |= settings
    assert band(FIGURES["9"], run, "default") == words


def test_figure_8_has_a_variant_in_every_column(tmp_path):
    frame = frame_of(tmp_path, "8")
    own = [captions["kl"][0] for captions in frame["captions"][:4]]
    # The made-up KL of no_pos is three times the default's.
    assert own == ["KL 0.4", "KL 1.2", "KL 0.44", "KL 0.48"]
    pictures = drawn(frame)
    assert "batch corr" in texts(pictures["figure_8"])
    ticks = [label.get_text() for label in pictures["tradeoff"].axes[0].get_xticklabels()]
    assert ticks == ["default", "no pos", "batch corr", "true obj"]


def test_one_dimension_is_drawn_as_lines(tmp_path):
    frame = frame_of(tmp_path, "1d", resolution=200, samples=500)
    figure = drawn(frame)["figure_1d"]
    assert len(figure.axes) == 2 * 4
    density, log_density = figure.axes[:2]
    assert [line.get_label() for line in density.lines] == [
        "truth",
        r"$p_\theta$",
        r"SGLD$(p_\theta)$",
    ]
    step = float(frame["axis"][0][1] - frame["axis"][0][0])
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
    gmm, circles = drawn(frame_of(tmp_path, "2"))["tradeoff"].axes
    assert gmm.get_yscale() == "log"
    kl, kl_sgld = gmm.containers
    np.testing.assert_allclose(numbers(kl[0].get_xdata()), [0, 0.1, 0.3, 0.5, 0.7, 0.9])
    expected = [8.8 * math.exp(-6 * beta) for beta in (0, 0.1, 0.3, 0.5, 0.7, 0.9)]
    np.testing.assert_allclose(numbers(kl[0].get_ydata()), expected)
    np.testing.assert_allclose(kl[2][0].get_segments()[0][:, 1], [8.0, 9.6])
    np.testing.assert_allclose(numbers(kl_sgld[0].get_ydata())[0], 0.022)
    assert "circles-default" in circles.get_title()


def test_a_lost_member_does_not_flatten_the_others(tmp_path):
    def metrics(beta, variant, seed):
        return made_up(beta, variant, seed) | ({"kl": 1e20} if beta == "0" else {})

    frame = frame_of(tmp_path / "a", "2", metrics=metrics)
    assert drawn(frame)["tradeoff"].axes[0].get_ylim()[1] == 1e4
    frame = frame_of(tmp_path / "b", "mixture", metrics=metrics)
    assert drawn(frame)["curves"].axes[0].get_ylim()[1] == 1e3


def test_one_seed_has_no_median(tmp_path):
    captions = frame_of(tmp_path, "1d", seeds=1)["captions"][0]
    assert (captions["kl"], captions["tv"]) == (("KL 8",), ("TV 0.99",))


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


def test_no_two_curves_look_alike_and_members_that_diverged_are_counted(tmp_path):
    runs = fabricate(tmp_path, "broken", seeds=2)
    runs[2].results["members"][0]["diverged_at"] = 7
    figure = drawn(members(runs, ToyFigure(name="broken")))["curves"]
    lines = figure.axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(runs)
    words = [[text.get_text() for text in axes.texts] for axes in figure.axes[:2]]
    assert words == [["1 of 2 diverged: lost"], [""]]
