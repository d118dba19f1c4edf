from __future__ import annotations

import math

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.figures import nearest as module
from ebmguard.reference_training.shortrun.figures.nearest import nearest

LEVELS = 16


def some_data(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, LEVELS + 1, (count, 2, 3, 3), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_it_is_what_a_plain_loop_finds(monkeypatch, rows):
    monkeypatch.setattr(module, "ROWS", rows)
    data = some_data(20)
    x = torch.randn(9, 2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = nearest(x, data, LEVELS)
    for i, image in enumerate(x):
        distances = []
        for other in data:
            pairs = zip(image.flatten().tolist(), other.flatten().tolist(), strict=True)
            squares = [(min(1.0, max(-1.0, a)) - (b / 8 - 1)) ** 2 for a, b in pairs]
            distances.append(math.sqrt(sum(squares) / len(squares)))
        assert found.distance[i].item() == pytest.approx(min(distances), rel=1e-12)
        assert found.place[i].item() == distances.index(min(distances))


def test_an_image_of_the_data_is_at_distance_0_and_one_off_is_not():
    data = some_data(50)
    x = data.float() / 8 - 1
    found = nearest(x, data, LEVELS)
    assert found.distance.tolist() == [0.0] * 50
    # The shortcut by a product of matrices alone would lose this among its rounding errors.
    x[4, 0, 0, 0] += 1e-3 if x[4, 0, 0, 0] < 1 else -1e-3
    assert nearest(x, data, LEVELS).distance[4].item() == pytest.approx(1e-3 / 18**0.5, rel=1e-3)


def test_what_is_not_finite_has_no_distance():
    data = some_data(5)
    x = torch.zeros(3, 2, 3, 3)
    x[0, 0, 0, 0], x[1, 1, 2, 2] = torch.nan, torch.inf
    distance = nearest(x, data, LEVELS).distance
    assert distance.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (4, 2, 3, 4)])
def test_data_that_cannot_be_compared_are_refused(shape):
    with pytest.raises(ConfigError, match=r"images of \(2, 3, 3\).*data of"):
        nearest(torch.zeros(1, 2, 3, 3), torch.zeros(shape, dtype=torch.uint8), LEVELS)
