"""Fresh chains, likelihoods in a cube, and attacks whose worst case is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ebmguard.reference_training.judge.likelihood import Cube, described, measure
from ebmguard.reference_training.judge.robustness import holds
from ebmguard.reference_training.likelihood import Path, bracket_log_z, quadrature_log_z
from tests.parts import Bowl
from tests.reference_training.parts import rng

CUBE = Cube(1.5, torch.zeros(2, dtype=torch.float64))


def test_walls_reflect_and_likelihoods_turn_the_bracket_around():
    x = torch.tensor([0.0, 1.5, 1.7, 4.5, 4.6, 7.4, -1.6, -4.4, 13.5], dtype=torch.float64)
    expected = torch.tensor([0.0, 1.5, 1.3, -1.5, -1.4, 1.4, -1.4, 1.4, 1.5], dtype=torch.float64)
    torch.testing.assert_close(CUBE.fold(x), expected)
    inside = CUBE.sample(500, rng())
    assert torch.equal(CUBE.fold(inside), inside)
    assert CUBE.log_prob(inside)[0] == pytest.approx(-2 * math.log(3))
    path = Path(lambda x: -CUBE.fold(x).square().sum(1), CUBE)
    held_out = torch.zeros(30, 2, dtype=torch.float64)
    generator = rng(2)
    found = measure(path, held_out, held_out, generator, temperatures=20, chains=50, exact=False)
    low, high = found["log_z"]
    assert found["log_likelihood"] == (-high, -low)
    assert found["starts"] == "long-run"
    assert found["log_likelihood_error"] == 0
    assert found["verdict"] in described(found)
    assert "not to be quoted" not in described(found)
    assert "not to be quoted" in described(found | {"holds": False})


def test_a_model_that_leans_on_a_wall_keeps_its_log_z():
    def f(x):
        return 3 * CUBE.fold(x)[:, 0] - CUBE.fold(x)[:, 1] ** 2

    log_z = float(quadrature_log_z(f, (-1.5, -1.5), (1.5, 1.5)))
    generator = rng(1)
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


SHAPE = (1, 3, 4)
WEIGHTS = torch.randn(3, 12, generator=rng(1), dtype=torch.float64)


class Linear(Bowl):
    """Of a model whose logits are W x."""

    def classify(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ WEIGHTS.T


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2)])
def test_an_attack_finds_the_worst_case_of_a_linear_classifier(norm, dual):
    def classify(x: Tensor) -> Tensor:
        return Linear().classify(x)[:, :2]  # of several, the steepest loss is not the worst case

    x = 0.3 * torch.randn(200, *SHAPE, generator=rng(), dtype=torch.float64)
    logits = classify(x)
    y = logits.argmax(dim=1)
    y[:20] = 1 - y[:20]  # these are wrong without an attack
    radius = 0.1
    # In a ball, w @ x falls by radius times the dual norm of w.
    gap = (logits[:, 0] - logits[:, 1]) * (1 - 2 * y)
    fall = radius * float((WEIGHTS[0] - WEIGHTS[1]).norm(dual))
    inside = x.flatten(1).abs().amax(dim=1) < 1 - radius  # the cube stops no attack
    clear = inside & ((gap - fall).abs() > 0.02 * fall)
    assert 20 < int((gap[clear] > fall).sum()) < int(clear.sum()) - 20
    found = holds(classify, x, y, norm, radius, rng())
    assert torch.equal(found[clear], gap[clear] > fall)
    assert torch.equal(holds(classify, x, y, norm, 0.0, rng()), gap > 0)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_attack_stays_in_its_ball_and_in_the_cube(norm):
    x = torch.rand(30, *SHAPE, generator=rng(), dtype=torch.float64) * 2 - 1
    seen: list[Tensor] = []

    def logits(at: Tensor) -> Tensor:
        seen.append(at.detach())
        return Linear().classify(at) * torch.tensor([1.0, 0.0, 0.0]) + torch.tensor([99.0, 0, 0])

    assert holds(logits, x, torch.zeros(30, dtype=torch.int64), norm, 0.25, rng()).all()
    away = torch.stack(seen) - x
    size = away.abs().flatten(2).amax(2) if norm == "linf" else away.flatten(2).norm(dim=2)
    assert 0.2 < float(size.max()) <= 0.25 + 1e-9
    assert torch.stack(seen).abs().max() <= 1
