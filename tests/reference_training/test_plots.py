"""Images and numbers as people see them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from ebmguard.reference_training.plots.images import (
    as_bytes,
    load_samples,
    sample_grid,
    save_sample_figures,
)
from ebmguard.reference_training.plots.numbers import mean, median, number


def test_files_hold_the_samples(tmp_path):
    samples = {"start": torch.rand(9, 1, 8, 8), "end": torch.rand(4, 3, 8, 8)}
    save_sample_figures(tmp_path, samples)
    with np.load(tmp_path / "samples.npz") as stored:
        assert set(stored.files) == {"start", "end"}
        np.testing.assert_array_equal(stored["start"], samples["start"].numpy())
    found, expected = imread(tmp_path / "samples_start.png"), sample_grid(samples["start"])
    np.testing.assert_allclose(found[..., :3], expected, atol=1 / 255)


def test_kept_bytes_are_clamped_and_come_back_within_half_a_level(tmp_path):
    x = torch.tensor([-7.0, -1.0, 0.0, 1.0, 7.0, math.inf, -math.inf, math.nan])
    assert as_bytes(x).tolist() == [0, 0, 128, 255, 255, 255, 0, 0]
    x = torch.linspace(-1, 1, 3 * 16 * 16, dtype=torch.float64).reshape(1, 3, 16, 16)
    np.save(tmp_path / "x.npy", as_bytes(x).numpy())
    back = load_samples(tmp_path / "x.npy")
    assert back.dtype == torch.float32
    # Half a level of 2 / 255, and a rounding of numbers of size 1.
    assert (back - x).abs().max() <= 1 / 255 + torch.finfo(torch.float32).eps


def test_each_pixel_lands_where_it_belongs():
    samples = torch.tensor([[[[-1.0, 0.0], [1.0, 5.0]]], [[[0.5, -7.0], [0.0, 0.0]]]])
    grid = sample_grid(samples, columns=2, zoom=1)
    assert grid.shape == (4, 8, 3)
    np.testing.assert_allclose(grid[1:3, 1:3, 0], [[0.0, 0.5], [1.0, 1.0]])
    np.testing.assert_allclose(grid[1:3, 5:7, 2], [[0.75, 0.0], [0.5, 0.5]])
    lost = sample_grid(torch.tensor([[[[math.nan, math.inf], [0.0, 0.0]]]]), columns=1, zoom=1)
    assert lost[1:3, 1:3].tolist() == [[[1, 0, 0]] * 2, [[0.5] * 3] * 2]
    with pytest.raises(ValueError, match=r"\(3, 2, 8, 8\)"):
        sample_grid(torch.zeros(3, 2, 8, 8))


NAN, INF = math.nan, math.inf


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_mean_and_median_are_those_of_numpy(values):
    assert median(values) == pytest.approx(np.median(values))
    assert mean(values) == pytest.approx(np.mean(values), abs=1e-9)


@pytest.mark.parametrize(
    ("of", "values", "expected"),
    [
        *((median, values, NAN) for values in itertools.permutations([1.0, 2.0, NAN])),
        (median, [], None),
        (median, [INF, 1.0, 2.0], 2.0),
        (median, [INF, INF, 2.0], INF),
        (mean, [INF, 1.0], INF),
        (mean, [-INF, 1.0], -INF),
        *((mean, values, NAN) for values in ([NAN, 1.0], [INF, -INF], [NAN, INF, -INF])),
    ],
)
def test_what_is_undefined_stays_so_and_infinities_are_numbers(of, values, expected):
    assert of(values) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("value", "digits", "words"),
    [
        (math.nan, 3, "undefined"),
        (math.inf, 2, "∞"),
        (-math.inf, 3, "−∞"),
        (None, 3, "–"),
        (0.0, 2, "0"),
        (0.0864, 2, "0.086"),
        (8.04, 2, "8"),
        (99.4, 2, "99"),
        (99.7, 2, "100"),
        (999.7, 3, "1,000"),
        (-1234.5, 3, "-1,234"),
        (2.5e7, 2, "2.5e+07"),
    ],
)
def test_numbers_as_people_read_them(value, digits, words):
    assert number(value, digits) == words


@given(st.floats(1e-4, 1e6, exclude_max=True), st.sampled_from([2, 3]))
def test_numbers_of_everyday_size_are_no_powers_of_ten(value, digits):
    text = number(value, digits)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.5 * 10 ** (1 - digits))
