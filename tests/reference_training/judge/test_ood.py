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
from tests.reference_training.data.test_celeba import root


class Quadratic(nn.Module):
    """f(x) = c - a |x|^2 / 2, whose gradient is -a x; and the logits sum x and 0."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return 0.5 - self.a * x.flatten(1).square().sum(dim=1) / 2

    def classify(self, x):
        return torch.stack([x.flatten(1).sum(dim=1), torch.zeros(len(x))], dim=1)


faces = root
"""A data root with fabricated faces of CelebA."""


@pytest.fixture(scope="module")
def digits():
    return load_data("digits", test_images=20)


def test_scores_have_their_closed_form_and_leave_no_trace():
    network, images = Quadratic(), torch.randn(BATCH + 5, 1, 2, 3)
    found = scores(network, images, noise_std=0.0)
    flat = images.flatten(1)
    torch.testing.assert_close(found["f"], 0.5 - 1.5 * flat.square().sum(dim=1))
    torch.testing.assert_close(found["gradient"], -3 * flat.norm(dim=1))
    other = 1 / (1 + flat.sum(dim=1).double().exp())
    torch.testing.assert_close(found["confidence"], torch.maximum(other, 1 - other))
    assert network.a.grad is None
    assert network.a.requires_grad
    assert network.training
    assert not images.requires_grad
    assert not any(score.requires_grad for score in found.values())
    # Of images with noise, whose E |noise|^2 is 25 * 0.04.
    noisy = scores(network, torch.zeros(400, 1, 5, 5), noise_std=0.2)["f"]
    assert float(noisy.mean()) == pytest.approx(0.5 - 1.5, rel=0.05)


def test_auroc_is_the_share_of_pairs_in_the_right_order_and_nan_where_there_is_none():
    inside = torch.randint(0, 6, (40,)).float() + 1
    outside = torch.randint(0, 6, (30,)).float()
    pairs = [(a > b) + (a == b) / 2 for a in inside.tolist() for b in outside.tolist()]
    assert auroc(inside, outside) == pytest.approx(sum(pairs) / len(pairs))
    for one, other in (([1.0], []), ([], [1.0]), ([1.0, math.inf], [0.0]), ([1.0], [math.nan])):
        assert math.isnan(auroc(torch.tensor(one), torch.tensor(other)))


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


def test_another_data_set(digits, data_root):
    x = other_images("digits", replace(digits, name="mine"), None)
    assert torch.equal(x, digits.scale(digits.test_x))
    mnist = load_data("mnist", data_root, test_images=7)
    x = other_images("mnist", replace(mnist, name="mine"), data_root)
    assert torch.equal(x, mnist.scale(mnist.test_x))
    with pytest.raises(ConfigError, match="trained on"):
        other_images("digits", digits, None)
    colour = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"\(1, 8, 8\).*\(3, 8, 8\)"):
        other_images("digits", replace(digits, name="mine", train_x=colour, test_x=colour), None)


def test_faces_are_averaged_down_to_the_size_of_the_images(digits, faces):
    colour = torch.zeros(3, 3, 16, 16, dtype=torch.uint8)
    x = other_images("celeba64", replace(digits, train_x=colour, test_x=colour), str(faces))
    whole = load_data("celeba64", faces, train_images=1, valid_images=0, test_images=3)
    means = whole.test_x.double().unflatten(3, (16, 4)).unflatten(2, (16, 4)).mean((3, 5))
    assert x.shape == (3, 3, 16, 16)
    torch.testing.assert_close(x.double(), means / 127.5 - 1, rtol=0, atol=1 / 127)
