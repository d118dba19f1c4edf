"""Numbers named on the host: of floats the same as of tensors, and never an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ebmguard.diagnostics import (
    energy_sums,
    grad_scale_of,
    named_energies,
    named_nonfinite,
    named_samples,
    named_weights,
    sample_shares,
    weight_sums,
)
from ebmguard.objective import Terms

NUMBERS = st.one_of(
    st.floats(-5, 5), st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e35, -1e30, 1e-40])
)


def nonfinite(sums: Any) -> Any:
    pos, neg = sums
    return named_nonfinite(pos, neg, 5, 5)


# The names, and how many sums they are made of.
NAMED: dict[str, tuple[Callable[[Any], Any], int]] = {
    "weights": (partial(named_weights, n=5, m=5, is_grouped=False), 10),
    "of classes": (partial(named_weights, n=5, m=5, is_grouped=True), 10),
    "energies": (partial(named_energies, n=5, m=5), 26),
    "not finite": (nonfinite, 2),
    "samples": (named_samples, 3),
}
WITH_TENSORS = "weights", "of classes", "energies", "not finite"


def sums_of(name: str, x: Tensor, beta_star: float) -> Tensor:
    """What the device makes of ``(15,)`` numbers."""
    pos, neg, q = x.view(3, 5)
    labels = torch.tensor([0, 1, 0, 2, 1]), torch.tensor([1, 0, 1, 1, 0])
    if name == "energies":
        return energy_sums(pos, neg)
    if name == "samples":
        return sample_shares(x[:10].view(5, 2), sample_shares(x[5:].view(5, 2))[1], (-1.0, 1.0))[0]
    groups, log_q = labels if name == "of classes" else None, (q, q.flip(0))
    terms = Terms.of(pos, neg, torch.tensor([[beta_star], [0.5]], dtype=x.dtype), groups, log_q)
    sums = weight_sums(terms)[0]
    return 5 - sums[-2:] if name == "not finite" else sums


def same(name: str, sums: Tensor) -> None:
    named, _ = NAMED[name]
    of_floats = named(sums.tolist())
    assert all(type(x) is float for x in of_floats.values())
    of_tensors = named(sums.unbind()) if name in WITH_TENSORS else {}
    assert list(of_tensors) in ([], list(of_floats))
    for tag, x in of_floats.items() if of_tensors else ():
        assert x == pytest.approx(float(of_tensors[tag]), rel=1e-5, abs=1e-38, nan_ok=True), tag


@pytest.mark.parametrize("name", NAMED)
@given(
    numbers=st.lists(NUMBERS, min_size=15, max_size=15),
    beta_star=st.sampled_from([0.0, 1.0, -2.0, 1e10]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_floats_give_what_tensors_give(name, numbers, beta_star, dtype):
    same(name, sums_of(name, torch.tensor(numbers, dtype=dtype), beta_star))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_sums_of_nothing_known_raise_nothing(name, value):
    same(name, torch.full((NAMED[name][1],), value))


def test_of_no_samples_nothing_is_known():
    shares, _ = sample_shares(torch.empty(0, 3), None, (0.0, 1.0))
    found = named_samples(shares.tolist())
    assert len(found) == 3
    assert all(math.isnan(x) for x in found.values())


@given(st.lists(NUMBERS, min_size=10, max_size=10))
def test_grad_scale_alone_is_that_of_the_names(values):
    sums = torch.tensor(values, dtype=torch.float64)
    named = named_weights(sums.unbind(), 5, 5, is_grouped=False)["grad_scale"]
    torch.testing.assert_close(grad_scale_of(sums, 5, 5), named, equal_nan=True)
