"""Rows of several ranks as one, against the numbers of the whole batch."""

from __future__ import annotations

import math

import pytest
import torch

from ebmguard.diagnostics import (
    energy_diagnostics,
    nonfinite_diagnostics,
    sample_diagnostics,
    sample_marks,
)
from ebmguard.retrofit.parts import joined_ranks

Row = dict[str, float]
SIZES = [4, 1, 7], [10, 3, 3]  # of three ranks


def joined_row(rows: list[Row]) -> Row:
    values = torch.tensor([[*row.values()] for row in rows], dtype=torch.float64)
    return {name: x.item() for name, x in joined_ranks(values, tuple(rows[0]), *SIZES).items()}


def test_numbers_of_samples_are_those_of_the_whole_batch():
    """Also where ranks have uneven batches, and lost samples, repeats and clamped entries."""
    pos, neg = (torch.randn(sum(sizes)).double() for sizes in SIZES)
    x = torch.randn(sum(SIZES[1]), 3).double()
    before = torch.cat((x[:5], torch.randn(len(x) - 5, 3)))
    neg[2] = pos[3] = 1e31
    x[11, 0] = torch.nan
    norms, ages = torch.rand(len(x)).double(), torch.randint(9, (len(x),)).double()

    def row(pos, neg, x, before, norms, ages) -> Row:
        marks = sample_marks(x, (-1.0, 1.0)), sample_marks(before)
        numbers = {
            **energy_diagnostics(pos, neg),
            **nonfinite_diagnostics(pos, neg, 1.0),
            "sampler/grad_norm": norms.mean(),
            "sampler/grad_norm_max": norms.max(),
            "sampler/drift_to_noise": 3 * norms.mean(),
            "sampler/acceptance": norms.square().mean(),
            "buffer/age": ages.mean(),
            "buffer/reinit": (ages == 0).double().mean(),
            **sample_diagnostics(*marks, entries=3),
        }
        return {name: x.item() for name, x in numbers.items()}

    of_negatives = (y.split(SIZES[1]) for y in (neg, x, before, norms, ages))
    parts = zip(pos.split(SIZES[0]), *of_negatives, strict=True)
    found = joined_row([row(*part) for part in parts])
    expected = row(pos, neg, x, before, norms, ages)
    assert list(found) == list(expected)
    # Quantiles, spreads and overlap do not join; the guard takes them of the gathered energies.
    not_joined = {
        f"{side}/{x}" for side in ("f_pos", "f_neg") for x in ("std", "q05", "median", "q95")
    }
    for name in expected.keys() - not_joined - {"energy_gap", "energy_overlap"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-6, nan_ok=True), name


@pytest.mark.parametrize(
    ("name", "values", "joined"),
    [
        ("sampler/evaluations", [20.0, 20.0, 20.0], 20.0),  # what all ranks share
        ("optim/grad_norm", [1.5, 1.5, 1.5], 1.5),
        ("f_neg/q05", [1.0, 2.0, 6.0], 3.0),
        ("buffer/own", [1.0, 2.0, 6.0], 3.0),  # a number that no line is about
        ("nonfinite/pos", [1.0, 0.0, 2.0], 3.0),
        ("f_neg/min", [1.0, -2.0, 6.0], -2.0),
        ("f_pos/max", [1.0, -2.0, 6.0], 6.0),
        ("sampler/grad_norm_max", [1.0, math.nan, 6.0], math.nan),
        ("f_neg/min", [1.0, -2.0, math.nan], math.nan),
        ("nonfinite/pos", [math.nan, 0.0, 2.0], math.nan),
        ("f_neg/mean", [math.inf, 0.0, 1.0], math.inf),
        ("f_neg/mean", [math.inf, -math.inf, 1.0], math.nan),
    ],
)
def test_how_each_kind_of_number_joins(name, values, joined):
    found = joined_row([{name: x} for x in values])
    assert found == {name: pytest.approx(joined, nan_ok=True)}
