"""Accuracy, calibration, quality and detection against formulas, scipy and brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.judge import ood
from ebmguard.reference_training.judge.classification import (
    BATCH,
    accuracy,
    as_seen,
    calibration_error,
    classify,
)
from ebmguard.reference_training.judge.features import Features
from ebmguard.reference_training.judge.ood import auroc, other_images, scores
from ebmguard.reference_training.judge.quality import SPLITS, SampleQuality, inception_score
from ebmguard.reference_training.networks import WideResNet
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


@pytest.mark.parametrize(("sharpness", "bins"), [(0.3, 15), (2.0, 7), (3000.0, 15)])
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


def test_logits_are_those_of_all_images_and_noise_is_the_same_every_time():
    network = WideResNet(width=1)
    images = torch.rand(BATCH + 3, 1, 4, 4)
    with torch.no_grad():
        expected = network.classify(images)
    actual = classify(network, images, noise_std=0.0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    images = torch.ones(2 * BATCH, 1, 8, 8)
    state = torch.get_rng_state()
    first, again = (torch.cat(as_seen(images, 0.03)) for _ in range(2))
    assert torch.equal(first, again)
    noise = first - 1
    assert float(noise.std()) == pytest.approx(0.03, rel=0.02)
    assert not torch.equal(noise[:BATCH], noise[BATCH:])
    assert torch.equal(torch.get_rng_state(), state)


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
    wild = 3 * torch.randn(50, *images.shape[1:])
    assert quality.measure(wild) == quality.measure(wild.clamp(-1, 1))


def test_reference_images_are_seen_once_unless_features_are_in_training():
    seen = []

    def counting(x):
        seen.append(len(x))
        return pixels(x)

    quality, images = make(counting, count=250)
    seen.clear()
    quality.measure(images[:30])
    quality.measure(images[50:90] + 0.1)
    assert sum(seen) == 250 + 30 + 40
    factor = [1.0]

    def growing(x):
        features, logits = pixels(x)
        return factor[0] * features, logits

    quality, images = make(growing, fixed=False)
    samples = images[:60] * 0.5
    once = quality.measure(samples)["fid"]
    factor[0] = 3.0
    # A distance of features that are all three times as large.
    assert quality.measure(samples)["fid"] == pytest.approx(9 * once, rel=1e-6)


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


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda x: x.flatten(1), "returned Tensor"),
        (lambda x: (x[:1].flatten(1), x.flatten(1)), r"\(1, 6\)"),
        (torch.nn.Conv2d(4, 4, 1), r"shape \(3, 1, 2\)"),
    ],
)
def test_a_module_of_another_interface_is_refused_at_once(module, words):
    with pytest.raises(ConfigError, match=words):
        make(module)


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
    assert network.training
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


def test_made_up_images_are_noise_colours_and_means(digits):
    x = other_images("uniform", digits, None)
    assert x.shape == digits.test_x.shape
    assert -1 <= float(x.min()) < -0.98
    assert 0.98 < float(x.max()) <= 1
    assert torch.equal(x, other_images("uniform", digits, None))
    colour = torch.randint(0, 256, (30, 3, 4, 4), dtype=torch.uint8)
    data = replace(load_data("digits"), train_x=colour, test_x=colour, levels=255)
    x = other_images("constant", data, None)
    assert torch.equal(x, x[:, :, :1, :1].expand(30, 3, 4, 4))
    assert len(x[:, :, 0, 0].unique()) == 90
    x = other_images("interpolated", digits, None)
    images = digits.scale(digits.test_x)
    pairs = torch.combinations(torch.arange(20))
    means = images[pairs].mean(1)
    used = [pairs[(means - row).abs().flatten(1).amax(1) < 1e-6] for row in x]
    assert sorted(torch.cat(used).flatten().tolist()) == sorted([*range(20)] * 2)


def test_other_data_sets_are_of_the_size_of_the_images(digits, faces):
    x = other_images("digits", replace(digits, name="mine"), None)
    assert torch.equal(x, digits.scale(digits.test_x))
    with pytest.raises(ConfigError, match="trained on"):
        other_images("digits", digits, None)
    colour = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"\(1, 8, 8\).*\(3, 8, 8\)"):
        other_images("digits", replace(digits, name="mine", train_x=colour, test_x=colour), None)
    colour = torch.zeros(3, 3, 16, 16, dtype=torch.uint8)
    x = other_images("celeba64", replace(digits, train_x=colour, test_x=colour), str(faces))
    whole = load_data("celeba64", faces, train_images=1, valid_images=0, test_images=3)
    means = whole.test_x.double().unflatten(3, (16, 4)).unflatten(2, (16, 4)).mean((3, 5))
    assert x.shape == (3, 3, 16, 16)
    torch.testing.assert_close(x.double(), means / 127.5 - 1, rtol=0, atol=1 / 127)
