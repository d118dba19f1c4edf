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
from ebmguard.errors import ConfigError
from ebmguard.reference_training.engine.graphs import (
    first_steps,
    graphed,
    graphed_energies,
)
from ebmguard.reference_training.networks import WideResNet, frozen
from ebmguard.samplers import sgld
from tests.replay import capture_as_replays

CPU = torch.device("cpu")
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


@pytest.fixture
def stand_ins(monkeypatch):
    """CUDA graphs by replayed CPU operations."""
    capture_as_replays(monkeypatch)


@pytest.fixture(params=["stand-ins", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    """Where graphs are captured."""
    if request.param == "cuda":
        return torch.device("cuda")
    request.getfixturevalue("stand_ins")
    return CPU


@pytest.fixture(params=["eager", "stand-ins", pytest.param("cuda", marks=needs_gpu)])
def anywhere(request):
    """Any device, with or without graphs."""
    if request.param == "cuda":
        return torch.device("cuda")
    if request.param == "stand-ins":
        request.getfixturevalue("stand_ins")
    return CPU


def samples(n, seed, device=CPU):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(G, n, 2, generator=rng, dtype=torch.float64).to(device)


def chain(network, x, noise):
    return sgld(network, x, steps=4, step_size=0.1, noise_std=0.1, noise=noise)


def chain_of_any_length(network, x, noise):
    return sgld(network, x, steps=len(noise), step_size=0.1, noise_std=0.1, noise=noise)


def draws(seed, n=M, device=CPU):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(4, 1, n, 2, generator=rng, dtype=torch.float64).to(device)


def twins(device):
    network, twin = Members(), Members()
    twin.load_state_dict(network.state_dict())
    return network.to(device), twin.to(device)


# -- graphed ---------------------------------------------------------------------------------


def test_function_itself_on_a_cpu():
    assert graphed(chain, CPU) is chain


def test_a_chain_is_warmed_up_by_its_first_steps(stand_ins):
    network, calls = Members(), []
    network.register_forward_pre_hook(lambda *_: calls.append(1))
    captured = graphed(chain_of_any_length, CPU, first_steps)
    x, noise = samples(M, 0), draws(0)
    expected = chain(network, x, noise)
    calls.clear()
    torch.testing.assert_close(captured(network, x, noise), expected)
    assert len(calls) == 3 + len(noise)  # and those of the capture
    captured(network, x, noise)
    assert len(calls) == 3 + len(noise)


def test_what_other_threads_ask_does_not_break_a_capture(stand_ins, monkeypatch):
    asked = []

    def captured(graph, **told):
        asked.append(told)
        return graph

    monkeypatch.setattr("torch.cuda.graph", captured)
    graphed(chain, CPU)(Members(), samples(M, 0), draws(0))
    assert [told["capture_error_mode"] for told in asked] == ["thread_local"]


def test_replays_follow_inputs_and_parameters(device):
    network, call = Members().to(device), graphed(chain, device)
    for step in range(4):
        n = M if step % 2 else N  # two graphs
        x, noise = samples(n, step, device), draws(step, n, device)
        expected = chain(network, x, noise)
        torch.testing.assert_close(call(network, x, noise), expected)
        with torch.no_grad():
            network.weights[0].mul_(1.1)


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


def test_another_network_is_refused(device):
    network, twin = twins(device)
    call = graphed(chain, device)
    call(network, samples(N, 0, device), draws(0, N, device))
    with pytest.raises(ConfigError, match="another network"):
        call(twin, samples(N, 0, device), draws(0, N, device))


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
@pytest.mark.usefixtures("stand_ins")
def test_bfloat16_chain_reads_the_parameters_of_each_call(own, inside):
    """Also inside a caller's autocast, whose cache would keep the weights of the warm-up."""
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


def contrast(f_pos, f_neg):
    return (f_neg.exp().mean(-1) - f_pos.mean(-1)).sum()


def test_energies_and_gradients_over_several_steps(anywhere):
    network, twin = twins(anywhere)
    energies = graphed_energies(network, samples(N, 0, anywhere), samples(M, 0, anywhere))
    assert all(p.grad is None for p in network.parameters())
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (network, twin)]
    for step in range(1, 5):
        x_pos, x_neg = samples(N, step, anywhere), samples(M, 100 + step, anywhere)
        f_pos, f_neg = energies(x_pos, x_neg)
        assert (f_pos.shape, f_neg.shape) == ((G, N), (G, M))
        expected = twin(x_pos), twin(x_neg)
        torch.testing.assert_close((f_pos, f_neg), expected)
        for optimizer, loss in zip(
            optimizers, (contrast(f_pos, f_neg), contrast(*expected)), strict=True
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for p, q in zip(network.parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
            torch.testing.assert_close(p, q)


def test_examples_and_forward_stay_as_they_are_also_without_gradients(anywhere):
    network = Members().to(anywhere)
    x_pos, x_neg = samples(N, 0, anywhere), samples(M, 0, anywhere)
    kept, before = (x_pos.clone(), x_neg.clone()), dict(vars(network))
    energies = graphed_energies(network, x_pos, x_neg)
    with torch.no_grad():
        f_pos, f_neg = energies(x_pos + 1, x_neg + 1)
    assert not f_pos.requires_grad
    torch.testing.assert_close((f_pos, f_neg), (network(x_pos + 1), network(x_neg + 1)))
    assert torch.equal(x_pos, kept[0])
    assert torch.equal(x_neg, kept[1])
    assert vars(network) == before


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_an_earlier_pass_are_refused(anywhere, set_to_none):
    network = Members().to(anywhere)
    x_pos, x_neg = samples(N, 0, anywhere), samples(M, 0, anywhere)
    energies = graphed_energies(network, x_pos, x_neg)
    for step in range(2):
        network.zero_grad(set_to_none)
        loss = contrast(*energies(x_pos, x_neg))
        if step and not set_to_none:
            with pytest.raises(ConfigError, match="set_to_none=True"):
                loss.backward()
        else:
            loss.backward()


def test_other_samples_are_refused(anywhere):
    network = Members().to(anywhere)
    x_pos, x_neg = samples(N, 0, anywhere), samples(M, 0, anywhere)
    energies = graphed_energies(network, x_pos, x_neg)
    for pos, neg in (
        (x_pos[:1], x_neg),  # would be broadcast into the graph's memory
        (x_pos, x_neg[:, 1:]),
        (x_pos.float(), x_neg),
        (x_pos, x_neg.clone().requires_grad_()),
    ):
        with pytest.raises(ConfigError, match="the energies were prepared for"):
            energies(pos, neg)


def test_network_without_one_energy_per_sample_is_refused(anywhere):
    x = samples(N, 0, anywhere)
    with pytest.raises(ConfigError, match=r"returned \(3, 14, 2\).*expected .* \(3, 14\)"):
        graphed_energies(nn.Identity(), x, x)(x, x)


def test_whole_training_steps(anywhere):
    """Sampler, energies and the guard's loss together: the graphs against eager code."""
    network, twin = twins(anywhere)
    found = []
    for each, is_plain in ((network, False), (twin, True)):
        optimizer = torch.optim.Adam(each.parameters(), lr=0.01)
        x_pos = samples(N, 0, anywhere)
        g = guard(
            None,
            chain if is_plain else graphed(chain, anywhere),
            beta_star=torch.tensor([0.25, 0.5, 1.0], device=anywhere),
            output_scale=2.0,
        )
        energies: Any = (lambda pos, neg, f=each: (f(pos), f(neg))) if is_plain else None
        if energies is None:
            energies = graphed_energies(each, x_pos, samples(M, 0, anywhere))
        losses = []
        for step in range(5):
            x_neg = g.sampler(each, samples(M, step, anywhere), draws(step, M, anywhere))
            loss = g.loss_fn(*energies(samples(N, 50 + step, anywhere), x_neg))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
        found.append([*losses, *each.parameters()])
    torch.testing.assert_close(*found)
