"""The energy diagnostics against numpy and scipy, and where they are undefined."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu
from torch import Tensor

from ebmguard.diagnostics import (
    buffer_diagnostics,
    energy_diagnostics,
    nonfinite_diagnostics,
    sample_diagnostics,
    sample_marks,
    weight_diagnostics,
)
from ebmguard.errors import ConfigError

LEVELS = {"min": 0.0, "q05": 0.05, "median": 0.5, "q95": 0.95, "max": 1.0}


def summary(f: np.ndarray) -> dict[str, float]:
    quantiles = {name: np.quantile(f, level) for name, level in LEVELS.items()}
    return {"mean": f.mean(), "std": f.std(), **quantiles}


def overlap(pos: np.ndarray, neg: np.ndarray) -> float:
    statistic: float = mannwhitneyu(neg, pos).statistic
    return statistic / (len(pos) * len(neg))


def expected(pos: Tensor, neg: Tensor) -> dict[str, float]:
    p, n = pos.numpy(), neg.numpy()
    return {
        "energy_gap": p.mean() - n.mean(),
        "energy_overlap": overlap(p, n),
        **{f"f_pos/{name}": value for name, value in summary(p).items()},
        **{f"f_neg/{name}": value for name, value in summary(n).items()},
    }


@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 10), (64, 64), (41, 101)])
def test_definitions(n, m):
    pos, neg = torch.randn(n).double() + 0.5, torch.randn(m).double()
    found = energy_diagnostics(pos, neg)
    right = expected(pos, neg)
    assert set(found) == set(right)
    for tag, value in right.items():
        assert found[tag].shape == ()
        assert found[tag].item() == pytest.approx(value, rel=1e-12, abs=1e-13), tag


def test_overlap_counts_ties_half():
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        pos = torch.randint(4, (9,), generator=rng).double()
        neg = torch.randint(4, (9 + seed,), generator=rng).double()
        found = energy_diagnostics(pos, neg)["energy_overlap"].item()
        assert found == pytest.approx(overlap(pos.numpy(), neg.numpy()), rel=1e-12)


@pytest.mark.parametrize(
    ("pos", "neg", "value"),
    [([1.0, 1.0], [1.0, 1.0, 1.0], 0.5), ([0.0], [1.0, 2.0], 1.0), ([2.0, 3.0], [1.0, 1.5], 0.0)],
)
def test_overlap_at_its_ends(pos, neg, value):
    found = energy_diagnostics(torch.tensor(pos), torch.tensor(neg))
    assert found["energy_overlap"].item() == value


@pytest.mark.parametrize("m", [5, 6])
def test_nan_spoils_its_own_side_and_what_needs_both(m):
    pos, neg = torch.randn(5), torch.randn(m)
    neg[1] = math.nan
    found = energy_diagnostics(pos, neg)
    spoilt = {tag for tag, value in found.items() if math.isnan(value.item())}
    assert spoilt == {"energy_gap", "energy_overlap"} | {
        f"f_neg/{name}" for name in ("mean", "std", *LEVELS)
    }


@pytest.mark.parametrize(("value", "m"), [(math.inf, 41), (-math.inf, 61)])
def test_infinities_show_in_extremes_and_spare_the_median(value, m):
    pos, neg = torch.randn(41), torch.randn(m)
    neg[3] = neg[7] = value
    found = {tag: x.item() for tag, x in energy_diagnostics(pos, neg).items()}
    assert found["f_neg/max" if value > 0 else "f_neg/min"] == value
    assert found["f_neg/mean"] == value
    assert math.isfinite(found["f_neg/median"])
    assert found["energy_gap"] == -value
    assert found["energy_overlap"] == pytest.approx(overlap(pos.numpy(), neg.numpy()))
    assert math.isfinite(found["f_pos/std"])


def test_no_rounding_that_matters_far_from_zero():
    pos, neg = torch.randn(64), torch.randn(64)
    found = energy_diagnostics(pos + 4096, neg + 4096)
    assert found["f_pos/std"].item() == pytest.approx(pos.std(correction=0).item(), rel=1e-3)
    assert found["energy_gap"].item() == pytest.approx((pos.mean() - neg.mean()).item(), abs=2e-3)


@pytest.mark.parametrize("beta_star", [0.0, torch.tensor(-2.0)])
def test_lost_samples_are_counted(beta_star):
    pos = torch.tensor([0.0, math.nan, 1.0, math.inf])
    neg = torch.tensor([-math.inf, 2.0, 3.0])
    found = {k: x.item() for k, x in nonfinite_diagnostics(pos, neg, beta_star).items()}
    assert found == {
        "nonfinite/pos": 2.0,
        "nonfinite/neg": 1.0,
        "nonfinite/energies": pytest.approx(3 / 7),
    }


def test_products_beyond_all_bounds_count_as_lost():
    f = torch.tensor([1e29, 1e31, -1e31, 0.0])
    g = torch.tensor([1.0, 2.0])
    assert nonfinite_diagnostics(f, g, 1.0)["nonfinite/pos"].item() == 2
    assert nonfinite_diagnostics(f, g, 1e-3)["nonfinite/pos"].item() == 0
    assert nonfinite_diagnostics(g, f, 100.0)["nonfinite/neg"].item() == 3


@pytest.mark.parametrize("shapes", [((4,), (4,)), ((4,), (5,))])
def test_nothing_waits_for_the_device(shapes):
    """On the device `meta` any read by the host raises."""
    pos, neg = (torch.empty(shape, device="meta") for shape in shapes)
    assert all(x.is_meta for x in energy_diagnostics(pos, neg).values())
    assert all(x.is_meta for x in nonfinite_diagnostics(pos, neg, 1.0).values())


# -- what a buffer says of its draws, whoever has written it ---------------------------------------


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def diagnostics(self):
        return self.answer


def test_numbers_are_taken_over_detached():
    age = torch.tensor(3.0, requires_grad=True)
    found = buffer_diagnostics(Answers({"age": age, "full": torch.tensor(7)}))
    assert {name: x.item() for name, x in found.items()} == {"buffer/age": 3.0, "buffer/full": 7}
    assert not found["buffer/age"].requires_grad


class Silent:
    diagnostics = "not a method"


@pytest.mark.parametrize("buffer", [None, torch.zeros(3), [torch.zeros(3)], object(), Silent()])
def test_nothing_is_known_of_others(buffer):
    assert buffer_diagnostics(buffer) == {}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"Answers\.diagnostics\(\) returned a NoneType; expected 0-dim tensors"),
        ({"age": 3.0}, "has a float under 'age'"),
        ({"age": torch.zeros(2)}, r"shape \(2,\) and torch.float32 under 'age'"),
        ({"full": torch.tensor(True)}, "torch.bool"),
    ],
)
def test_what_cannot_be_a_row_is_refused(answer, message):
    with pytest.raises(ConfigError, match=message):
        buffer_diagnostics(Answers(answer))


# -- rows of several steps or models at once: each has the numbers that it has alone ---------------


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
