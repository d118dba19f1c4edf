from __future__ import annotations

import pytest
import torch

from ebmguard.reference_training.data import load_digits
from ebmguard.reference_training.jem.accuracy import AccuracyWatch, accuracy
from ebmguard.reference_training.networks import WideResNet


@pytest.fixture
def network():
    torch.manual_seed(0)
    return WideResNet(width=1)


@pytest.fixture(scope="module")
def data():
    return load_digits()


def test_accuracy_counts_the_hits(network, data):
    # More images than one batch, so that the parts are put together as well.
    images, labels = data.train_x[:600], data.train_y[:600]
    expected = sum(
        int(network.classify(x[None]).argmax() == y) for x, y in zip(images, labels, strict=True)
    )
    assert accuracy(network, images, labels) == expected / 600


def make(network, data, **settings):
    settings = {"every": 5, "context": 3, "window": 2, **settings}
    images, labels = data.test_x[:50], data.test_y[:50]
    return AccuracyWatch(network, images, labels, results={}, **settings)


def drift(network, step):
    """A stand-in for training that changes what the network answers."""
    with torch.no_grad():
        rng = torch.Generator().manual_seed(step)
        network.head.weight.add_(torch.randn(network.head.weight.shape, generator=rng))


def test_steps_before_an_event_are_those_that_were_there(network, data):
    watch = make(network, data)
    every_step = {}
    evaluated = []
    for step in range(14):
        evaluated += watch.before_step(step)
        every_step[step] = accuracy(network, watch.images, watch.labels)
        drift(network, step)
        if step == 7:
            before = {k: v.clone() for k, v in network.state_dict().items()}
            assert watch.look_at(step) == [6, 7]  # step 5 was evaluated in its turn
            after = network.state_dict()
            assert all(torch.equal(before[k], after[k]) for k in before)
    assert len(set(every_step.values())) > 3
    assert evaluated == [0, 5, 8, 9, 10]
    assert watch.results == {s: every_step[s] for s in (0, 5, 6, 7, 8, 9, 10)}


def test_without_context_nothing_is_copied(network, data):
    watch = make(network, data, context=0)
    assert watch.before_step(1) == []
    assert watch.look_at(1) == []
    assert watch.before_step(2) == [2]


def test_state_round_trip(network, data):
    watch = make(network, data)
    for step in range(4):
        watch.before_step(step)
        drift(network, step)
    other = make(network, data)
    other.load_state_dict(watch.state_dict())
    assert watch.look_at(3) == other.look_at(3) == [1, 2, 3]
    assert [watch.results[s] for s in (1, 2, 3)] == [other.results[s] for s in (1, 2, 3)]
    assert other.before_step(4) == [4]
