"""CUDA graphs give what eager code gives: on stand-ins everywhere, and on a GPU where there is one.

The stand-ins replay recorded operations on the same storages (`tests/replay.py`), under PyTorch's
own `make_graphed_callables`: they show what is static and what is overwritten, not that CUDA can
capture it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from ebmguard import guard
from ebmguard.reference_training.engine.graphs import graphed, graphed_energies
from ebmguard.reference_training.networks import WideResNet, frozen
from ebmguard.samplers import sgld
from tests.reference_training.parts import CPU
from tests.replay import capture_as_replays

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: captures CUDA graphs"
)
G, N, M = 3, 7, 5


class Members(nn.Module):
    """Three small networks on (3, n, 2), with a parameter that is unused and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(G, 2, 8), torch.randn(G, 8, 1)])
        self.unused = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)
        self.double()  # Adam would turn the last digits of float32 into steps of their own

    def forward(self, x):
        return self.frozen * torch.bmm(torch.tanh(x @ self.weights[0]), self.weights[1]).squeeze(-1)


@pytest.fixture(params=["eager", "stand-ins", pytest.param("cuda", marks=needs_gpu)])
def device(request, monkeypatch):
    """Any device, with or without graphs."""
    if request.param == "stand-ins":
        capture_as_replays(monkeypatch)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


with_graphs = pytest.mark.parametrize(
    "device", ["stand-ins", pytest.param("cuda", marks=needs_gpu)], indirect=True
)


def samples(n, seed, device=CPU):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(G, n, 2, generator=rng, dtype=torch.float64).to(device)


def chain(network, x, noise):
    return sgld(network, x, steps=len(noise), step_size=0.1, noise_std=0.1, noise=noise)


def draws(seed, n=M, device=CPU):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(4, 1, n, 2, generator=rng, dtype=torch.float64).to(device)


def twins(device):
    network, twin = Members(), Members()
    twin.load_state_dict(network.state_dict())
    return network.to(device), twin.to(device)


# -- graphed ---------------------------------------------------------------------------------


def test_the_chain_itself_on_a_cpu():
    assert graphed(chain, CPU) is chain


@with_graphs
def test_a_chain_is_warmed_up_by_its_first_steps(device):
    network, calls = Members().to(device), []
    network.register_forward_pre_hook(lambda *_: calls.append(1))
    captured = graphed(chain, device)
    for _ in range(2):
        captured(network, samples(M, 0, device), draws(0, M, device))
        assert len(calls) == 3 + 4  # and those of the capture


@with_graphs
def test_what_is_the_graphs_memory_and_what_is_the_callers(device):
    network, call = Members().to(device), graphed(chain, device)
    x, noise = samples(N, 0, device), draws(0, N, device)
    kept = x.clone(), noise.clone()
    first = call(network, x, noise)
    before = first.clone()
    second = call(network, (x + 1).requires_grad_(), noise + 1)
    assert second.data_ptr() == first.data_ptr()
    assert not torch.equal(first, before)
    assert not second.requires_grad
    assert torch.equal(x, kept[0])
    assert torch.equal(noise, kept[1])
    other = call(network, samples(M, 1, device), draws(1, M, device))
    assert other.data_ptr() != first.data_ptr()
    # Its own result may be the next start.
    x = expected = samples(N, 0, device)
    for step in range(3):
        noise = draws(step, N, device)
        x, expected = call(network, x, noise), chain(network, expected, noise)
    torch.testing.assert_close(x, expected)


def chain_of_classes(network, x, noise, labels):
    """A trainer's kind of sampler: f(x, y) of a convolutional network, its parameters frozen."""
    with frozen(network) as f:
        return chain(lambda x: f(x, labels), x, noise)


