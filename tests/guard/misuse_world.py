"""What a mistake could damage, and what a case of misuse is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebmguard import Guard, guard
from tests.parts import Energy, Memory

X = torch.ones(3, 2)
POS, NEG = torch.ones(4), torch.zeros(5)


class Pair(Energy):
    def forward(self, x):
        return super().forward(x), x


@dataclass
class World:
    """What a mistake could damage."""

    folder: Path
    f: Energy = field(default_factory=Energy)
    h: Energy = field(default_factory=Energy)
    pair: Pair = field(default_factory=lambda: Pair())
    memory: Memory = field(default_factory=Memory)
    guards: list[Guard] = field(default_factory=list)

    def guard(self, loss_fn: Any = None, sampler: Any = None, **options: Any) -> Guard:
        defaults: dict[str, Any] = {"beta_star": 1.0, "output_scale": 10.0}
        options = defaults | {"sinks": [self.memory]} | options
        self.guards.append(guard(loss_fn, sampler, **options))
        return self.guards[-1]

    def loss(self, pos: Any = POS, neg: Any = NEG, groups: Any = None, **options: Any) -> Any:
        return self.guard(**options).loss_fn(pos, neg, groups)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1)


@dataclass(frozen=True)
class Case:
    name: str
    mistake: Callable[[World], Any]
    error: type[Exception]
    message: str  # a regular expression
