"""A line of evaluations.jsonl, and that taking it does not change a training run."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from ebmguard.reference_training.data import load_data
from ebmguard.reference_training.judge.evaluator import Evaluator
from ebmguard.reference_training.judge.features import load_features
from ebmguard.reference_training.judge.quality import SampleQuality
from ebmguard.reference_training.networks import WideResNet
from tests.reference_training.judge.parts import CPU

DATA = load_data("digits", train_images=120, valid_images=50, test_images=80)


@pytest.fixture
def network():
    return WideResNet(width=1, early_stride=True)


def make(network, *, data=DATA):
    features = load_features("own", CPU, network=network)
    quality = SampleQuality(features, data)
    return Evaluator(data, noise_std=0.0, quality=quality)


def share_right(network, images, labels):
    with torch.no_grad():
        answers = [int(network.classify(DATA.scale(x[None])).argmax()) for x in images]
    return sum(a == b for a, b in zip(answers, labels.tolist(), strict=True)) / len(labels)


def test_a_row_has_what_was_measured(network):
    evaluator = make(network)
    buffer = torch.rand(40, 1, 8, 8) * 2 - 1
    row = evaluator.evaluate(network, step=11, epoch=0.5, buffer=buffer)
    assert list(row) == [
        *("step", "epoch", "valid_accuracy", "test_accuracy", "ece"),
        *("buffer_is", "buffer_is_std", "buffer_fid", "buffer_samples"),
        *("features", "features_comparable", "features_fixed"),
    ]
    assert (row["step"], row["epoch"], row["buffer_samples"]) == (11, 0.5, 40)
    assert row["valid_accuracy"] == share_right(network, DATA.valid_x, DATA.valid_y)
    assert row["test_accuracy"] == share_right(network, DATA.test_x, DATA.test_y)
    assert row["test_accuracy"] == evaluator.test_accuracy(network)
    assert 0 < row["ece"] < 1
    assert row["buffer_fid"] > 0
    assert row["buffer_is"] >= 1
    assert "own classifier" in row["features"]
    assert (row["features_comparable"], row["features_fixed"]) == (False, False)


def test_samples_are_judged_only_where_there_are_some(network):
    row = make(network).evaluate(network, 0, 0.0, None)
    assert not any(name.startswith(("buffer", "features")) for name in row)
    unjudged = Evaluator(DATA, noise_std=0.0, quality=None)
    assert unjudged.evaluate(network, 0, 0.0, torch.zeros(9, 1, 8, 8)) == row


def test_there_may_be_no_validation_images(network):
    data = load_data("digits", train_images=60, test_images=30)
    assert make(network, data=data).evaluate(network, 0, 0.0, None)["valid_accuracy"] is None


def test_a_diverged_network_is_measured_and_not_fatal(network):
    with torch.no_grad():
        network.head.weight.fill_(math.nan)
    row = make(network).evaluate(network, 0, 0.0, torch.full((20, 1, 8, 8), math.nan))
    assert math.isnan(row["ece"])
    assert math.isnan(row["buffer_is"])
    assert math.isnan(row["buffer_fid"])
    assert 0 <= row["test_accuracy"] <= 1


def test_a_run_takes_the_same_course_with_and_without_evaluations(network):
    def course(network, evaluator):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for step in range(4):
            f = network(DATA.scale(DATA.train_x[:8]) + 0.03 * torch.randn(8, 1, 8, 8))
            f.mean().backward()  # gradients add up over the steps
            if evaluator is not None:
                evaluator.evaluate(network, step, 0.0, torch.rand(30, 1, 8, 8, generator=chains))
            assert network.training
            optimizer.step()
        return [parameter.detach().clone() for parameter in network.parameters()]

    chains = torch.Generator().manual_seed(1)
    other = copy.deepcopy(network)
    plain, watched = course(network, None), course(other, make(other))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert all(a.requires_grad for a in other.parameters())
