"""An ensemble is `torch.vmap` of the functions of one model: each member as if alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard.diagnostics import (
    ChainState,
    clamped,
    drift_to_noise,
    energy_diagnostics,
    fingerprint,
    metropolis_acceptance,
    mixture_gaps,
    mixture_weights,
    nonfinite_diagnostics,
    pareto_k,
    repeated,
    weight_diagnostics,
    weight_diagnostics_at,
)

STARS = torch.tensor([0.0, 0.5, -2.0, 3.0], dtype=torch.float64)
PARTS = {"good": slice(0, 3), "broken": slice(3, 8)}
LABELS = torch.tensor([0, 1, 2, 0, 1, 3]), torch.tensor([1, 0, 0, 2, 1, 1, 4, 0])
SCALES = torch.tensor([0.25, 3.0, 1.5, 0.25, 3.0, 2.0], dtype=torch.float64)


def steps(x: Tensor, x_end: Tensor) -> Tensor:
    start, end = (ChainState(each, -0.5 * each.square().sum(-1), -each) for each in (x, x_end))
    return metropolis_acceptance(start, end, step_size=0.3, noise_std=0.5)


# Of the energies of both sides, log-densities of both, and β*.
OF_ENERGIES: dict[str, Callable[..., Any]] = {
    "weights": lambda p, n, q, r, b: weight_diagnostics(p, n, b),
    "weights at two": lambda p, n, q, r, b: weight_diagnostics_at(p, n, (b, 0.5)),
    "weights with log q": lambda p, n, q, r, b: weight_diagnostics(p, n, b, log_q=(q, r)),
    "weights of classes": lambda p, n, q, r, b: weight_diagnostics(p, n, b, LABELS),
    "weights of scales": lambda p, n, q, r, b: weight_diagnostics(p, n, b, (*LABELS, SCALES)),
    "energies": lambda p, n, q, r, b: energy_diagnostics(p, n),
    "not finite": lambda p, n, q, r, b: nonfinite_diagnostics(p, n, b, (q, r)),
    "parts": lambda p, n, q, r, b: mixture_weights(p, n, PARTS, b) | mixture_gaps(p, n, PARTS),
    "pareto": lambda p, n, q, r, b: pareto_k(torch.cat((n, r, n + 1, r - 1))),
}
OF_SAMPLES: dict[str, Callable[..., Any]] = {
    "acceptance": steps,
    "clamped": lambda x, y: clamped(x, (-1.0, 1.0)),
    "drift": lambda x, y: drift_to_noise(x.norm(dim=-1), entries=3, step_size=0.1, noise_std=0.2),
    "repeated": lambda x, y: repeated(fingerprint(x), fingerprint(torch.cat((x[:2], y[2:])))),
}


def check(function: Callable[..., Any], *arguments: Tensor) -> None:
    found = torch.vmap(function)(*arguments)
    each = [function(*one) for one in zip(*arguments, strict=True)]
    for k, alone in enumerate(each):
        member = torch.utils._pytree.tree_map(lambda x, k=k: x[k], found)
        torch.testing.assert_close(member, alone, rtol=1e-12, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("name", OF_ENERGIES)
def test_of_energies(name: str) -> None:
    pos, q = torch.randn(2, 4, 6, dtype=torch.float64)
    neg, r = torch.randn(2, 4, 8, dtype=torch.float64)
    neg[3, 1] = math.nan
    check(OF_ENERGIES[name], pos, neg, q, r, STARS)


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_of_samples(name: str) -> None:
    check(OF_SAMPLES[name], *torch.randn(2, 4, 5, 3, dtype=torch.float64))
