"""The guarded loss of an ensemble is the sum of its members' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ebmguard import contrastive_loss, guard
from ebmguard.energies import Variant
from ebmguard.errors import ConfigError
from tests.parts import slopes

N, M = 6, 5
VARIANTS: list[Variant] = ["default", "default", "no_pos", "batch"]
STARS = torch.tensor([0.5, 0.0, 1.5, 2.0], dtype=torch.float64)
# The first entry is the same for all members, the second their own, the third a schedule.
SEVERAL: list[Any] = [0.3, STARS, lambda step: STARS * (1 + step)]


def leaves() -> tuple[Tensor, Tensor]:
    pos = torch.randn(4, N, dtype=torch.float64).requires_grad_()
    neg = torch.randn(4, M, dtype=torch.float64).requires_grad_()
    return pos, neg


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def several(step: int) -> list[Tensor]:
    return [torch.full((4,), 0.3, dtype=torch.float64), STARS, STARS * (1 + step)]


def test_mixed_variants_by_loss_and_by_reweighting():
    pos, neg = leaves()
    g = guard(None, None, beta_star=STARS, variant=VARIANTS)
    loss = g.loss_fn(pos, neg)
    alone = [contrastive_loss(pos[i], neg[i], STARS[i], variant=VARIANTS[i]) for i in range(4)]
    expected = torch.stack(alone).sum()
    close(loss, expected)
    wanted = slopes(expected, pos, neg)
    same_pos, same_neg = g.reweight(pos, neg)
    reweighted = slopes((same_neg.mean(1) - same_pos.mean(1)).sum(), pos, neg)
    for found in (slopes(loss, pos, neg), reweighted):
        close(found[0], wanted[0])
        close(found[1], wanted[1])


@pytest.mark.parametrize("variant", ["default", VARIANTS])
def test_several_exponents_that_differ_from_member_to_member(variant):
    pos, neg = leaves()
    g = guard(None, None, beta_stars=SEVERAL, variant=variant, sampler_scale=1.0)
    for step in range(3):
        assert g.step == max(step - 1, 0)
        each = [contrastive_loss(pos, neg, star, variant=variant) for star in several(step)]
        expected = torch.stack(each).mean(0).sum()
        loss = g.loss_fn(pos, neg)
        close(loss, expected)
        assert g.last["beta_star"] == pytest.approx(
            torch.stack(several(step)).mean().item(), rel=1e-6
        )
    found, wanted = slopes(loss, pos, neg), slopes(expected, pos, neg)
    close(found[0], wanted[0])
    close(found[1], wanted[1])
    reweight = guard(None, None, beta_stars=several(2), variant=variant, sampler_scale=1.0)
    same_pos, same_neg = reweight.reweight(pos, neg)
    found = slopes((same_neg.mean(1) - same_pos.mean(1)).sum(), pos, neg)
    close(found[0], wanted[0])
    close(found[1], wanted[1])


def test_weight_of_a_given_loss_with_several_exponents():
    pos, neg = leaves()

    def loss_fn(pos: Tensor, neg: Tensor) -> Tensor:
        return 0.3 * (neg - pos).mean(-1).sum()

    pos = pos[:, :M]
    given = guard(loss_fn, None, beta_stars=[STARS, 0.2], sampler_scale=1.0)
    plain = guard(None, None, beta_stars=[STARS, 0.2], sampler_scale=1.0)
    close(given.loss_fn(pos, neg), 0.3 * plain.loss_fn(pos, neg))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta_star": 1.0}, "beta_star has no model dimensions"),
        ({"beta_star": STARS[:3]}, "has 4 names, but beta_star has model dimensions"),
        ({"beta_stars": [0.1, 0.2], "sampler_scale": 1.0}, "has no model dimensions"),
        ({"beta_star": STARS, "variant": ["default", "best"]}, "variant='best'; expected one of"),
        ({"beta_stars": [STARS, STARS[:2]], "sampler_scale": 1.0}, r"\(2,\) and \(4,\); expected"),
    ],
)
def test_refused_when_it_is_built(arguments, message):
    with pytest.raises(ValueError, match=message):
        guard(None, None, **({"variant": VARIANTS} | arguments))


def test_a_schedule_keeps_the_model_dimensions():
    g = guard(None, None, beta_star=lambda step: STARS[: 4 - step])
    pos, neg = leaves()
    g.loss_fn(pos, neg)
    with pytest.raises(ConfigError, match=r"dimensions \(3,\) at step 1, but \(4,\) at step 0"):
        g.loss_fn(pos, neg)
