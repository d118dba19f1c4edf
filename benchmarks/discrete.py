"""Energies of bits, trained by chains that make no Langevin steps: nothing can be taken finer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ebmguard import Guard, guard
from ebmguard.samplers import Chains, start_chains

from .population.data import PROBES, load
from .population.networks import Energy
from .population.trainer import SKILL

UPDATES, BATCH, FLIPS = 600, 64, 20


class Trained(NamedTuple):
    """What came of a run: each update's row, the last negatives or the buffer, and fresh chains."""

    rows: list[dict[str, float]]
    guard: Guard
    network: nn.Module
    train: Tensor
    held_out: Tensor
    samples: Tensor
    fresh: Callable[[int, int], Tensor]  # of so many chains and steps


class Machine(nn.Module):
    """A restricted Boltzmann machine."""

    def __init__(self, visible: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.01 * torch.randn(hidden, visible))
        self.of_visible = nn.Parameter(torch.zeros(visible))
        self.of_hidden = nn.Parameter(torch.zeros(hidden))

    def free_energy(self, v: Tensor) -> Tensor:
        """-log p(v) up to a constant, (B,)."""
        logits = functional.linear(v, self.weight, self.of_hidden)
        return -v @ self.of_visible - functional.softplus(logits).sum(1)

    def hidden(self, v: Tensor) -> Tensor:
        """p(h_j = 1 | v)."""
        return functional.linear(v, self.weight, self.of_hidden).sigmoid()

    def visible(self, h: Tensor) -> Tensor:
        """p(v_i = 1 | h)."""
        return (h @ self.weight + self.of_visible).sigmoid()

    def error(self, v: Tensor) -> float:
        """Squared, of v rebuilt from the means of h: a sum over bits, a mean over samples."""
        return float((self.visible(self.hidden(v)) - v).square().sum(1).mean())


def gibbs(machine: Machine, v: Tensor, steps: int, rng: torch.Generator) -> Tensor:
    """Sweeps over all hidden and then all visible bits."""
    with torch.no_grad():
        for _ in range(steps):
            h = torch.bernoulli(machine.hidden(v), generator=rng)
            v = torch.bernoulli(machine.visible(h), generator=rng)
    return v


def flips(f: Callable[[Tensor], Tensor], x: Tensor, steps: int, rng: torch.Generator) -> Tensor:
    """Gibbs with gradients: Grathwohl and others 2021, Algorithm 1."""

    def chances(at: Chains) -> Tensor:
        return ((1 - 2 * at.x) * at.grad / 2).log_softmax(1)

    here = start_chains(f, x)
    for _ in range(steps):
        bit = torch.multinomial(chances(here).exp(), 1, generator=rng)
        there = start_chains(f, here.x.scatter(1, bit, 1 - here.x.gather(1, bit)))
        odds = (chances(there) - chances(here)).gather(1, bit).squeeze(1) + there.f - here.f
        moves = torch.rand(len(x), generator=rng).log() < odds
        masks = moves[:, None], moves, moves[:, None]
        here = Chains(*map(torch.where, masks, there, here))
    return here.x


def prototypes(rng: torch.Generator) -> Tensor:
    """Bits of ten prototypes: 4,000 samples, and some to be held out, of 256."""
    chances = torch.rand(10, 256, generator=rng) ** 3
    chosen = torch.randint(10, (4000 + PROBES,), generator=rng)
    return torch.bernoulli(chances[chosen], generator=rng)


def train_machine(lr: float, seed: int, **options: Any) -> Trained:
    """CD-1; its skill is the error of reconstruction, which is low where the machine is good."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    data, machine = prototypes(rng), Machine(256, 128)
    held_out, data = data[:PROBES], data[PROBES:]
    drawn: deque[Tensor] = deque(maxlen=1000 // BATCH)

    def sample(model: Machine, v: Tensor) -> Tensor:
        drawn.append(gibbs(model, v, 1, rng))
        return drawn[-1]

    optimizer = torch.optim.SGD(machine.parameters(), lr)
    told: dict[str, Any] = {"energy": "free_energy", "convention": "energy", "generators": [rng]}
    g = guard(None, sample, model=machine, optimizer=optimizer, **told, **options)
    error = torch.no_grad()(lambda: machine.error(held_out))
    rows = loop(g, machine, machine.free_energy, optimizer, data, error, rng)
    rows[-1][SKILL] = error()  # of the machine that is kept

    def fresh(count: int, steps: int) -> Tensor:
        return gibbs(machine, data[:count], steps, rng)

    return Trained(rows, g, machine, data, held_out, torch.cat([*drawn]), fresh)


def train_network(lr: float, seed: int, **options: Any) -> Trained:
    """Persistent chains; its skill is the AUC of f against data whose bits were permuted."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    digits, network = load("digits"), Energy((64,), 1, "mlp", 64, "silu", "none")
    data, held_out = ((x > 0).float().flatten(1) for x in (digits.x, digits.held_out))
    orders = torch.rand(held_out.shape, generator=rng).argsort(0)
    shuffled = held_out.gather(0, orders)

    def start(count: int) -> Tensor:
        return torch.randint(2, (count, 64), generator=rng).float()

    chains = start(1000)

    def sample(model: Energy, x: Tensor) -> Tensor:
        rows = torch.randint(len(chains), (len(x),), generator=rng)
        chains[rows] = found = flips(model, chains[rows], FLIPS, rng)
        return found

    @torch.no_grad()
    def skill() -> float:
        real, other = network(held_out)[:, None], network(shuffled)
        return 100 * float((real > other).double().mean())

    optimizer = torch.optim.Adam(network.parameters(), lr)
    told: dict[str, Any] = {"buffer": chains, "generators": [rng]}
    g = guard(None, sample, model=network, optimizer=optimizer, **told, **options)
    rows = loop(g, network, network, optimizer, data, skill, rng)

    def fresh(count: int, steps: int) -> Tensor:
        return flips(network, start(count), steps, rng)

    return Trained(rows, g, network, data, held_out, chains, fresh)


def loop(
    g: Guard,
    model: nn.Module,
    f: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    data: Tensor,
    skill: Callable[[], float],
    rng: torch.Generator,
) -> list[dict[str, float]]:
    """A plain one; the rows have the skill before their update."""
    rows, (loss, sample) = [], g
    for _ in range(UPDATES):
        before = skill()
        x = data[torch.randint(len(data), (BATCH,), generator=rng)]
        value = loss(f(x), f(sample(model, x)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        rows.append({**g.last, SKILL: before})
    g.close()
    return rows
