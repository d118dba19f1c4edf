"""The gradient of the guarded loss, written out, and what a small training run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Call", "Run", "gradients"]


@dataclass
class Call:
    """The energies of one loss, whose gradients are kept, and the samples behind them."""

    f_pos: Tensor
    f_neg: Tensor
    x_neg: Tensor

    def __post_init__(self) -> None:
        self.f_pos.retain_grad()
        self.f_neg.retain_grad()

    @property
    def to_pos(self) -> Tensor:
        """The gradient that has arrived at the positives' energies, in float64."""
        assert self.f_pos.grad is not None
        return self.f_pos.grad.double()

    @property
    def to_neg(self) -> Tensor:
        """The same of the negatives'."""
        assert self.f_neg.grad is not None
        return self.f_neg.grad.double()


@dataclass
class Run:
    """All that a run leaves behind."""

    model: nn.Module
    calls: list[Call] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    rng: Tensor = field(default_factory=lambda: torch.zeros(0))

    def equals(self, other: Run) -> bool:
        """Whether parameters, buffers, samples, random state and the rest agree bit by bit."""
        mine, its = self.model.state_dict(), other.model.state_dict()
        assert mine.keys() == its.keys()
        assert len(self.calls) == len(other.calls)
        return (
            all(torch.equal(mine[name], its[name]) for name in mine)
            and all(
                torch.equal(a.x_neg, b.x_neg) and torch.equal(a.f_pos, b.f_pos)
                for a, b in zip(self.calls, other.calls, strict=True)
            )
            and torch.equal(self.rng, other.rng)
            and self.others == other.others
        )


def gradients(f_pos: Tensor, f_neg: Tensor, beta_star: float) -> tuple[Tensor, Tensor]:
    """dL/df of the default loss, for vectors f that are high on data, in float64.

    -(1 - w⁺_i)/N and GradScale · w_j, with w_j = exp(β* f⁻_j) / Σ_k exp(β* f⁻_k), w⁺_i = exp(β*
    f⁺_i) / (exp(β* f⁺_i) + Σ_k exp(β* f⁻_k)), and GradScale the mean of 1 - w⁺_i.
    """
    pos, neg = (beta_star * f.detach().double() for f in (f_pos, f_neg))
    pos, neg = pos.exp(), neg.exp()
    weights = neg / neg.sum()
    left = 1 - pos / (pos + neg.sum())
    return -left / len(left), left.mean() * weights
