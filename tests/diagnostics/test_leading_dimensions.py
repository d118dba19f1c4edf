"""Rows of several steps or models at once: each has the numbers that it has alone, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ebmguard.diagnostics import (
    energy_diagnostics,
    nonfinite_diagnostics,
    sample_diagnostics,
    sample_marks,
    weight_diagnostics,
)

K = 3  # rows
NUMBERS = st.one_of(
    st.floats(-5, 5), st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e35, -1e30, 1e-40])
)
LABELS = torch.tensor([0, 1, 0, 2, 1]), torch.tensor([1, 0, 1, 1, 0])


def numbers_of(name: str, x: Tensor, beta_star: float) -> dict[str, Tensor]:
    """Those of ``(..., 15)`` numbers."""
    pos, neg, q = x.split(5, -1)
    if name == "energies":
        return energy_diagnostics(pos, neg)
    if name == "energies of other sizes":
        return energy_diagnostics(pos, torch.cat((neg, q), -1))
    if name == "not finite":
        return nonfinite_diagnostics(pos, neg, beta_star, (q, q.flip(-1)))
    if name == "samples":
        now, before = (y.reshape(*y.shape[:-1], 5, 1) for y in (pos, neg))
        marks, known = (sample_marks(y, (-1.0, 1.0)) for y in (now, before))
        return sample_diagnostics(marks, known, entries=1)
    if name == "weights of classes":
        return weight_diagnostics(pos, neg, beta_star, LABELS)
    return weight_diagnostics(pos, neg, beta_star, None, (q, q.flip(-1)))


@pytest.mark.parametrize(
    "name",
    [
        *("energies", "energies of other sizes", "not finite"),
        *("samples", "weights", "weights of classes"),
    ],
)
@given(
    numbers=st.lists(NUMBERS, min_size=15 * K, max_size=15 * K),
    beta_star=st.sampled_from([0.0, 1.0, -2.0, 1e10]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_rows_at_once_are_the_rows_alone(name, numbers, beta_star, dtype):
    x = torch.tensor(numbers, dtype=dtype).reshape(K, 15)
    found = numbers_of(name, x, beta_star)
    for i in range(K):
        for tag, value in numbers_of(name, x[i], beta_star).items():
            assert value.shape == ()
            torch.testing.assert_close(found[tag][i], value, rtol=0, atol=0, equal_nan=True)


def test_of_no_samples_nothing_is_known():
    marks = torch.empty(4, 0)
    found = sample_diagnostics(marks, None, entries=3)
    assert len(found) == 3
    assert all(math.isnan(x) for x in found.values())
