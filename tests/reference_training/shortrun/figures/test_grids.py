"""Figure 15 against plain loops, and that runs are shown the same noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ebmguard.reference_training.plots.images import sample_grid
from ebmguard.reference_training.shortrun.figures.config import FigureConfig
from ebmguard.reference_training.shortrun.figures.grids import (
    draw_samples,
    energy_distance,
    make,
    pictures,
    quality,
)
from tests.reference_training.pictures import assert_no_text_on_text
from tests.reference_training.shortrun.parts import Quadratic, tiny_run

FIGURE_15 = FigureConfig(name="15", runs=())


def test_the_energy_distance_is_that_of_a_loop():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((5, 1, 2, 3), generator=generator, dtype=torch.float64)
    y = 1 + torch.randn((4, 1, 2, 3), generator=generator, dtype=torch.float64)

    def mean(a: torch.Tensor, b: torch.Tensor, same: bool) -> float:
        apart = [
            math.sqrt(float((p - q).square().mean()))
            for i, p in enumerate(a)
            for j, q in enumerate(b)
            if not (same and i == j)
        ]
        return sum(apart) / len(apart)

    expected = 2 * mean(x, y, False) - mean(x, x, True) - mean(y, y, True)
    assert energy_distance(x, y) == pytest.approx(expected)
    assert math.isnan(energy_distance(x[:1], y))


def test_the_energy_distance_tells_distributions_apart():
    generator = torch.Generator().manual_seed(1)
    a, b, c = (torch.rand((400, 1, 8, 8), generator=generator).double() for _ in range(3))
    assert energy_distance(a, b) == pytest.approx(0, abs=0.002)
    assert energy_distance(a, c / 2) > 0.05
    # Of two points the distance is twice that between them.
    zeros, ones = torch.zeros(3, 1, 2, 2), torch.ones(3, 1, 2, 2)
    assert energy_distance(zeros, ones) == pytest.approx(2)


def test_runs_are_shown_the_same_starts_and_noise():
    first = tiny_run("a", beta_star=0.0, network=Quadratic(0.4), sgld_steps=3)
    x = draw_samples(first, 5, 7)
    # A flat energy gives starts and noise themselves: x is what three steps make of them.
    flat = tiny_run("b", beta_star=0.0, network=Quadratic(0.0), sgld_steps=1)
    generator = torch.Generator().manual_seed(7)
    start = torch.rand((5, 1, 8, 8), generator=generator) * 2 - 1
    noise = torch.randn((3, 5, 1, 8, 8), generator=generator)
    expected = start
    for z in noise:
        expected = expected * (1 - 0.4) + 0.01 * z
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(
        draw_samples(flat, 5, 7).sub(start).std(), torch.tensor(0.01), rtol=0.2, atol=0
    )
    assert not torch.equal(x, draw_samples(first, 5, 8))


def test_the_images_to_compare_with_are_others_than_those_shown():
    run = tiny_run(train_images=60, test_images=20)
    shown, reference, held_out = pictures(run, 25, 0)
    assert (len(shown), len(reference), len(held_out)) == (25, 35, 20)
    both = torch.cat([shown, reference]).flatten(1)
    everything = run.data.scale(run.data.train_x).flatten(1)
    np.testing.assert_array_equal(
        np.sort(both.numpy(), axis=0), np.sort(everything.numpy(), axis=0)
    )
    torch.testing.assert_close(held_out, run.data.scale(run.data.test_x))
    # Half of the images at most are shown.
    assert [len(x) for x in pictures(run, 64, 0)] == [30, 30, 20]


def test_quality_of_images_beyond_the_cube():
    reference = torch.rand((30, 1, 4, 4), generator=torch.Generator().manual_seed(0)) * 2 - 1
    images = reference[:10].clone()
    images[0, 0, 0, 0] = 3.0
    clipped = images.clamp(-1, 1)
    found = quality(images, reference)
    assert found.beyond == pytest.approx(2 / 160)
    assert found.distance == pytest.approx(energy_distance(clipped.double(), reference.double()))
    assert found.mean == pytest.approx(float(images.mean()), abs=1e-6)
    assert found.std == pytest.approx(float(images.numpy().std()))
    images[3, 0, 1, 1] = math.nan
    images[4, 0, 1, 1] = math.inf
    lost = quality(images, reference)
    assert lost.not_finite == 2
    assert all(map(math.isnan, (lost.distance, lost.mean, lost.std, lost.beyond)))


def test_figure_15():
    runs = [
        tiny_run("one", beta_star=2.0, network=Quadratic(0.02)),
        tiny_run("two", beta_star=0.0, network=Quadratic(0.3)),
    ]
    made = make(runs, FigureConfig(name="15", runs=(), count=9))
    titles = [text.get_text() for text in made.figure.texts]
    assert titles == [
        "Figure 15: negatives of SGLD from the same noise, digits",
        "training images",
        "β* = 0",
        "β* = 2",
    ]
    shown = [np.asarray(axes.images[0].get_array()) for axes in made.figure.axes]
    # Nine images of 8x8 in three rows, each pixel eight of the picture, in frames of one.
    assert [picture.shape for picture in shown] == [(3 * 66, 3 * 66, 3)] * 3
    expected = sample_grid(draw_samples(runs[1], 9, 0), columns=3, zoom=8)
    np.testing.assert_allclose(shown[1], expected, atol=1e-6)
    images, reference, held_out = pictures(runs[0], 9, 0)
    np.testing.assert_allclose(shown[0], sample_grid(images, columns=3, zoom=8), atol=1e-6)
    judged = quality(draw_samples(runs[0], 9, 0), reference)
    assert made.numbers["runs"][1]["distance"] == judged.distance
    assert made.numbers["runs"][1]["beta_star"] == 2
    assert made.numbers["test_images"]["distance"] == quality(held_out, reference).distance
    lines = made.text.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:5]] == [
        "β* = 0",
        "β* = 2",
        "test images",
    ]
    assert f"{judged.distance:.3g} at 2; that of test images" in made.text
    assert_no_text_on_text(made.figure)


def test_lost_samples_are_told_and_red():
    made = make([tiny_run(network=Quadratic(math.nan))], FIGURE_15)
    assert made.numbers["runs"][0]["not_finite"] == 64
    assert "undefined" in made.text.splitlines()[2]
    lost = np.asarray(made.figure.axes[1].images[0].get_array())
    assert (lost[10, 10] == (1, 0, 0)).all()
