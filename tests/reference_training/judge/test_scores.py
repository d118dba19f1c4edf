"""Accuracy, calibration, quality and detection against formulas, scipy and brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.judge import ood
from ebmguard.reference_training.judge.classification import (
    accuracy,
    calibration_error,
    evaluation_mode,
)
from ebmguard.reference_training.judge.features import Features
from ebmguard.reference_training.judge.ood import auroc, scores
from ebmguard.reference_training.judge.quality import SPLITS, SampleQuality, inception_score
from tests.parts import Bowl
from tests.reference_training.data.test_celeba import root
from tests.reference_training.judge.parts import frechet


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


@pytest.mark.parametrize(("sharpness", "bins"), [(0.3, 15), (2.0, 7), (30.0, 1), (3000.0, 15)])
def test_calibration_error_is_guos_formula(sharpness, bins):
    logits = sharpness * torch.randn(300, 10)
    labels = torch.randint(0, 10, (300,))
    expected = guo(logits, labels, bins)
    assert calibration_error(logits, labels, bins=bins) == pytest.approx(expected, abs=1e-12)


def test_accuracy_counts_hits_and_the_calibration_of_what_is_undefined_is_nan():
    logits = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 5.0], [1.0, 0.0]])
    assert accuracy(logits, torch.tensor([1, 0, 0, 0])) == 0.75
    logits = torch.zeros(4, 3)
    logits[1, 2] = math.nan
    assert math.isnan(calibration_error(logits, torch.zeros(4, dtype=torch.int64)))


def test_modes_of_all_modules_come_back_after_an_error_too():
    network = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    network[1].eval()
    with pytest.raises(ZeroDivisionError), evaluation_mode(network):
        _ = 1 / sum(module.training for module in network.modules())  # none is
    assert [module.training for module in network.modules()] == [True, True, False, False]


def pixels(x):
    """The pixels themselves are features and logits."""
    flat = x.flatten(1)
    return flat, 5 * flat


def make(module=pixels, *, fixed=True, reference=None, count=400):
    if reference is None:
        reference = torch.randint(60, 200, (count, 3, 1, 2), dtype=torch.uint8)
    features = Features(module, "test", False, fixed=fixed)
    data = replace(load_data("digits", test_images=1), train_x=reference, levels=255)
    return SampleQuality(features, data), data.scale(reference)


def score_of(probabilities):
    """exp of the mean KL divergence of p(y|x) from p(y), class by class."""
    count, classes = probabilities.shape
    marginal = [sum(float(p[k]) for p in probabilities) / count for k in range(classes)]
    total = 0.0
    for p in probabilities:
        total += sum(float(p[k]) * math.log(float(p[k]) / marginal[k]) for k in range(classes))
    return math.exp(total / count)


def test_fid_is_the_definition_with_scipys_matrix_root():
    quality, images = make()
    mixing = torch.randn(6, 6) / 5
    samples = (torch.randn(150, 6) @ mixing).view(-1, 3, 1, 2).clamp(-1, 1)
    state = torch.get_rng_state()
    result = quality.measure(samples)
    assert torch.equal(torch.get_rng_state(), state)
    assert result["fid"] == pytest.approx(frechet(images, samples), rel=1e-5)
    assert result["samples"] == 150
    wild = 3 * torch.randn(50, *images.shape[1:])
    assert quality.measure(wild) == quality.measure(wild.clamp(-1, 1))


def test_what_is_undefined_is_nan_and_leaves_the_next_measurement_alone():
    quality, images = make()
    good = quality.measure(images[:40] * 0.5)
    broken = images[:40].clone()
    broken[7] = math.nan
    result = quality.measure(broken)
    assert math.isnan(result["fid"])
    assert math.isnan(result["is"])
    assert quality.measure(images[:40] * 0.5) == good
    one = quality.measure(images[:1])
    assert math.isnan(one["fid"])
    assert (one["is"], one["is_std"]) == (pytest.approx(1.0), 0.0)


def test_inception_score_is_the_definition_on_ten_parts():
    logits = 2 * torch.randn(103, 7)
    mean, deviation = inception_score(logits)
    order = torch.randperm(103, generator=torch.Generator().manual_seed(0))
    probabilities = logits[order].double().softmax(dim=1).numpy()
    parts = [score_of(part) for part in np.array_split(probabilities, SPLITS)]
    assert mean == pytest.approx(np.mean(parts), rel=1e-12)
    assert deviation == pytest.approx(np.std(parts), rel=1e-9)


class Judged(Bowl):
    """With logits: the sum of x, and 0."""

    def classify(self, x):
        return torch.stack([x.flatten(1).sum(dim=1), torch.zeros(len(x))], dim=1)


faces = root
"""A data root with fabricated faces of CelebA."""


@pytest.fixture(scope="module")
def digits():
    return load_data("digits", test_images=20)


def test_scores_have_their_closed_form_and_leave_no_trace():
    network, images = Judged(torch.float32), torch.randn(ood.BATCH + 5, 1, 2, 3)
    found = scores(network, images, noise_std=0.0)
    flat = images.flatten(1)
    torch.testing.assert_close(found["f"], -flat.square().sum(dim=1) / 2)
    torch.testing.assert_close(found["gradient"], -flat.norm(dim=1))
    other = 1 / (1 + flat.sum(dim=1).double().exp())
    torch.testing.assert_close(found["confidence"], torch.maximum(other, 1 - other))
    assert network.height.grad is None
    assert network.height.requires_grad
    assert network.training
    assert not images.requires_grad
    assert not any(score.requires_grad for score in found.values())
    # Of images with noise, whose E |noise|^2 is 25 * 0.04.
    noisy = scores(network, torch.zeros(400, 1, 5, 5), noise_std=0.2)["f"]
    assert float(noisy.mean()) == pytest.approx(-0.5, rel=0.05)


def test_auroc_is_the_share_of_pairs_in_the_right_order_and_nan_where_there_is_none():
    inside = torch.randint(0, 6, (40,)).float() + 1
    outside = torch.randint(0, 6, (30,)).float()
    pairs = [(a > b) + (a == b) / 2 for a in inside.tolist() for b in outside.tolist()]
    assert auroc(inside, outside) == pytest.approx(sum(pairs) / len(pairs))
    for one, other in (([1.0], []), ([], [1.0]), ([1.0, math.inf], [0.0]), ([1.0], [math.nan])):
        assert math.isnan(auroc(torch.tensor(one), torch.tensor(other)))
