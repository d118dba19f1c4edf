from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from ebmguard.reference_training.plots.images import (
    as_bytes,
    load_samples,
    sample_grid,
    save_sample_figures,
)


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
