"""Test accuracy around alerts: what was evaluated is what the network was at that step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ebmguard.reference_training.jem.accuracy import AccuracyWatch


@pytest.fixture
def network():
    return nn.Linear(3, 2)


def make(network, *, context=3, window=2):
    """A watch whose measure is a number that tells the parameters apart."""
    calls: list[float] = []

    def measure():
        calls.append(network.weight.detach().sum().item())
        return calls[-1]

    return AccuracyWatch(network, measure, {}, context, window), calls


def drift(network, step):
    """A stand-in for training that changes what the network answers."""
    with torch.no_grad():
        rng = torch.Generator().manual_seed(step)
        network.weight.add_(torch.randn(network.weight.shape, generator=rng))


def test_steps_before_an_event_are_those_that_were_there(network):
    watch, calls = make(network)
    every_step, evaluated = {}, []
    for step in range(14):
        every_step[step] = network.weight.detach().sum().item()
        if step % 5 == 0:  # the evaluations that come in their turn are the caller's
            watch.results[step] = every_step[step]
        evaluated += watch.before_step(step)
        drift(network, step)
        if step == 7:
            before = {k: v.clone() for k, v in network.state_dict().items()}
            assert watch.look_at(step) == [6, 7]  # step 5 was evaluated in its turn
            after = network.state_dict()
            assert all(torch.equal(before[k], after[k]) for k in before)
    assert len(set(every_step.values())) == 14
    assert evaluated == [8, 9]  # step 10 in its turn
    assert len(calls) == 4
    assert watch.results == {s: every_step[s] for s in (0, 5, 6, 7, 8, 9, 10)}


def test_a_second_event_extends_the_watch_and_measures_nothing_twice(network):
    watch, calls = make(network, context=2, window=2)
    evaluated = []
    for step in range(9):
        evaluated += watch.before_step(step)
        drift(network, step)
        if step in (3, 4):
            evaluated += watch.look_at(step)
    assert evaluated == [2, 3, 4, 5, 6]
    assert len(calls) == 5


def test_state_round_trip(network):
    watch, _ = make(network)
    for step in range(4):
        watch.before_step(step)
        drift(network, step)
    other, _ = make(network)
    other.load_state_dict(watch.state_dict())
    assert watch.look_at(3) == other.look_at(3) == [1, 2, 3]
    assert [watch.results[s] for s in (1, 2, 3)] == [other.results[s] for s in (1, 2, 3)]
    third, _ = make(network)
    third.load_state_dict(other.state_dict())
    assert [third.before_step(step) for step in (4, 5, 6)] == [[4], [5], []]
