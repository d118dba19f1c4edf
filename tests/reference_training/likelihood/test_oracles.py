"""Oracles against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.likelihood import enumerated_log_z, quadrature_log_z


@pytest.mark.parametrize("bits", [1, 5, 16])
def test_independent_bits_are_a_product(bits):
    logits = torch.linspace(-2, 3, bits, dtype=torch.float64)
    expected = torch.nn.functional.softplus(logits).sum()
    torch.testing.assert_close(enumerated_log_z(lambda h: h @ logits, bits), expected)


def test_latents_of_several_visible_states_are_summed_at_once():
    pull = torch.randn(5, 3)
    found = enumerated_log_z(lambda h: h @ pull.T, 3, like=pull)
    expected = torch.nn.functional.softplus(pull.double()).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("low", "high"), [((-9,), (9,)), ((-9.0, -8.0), (9.0, 9.5))], ids=["1d", "2d"]
)
def test_a_gaussian_is_integrated(low, high):
    found = quadrature_log_z(lambda x: -x.square().sum(1) / 2, low, high, points=300)
    # Of an analytic function that is 0 at the ends the midpoint rule is exact to rounding.
    assert float(found) == pytest.approx(len(low) / 2 * math.log(2 * math.pi), abs=1e-12)


def test_a_box_is_what_is_integrated():
    found = quadrature_log_z(lambda x: x[:, 0] * 0 + 2, (0, 0), (3, 0.5), points=7)
    assert float(found) == pytest.approx(2 + math.log(1.5))


@pytest.mark.parametrize(
    ("low", "high", "points"),
    [((0,), (0,), 9), ((0, 0), (1,), 9), ((0, 0, 0), (1, 1, 1), 9), ((), (), 9), ((0,), (1,), 0)],
)
def test_what_is_no_box_is_refused(low, high, points):
    with pytest.raises(ConfigError, match="expected one or two numbers each"):
        quadrature_log_z(lambda x: x.sum(1), low, high, points=points)


@pytest.mark.parametrize("bits", [0, 21])
def test_what_cannot_be_enumerated_is_refused(bits):
    with pytest.raises(ConfigError, match=f"bits is {bits}, expected 1 to 20"):
        enumerated_log_z(lambda h: h.sum(1), bits)
