"""The weight diagnostics against naive sums in numpy, and where they are undefined."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ebmguard.diagnostics import weight_diagnostics, weight_diagnostics_at
from ebmguard.objective import coefficients, grad_scale, weights

TAGS = {
    "grad_scale",
    "weight_entropy",
    "ess",
    "max_weight",
    "positive_weight_entropy",
    "reweighting_angle",
}


def entropy(p: np.ndarray) -> float:
    return float(-sum(x * math.log(x) for x in p if x > 0))


def naive(pos: np.ndarray, neg: np.ndarray, beta_star: float) -> dict[str, float]:
    """The definitions, with no care for overflow."""
    n, m = len(pos), len(neg)
    total = np.exp(beta_star * neg).sum()
    w = np.exp(beta_star * neg) / total
    missing = np.array([total / (total + np.exp(beta_star * f)) for f in pos])
    v = missing / missing.sum()
    now = np.concatenate([-missing / n, missing.mean() * w])
    plain = np.concatenate([-np.ones(n) / n, np.ones(m) / m])
    return {
        "grad_scale": missing.mean(),
        "weight_entropy": entropy(w) / math.log(m),
        "ess": 1 / (w**2).sum() / m,
        "max_weight": w.max(),
        "positive_weight_entropy": entropy(v) / math.log(n),
        "reweighting_angle": now @ plain / np.linalg.norm(now) / np.linalg.norm(plain),
    }


def close(found: dict[str, Tensor], expected: dict[str, float], rtol: float = 1e-12) -> None:
    assert set(found) == set(expected)
    for tag, value in expected.items():
        assert found[tag].item() == pytest.approx(value, rel=rtol, nan_ok=True), tag


def draw(n: int, m: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.randn(n).double() * spread, torch.randn(m).double() * spread - 0.3


@pytest.mark.parametrize("beta_star", [0.0, 0.01, 0.5, 2.0, -1.5])
@pytest.mark.parametrize(("n", "m"), [(2, 2), (5, 8), (64, 64), (40, 3)])
def test_definitions(n, m, beta_star):
    pos, neg = draw(n, m, 2.0)
    found = weight_diagnostics(pos, neg, beta_star)
    assert set(found) == TAGS
    assert all(value.shape == () for value in found.values())
    close(found, naive(pos.numpy(), neg.numpy(), beta_star))


def test_uniform_weights():
    found = weight_diagnostics(*draw(5, 8), 0.0)
    assert found["grad_scale"].item() == pytest.approx(8 / 9)
    for tag in ("weight_entropy", "ess", "positive_weight_entropy", "reweighting_angle"):
        assert found[tag].item() == pytest.approx(1.0, rel=1e-12)
    assert found["max_weight"].item() == pytest.approx(1 / 8)


def test_one_negative_carries_the_batch():
    neg = torch.tensor([100.0, 0.0, 0.0, 0.0]).double()
    found = weight_diagnostics(torch.zeros(3).double(), neg, 1.0)
    assert found["ess"].item() == pytest.approx(0.25)
    assert found["max_weight"].item() == pytest.approx(1.0)
    assert found["weight_entropy"].item() == pytest.approx(0.0, abs=1e-40)
    assert found["grad_scale"].item() == pytest.approx(1.0)


def test_agree_with_the_objective():
    pos, neg = draw(6, 9)
    found = weight_diagnostics(pos, neg, 1.3)
    assert found["grad_scale"].item() == pytest.approx(grad_scale(pos, neg, 1.3).item())
    assert found["max_weight"].item() == pytest.approx(weights(neg, 1.3).max().item())
    now, plain = (torch.cat(coefficients(pos, neg, star)) for star in (1.3, 0.0))
    angle = torch.cosine_similarity(now, plain.double(), dim=0).item()
    assert found["reweighting_angle"].item() == pytest.approx(angle)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_common_offset_does_not_matter(shift):
    pos, neg = draw(6, 9)
    expected = naive(pos.numpy(), neg.numpy(), 2.0)
    close(weight_diagnostics(pos + shift, neg + shift, 2.0), expected, rtol=1e-9)


@pytest.mark.parametrize("gap", [10.0, 300.0, 3000.0])
def test_failing_sampler_in_float32(gap):
    """GradScale leaves float32; how it is shared among the positives does not."""
    neg, pos = np.array([0.0, 1.0, 0.5]), np.array([0.0, 0.5, 2.0, 1.0])
    found = weight_diagnostics(torch.tensor(pos + gap).float(), torch.tensor(neg).float(), 1.0)
    # 1 - w+ is proportional to exp(-f+) there.
    v, w = np.exp(-pos), np.exp(neg)
    v, w = v / v.sum(), w / w.sum()
    assert found["positive_weight_entropy"].item() == pytest.approx(
        entropy(v) / math.log(4), rel=2e-4
    )
    cosine = (1 / 4 + 1 / 3) ** 0.5 / ((v**2).sum() + (w**2).sum()) ** 0.5
    assert found["reweighting_angle"].item() == pytest.approx(cosine, rel=1e-4)
    expected = (np.exp(neg).sum() * np.exp(-pos - gap)).mean()
    assert found["grad_scale"].item() == pytest.approx(expected, rel=1e-3, abs=1e-44)


def test_single_samples_have_no_entropy():
    found = weight_diagnostics(*draw(1, 5), 1.0)
    assert math.isnan(found["positive_weight_entropy"].item())
    assert not math.isnan(found["weight_entropy"].item())
    found = weight_diagnostics(*draw(5, 1), 1.0)
    assert math.isnan(found["weight_entropy"].item())
    assert found["ess"].item() == found["max_weight"].item() == 1.0
    assert not math.isnan(found["positive_weight_entropy"].item())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_energy_spoils_all(value):
    for side in (0, 1):
        sides = draw(5, 6)
        sides[side][2] = value
        for beta_star in (0.0, 1.0, torch.tensor(1.0)):
            found = weight_diagnostics(*sides, beta_star)
            assert set(found) == TAGS
            assert all(math.isnan(x.item()) for x in found.values())


def test_several_exponents_are_as_if_alone():
    pos, neg = draw(5, 6)
    first: float | Tensor
    for first in (0.5, torch.tensor(0.5)):
        together = weight_diagnostics_at(pos, neg, (first, 2.0))
        for found, star in zip(together, (0.5, 2.0), strict=True):
            close(found, naive(pos.numpy(), neg.numpy(), star), rtol=1e-7)


# -- a proposal that knows its density ---------------------------------------------------------


@pytest.mark.parametrize("beta_star", [0.5, 2.0, -1.5])
def test_the_proposal_is_divided_out(beta_star):
    pos, neg = draw(5, 8)
    log_q = torch.randn(5).double(), torch.randn(8).double()
    found = weight_diagnostics(pos, neg, beta_star, log_q=log_q)
    # As of energies that hold it.
    held = [(f - q / beta_star).numpy() for f, q in zip((pos, neg), log_q, strict=True)]
    close(found, naive(held[0], held[1], beta_star), rtol=1e-10)
    assert found["grad_scale"].item() == pytest.approx(
        grad_scale(pos, neg, beta_star, log_q=log_q).item()
    )


def test_of_several_exponents_the_first_alone_has_the_proposal():
    pos, neg = draw(5, 8)
    log_q = torch.randn(5).double(), torch.randn(8).double()
    first, other = weight_diagnostics_at(pos, neg, (2.0, 0.5), log_q=log_q)
    close(first, {k: x.item() for k, x in weight_diagnostics(pos, neg, 2.0, None, log_q).items()})
    close(other, naive(pos.numpy(), neg.numpy(), 0.5))


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)], ids=repr)
def test_where_the_exponent_is_zero_the_proposal_is_not_looked_at(zero):
    pos, neg = draw(5, 8)
    log_q = torch.randn(5).double(), torch.full((8,), math.nan).double()
    found = weight_diagnostics(pos, neg, zero, log_q=log_q)
    close(found, naive(pos.numpy(), neg.numpy(), 0.0))


@pytest.mark.parametrize("side", [0, 1])
def test_one_lost_log_density_spoils_all_at_the_exponent_in_force(side):
    pos, neg = draw(5, 8)
    for value in (math.nan, math.inf, -math.inf):
        log_q = torch.zeros(5), torch.zeros(8)
        log_q[side][2] = value
        spoiled, plain = weight_diagnostics_at(pos, neg, (2.0, 0.5), log_q=log_q)
        assert all(math.isnan(x.item()) for x in spoiled.values())
        close(plain, naive(pos.numpy(), neg.numpy(), 0.5))


# -- classes -----------------------------------------------------------------------------------


def naive_groups(pos, neg, y_pos, y_neg, beta_star):
    share, found = np.zeros(len(neg)), []
    for f, y in zip(pos, y_pos, strict=True):
        mine = y_neg == y
        if mine.any():
            total = np.exp(beta_star * neg[mine]).sum()
            found.append(total / (total + np.exp(beta_star * f)))
            share[mine] += found[-1] * np.exp(beta_star * neg[mine]) / total
    missing = np.array(found)
    w, v = share / share.sum(), missing / missing.sum()
    # Positives without a partner have no part in either gradient.
    now = np.concatenate([missing / len(missing), missing.mean() * w])
    plain = np.concatenate([np.ones(len(missing)) / len(missing), np.ones(len(neg)) / len(neg)])
    return {
        "grad_scale": missing.mean(),
        "weight_entropy": entropy(w) / math.log(len(neg)),
        "ess": 1 / (w**2).sum() / len(neg),
        "max_weight": w.max(),
        "positive_weight_entropy": entropy(v) / math.log(len(pos)),
        "reweighting_angle": now @ plain / np.linalg.norm(now) / np.linalg.norm(plain),
        "unpaired": len(pos) - len(missing),
    }


@pytest.mark.parametrize("beta_star", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("classes", [1, 2, 5])
def test_groups(beta_star, classes):
    pos, neg = draw(9, 11)
    groups = torch.randint(classes, (9,)), torch.randint(classes, (11,))
    groups[0][0] = 77  # of a class that no negative has
    found = weight_diagnostics(pos, neg, beta_star, groups)
    y_pos, y_neg = (y.numpy() for y in groups)
    close(found, naive_groups(pos.numpy(), neg.numpy(), y_pos, y_neg, beta_star))
    scales = torch.linspace(0.5, 4, 78).double()  # of the classes
    found = weight_diagnostics(pos, neg, beta_star, (*groups, scales[groups[0]]))
    pos, neg = (f * scales[y] for f, y in zip((pos, neg), groups, strict=True))
    close(found, naive_groups(pos.numpy(), neg.numpy(), y_pos, y_neg, beta_star))


def test_one_class_is_no_class():
    pos, neg = draw(5, 6)
    same = torch.zeros(5, dtype=torch.long), torch.zeros(6, dtype=torch.long)
    found = weight_diagnostics(pos, neg, 1.0, same)
    assert found.pop("unpaired").item() == 0
    close(found, naive(pos.numpy(), neg.numpy(), 1.0))


def test_a_single_pair():
    pos, neg = draw(5, 6)
    y_pos, y_neg = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([2, 9, 9, 9, 9, 9])
    found = weight_diagnostics(pos, neg, 1.0, (y_pos, y_neg))
    assert found["unpaired"].item() == 4
    assert found["grad_scale"].item() == pytest.approx(torch.sigmoid(neg[0] - pos[2]).item())
    assert found["ess"].item() == pytest.approx(1 / 6)
    assert found["max_weight"].item() == 1.0
    assert found["weight_entropy"].item() == found["positive_weight_entropy"].item() == 0.0


def test_no_partners_at_all():
    pos, neg = draw(5, 6)
    found = weight_diagnostics(pos, neg, 1.0, (torch.zeros(5), torch.ones(6)))
    assert found.pop("unpaired").item() == 5
    assert all(math.isnan(value.item()) for value in found.values())


def test_failing_sampler_with_classes():
    pos, neg = draw(5, 6)
    groups = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 1, 0, 0, 1])
    far = weight_diagnostics((pos + 3000).float(), neg.float(), 1.0, groups)
    y_pos, y_neg = (y.numpy() for y in groups)
    # At a distance where float64 still has it.
    expected = naive_groups(pos.numpy() + 300, neg.numpy(), y_pos, y_neg, 1.0)
    for tag in TAGS - {"grad_scale"}:
        assert far[tag].item() == pytest.approx(expected[tag], rel=5e-3), tag
    assert far["grad_scale"].item() == 0.0


@pytest.mark.parametrize("level", [1e8, -1e9])
def test_the_level_of_a_class_costs_no_other_class_its_digits(level):
    pos = torch.tensor([level, level + 64, 0.25, 1.5, -1.0])
    neg = torch.tensor([level - 64, level, 0.625, 0.75, -1.25])
    labels = torch.tensor([0, 0, 1, 1, 1])
    exact = weight_diagnostics(pos.double(), neg.double(), 0.5, (labels, labels))
    found = weight_diagnostics(pos, neg, 0.5, (labels, labels))
    close(found, {tag: x.item() for tag, x in exact.items()}, rtol=1e-5)


def test_classes_and_a_proposal():
    pos, neg = draw(9, 11)
    groups = torch.randint(3, (9,)), torch.randint(3, (11,))
    log_q = torch.randn(9).double(), torch.randn(11).double()
    found = weight_diagnostics(pos, neg, 2.0, groups, log_q)
    y_pos, y_neg = (y.numpy() for y in groups)
    held = [(f - q / 2.0).numpy() for f, q in zip((pos, neg), log_q, strict=True)]
    close(found, naive_groups(held[0], held[1], y_pos, y_neg, 2.0), rtol=1e-10)
