"""The drift that a chain gets: (1 - β) of its energy's gradient, or a refusal before any update."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebmguard import guard
from ebmguard.errors import SamplerError

HALF: Any = {"beta_star": 0.5, "output_scale": 1.0, "substeps": 1}


def network(heads: int = 1) -> nn.Sequential:
    layers = nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, heads)
    return nn.Sequential(*layers).double()


def plain(f: Any, x: Tensor) -> Tensor:
    """The energies of a network that is tempered: its layers one by one."""
    for layer in f:
        x = layer(x)
    return x


def slope(energy: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(energy(x).sum(), x)[0]


class Loop:
    """A trainer whose sampler moves by ``gradient(f, x)``; it notes the drift over the true one.

    Args:
        energy: of the network's plain outputs, what the sampler follows.
        gradient: how the sampler computes its gradient; by default, that of ``energy(f(x))``.
        per_sample: gives outputs as the sampler sees them, from the network.
    """

    def __init__(
        self,
        energy: Callable[[Tensor], Tensor] = lambda out: out,
        gradient: Callable[[Any, Tensor], Tensor] | None = None,
        *,
        heads: int = 1,
        prepare: Callable[[Any], Any] = lambda f: f,
        joins: Callable[[Tensor], Tensor] = lambda x: x.new_zeros(len(x)),
        wrapped: Callable[[Any], Any] = lambda f: f,
    ) -> None:
        self.energy, self.heads, self.prepare, self.wrapped = energy, heads, prepare, wrapped
        self.joins = joins
        self.gradient = gradient or (
            lambda f, x: slope(lambda x: energy(f(x)).reshape(len(x), -1).sum(1) + joins(x), x)
        )

    def true(self, f: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return slope(
                lambda x: self.energy(plain(f, x)).reshape(len(x), -1).sum(1) + self.joins(x), x
            )

    def factors(self, steps: int = 3, **options: Any) -> Tensor:
        f, seen = network(self.heads), list[Tensor]()
        prepared, used = self.prepare(f), self.wrapped(f)

        def sampler(x: Tensor) -> Tensor:
            for _ in range(4):
                drift = self.gradient(prepared if prepared is not f else used, x.detach())
                seen.append((drift / self.true(f, x)).flatten())
                x = (x + 0.02 * drift + 0.2 * torch.randn_like(x)).detach()
            return x

        optimizer = torch.optim.SGD(f.parameters(), lr=0.1)
        before = [p.clone() for p in f.parameters()]
        options = HALF | {"model": f, "optimizer": optimizer} | options
        loss, sample = guard(None, sampler, **options)
        try:
            for _ in range(steps):
                x, q = torch.randn(16, 2).double(), sample(torch.randn(16, 2).double())
                sides = (self.energy(f(each)).reshape(16, -1).sum(1) for each in (x, q))
                loss(*sides).backward()
                optimizer.step()
                optimizer.zero_grad()
        except SamplerError:
            assert all(map(torch.equal, f.parameters(), before))
            raise
        return torch.cat(seen)
