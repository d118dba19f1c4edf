"""Shares of the samplers of a mixture, against sums written out over their samples."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ebmguard.diagnostics import mixture_gaps, mixture_weights
from ebmguard.samplers import Mixture

PARTS = {"good": slice(0, 5), "broken": slice(5, 8), "none": slice(8, 8)}


def read(found: dict[str, Tensor]) -> dict[str, float]:
    return {tag: value.item() for tag, value in found.items()}


def draw() -> tuple[Tensor, Tensor]:
    return torch.randn(6, dtype=torch.float64), 2 * torch.randn(8, dtype=torch.float64)


@pytest.mark.parametrize("beta_star", [0.0, 0.5, 3.0, -1.0, torch.tensor(0.5)])
def test_shares_and_gaps_are_the_sums_over_the_parts(beta_star):
    pos, neg = draw()
    mass = [math.exp(float(beta_star) * f) for f in neg.tolist()]
    weights = read(mixture_weights(pos, neg, PARTS, beta_star))
    assert weights == pytest.approx(
        {
            "mixture/good/weight": sum(mass[:5]) / sum(mass),
            "mixture/broken/weight": sum(mass[5:]) / sum(mass),
            "mixture/none/weight": 0.0,
        },
        rel=1e-12,
    )
    gaps = read(mixture_gaps(pos, neg, PARTS))
    assert gaps == pytest.approx(
        {
            "mixture/good/energy_gap": sum(pos.tolist()) / 6 - sum(neg[:5].tolist()) / 5,
            "mixture/broken/energy_gap": sum(pos.tolist()) / 6 - sum(neg[5:].tolist()) / 3,
            "mixture/none/energy_gap": math.nan,
        },
        rel=1e-12,
        nan_ok=True,
    )


def test_classes_share_within_each_positive():
    """By hand: each positive weighs the negatives of its class; the one of class 7 has none."""
    pos, neg = torch.zeros(4), torch.tensor([0.0, math.log(3.0), 5.0, 1.0])
    labels = torch.tensor([0, 0, 1, 7]), torch.tensor([0, 0, 1, 2])
    parts = {"a": slice(0, 1), "b": slice(1, 3), "c": slice(3, 4)}
    found = read(mixture_weights(pos, neg, parts, 1.0, labels))
    expected = {"a": (1 / 4 + 1 / 4) / 3, "b": (3 / 4 + 3 / 4 + 1) / 3, "c": 0.0}
    assert found == pytest.approx({f"mixture/{x}/weight": w for x, w in expected.items()})


def test_what_a_proposal_knows_of_its_density_is_divided_out():
    pos, neg = draw()
    log_q = torch.randn(6).double(), torch.randn(8).double()
    mass = (0.5 * neg - log_q[1]).exp()
    found = read(mixture_weights(pos, neg, PARTS, 0.5, log_q=log_q))
    assert found["mixture/broken/weight"] == pytest.approx((mass[5:].sum() / mass.sum()).item())


def test_a_sampler_that_lost_its_energies_weighs_nothing():
    pos, neg = draw()
    neg[5:] = torch.nan
    found = read(mixture_weights(pos, neg, PARTS, 0.5) | mixture_gaps(pos, neg, PARTS))
    assert found["mixture/good/weight"] == pytest.approx(1.0)
    assert found["mixture/broken/weight"] == 0.0
    assert math.isnan(found["mixture/broken/energy_gap"])
    assert not math.isnan(found["mixture/good/energy_gap"])
    neg[:] = torch.nan
    assert all(math.isnan(x) for x in read(mixture_weights(pos, neg, PARTS, 0.5)).values())


def test_shares_are_known_where_grad_scale_is_too_small_for_a_float():
    pos, neg = torch.full((3,), 500.0), torch.tensor([0.0, 0.0, math.log(2.0)])
    found = read(mixture_weights(pos, neg, {"a": slice(0, 2), "b": slice(2, 3)}, 1.0))
    assert found == pytest.approx({"mixture/a/weight": 0.5, "mixture/b/weight": 0.5})


@pytest.mark.parametrize("count", [3, 9])
def test_parts_of_other_negatives_say_nothing(count):
    found = mixture_weights(torch.zeros(2), torch.zeros(count), PARTS, 0.5)
    found |= mixture_gaps(torch.zeros(2), torch.zeros(count), PARTS)
    assert all(math.isnan(x) for x in read(found).values())


def test_parts_are_those_of_the_sampler():
    mixture = Mixture({"a": lambda: torch.zeros(3, 1), "b": lambda: torch.ones(1, 1)})
    f_neg = mixture().squeeze(1)
    found = read(mixture_weights(torch.zeros(2), f_neg, mixture.parts, math.log(3)))
    assert found == pytest.approx({"mixture/a/weight": 0.5, "mixture/b/weight": 0.5})


def test_nothing_waits_for_the_device():
    """On the device `meta` any read by the host raises."""
    pos, neg = torch.empty(6, device="meta"), torch.empty(8, device="meta")
    for groups in (None, (pos, neg)):
        found = mixture_weights(pos, neg, PARTS, torch.empty((), device="meta"), groups)
        found |= mixture_gaps(pos, neg, PARTS)
        assert {value.shape for value in found.values()} == {()}
