"""The cube whose walls reflect, and a likelihood whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch

from ebmguard.reference_training.judge.likelihood import Cube, described, measure
from ebmguard.reference_training.likelihood import Path, bracket_log_z, quadrature_log_z

CUBE = Cube(1.5, torch.zeros(2, dtype=torch.float64))


def test_walls_reflect():
    x = torch.tensor([0.0, 1.5, 1.7, 4.5, 4.6, 7.4, -1.6, -4.4, 13.5], dtype=torch.float64)
    expected = torch.tensor([0.0, 1.5, 1.3, -1.5, -1.4, 1.4, -1.4, 1.4, 1.5], dtype=torch.float64)
    torch.testing.assert_close(CUBE.fold(x), expected)
    inside = CUBE.sample(500, torch.Generator().manual_seed(0))
    assert torch.equal(CUBE.fold(inside), inside)
    assert CUBE.log_prob(inside)[0] == pytest.approx(-2 * math.log(3))


def test_a_model_that_leans_on_a_wall_keeps_its_log_z():
    def f(x):
        return 3 * CUBE.fold(x)[:, 0] - CUBE.fold(x)[:, 1] ** 2

    log_z = float(quadrature_log_z(f, (-1.5, -1.5), (1.5, 1.5)))
    generator = torch.Generator().manual_seed(1)
    # Exact samples of x: an exponential density cut off, by its inverse; of y: by its weights.
    u = torch.rand(400, generator=generator, dtype=torch.float64)
    x = torch.log(u * (math.exp(4.5) - math.exp(-4.5)) + math.exp(-4.5)) / 3
    axis = torch.linspace(-1.5, 1.5, 3001, dtype=torch.float64)
    y = axis[torch.multinomial((-(axis**2)).exp(), 400, replacement=True, generator=generator)]
    found = bracket_log_z(
        Path(f, CUBE),
        torch.stack((x, y), 1),
        starts="exact",
        temperatures=60,
        chains=400,
        generator=generator,
    )
    assert found.problems == []
    assert found.lower < log_z < found.upper


def test_log_likelihoods_turn_the_bracket_around():
    path = Path(lambda x: -CUBE.fold(x).square().sum(1), CUBE)
    held_out = torch.zeros(30, 2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    found = measure(path, held_out, held_out, generator, temperatures=20, chains=50, exact=False)
    low, high = found["log_z"]
    assert found["log_likelihood"] == (-high, -low)
    assert found["starts"] == "long-run"
    assert found["log_likelihood_error"] == 0
    assert found["verdict"] in described(found)
    assert "not to be quoted" not in described(found)
    assert "not to be quoted" in described(found | {"holds": False})
