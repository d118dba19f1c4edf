"""The guarded loss of an ensemble is the sum of its members' own."""

from __future__ import annotations

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


def leaves() -> tuple[Tensor, Tensor]:
    pos = torch.randn(4, N, dtype=torch.float64).requires_grad_()
    neg = torch.randn(4, M, dtype=torch.float64).requires_grad_()
    return pos, neg


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta_star": 1.0}, "beta_star has no model dimensions"),
        ({"beta_star": STARS[:3]}, "has 4 names, but beta_star has model dimensions"),
        ({"beta_star": STARS, "variant": ["default", "best"]}, r"\['default', 'best'\]; expected one"),
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
