"""Limits: an exponent of 0 and nearly so, a side that is out of reach; nothing is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebmguard.objective import (
    coefficients,
    contrastive_loss,
    grad_scale,
    weights,
)
from tests.objective.oracles import VARIANTS, both_slopes, energies, slopes

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 0.0}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def _plain(pos, neg):
    """The β* = 0 gradient: -1/N and 1/M."""
    return torch.full_like(pos, -1 / len(pos)), torch.full_like(neg, 1 / len(neg))


@EVERY_VARIANT
def test_exponent_too_small_for_its_reciprocal_counts_as_zero(variant):
    pos, neg = energies(4, 3, dtype=torch.float32)
    for beta in (1e-36, -1e-320, torch.tensor(1e-36), torch.tensor(-1e-50, dtype=torch.float64)):
        loss = contrastive_loss(pos, neg, beta, variant=variant)
        torch.testing.assert_close(loss, neg.mean() - pos.mean())
        for sides in both_slopes(pos, neg, beta, variant=variant):
            torch.testing.assert_close(sides, _plain(pos, neg))


@EVERY_VARIANT
def test_a_tensor_exponent_of_zero_brings_no_nan_into_any_gradient(variant):
    # At β* = 1, where it is computed, these energies are far beyond exp's range.
    pos = torch.tensor([1e8, -1e8], requires_grad=True)
    neg = torch.tensor([-1e8, 1e8, 0.0], requires_grad=True)
    for sides in both_slopes(pos, neg, torch.tensor(0.0), variant=variant):
        torch.testing.assert_close(sides, _plain(pos, neg))


@pytest.mark.parametrize("beta", [0.5, -0.5])
def test_grad_scale_runs_to_zero_and_one_when_one_side_is_out_of_reach(beta):
    pos, neg = energies(4, 3)
    apart = 1e5 * (1 if beta > 0 else -1)
    for variant in VARIANTS:
        lost = slopes(contrastive_loss(pos + apart, neg, beta, variant=variant), pos, neg)
        vanishes = variant != "no_pos"
        assert all((side == 0).all() == vanishes for side in lost)
        found = slopes(contrastive_loss(pos - apart, neg, beta, variant=variant), pos, neg)
        torch.testing.assert_close(found[0], _plain(pos, neg)[0], **EXACT)
        torch.testing.assert_close(found[1], weights(neg, beta).detach(), **EXACT)
    assert grad_scale(pos + apart, neg, beta) == 0
    assert grad_scale(pos - apart, neg, beta) == 1


@EVERY_VARIANT
def test_reads_no_value_on_the_host_and_brings_the_exponent_to_the_energies(variant):
    # Meta tensors have no values: a read, a boolean index or a stray device would raise.
    pos = torch.empty(4, device="meta", requires_grad=True)
    neg = torch.empty(3, device="meta", requires_grad=True)
    log_q = torch.empty(4, device="meta"), torch.empty(3, device="meta")
    for beta in (0.5, torch.tensor(0.5), torch.tensor(0.5, device="meta")):
        for q in (None, log_q):
            loss = contrastive_loss(pos, neg, beta, variant=variant, log_q=q)
            assert loss.device.type == "meta"
            assert [g.shape for g in slopes(loss, pos, neg)] == [(4,), (3,)]
        assert coefficients(pos, neg, beta, variant=variant)[1].shape == (3,)
        assert weights(neg, beta).device == grad_scale(pos, neg, beta).device == neg.device
