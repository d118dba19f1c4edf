from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.image import imread

from ebmguard.reference_training.figures import as_bytes, save_sample_figures
from ebmguard.report import sample_grid


def test_files_hold_the_samples(tmp_path):
    samples = {"start": torch.rand(9, 1, 8, 8), "end": torch.rand(4, 3, 8, 8)}
    save_sample_figures(tmp_path, samples)
    with np.load(tmp_path / "samples.npz") as stored:
        assert set(stored.files) == {"start", "end"}
        np.testing.assert_array_equal(stored["start"], samples["start"].numpy())
    assert (
        imread(tmp_path / "samples_start.png").shape[:2] == sample_grid(samples["start"]).shape[:2]
    )


def test_pixels_are_clamped_and_nan_is_black():
    x = torch.tensor([-7.0, -1.0, 0.0, 1.0, 7.0, math.inf, -math.inf, math.nan])
    assert as_bytes(x).tolist() == [0, 0, 128, 255, 255, 255, 0, 0]
