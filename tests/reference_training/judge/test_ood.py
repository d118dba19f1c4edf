"""Out-of-distribution scores against closed forms and brute force, and the sets of other images."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.judge.ood import BATCH, auroc, other_images, scores


class Quadratic(nn.Module):
    """f(x) = c - a |x|^2 / 2, whose gradient is -a x."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return 0.5 - self.a * x.flatten(1).square().sum(dim=1) / 2


@pytest.fixture(scope="module")
def digits():
    return load_data("digits", test_images=20)


def test_scores_have_their_closed_form_and_leave_no_trace():
    network, images = Quadratic(), torch.randn(BATCH + 5, 1, 2, 3)
    with torch.no_grad():
        energy, mass = scores(network, images, noise_std=0.0)
    flat = images.flatten(1)
    torch.testing.assert_close(energy, 0.5 - 1.5 * flat.square().sum(dim=1))
    torch.testing.assert_close(mass, -3 * flat.norm(dim=1))
    assert network.a.grad is None
    assert network.a.requires_grad
    assert network.training
    assert not images.requires_grad
    assert not energy.requires_grad
    assert not mass.requires_grad


def test_scores_are_of_images_with_noise():
    energy, _ = scores(Quadratic(), torch.zeros(400, 1, 5, 5), noise_std=0.2)
    # E |noise|^2 = 25 * 0.04.
    assert float(energy.mean()) == pytest.approx(0.5 - 1.5, rel=0.05)


def test_auroc_is_the_share_of_pairs_in_the_right_order():
    inside = torch.randint(0, 6, (40,)).float() + 1
    outside = torch.randint(0, 6, (30,)).float()
    pairs = [(a > b) + (a == b) / 2 for a in inside.tolist() for b in outside.tolist()]
    assert auroc(inside, outside) == pytest.approx(sum(pairs) / len(pairs))
    assert auroc(outside + 100, outside) == 1.0
    assert auroc(outside, outside) == 0.5


def test_auroc_of_what_is_not_finite_is_nan():
    assert math.isnan(auroc(torch.tensor([1.0, math.inf]), torch.tensor([0.0])))
    assert math.isnan(auroc(torch.tensor([1.0]), torch.tensor([math.nan, 0.0])))


def test_noise_fills_the_box(digits):
    x = other_images("uniform", digits, None)
    assert x.shape == digits.test_x.shape
    assert -1 <= float(x.min()) < -0.98
    assert 0.98 < float(x.max()) <= 1
    assert torch.equal(x, other_images("uniform", digits, None))


def test_constant_images_have_one_colour_each():
    colour = torch.randint(0, 256, (30, 3, 4, 4), dtype=torch.uint8)
    data = replace(load_data("digits"), train_x=colour, test_x=colour, levels=255)
    x = other_images("constant", data, None)
    assert torch.equal(x, x[:, :, :1, :1].expand(30, 3, 4, 4))
    assert len(x[:, :, 0, 0].unique()) == 90


def test_interpolated_images_are_means_of_two_test_images(digits):
    x = other_images("interpolated", digits, None)
    images = digits.scale(digits.test_x)
    used: list[int] = []
    for row in x:
        (pair,) = (
            {i, j}
            for i in range(20)
            for j in range(i + 1, 20)
            if torch.allclose(row, (images[i] + images[j]) / 2)
        )
        used += pair
    assert sorted(used) == sorted([*range(20)] * 2)


def test_another_data_set_of_the_same_shape(digits):
    mine = replace(digits, name="mine")
    x = other_images("digits", mine, None)
    assert torch.equal(x, digits.scale(digits.test_x))


def test_sets_that_say_nothing_are_refused(digits):
    with pytest.raises(ConfigError, match="trained on"):
        other_images("digits", digits, None)
    colour = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"\(1, 8, 8\).*\(3, 8, 8\)"):
        other_images("digits", replace(digits, name="mine", train_x=colour, test_x=colour), None)


def test_a_data_set_from_files(digits, data_root):
    mnist = load_data("mnist", data_root, test_images=7)
    x = other_images("mnist", replace(mnist, name="mine"), data_root)
    assert torch.equal(x, mnist.scale(mnist.test_x))
