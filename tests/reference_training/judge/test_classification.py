"""Accuracy and calibration, and that evaluating a network leaves no trace in it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ebmguard.reference_training.judge.classification import (
    BATCH,
    accuracy,
    as_seen,
    calibration_error,
    classify,
    evaluation_mode,
)
from ebmguard.reference_training.networks import WideResNet


def guo(logits, labels, bins):
    """The formula, image by image."""
    members: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for row, label in zip(logits.double().softmax(dim=1).tolist(), labels.tolist(), strict=True):
        confidence = max(row)
        (number,) = (m for m in range(bins) if m / bins < confidence <= (m + 1) / bins)
        members[number].append((confidence, row.index(confidence) == label))
    total = 0.0
    for own in members:
        if own:
            gap = sum(hit for _, hit in own) / len(own) - sum(c for c, _ in own) / len(own)
            total += len(own) / len(labels) * abs(gap)
    return total


@pytest.mark.parametrize("sharpness", [0.3, 2.0, 30.0, 3000.0])
@pytest.mark.parametrize("bins", [1, 7, 15])
def test_calibration_error_is_guos_formula(sharpness, bins):
    logits = sharpness * torch.randn(300, 10)
    labels = torch.randint(0, 10, (300,))
    expected = guo(logits, labels, bins)
    assert calibration_error(logits, labels, bins=bins) == pytest.approx(expected, abs=1e-12)


def test_calibration_error_of_what_is_undefined_is_nan():
    logits = torch.zeros(4, 3)
    logits[1, 2] = math.nan
    assert math.isnan(calibration_error(logits, torch.zeros(4, dtype=torch.int64)))


def test_accuracy_counts_hits():
    logits = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 5.0], [1.0, 0.0]])
    assert accuracy(logits, torch.tensor([1, 0, 0, 0])) == 0.75


def test_logits_are_those_of_the_images_over_several_batches():
    network = WideResNet(width=1)
    images = torch.rand(BATCH + 3, 1, 4, 4)
    with torch.no_grad():
        expected = network.classify(images)
    actual = classify(network, images, noise_std=0.0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_noise_has_its_size_and_is_the_same_every_time():
    images = torch.ones(2 * BATCH, 1, 8, 8)
    state = torch.get_rng_state()
    first, again = (torch.cat(as_seen(images, 0.03)) for _ in range(2))
    assert torch.equal(first, again)
    noise = first - 1
    assert float(noise.std()) == pytest.approx(0.03, rel=0.02)
    assert not torch.equal(noise[:BATCH], noise[BATCH:])
    assert torch.equal(torch.get_rng_state(), state)


def test_modes_of_all_modules_come_back_after_an_error_too():
    network = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    network[1].eval()
    before = [module.training for module in network.modules()]
    inside: list[bool] = []

    def fail():
        with evaluation_mode(network):
            inside.extend(module.training for module in network.modules())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert inside == [False] * 4
    assert [module.training for module in network.modules()] == before == [True, True, False, False]
