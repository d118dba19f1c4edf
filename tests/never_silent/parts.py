"""Samplers by a gradient of one's own; a network with logits, and a loop with sides as told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from ebmguard import Guard, guard
from tests.parts import Energy, Memory, unit_langevin

__all__ = [
    *("LOGITS", "N", "Net", "Sides", "alike", "batched", "by", "halves", "heads", "logsumexps"),
    *("Run", "mapped", "train"),
]

N = 12
Sides = Callable[[Any, Tensor, Any], tuple[Tensor, Tensor]]


class Run:
    """A network, an optimizer, and a guard that was told both."""

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        f: nn.Module | None = None,
        sampler: Any = unit_langevin,
        **told: Any,
    ) -> None:
        self.f: Any = f or Energy()
        self.told: Any = optimizer or Adam(self.f.parameters(), lr=1e-2)
        self.other: Any = None  # which steps instead, from some step on
        self.memory = Memory()
        options = {"beta_star": 0.5, "output_scale": 1.0, "sinks": [self.memory], "flush_every": 1}
        options |= {"model": self.f, "optimizer": self.told}
        self.g: Any = guard(None, sampler, **{**options, **told})

    def loss(self, scale: float = 1.0, draw: Any = None) -> Tensor:
        """The loss of samples that are drawn by ``draw(sampler, f)``."""
        draw = draw or (lambda sample, f: sample(f, torch.randn(8, 2)))
        x = torch.randn(8, 2) * scale
        value: Tensor = self.g.loss_fn(self.f(x), self.f(draw(self.g.sampler, self.f)))
        return value

    def backward(self, scale: float = 1.0, draw: Any = None) -> None:
        self.f.zero_grad()
        self.loss(scale, draw).backward()

    def go(self, steps: int, draw: Any) -> None:
        for _ in range(steps):
            self.backward(draw=draw)
            self.told.step()

    def each(self) -> list[tuple[Tensor, Tensor]]:
        """Every parameter, and its gradient."""
        return [(p, p.grad) for p in self.f.parameters() if p.grad is not None]

    @property
    def is_finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.f.parameters())


def by(gradient: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Langevin steps along ``gradient(f, x)``."""

    def sampler(f: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x + 0.02 * gradient(f, x) + 0.2 * torch.randn_like(x)).detach()
        return x

    return sampler


def batched(f: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (rows,) = torch.autograd.grad(f(x), x, torch.eye(len(x)), is_grads_batched=True)
    return rows.diagonal(dim1=0, dim2=1).T


def mapped(f: Any, x: Tensor) -> Tensor:
    one: Tensor = torch.func.vmap(torch.func.grad(lambda z: f(z[None]).sum()))(x)
    return one


def logsumexp(logits: Tensor) -> Tensor:
    return logits.logsumexp(1)


class Net(nn.Module):
    """A classifier, whose energy is by default the logsumexp of its logits."""

    def __init__(
        self,
        width: int = 2,
        *middle: nn.Module,
        energy: Callable[[Tensor], Tensor] = logsumexp,
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 8), nn.SiLU(), *middle, nn.Linear(8, 5))
        self.of_logits = energy

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.body(x)
        return self.of_logits(logits) if y is None else logits.gather(1, y[:, None])

    def energy(self, x: Tensor) -> Tensor:
        turned: Tensor = -self(x)
        return turned


def heads() -> Net:
    """Its forward returns all logits."""
    return Net(energy=lambda logits: logits)


def alike(energy: Callable[[Any, Tensor], Tensor]) -> Sides:
    """The same of both sides."""
    return lambda f, x, q: (energy(f, x), energy(f, q))


def halves(of: Tensor) -> tuple[Tensor, Tensor]:
    first, second = of.chunk(2)
    return first, second


logsumexps = alike(lambda f, x: logsumexp(f(x)))

# The logsumexp of a network's logits is sampled.
LOGITS: dict[str, Any] = {
    "f": heads(),
    "sampler": lambda f, x: unit_langevin(lambda x: logsumexp(f(x)), x),
}


def train(
    sides: Sides,
    f: nn.Module | None = None,
    sampler: Any = unit_langevin,
    *,
    draw: Callable[..., Any] = lambda sample, f, x: sample(f, torch.randn_like(x)),
    steps: int = 3,
    **options: Any,
) -> Guard:
    """A loop whose two sides are what a case says of ``(f, data, samples)``."""
    torch.manual_seed(0)
    f = f or Net()
    told: dict[str, Any] = {"model": f, "beta_star": 0.5, "output_scale": 1.0} | options
    loss, sample = g = guard(None, sampler, **told)
    optimizer = torch.optim.SGD(f.parameters(), lr=1e-3)
    g.attach(optimizer=optimizer)
    for _ in range(steps):
        x = torch.randn(N, next(f.parameters()).shape[1]) / 2 + 1
        value = loss(*sides(f, x, draw(sample, f, x)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return g
