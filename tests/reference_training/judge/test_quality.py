"""Inception score and FID against closed forms, scipy and brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.judge.features import Features
from ebmguard.reference_training.judge.quality import (
    SPLITS,
    SampleQuality,
    inception_score,
)
from tests.reference_training.judge.parts import frechet


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


def test_fixed_features_see_the_reference_images_once():
    seen = []

    def counting(x):
        seen.append(len(x))
        return pixels(x)

    quality, images = make(counting, count=250)
    seen.clear()
    first = quality.measure(images[:30])
    assert sum(seen) == 250 + 30
    quality.measure(images[50:90] + 0.1)
    assert sum(seen) == 250 + 30 + 40
    assert quality.measure(images[:30]) == first


def test_features_in_training_see_the_reference_images_each_time():
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


def test_inception_score_knows_collapse_and_variety():
    collapsed = torch.zeros(50, 4)
    collapsed[:, 2] = 1e4  # all other probabilities are 0, not merely small
    assert inception_score(collapsed) == (1.0, 0.0)
    # Sorted by class, as a replay buffer may be: the parts are still of all classes.
    varied = 1e4 * torch.eye(4).repeat_interleave(500, dim=0)
    mean, _ = inception_score(varied)
    assert 3.9 < mean <= 4.0


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda x: x.flatten(1), "returned Tensor"),
        (lambda x: (x, x.flatten(1)), r"\(2, 3, 1, 2\)"),
        (lambda x: (x[:1].flatten(1), x.flatten(1)), r"\(1, 6\)"),
        (torch.nn.Conv2d(4, 4, 1), r"shape \(3, 1, 2\)"),
    ],
)
def test_a_module_of_another_interface_is_refused_at_once(module, words):
    with pytest.raises(ConfigError, match=words):
        make(module)
