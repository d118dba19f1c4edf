"""Rows of a guarded mixture of samplers: who delivers the weight."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ebmguard import guard
from ebmguard.samplers import Mixture, sgld
from tests.parts import Energy

NEAR, FAR = 5, 3
TAGS = [
    f"{prefix}mixture/{name}/{what}"
    for name in ("near", "far")
    for prefix, what in (("", "weight"), ("ref/", "weight"), ("", "energy_gap"))
]


def climb(f, x: Tensor) -> Tensor:
    return sgld(f, x, steps=2, step_size=0.1, noise_std=0.0)


def mixture() -> Mixture:
    return Mixture(
        {
            "near": lambda f: climb(f, torch.randn(NEAR, 2)),
            "far": lambda f: climb(f, torch.randn(FAR, 2) + 4),
        }
    )


@pytest.mark.parametrize("beta_star", [0.0, 1.5])
def test_the_row_has_every_samplers_share_and_gap(beta_star):
    f = Energy(dtype=torch.float64).double()
    g = guard(None, mixture(), beta_star=beta_star, model=f, reference_beta_star=0.7)
    torch.set_default_dtype(torch.float64)
    try:
        x_neg = g.sampler(f)
        f_pos, f_neg = f(torch.randn(6, 2)), f(x_neg)
    finally:
        torch.set_default_dtype(torch.float32)
    g.loss_fn(f_pos, f_neg)
    for name, part in (("near", f_neg[:NEAR]), ("far", f_neg[NEAR:])):
        for prefix, beta in (("", beta_star), ("ref/", 0.7)):
            share = (beta * part).exp().sum() / (beta * f_neg).exp().sum()
            found = g.last[f"{prefix}mixture/{name}/weight"]
            assert found == pytest.approx(share.item(), rel=1e-6)
        gap = (f_pos.mean() - part.mean()).item()
        assert g.last[f"mixture/{name}/energy_gap"] == pytest.approx(gap, rel=1e-6)


def test_shares_are_within_classes_and_without_the_proposal_but_for_the_reference():
    """By hand: of each positive's class, averaged; log q in the weights in force alone."""
    f = Energy()
    g = guard(None, mixture(), beta_star=1.5, model=f, reference_beta_star=0.7)
    f_pos, f_neg = torch.zeros(3), f(g.sampler(f)).detach()
    log_q = torch.zeros(3), torch.linspace(-2, 2, NEAR + FAR)
    labels = torch.tensor([0, 1, 1]), torch.arange(NEAR + FAR) % 2
    g.loss_fn(f_pos, f_neg, groups=labels, log_q=log_q)
    for prefix, exponent in (("", 1.5 * f_neg - log_q[1]), ("ref/", 0.7 * f_neg)):
        even, odd = exponent.exp()[::2], exponent.exp()[1::2]
        near = (even[:3].sum() / even.sum() + 2 * odd[:2].sum() / odd.sum()) / 3
        assert g.last[f"{prefix}mixture/near/weight"] == pytest.approx(near.item(), rel=1e-5)


def test_parts_run_on_the_tempered_energy():
    f = Energy()
    torch.manual_seed(0)
    tempered = guard(None, mixture(), beta_star=1.0, output_scale=2.0, model=f).sampler(f)

    class Half(torch.nn.Module):
        def forward(self, x):
            return 0.5 * f(x)

    torch.manual_seed(0)
    torch.testing.assert_close(tempered, mixture()(Half()))


def test_a_second_loss_of_the_same_samples_has_the_same_shares():
    f = Energy()
    g = guard(None, mixture(), beta_star=1.0, model=f)
    x_neg = g.sampler(f)
    f_pos, f_neg = f(torch.randn(6, 2)).detach(), f(x_neg).detach()
    rows = []
    for _ in range(2):
        g.loss_fn(f_pos, f_neg)
        rows.append([g.last[tag] for tag in TAGS])
    assert rows[0] == rows[1]


def test_negatives_that_are_not_the_mixtures_are_nobodys():
    f = Energy()
    g = guard(None, mixture(), beta_star=1.0, model=f)
    x_neg = g.sampler(f)
    g.loss_fn(f(torch.randn(6, 2)), f(x_neg[1:]))
    assert all(math.isnan(g.last[tag]) for tag in TAGS)


def test_other_samplers_have_no_such_rows():
    f = Energy()
    g = guard(None, lambda f: climb(f, torch.randn(4, 2)), beta_star=1.0, model=f)
    g.loss_fn(f(torch.randn(6, 2)), f(g.sampler(f)))
    assert not [tag for tag in g.last if "mixture" in tag]


def test_members_of_an_ensemble_have_shares_of_their_own():
    fs = [Energy(), Energy()]
    sampler = Mixture(
        {"near": lambda: torch.randn(2, NEAR, 2), "far": lambda: torch.randn(2, FAR, 2) + 4}, dim=1
    )
    g = guard(None, sampler, beta_star=torch.tensor([0.0, 2.0]))
    x_neg = g.sampler()
    f_neg = torch.stack([f(x) for f, x in zip(fs, x_neg, strict=True)])
    g.loss_fn(torch.stack([f(torch.randn(6, 2)) for f in fs]), f_neg)
    for member, beta, energies in zip(g.members, (0.0, 2.0), f_neg, strict=True):
        mass = (beta * energies).exp()
        share = (mass[:NEAR].sum() / mass.sum()).item()
        assert member["mixture/near/weight"] == pytest.approx(share, rel=1e-5)
