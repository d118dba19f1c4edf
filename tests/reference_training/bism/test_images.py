"""Images as vectors: their scale, their noise, and which of them are trained on."""

from __future__ import annotations

import pytest
import torch

from ebmguard.reference_training.bism.images import FlatImages
from ebmguard.reference_training.data import load_data

from .parts import rng


@pytest.mark.parametrize("black", [-1.0, 0.0])
def test_they_are_within_half_a_level_of_the_test_images(black):
    data = load_data("digits")
    images = FlatImages(data, black)
    assert images.dim == 64
    level = (1 - black) / 16
    exact = black + level * data.test_x.flatten(1)
    apart = (images.held_out(1000, rng()) - exact) / level
    assert apart.shape == (360, 64)
    assert apart.abs().max() <= 0.5 + 1e-4
    # Uniform, with variance 1/12: its standard error over all entries is below 1e-3.
    assert apart.var().item() == pytest.approx(1 / 12, abs=5e-3)


def test_samples_are_training_images():
    data = load_data("digits")
    drawn = FlatImages(data, -1.0).sample(50, rng(1))
    levels = ((drawn + 1) * 8).round().to(torch.uint8)
    known = {tuple(row) for row in data.train_x.flatten(1).tolist()}
    assert all(tuple(row) in known for row in levels.tolist())
