from __future__ import annotations

import math

import pytest
import torch

from ebmguard.reference_training.shortrun.figures.saturation import saturation


def test_the_numbers_of_images_made_by_hand():
    x = torch.tensor(
        [
            [[[-1.0, 1.0], [-1.0, 1.0]]],  # at the ends, and not beyond them
            [[[-1.5, 0.0], [0.0, 1.25]]],
            [[[0.5, 0.5], [0.5, 0.5]]],
            [[[-0.9, 0.95], [0.0, 0.9375]]],  # within half a level of an end: 1 - 1/16 and more
        ]
    )
    found = saturation(x, levels=16)
    assert found.beyond.tolist() == [0.0, 0.5, 0.0, 0.0]
    assert found.excess.tolist() == [0.0, 0.1875, 0.0, 0.0]
    assert found.ends.tolist() == [1.0, 0.5, 0.0, 0.5]
    size = (0.9 + 0.95 + 0.9375) / 4
    assert found.size.tolist() == pytest.approx([1.0, 0.6875, 0.5, size], rel=1e-6)
    second = math.sqrt((1.5**2 + 1.25**2) / 4 - 0.0625**2)
    assert found.contrast[:3].tolist() == pytest.approx([1.0, second, 0.0], rel=1e-12)
    assert found.colour.tolist() == [0.0] * 4


def test_colour_is_how_far_channels_lie_apart_and_grey_has_none():
    grey = torch.rand(1, 1, 4, 4).expand(1, 3, 4, 4)
    red = torch.tensor([1.0, -1.0, -1.0]).reshape(1, 3, 1, 1).expand(1, 3, 4, 4)
    pale = torch.tensor([0.5, 0.25, 0.0]).reshape(1, 3, 1, 1).expand(1, 3, 4, 4)
    found = saturation(torch.cat([grey, red, pale]), levels=255)
    assert found.colour.tolist() == [0.0, 2.0, 0.5]


def test_every_number_grows_as_an_image_is_stretched():
    image = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    factors = torch.tensor([0.5, 1.0, 1.5, 2.0, 4.0]).reshape(-1, 1, 1, 1)
    for name, values in saturation(factors * image, levels=255)._asdict().items():
        rises = values.diff()
        assert (rises >= 0).all(), name
        assert (rises[1:] > 0).all(), name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_image_that_is_not_finite_has_no_numbers(value):
    x = torch.zeros(2, 1, 2, 2)
    x[0, 0, 1, 1] = value
    for name, values in saturation(x, levels=16)._asdict().items():
        assert values.isnan().tolist() == [True, False], name
