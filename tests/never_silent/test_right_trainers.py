"""What the loss gets is held against what the sampler drew: right trainers go on."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from tests.never_silent.parts import (
    LOGITS,
    N,
    Net,
    Sides,
    alike,
    halves,
    heads,
    logsumexps,
    train,
)
from tests.parts import unit_langevin


class Noisy(Net):
    """Its first argument is the noise level."""

    def forward(self, sigma: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + sigma)


def dropped(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    f(q).square().mean()  # of another term
    return f(x), f(q)


def augmented(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    f(q)
    return f(x), f(q + 0.1 * torch.randn_like(q))


def by_a_function(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    call, own = torch.func.functional_call, dict(f.named_parameters())
    return call(f, own, (x,)), torch.vmap(lambda z: call(f, own, (z[None],))[0])(q)


def compiled(f: nn.Module, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    torch.compiler.reset()
    fast = torch.compile(f, backend="eager", fullgraph=True)
    return f(x), fast(q)


def in_half(f: Any, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return f(x).float(), f(q).float()


def of_copies(f: nn.Module, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Averages and files of the model are made at any time."""
    average, read = copy.deepcopy(f), pickle.loads(pickle.dumps(f))
    for each in (average, read):
        each(q).sum().backward()
        hooks = [*each._forward_hooks.values()]
        assert not any(hook.kept for hook in hooks)
    return f(x), f(q)


def frozen() -> Net:
    f = Net()
    f.body[0].requires_grad_(requires_grad=False)
    return f


def constant(f: Net) -> Net:
    for each in f.body[-1].parameters():
        nn.init.zeros_(each)
    return f


def flips(f: Any, x: Tensor) -> Tensor:
    """A chain on two bits, whose states are the data's."""
    new = torch.where(torch.rand_like(x) < 0.5, x, 1 - x)
    return torch.where(torch.rand(len(x), 1) < (f(new) - f(x)).exp()[:, None], new, x).detach()


both = alike(lambda f, x: f(x))

RIGHT: dict[str, tuple[Sides, dict[str, Any]]] = {
    "plain": (both, {}),
    "negated, low on data": (
        both,
        {"convention": "energy", "sampler": lambda f, x: unit_langevin(lambda x: -f(x), x)},
    ),
    "turned by the trainer": (alike(lambda f, x: -f(x)), {"convention": "energy"}),
    "scaled, in another order": (lambda f, x, q: (3 * f(x) - 1, (3 * f(q) - 1).flip(0)), {}),
    # Which has no parameters.
    "a base measure": (alike(lambda f, x: f(x) - x.square().sum(1)), {}),
    "one batch": (lambda f, x, q: halves(f(torch.cat([x, q]))), {}),
    "samples selected": (lambda f, x, q: (f(x), f(q)[::3]), {}),
    "samples augmented": (augmented, {}),
    "several heads": (both, {"f": heads()}),
    "logsumexp": (logsumexps, LOGITS),
    "logsumexp of one batch": (
        lambda f, x, q: halves(f(torch.cat([x, q])).logsumexp(1)),
        LOGITS,
    ),
    "the logits of labels, and the logsumexp of samples": (
        lambda f, x, q: (f(x)[torch.arange(N), torch.arange(N) % 5], f(q).logsumexp(1)),
        LOGITS,
    ),
    "a positive of many views, and one chain": (
        lambda f, x, q: (f(x[:1] + 0.1 * torch.randn_like(x)).mean(0, keepdim=True), f(q[:1])),
        {},
    ),
    "dropout": (dropped, {"f": Net(2, nn.Dropout(0.5))}),
    "batch norm": (both, {"f": Net(2, nn.BatchNorm1d(8))}),
    "frozen parts": (both, {"f": frozen()}),
    "a constant at first": (both, {"f": constant(Net())}),
    "half precision": (in_half, {}),
    "compiled": (compiled, {}),
    "functional calls": (by_a_function, {}),
    "copies": (of_copies, {}),
    "data beside the samples": (
        lambda f, x, q: (f(q[0]), f(q[1] + 0.1 * torch.randn_like(x))),
        {"sampler": lambda f, x: (torch.randn_like(x), unit_langevin(f, x))},
    ),
    "levels beside the samples": (
        lambda f, x, q: (f(q[1], x), f(q[1], q[0] + 0.1 * torch.randn_like(x))),
        {
            "f": Noisy(1),
            "sampler": lambda f, x: (unit_langevin(lambda z: f(x, z), x), torch.rand(N, 1)),
        },
    ),
    "two samplers, data last": (
        lambda f, x, q: (f(q[1]), f(q[0])),
        {"draw": lambda sample, f, x: (sample(f, torch.randn_like(x)), sample(f, x))},
    ),
    "every proposal rejected": (
        both,
        {"sampler": lambda f, x: (f(x), x.clone())[1], "draw": lambda sample, f, x: sample(f, x)},
    ),
    # The samples by a way that nothing sees.
    "states of the data": (
        lambda f, x, q: (f(q[torch.randperm(N)]), f.body(q).logsumexp(1)),
        {
            "sampler": flips,
            "draw": lambda sample, f, x: sample(f, (torch.randn_like(x) > 0).float()),
        },
    ),
    "energy=": (
        alike(lambda f, x: f.energy(x)),
        {
            "energy": "energy",
            "convention": "energy",
            "sampler": lambda f, x: unit_langevin(lambda x: -f.energy(x), x),
        },
    ),
    "no sampler": (both, {"sampler": None, "draw": lambda sample, f, x: unit_langevin(f, x)}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_trainer_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    sides, options = RIGHT[name]
    options = {"f": Net()} | copy.deepcopy(options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(sides, **options, steps=7).step == 7
    assert not [each for each in caplog.records if "Write" in each.getMessage()]
    assert not options["f"]._forward_hooks


@pytest.mark.parametrize("order", ["together", "data first"])
def test_a_step_may_have_a_loss_for_each_side(order: str) -> None:
    """Each holds the other side still: half of the graph at a time."""
    f = Net()
    optimizer = torch.optim.SGD(f.parameters(), lr=1e-3)
    told: dict[str, Any] = {"model": f, "optimizer": optimizer, "beta_star": 0.5}
    loss, sample = guard(None, unit_langevin, output_scale=1.0, **told)
    for _ in range(3):
        batches = [torch.randn(N, 2) for _ in range(2)]
        pairs = [(x, sample(f, x)) for x in batches]
        turns = [(pair, is_data) for pair in pairs for is_data in (True, False)]
        if order == "data first":
            turns.sort(key=lambda turn: not turn[1])
        for (x, q), is_data in turns:
            pos, neg = f(x), f(q)
            loss(*((pos, neg.detach()) if is_data else (pos.detach(), neg))).backward()
        optimizer.step()
