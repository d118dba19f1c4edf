"""The weight diagnostics against naive sums in numpy, and where they are undefined."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ebmguard.diagnostics import weight_diagnostics

TAGS = {
    *("grad_scale", "weight_entropy", "ess", "max_weight"),
    *("positive_weight_entropy", "reweighting_angle"),
}


def entropy(p: np.ndarray) -> float:
    return float(-sum(x * math.log(x) for x in p if x > 0))


def naive(
    pos: Tensor, neg: Tensor, beta_star: Any, groups: Any = None, log_q: Any = None
) -> dict[str, float]:
    """The definitions, with no care for overflow."""
    n, m = len(pos), len(neg)
    y_pos, y_neg, *scale = groups or (torch.zeros(n), torch.zeros(m))
    q_pos, q_neg = log_q or (torch.zeros(n), torch.zeros(m))
    of_pos = scale[0] if scale else torch.ones(n).double()
    share, found = np.zeros(m), []
    for f, q, y, a in zip(pos, q_pos, y_pos, of_pos, strict=True):
        mine = (y_neg == y).numpy()
        if mine.any():
            mass = np.exp((beta_star * a * neg - q_neg).numpy()[mine])
            found.append(mass.sum() / (mass.sum() + math.exp(beta_star * a * f - q)))
            share[mine] += found[-1] * mass / mass.sum()
    missing = np.array(found)
    w, v = share / share.sum(), missing / missing.sum()
    # Positives without a partner have no part in either gradient.
    now = np.concatenate([missing / len(missing), missing.mean() * w])
    plain = np.concatenate([np.ones(len(missing)) / len(missing), np.ones(m) / m])
    unpaired = {} if groups is None else {"unpaired": n - len(missing)}
    return unpaired | {
        "grad_scale": missing.mean(),
        "weight_entropy": entropy(w) / math.log(m),
        "ess": 1 / (w**2).sum() / m,
        "max_weight": w.max(),
        "positive_weight_entropy": entropy(v) / math.log(n),
        "reweighting_angle": now @ plain / np.linalg.norm(now) / np.linalg.norm(plain),
    }


def close(found: dict[str, Tensor], expected: dict[str, Any], rtol: float = 1e-12) -> None:
    assert set(found) == set(expected)
    assert all(value.shape == () for value in found.values())
    for tag, value in expected.items():
        assert found[tag].item() == pytest.approx(float(value), rel=rtol, nan_ok=True), tag


def draw(n: int, m: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n).double(), torch.randn(m).double() - 0.3


def of_classes(n: int, m: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    y_pos, y_neg = torch.randint(classes, (n,)), torch.randint(classes, (m,))
    y_pos[0], y_pos[1] = 77, y_neg[0]  # a class that no negative has, and a pair
    return y_pos, y_neg


@pytest.mark.parametrize("beta_star", [0.0, 0.5, -1.5])
@pytest.mark.parametrize(
    ("n", "m", "has_proposal"), [(2, 2, True), (5, 8, True), (64, 64, False), (40, 3, True)]
)
def test_definitions(n, m, beta_star, has_proposal):
    pos, neg = draw(n, m)
    log_q = draw(n, m) if has_proposal else None
    # Where the exponent is 0 there are no weights to divide a proposal out of.
    known = None if beta_star == 0 else log_q
    found = weight_diagnostics(pos, neg, beta_star, None, log_q)
    assert set(found) == TAGS
    close(found, naive(pos, neg, beta_star, None, known))
    for classes in (1, 2, 5):
        labels = of_classes(n, m, classes)
        scales = torch.linspace(0.5, 2, 78).double()[labels[0]]
        for groups in (labels, (*labels, scales)):
            found = weight_diagnostics(pos, neg, beta_star, groups, log_q)
            close(found, naive(pos, neg, beta_star, groups, known))
    if m % n == 0:
        rows = torch.arange(n), torch.arange(n).repeat_interleave(m // n)
        found = weight_diagnostics(pos, neg, beta_star, "rows", log_q)
        close(found, naive(pos, neg, beta_star, rows, known))


@pytest.mark.parametrize(
    ("neg", "labels", "beta_star", "expected"),
    [
        # Uniform weights.
        ([3.0, 1.0, -1.0, 0.0], None, 0.0, [4 / 5, 1, 1, 1 / 4, 1, 1]),
        # One negative carries the batch.
        ([100.0, 0.0, 0.0, 0.0], None, 1.0, [1, 0, 1 / 4, 1, 1, math.sqrt(7 / 12 / (4 / 3))]),
        # A single pair among classes.
        ([0.0, 9.0, 9.0, 9.0], ([0, 1, 2], [2, 9, 9, 9]), 1.0, [1 / 2, 0, 1 / 4, 1, 0, 0.625**0.5]),
        # No partners at all.
        ([0.0, 0.0], ([0, 0, 0], [1, 1]), 1.0, [math.nan] * 6),
        # Of one negative there is no entropy.
        ([0.0], None, 1.0, [1 / 2, math.nan, 1, 1, 1, 1]),
    ],
)
def test_closed_forms_at_the_ends(neg, labels, beta_star, expected):
    groups = labels and tuple(map(torch.tensor, labels))
    pos, neg = torch.zeros(3).double(), torch.tensor(neg).double()
    found = weight_diagnostics(pos, neg, beta_star, groups)
    if groups:
        paired = sum(y in labels[1] for y in labels[0])
        assert found.pop("unpaired") == 3 - paired
    for tag, value in zip(found, expected, strict=True):
        assert found[tag].item() == pytest.approx(value, rel=1e-12, abs=1e-40, nan_ok=True), tag


# -- digits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1e8, -1e9])
def test_the_level_of_a_class_costs_no_other_class_its_digits(level):
    pos = torch.tensor([level, level + 64, 0.25, 1.5, -1.0])
    neg = torch.tensor([level - 64, level, 0.625, 0.75, -1.25])
    labels = torch.tensor([0, 0, 1, 1, 1])
    exact = weight_diagnostics(pos.double(), neg.double(), 0.5, (labels, labels))
    close(weight_diagnostics(pos, neg, 0.5, (labels, labels)), exact, rtol=1e-5)


@pytest.mark.parametrize("gap", [80.0, 3000.0])
@pytest.mark.parametrize("groups", [None, of_classes(5, 6)], ids=["", "classes"])
def test_failing_sampler_in_float32(gap, groups):
    """GradScale leaves float32; how it is shared among the positives does not."""
    pos, neg = draw(5, 6)
    found = weight_diagnostics((pos + gap).float(), neg.float(), 1.0, groups)
    # At a distance where float64 still has it, as its logarithm in float32 does.
    expected = naive(pos + min(gap, 300.0), neg, 1.0, groups)
    if gap > 300:
        assert found.pop("grad_scale") == 0.0
        del expected["grad_scale"]
    close(found, expected, rtol=1e-3)


# -- what is not known ---------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "side"), [(math.nan, 0), (math.inf, 1), (-math.inf, 0)])
@pytest.mark.parametrize("groups", [None, of_classes(5, 6)], ids=["", "classes"])
def test_one_bad_energy_or_log_density_spoils_all(value, side, groups):
    energies, log_q = draw(5, 6), draw(5, 6)
    log_q[side][2] = value
    assert all(x.isnan() for x in weight_diagnostics(*energies, 2.0, groups, log_q).values())
    for zero in (0.0, torch.tensor(0.0)):  # where it is not looked at
        found = weight_diagnostics(*energies, zero, groups, log_q)
        close(found, naive(*energies, 0.0, groups))
    energies[side][2] = value
    for beta_star in (0.0, 1.0, torch.tensor(1.0)):
        found = weight_diagnostics(*energies, beta_star, groups)
        assert found.keys() - {"unpaired"} == TAGS
        assert all(x.isnan() for x in found.values())


def test_nothing_waits_for_the_device():
    """On the device `meta` any read by the host raises."""
    pos, neg, star = (torch.empty(shape, device="meta") for shape in ((6,), (8,), ()))
    for groups in (None, (pos, neg)):
        found = weight_diagnostics(pos, neg, star, groups, (pos, neg))
        assert all(x.is_meta and x.shape == () for x in found.values())
