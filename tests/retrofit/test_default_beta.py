"""No β* given: nothing of a run changes to the bit, while its steps are not too long."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from tests.parts import Energy, Memory, gradient_at
from tests.runs import frozen, randomness

STEPS = 14


def sampler(o: float, size: float = 0.02) -> Any:
    """Langevin chains for exp(o f), without noise where o is infinite."""

    def sample(f: Any, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x + size * gradient_at(f, x) + (2 * size / o) ** 0.5 * torch.randn_like(x)
        return x

    return sample


class Boltzmann(nn.Module):
    """The free energy of binary units over hidden ones."""

    def __init__(self) -> None:
        super().__init__()
        self.between, self.bias = nn.Linear(6, 4), nn.Linear(6, 1, bias=False)

    def forward(self, v: Tensor) -> Tensor:
        f: Tensor = self.bias(v).squeeze(1) + nn.functional.softplus(self.between(v)).sum(1)
        return f


@torch.no_grad()
def gibbs(f: Boltzmann, v: Tensor) -> Tensor:
    h = torch.bernoulli(f.between(v).sigmoid())
    return torch.bernoulli((h @ f.between.weight + f.bias.weight).sigmoid())


CASES: dict[str, tuple[Any, Any, float | None]] = {  # the network, the sampler, the largest S
    "true scale": (Energy, sampler(1), 0.5),
    "JEM": (Energy, sampler(20_000, 1.0), 1.0),
    "no noise": (Energy, sampler(math.inf), 0.5),
    "no gradient": (Energy, lambda f, x: x * f(x).mean().detach(), None),
    "Boltzmann machine": (Boltzmann, gibbs, None),
}


def trained(network: Any, sample: Any, memory: Memory | None) -> tuple[Any, ...]:
    """What a run ends with; with a guard if there is where it writes to."""
    torch.manual_seed(0)
    f = network()
    optimizer = torch.optim.Adam(f.parameters(), lr=0.01)

    def loss_fn(f_pos: Tensor, f_neg: Tensor) -> Tensor:
        return f_neg.mean() - f_pos.mean()

    if memory is not None:
        loss_fn, sample = guard(None, sample, model=f, optimizer=optimizer, sinks=[memory])
    shape, seen = (8, 6 if network is Boltzmann else 2), []
    for _ in range(STEPS):
        x = sample(f, torch.bernoulli(torch.full(shape, 0.5)))
        loss = loss_fn(f(torch.bernoulli(torch.full(shape, 0.8))), f(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [x, loss]
    return frozen([*f.parameters(), *seen]), randomness()


@pytest.mark.parametrize("case", CASES)
def test_a_guard_of_which_nothing_is_asked_changes_no_bit(case: str) -> None:
    network, sample, largest = CASES[case]
    memory = Memory()
    assert trained(network, sample, memory) == trained(network, sample, None)
    assert memory.column("beta_star") == [0] * STEPS
    assert memory.column("sampler/substeps") == [1] * STEPS
    sharpness = memory.column("sampler/sharpness")
    assert [math.isnan(x) for x in sharpness] == [largest is None] * STEPS
    assert largest is None or max(sharpness) < largest
