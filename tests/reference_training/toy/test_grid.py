from __future__ import annotations

import numpy as np
import pytest

from ebmguard.reference_training.toy.distributions import DISTRIBUTIONS
from ebmguard.reference_training.toy.grid import Grid


def test_is_the_published_grid_row_by_row():
    grid = Grid.of(DISTRIBUTIONS["gmm"])
    axis = np.linspace(-1.6, 1.6, 200)
    np.testing.assert_allclose(grid.axis, axis)
    x, y = np.meshgrid(axis, axis)  # numpy's own convention: z[i_y, j_x]
    np.testing.assert_allclose(grid.points[:, 0].reshape(grid.shape), x)
    np.testing.assert_allclose(grid.points[:, 1].reshape(grid.shape), y)
    assert grid.cell == pytest.approx((3.2 / 199) ** 2)


def test_in_one_dimension():
    grid = Grid.of(DISTRIBUTIONS["mixture1d"], 50)
    assert grid.shape == (50,)
    assert grid.points.shape == (50, 1)
    assert grid.cell == pytest.approx(3.2 / 49)