def images(seed, device, dtype=torch.float64):
    """Start points, noise and labels."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(5, 1, 8, 8, generator=rng, dtype=dtype)
    noise = torch.randn(4, 5, 1, 8, 8, generator=rng, dtype=dtype)
    return x.to(device), noise.to(device), torch.randint(10, (5,), generator=rng).to(device)


def wide_resnet(**settings):
    torch.manual_seed(0)
    return WideResNet(width=1, **settings)


@with_graphs
def test_guarded_chain_of_classes_follows_labels_and_parameters(device):
    found = []
    for sampler in (graphed(chain_of_classes, device), chain_of_classes):
        network = wide_resnet().double().to(device)
        g = guard(None, sampler, beta_star=lambda step: 0.2 * (1 + step), output_scale=1.0)
        steps: list[Any] = []
        for step in range(4):
            x = g.sampler(network, *images(step, device))
            steps.append(x.clone())
            g.loss_fn(network(x + 1), network(x))
            if step:  # of the first call a guard has seen the warm-up alone
                steps.append(torch.tensor(g.last["sampler/grad_norm"]))
            with torch.no_grad():
                network.head.weight.mul_(1.5)
        found.append(steps)
        assert all(p.requires_grad and p.grad is None for p in network.parameters())
    torch.testing.assert_close(*found)
    network, (x, noise, labels) = wide_resnet().double().to(device), images(0, device)
    untempered, other = (chain_of_classes(network, x, noise, y) for y in (labels, 9 - labels))
    assert (untempered - found[0][0]).abs().max() > 1e-6
    assert (untempered - other).abs().max() > 1e-6


def chain_of_features(network, x, noise, labels):
    """Not frozen: what requires a gradient is cached by autocast."""
    return chain(lambda x: network.features(x).sum(1), x, noise)


@pytest.mark.parametrize(
    ("own", "inside"),
    [(chain_of_features, False), (chain_of_features, True), (chain_of_classes, False)],
)
def test_bfloat16_chain_reads_the_parameters_of_each_call(own, inside, monkeypatch):
    """Also inside a caller's autocast, whose cache would keep the weights of the warm-up."""
    capture_as_replays(monkeypatch)
    callers = torch.autocast("cpu", torch.bfloat16) if inside else nullcontext()
    found = []
    for sampler, context in ((graphed(own, CPU), callers), (own, nullcontext())):
        network, steps = wide_resnet(autocast=torch.bfloat16), []
        with context:
            for step in range(3):
                steps.append(sampler(network, *images(step, CPU, torch.float32)).clone())
                with torch.no_grad():
                    network.stem.weight.mul_(1.5)
        found.append(steps)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- graphed_energies ------------------------------------------------------------------------


def test_examples_and_forward_stay_as_they_are_also_without_gradients(device):
    network = Members().to(device)
    x_pos, x_neg = samples(N, 0, device), samples(M, 0, device)
    kept, before = (x_pos.clone(), x_neg.clone()), dict(vars(network))
    energies = graphed_energies(network, x_pos, x_neg)
    with torch.no_grad():
        f_pos, f_neg = energies(x_pos + 1, x_neg + 1)
    assert not f_pos.requires_grad
    torch.testing.assert_close((f_pos, f_neg), (network(x_pos + 1), network(x_neg + 1)))
    assert torch.equal(x_pos, kept[0])
    assert torch.equal(x_neg, kept[1])
    assert vars(network) == before


def test_whole_training_steps(device):
    """Sampler, energies and the guard's loss together: the graphs against eager code."""
    found = []
    for each, is_plain in zip(twins(device), (False, True), strict=True):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.05)
        g = guard(
            None,
            chain if is_plain else graphed(chain, device),
            beta_star=torch.tensor([0.25, 0.5, 1.0], device=device),
            output_scale=2.0,
        )
        examples = samples(N, 0, device), samples(M, 0, device)
        energies = None if is_plain else graphed_energies(each, *examples)
        assert all(p.grad is None for p in each.parameters())
        seen = []
        for step in range(5):
            x_neg = g.sampler(each, samples(M, step, device), draws(step, M, device))
            x_pos = samples(N, 50 + step, device)
            f = energies(x_pos, x_neg) if energies else (each(x_pos), each(x_neg))
            loss = g.loss_fn(*f)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trained = [p for p in each.parameters() if p.grad is not None]
            assert len(trained) == 2  # neither the unused one nor the frozen one
            seen += [x.detach().clone() for x in (*f, loss, *[p.grad for p in trained], *trained)]
        found.append(seen)
    torch.testing.assert_close(*found)
