"""Images in numbers against plain loops and sklearn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations, product
from statistics import fmean

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.studies import measures as module
from ebmguard.reference_training.studies.measures import (
    energy_distance,
    means,
    measure,
    nearest,
    saturation,
)
from tests.reference_training.shortrun.parts import Quadratic, tiny_run

LEVELS = 16


def random_data(count: int, channels: int = 2, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, channels, 3, 3)
    return torch.randint(0, LEVELS + 1, shape, generator=generator, dtype=torch.uint8)


def test_images_in_numbers():
    run = tiny_run(network=Quadratic(1.0))
    own = run.data.scale(run.data.train_x[:4])
    found = measure(run, 1.5 * own)
    assert means(found)["f"] == pytest.approx(
        -(1.5**2) / 2 * own.square().sum().item() / 4, rel=1e-5
    )
    # Cut to the cube, before it is compared, a stretched background is one again.
    expected = (1.5 * own).clamp(-1, 1).sub(own).square().flatten(1).mean(dim=1).sqrt()
    np.testing.assert_allclose(found["distance"], expected, rtol=1e-5)
    assert (found.dtypes == np.float64).all()


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_the_nearest_image_is_that_of_sklearn(monkeypatch, rows):
    monkeypatch.setattr(module, "ROWS", rows)
    data = random_data(20)
    x = torch.randn(9, 2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    neighbours = NearestNeighbors(n_neighbors=1).fit(data.flatten(1).double() / 8 - 1)
    distances, places = neighbours.kneighbors(x.clamp(-1, 1).flatten(1))
    found, place = nearest(x, data, LEVELS)
    np.testing.assert_allclose(found, distances[:, 0] / 18**0.5, rtol=1e-12)
    assert place.tolist() == places[:, 0].tolist()


def test_an_image_of_the_data_is_at_distance_0_and_one_off_is_not():
    data = random_data(50)
    x = data.float() / 8 - 1
    assert nearest(x, data, LEVELS)[0].tolist() == [0.0] * 50
    # The shortcut by a product of matrices alone would lose this among its rounding errors.
    x[4, 0, 0, 0] += 1e-3 if x[4, 0, 0, 0] < 1 else -1e-3
    assert nearest(x, data, LEVELS)[0][4].item() == pytest.approx(1e-3 / 18**0.5, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_image_that_is_not_finite_has_no_numbers(value):
    x = torch.zeros(2, 1, 3, 3)
    x[0, 0, 1, 1] = value
    assert saturation(x, LEVELS).isna().all(axis=1).tolist() == [True, False]
    assert nearest(x, random_data(5, 1), LEVELS)[0].isnan().tolist() == [True, False]


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (4, 2, 3, 4)])
def test_data_that_cannot_be_compared_are_refused(shape):
    data = torch.zeros(shape, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"images of \(2, 3, 3\) cannot be compared with data of"):
        nearest(torch.zeros(1, 2, 3, 3), data, LEVELS)


def test_saturation_of_images_made_by_hand():
    x = torch.tensor(
        [
            [[[-1.0, 1.0], [-1.0, 1.0]]],  # at the ends, and not beyond them
            [[[-1.5, 0.0], [0.0, 1.25]]],
            [[[0.5, 0.5], [0.5, 0.5]]],
            [[[-0.9, 0.95], [0.0, 0.9375]]],  # within half a level of an end: 1 - 1/16 and more
        ]
    )
    found = saturation(x, LEVELS)
    assert found["excess"].tolist() == [0.0, 0.1875, 0.0, 0.0]
    assert found["ends"].tolist() == [1.0, 0.5, 0.0, 0.5]
    second = math.sqrt((1.5**2 + 1.25**2) / 4 - 0.0625**2)
    assert found["contrast"][:3].tolist() == pytest.approx([1.0, second, 0.0], rel=1e-12)


def test_the_energy_distance_is_that_of_a_loop():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((5, 1, 2, 3), generator=generator, dtype=torch.float64)
    y = 1 + torch.randn((4, 1, 2, 3), generator=generator, dtype=torch.float64)

    def mean(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
        return fmean(math.sqrt(float((p - q).square().mean())) for p, q in pairs)

    expected = 2 * mean(product(x, y)) - mean(combinations(x, 2)) - mean(combinations(y, 2))
    assert energy_distance(x, y) == pytest.approx(expected)
    assert math.isnan(energy_distance(x[:1], y))
