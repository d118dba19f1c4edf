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
from ebmguard.errors import DivergenceError
from ebmguard.reference_training.engine.graphs import Replayed, graphed, graphed_energies
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


stand_ins = pytest.mark.parametrize("device", ["stand-ins"], indirect=True)
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


# -- a guard's calls ---------------------------------------------------------------------------


def labels(step):
    rng = torch.Generator().manual_seed(step)
    return torch.randint(3, (N,), generator=rng), torch.randint(3, (M,), generator=rng)


def densities(step):
    rng = torch.Generator().manual_seed(step)
    return torch.randn(N, generator=rng), torch.randn(M, generator=rng)


SINGLE: dict[str, dict[str, Any]] = {
    "default": {"beta_star": 0.7},
    "off": {"beta_star": 0.0},
    "no_pos": {"beta_star": 0.7, "variant": "no_pos"},
    "batch": {"beta_star": 0.7, "variant": "batch"},
    "true": {"beta_star": 0.7, "variant": "true"},
    "energy": {"beta_star": 0.7, "convention": "energy"},
    "numbers": {"beta_star": lambda step: 0.1 * (1 + step)},
    "tensors": {"beta_star": lambda step: torch.tensor(0.1 * step)},
    "late": {"beta_star": 0.7, "judge_in_loss": False},
    "chosen": {"output_scale": 20.0},
    "sampler": {"beta_star": 0.7, "output_scale": 20.0},
    "raise": {"beta_star": 0.7, "action": "raise"},
}
MODELS: dict[str, dict[str, Any]] = {
    "members": {"beta_star": torch.tensor([0.0, 0.5, 1.0])},
    "members' sampler": {"beta_star": torch.tensor([0.0, 0.5, 1.0]), "output_scale": 20.0},
    "of variants": {"beta_star": torch.ones(G), "variant": ("default", "true", "batch")},
}
BESIDE: dict[str, dict[str, Any]] = {"groups": {"groups": labels}, "log_q": {"log_q": densities}}
GUARDS = [
    *[pytest.param(told, {}, (), id=name) for name, told in SINGLE.items()],
    *[pytest.param(told, {}, (G,), id=name) for name, told in MODELS.items()],
    *[pytest.param(SINGLE["default"], own, (), id=name) for name, own in BESIDE.items()],
]


class Bowl(nn.Module):
    """Energies of samples of three entries."""

    def forward(self, x):
        return -x.square().sum(-1)


def sample_bowl(f, x0, generator):
    return sgld(f, x0, steps=2, step_size=0.1, noise_std=0.1, generator=generator)


def guarded_run(told, beside, models, compute=None, steps=8):
    """What the steps of a guarded training show, of two losses each: all of it, to the bit."""
    bowl = Bowl()
    given_sampler = sample_bowl if "output_scale" in told else None
    g = guard(None, given_sampler, **told)
    if compute is not None:
        g.compute = compute
    weight = nn.Parameter(torch.ones(models))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    g.attach(optimizer=optimizer)
    if given_sampler is not None:
        g.attach(step_size=0.1, noise_std=0.1, clamp=(-1.0, 1.0))
    _, sample_q = g
    shown: list[Any] = []
    for step in range(steps):
        rng = torch.Generator().manual_seed(step)
        losses = []
        if given_sampler is not None:
            x0 = torch.randn(*models, M, 3, generator=rng)
            x0[..., 0, 0] = torch.nan if step == 6 else 0.0
            # The last two calls return the same samples.
            sample_q(bowl, x0, torch.Generator().manual_seed(min(step, 6)))
        for shift in (0.0, 1.0):
            f_pos, f_neg = (torch.randn(*models, n, generator=rng) + shift for n in (N, M))
            if step == 5:
                f_neg[..., 0] = torch.nan
            f = [weight.unsqueeze(-1) * x if models else weight * x for x in (f_pos, f_neg)]
            given: dict[str, Any] = {name: of(step) for name, of in beside.items()}
            losses.append(g.loss(f[0], f[1], **given))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        try:
            optimizer.step()
        except DivergenceError as error:
            shown.append(str(error))
            break
        assert weight.grad is not None
        numbers = [x.tolist() for x in (*losses, weight.grad)]
        shown += map(repr, (*numbers, g.last, g.members))
    shown += [repr(g.alerts), repr(g.state_dict())]
    g.close()
    return shown


@pytest.mark.parametrize(("told", "beside", "models"), GUARDS)
@stand_ins
def test_a_guard_shows_the_same_bits_where_its_calls_are_replayed(device, told, beside, models):
    replays = Replayed(CPU)
    found = guarded_run(told, beside, models, replays)
    assert found == guarded_run(told, beside, models)
    captured = {key[0] for key in replays._graphs}
    # At β* = 0 there is no loss of the guard's to capture, and the host makes the numbers.
    star = told.get("beta_star", 0.0)
    is_off = not isinstance(star, torch.Tensor) and star == 0.0
    assert ("loss_and_numbers" in captured) == (told is not SINGLE["numbers"] and not is_off)
    assert ("sample_marks" in captured) == ("output_scale" in told)


@stand_ins
def test_a_result_is_the_callers_and_its_gradient_is_scaled(device):
    def spread(x, power):
        return {"loss": (x**power).sum(), "names": ("a",), "whole": x.detach().round().long()}

    call = Replayed(CPU)
    kept = []
    for step in range(5):
        x = torch.tensor([1.0 + step, 2.0]).requires_grad_()
        found = call(spread, x, 2)
        (3 * found["loss"]).backward()
        torch.testing.assert_close(x.grad, 6 * x.detach(), rtol=0, atol=0)
        kept.append(found)
        assert call(spread, x[:1], 3)["loss"] == (1.0 + step) ** 3  # another graph
    assert [found["loss"].item() for found in kept] == [5.0, 8.0, 13.0, 20.0, 29.0]
    assert [found["whole"].tolist() for found in kept] == [[1 + step, 2] for step in range(5)]
    assert kept[3]["names"] == ("a",)
    (again,) = torch.autograd.grad(kept[4]["loss"] * 1.0, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        again.sum().backward()
