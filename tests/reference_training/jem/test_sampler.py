"""The sampler against SGLD written by hand, and what it may touch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ebmguard import guard
from ebmguard.reference_training.jem.sampler import make_sampler
from ebmguard.reference_training.jem.scenarios import DEFAULT
from ebmguard.reference_training.networks import WideResNet
from ebmguard.samplers import ReplayBuffer
from tests.replay import Replay, capture_as_replays

SETTINGS = replace(DEFAULT, sgld_steps=3, step_size=0.7, noise_std=0.05)
SHAPE = (3, 8, 8)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return WideResNet(in_channels=3, classes=4, width=1)


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def buffer(rng, size=20, classes=1, reinit_rate=0.3):
    return ReplayBuffer(size, SHAPE, reinit_rate=reinit_rate, generator=rng, classes=classes)


def test_labels_climb_the_energy_of_their_class(network):
    """Without noise, each chain raises its own logit more than it raises the others'."""
    still = replace(SETTINGS, noise_std=0.0, step_size=20.0, sgld_steps=10)
    rng = generator()
    chains = buffer(rng, classes=4, reinit_rate=0.0)
    chains.samples[:] = chains.samples[:1]  # all from the same start
    x0 = chains.samples[:4].clone()
    x = make_sampler(still, 4, rng)(network, chains, torch.arange(4))
    with torch.no_grad():
        gain = network.classify(x) - network.classify(x0)
    assert gain.argmax(dim=0).tolist() == [0, 1, 2, 3]
    assert gain.argmax(dim=1).tolist() == [0, 1, 2, 3]


def test_samples_and_buffer_do_not_share_memory(network):
    rng = generator()
    chains = buffer(rng)
    sample_q = make_sampler(SETTINGS, 6, rng)
    x = sample_q(network, chains)
    stored = chains.samples.clone()
    x.zero_()
    assert torch.equal(chains.samples, stored)
    first = sample_q(network, chains)
    kept = first.clone()
    chains.samples.fill_(7)
    sample_q(network, chains)
    assert torch.equal(first, kept)


def test_the_network_is_frozen_while_samples_are_drawn(network):
    """A compiled network computes what requires a gradient; test_frozen.py has what comes after."""
    rng, seen = generator(), []
    network.register_forward_pre_hook(
        lambda module, args: seen.append(
            module.training or any(p.requires_grad for p in module.parameters())
        )
    )
    make_sampler(SETTINGS, 6, rng)(network, buffer(rng))
    assert seen == [False] * 3
    assert network.training
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


def test_the_number_of_steps_is_asked_for_at_every_call(network):
    asked = [3, 12, 6]
    rng, twin = generator(), generator()
    answers = iter(asked)
    sample_q = make_sampler(SETTINGS, 2, rng, lambda: next(answers))
    for steps in asked:
        chains, same = buffer(rng), buffer(twin)
        x = sample_q(network, chains)
        x0, _ = same.sample(2)
        noise = torch.randn(steps, 2, *SHAPE, generator=twin)
        for z in noise:
            x0 = x0.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(network.classify(x0).logsumexp(1).sum(), x0)
            x0 = (x0 + 0.7 * gradient + 0.05 * z).detach()
        torch.testing.assert_close(x, x0, rtol=1e-5, atol=1e-5)


def test_a_guard_measures_a_captured_sampler_by_its_warm_up(network, monkeypatch):
    """No evaluation inside a capture counts, as on a GPU."""
    capture_as_replays(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: Replay.recording)
    rng = generator()
    g = guard(None, make_sampler(SETTINGS, 6, rng), beta_star=0.5)
    g.sampler(network, buffer(rng))
    assert g.state_dict()["measured"]["settled"]["output_scale"] == pytest.approx(
        2 * 0.7 / 0.05**2, rel=0.01
    )
